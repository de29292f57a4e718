"""A real Slurm cluster of N nodes on one machine, in Linux namespaces, for tests and for trying things out.

    with Cluster.boot(Path("/tmp/my-cluster"), nodes=4) as cluster:
        job_id = cluster.sbatch("#!/bin/sh\\nsrun hostname\\n", "-N4", cwd=folder)
        assert cluster.wait_job(job_id).state == "COMPLETED"

`cluster.login()` adds an sshd and a laptop to come from, `accounting=True` slurmdbd with its database.

By hand: `python -m tests.minislurm up -n 4`, then `shell n1`, `login`, `status`, `down`.
"""

from tests.minislurm.cluster import Cluster as Cluster
from tests.minislurm.errors import BadInput as BadInput
from tests.minislurm.errors import BedError as BedError
from tests.minislurm.errors import Unsupported as Unsupported
from tests.minislurm.jobs import JobEnd as JobEnd
from tests.minislurm.login import Login as Login
from tests.minislurm.options import Options as Options
