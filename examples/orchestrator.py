"""An orchestrator in thirty lines: render a driver, submit it, wait, read how it ended.

usage: python examples/orchestrator.py [DIRECTORY]     (a directory on the shared home; default ~/gangrun-example)
"""

import json
import os
import subprocess
import sys

from codegen import Bundle, Job, Resources, render_driver, render_sbatch


def main(directory: str) -> int:
    job = Job(
        job_id="example",
        num_nodes=2,
        log_dir=os.path.join(directory, "logs"),
        resources=Resources(cpus=1),
        setup="echo preparing $(hostname)",
        run='echo "rank $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES, peers: " $SKYPILOT_NODE_IPS',
        cluster_home=directory,
        python=sys.executable,
    )
    driver = Bundle(job, render_driver(job)).write(directory)
    script = os.path.join(directory, "job.sbatch")
    with open(script, "w") as file:
        file.write(render_sbatch(job, driver, output=os.path.join(directory, "driver.log")))
    submitted = subprocess.run(["sbatch", "--parsable", "--wait", script], stdout=subprocess.PIPE, text=True)
    slurm_job_id = submitted.stdout.split(";")[0].strip()
    with open(os.path.join(directory, ".gangrun", slurm_job_id, job.job_id, "status.json")) as file:
        status = json.load(file)
    print(
        "job %s: %s, exit codes %s" % (slurm_job_id, status["state"], [rank["exit_code"] for rank in status["ranks"]])
    )
    return submitted.returncode


if __name__ == "__main__":
    sys.exit(main(os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.expanduser("~/gangrun-example"))))
