#!/usr/bin/env python3
"""Driver of job 7, rendered by gangrun 0.1.0.

Run it on the head node of a Ray cluster, with the Python that has Ray:  python driver.py
"""
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ARCHIVE = os.path.join(HERE, 'gangrun-executor.pyz')
if os.path.exists(ARCHIVE):  # else the installed `executor` is used
    # The user's PYTHONPATH is for the script, but Ray may be there: it comes last.
    foreign = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = [path for path in sys.path if os.path.abspath(path) not in foreign]
    sys.path[:] = [ARCHIVE, *own, *(path for path in sys.path if path not in own)]

from executor import ray_driver as driver

JOB = driver.Job(
    slurm_job_id='ray',
    job_id='7',
    task_name='train it',
    num_nodes=3,
    cluster_ips=[
        '10.77.0.11',
        '10.77.0.12',
        '10.77.0.13',
    ],
    log_dir='logs',
    cluster_home=None,
    workdir=None,
    grace_s=10.0,
    liveness_timeout_s=600.0,
    python=None,
    archive=ARCHIVE,
    remove_at_end=[],
    secrets_file=os.path.join(HERE, 'secrets.json'),
    env_vars={
        'GREETING': 'it\'s "fine"',
        'SKYPILOT_NUM_GPUS_PER_NODE': '1',
        'SKYPILOT_INTERNAL_JOB_ID': '7',
    },
    setup_env_vars={
        'MODE': 'fast',
        'SKYPILOT_NUM_NODES': '3',
        'SKYPILOT_NUM_GPUS_PER_NODE': '1',
        'SKYPILOT_INTERNAL_JOB_ID': '7',
    },
)
BUNDLE = {
    'CPU': 2,
    'GPU': 1,
}
RUN_SCRIPT = (
    '# "quotes" and {braces}\n'
    'echo "rank $SKYPILOT_NODE_RANK says $GREETING"\n'
)
SETUP_SCRIPT = (
    'echo "set up $SKYPILOT_SETUP_NODE_RANK"\n'
)


def body(launch):
    """What happens, in this order; a step that fails ends the job."""
    launch.connect()
    launch.reserve(BUNDLE)
    launch.run_setup(SETUP_SCRIPT)
    launch.run(RUN_SCRIPT)


if __name__ == "__main__":
    sys.exit(driver.main(body, JOB))
