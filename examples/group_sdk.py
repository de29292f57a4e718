"""A group from Python: a server, two clients that start when it is ready, and how each of them ended.

python examples/group_sdk.py login        # an alias of ~/.ssh/config; `local` on the login node itself
"""

import sys

from gangrun import Cluster, Group, Ready, Task

SERVER = "exec python3 -m http.server 8766"
CLIENT = """
exec python3 -c '
import os, urllib.request
url = "http://server-0.%s:8766/" % os.environ["SKYPILOT_JOBGROUP_NAME"]
print("the server says", urllib.request.urlopen(url, timeout=30).status)
'
"""


def main(host: str) -> int:
    group = Group(
        "group-sdk",
        tasks=[Task(name="server", run=SERVER), Task(name="client", num_nodes=2, run=CLIENT)],
        primary=["client"],
        termination_delay="10s",
        ready={"server": Ready(port=8766, timeout_s=60)},
        after={"client": ["server"]},
    )
    job = Cluster(host).launch(group, time="10m")
    run = job.wait(timeout_s=600)
    print(f"group {run.run}: {run.state}, exit code {run.exit_code}")
    for task in run.tasks:
        print(f"  {task['name']}: {task['state']} on {len(task['nodes'])} node(s)")
    for piece in job.logs("tasks/client.out"):
        sys.stdout.buffer.write(piece)
    return run.exit_code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
