"""A real Ray cluster of N nodes on one machine: each raylet in the namespaces of tests/minislurm, with its own address.

    with RayBed.boot(Path("/tmp/my-ray"), nodes=3, gpus=2) as bed:
        bed.run("n1", [sys.executable, "driver.py"])  # n1 is the head

By hand: `python -m tests.miniray up`, then `run n1 ray status`, `down`.
"""

from tests.miniray.bed import HEAD as HEAD
from tests.miniray.bed import RayBed as RayBed
from tests.miniray.bed import missing as missing
