"""Launch two tasks on a cluster, wait for the first to end, read its output, cancel what is left.

python examples/sdk.py login        # an alias of ~/.ssh/config; `local` on the login node itself
"""

import sys

from gangrun import Cluster, Task, wait


def main(host: str) -> None:
    cluster = Cluster(host)
    quick = cluster.launch(
        Task(name="sdk-quick", num_nodes=2, run="echo rank $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES")
    )
    endless = cluster.launch(Task(name="sdk-endless", run="sleep 3600"), time="10m")

    for run in wait([quick, endless], timeout_s=600, any_of_them=True):
        print(run.run, run.state, run.exit_code)
    for piece in quick.logs("logs/1-worker1.log"):
        print(piece.decode(errors="replace"), end="")

    print(endless.cancel(grace_s=5).state)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "local")
