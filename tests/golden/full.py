#!/usr/bin/env python3
"""Driver of job 7, rendered by gangrun 0.1.0.

Run it on the head node of the allocation:  python3 driver.py
"""
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ARCHIVE = os.path.join(HERE, 'gangrun-executor.pyz')
if os.path.exists(ARCHIVE):  # else the installed `executor` is used
    # The user's PYTHONPATH is for the script; a module of that name must not be taken for one of ours.
    foreign = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [ARCHIVE, *(path for path in sys.path if os.path.abspath(path) not in foreign)]

from executor import driver

JOB = driver.Job(
    slurm_job_id='4711',
    job_id='7',
    task_name='train it',
    num_nodes=3,
    cluster_ips=[
        '127.0.0.1',
        '127.0.0.2',
        '127.0.0.3',
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
        'SKYPILOT_NUM_GPUS_PER_NODE': '0',
        'SKYPILOT_INTERNAL_JOB_ID': '7',
    },
    setup_env_vars={
        'MODE': 'fast',
        'SKYPILOT_NUM_NODES': '3',
        'SKYPILOT_NUM_GPUS_PER_NODE': '0',
        'SKYPILOT_INTERNAL_JOB_ID': '7',
    },
)
SRUN = ["srun", "--jobid=" + JOB.slurm_job_id, *driver.member_options()]
GPUS = "--gpus-per-node=" + driver.gpu_request(JOB.slurm_job_id, 0)
RUN_SRUN = [
    *SRUN,
    '--job-name=gangrun-7',
    '--nodes=3',
    '--ntasks=3',
    '--ntasks-per-node=1',
    '--export=ALL',
    '--kill-on-bad-exit=1',
    '--wait=0',
    '--exclusive',
    '--cpus-per-task=2',
    '--mem=0',
    GPUS,
]
RUN_SCRIPT = (
    '# "quotes" and {braces}\n'
    'echo "rank $SKYPILOT_NODE_RANK says $GREETING"\n'
)
SETUP_SRUN = [
    *SRUN,
    '--job-name=gangrun-7-setup',
    '--nodes=3',
    '--ntasks=3',
    '--ntasks-per-node=1',
    '--export=ALL',
    '--kill-on-bad-exit=1',
    '--wait=0',
    '--overlap',
    '--cpus-per-task=2',
    '--mem=0',
    GPUS,
]
SETUP_SCRIPT = (
    'echo "set up $SKYPILOT_SETUP_NODE_RANK"\n'
)


def body(launch):
    """What happens, in this order; a step that fails ends the job."""
    launch.start_run(RUN_SRUN, RUN_SCRIPT, has_setup=True)
    launch.wait_for_allocation()
    launch.run_setup(SETUP_SRUN, SETUP_SCRIPT)
    launch.let_go()
    launch.wait_for_run()


if __name__ == "__main__":
    sys.exit(driver.main(body, JOB))
