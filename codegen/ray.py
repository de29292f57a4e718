"""The driver for a Ray cluster: one bundle per node in a placement group that comes whole, a relay in each."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.base import TaskCodeGen
from codegen.render import render_driver_of
from codegen.spec import Job, Resources, SpecError
from executor import protocol

TEMPLATE = "ray_driver.py.j2"
GPU = "GPU"
# Fields of a job that mean nothing here, and the value that asks for nothing.
OF_SLURM: Mapping[str, object] = {
    "slurm_job_id": None,
    "container_name": None,
    "warn_signal": None,
    "launcher": "srun",
}


class RayCodeGen(TaskCodeGen):
    """Renders a driver that runs on the head node of a Ray cluster, with the Python that has Ray there.

    The calls are SlurmCodeGen's. `cluster_ips` may be empty: then the nodes that are alive are the cluster.
    """

    def _render(self, job: Job) -> str:
        return render_ray_driver(job)


def render_ray_driver(job: Job, secrets_name: str = protocol.SECRETS_NAME) -> str:
    """The driver of a typed job description. Compiled before it is returned: never a broken script.

    Raises SpecError for a field that only Slurm has a use for. `secrets_name` is the file beside it with the secrets.
    """
    for name, nothing in OF_SLURM.items():
        if getattr(job, name) != nothing:
            raise SpecError(f"{name}={getattr(job, name)!r}: Ray has nothing like it; leave it out")
    if getattr(job.resources, "ray", None) is not None:
        raise SpecError("resources.ray: the job runs on a Ray cluster already; leave it out")
    return render_driver_of(job, TEMPLATE, secrets_name, wish=wish(job.resources))


def wish(resources: Resources) -> dict[str, float]:
    """What each node must have; what its nodes call an accelerator, the driver finds out."""
    accelerators = {resources.gpu_type or GPU: resources.gpus} if resources.gpus else {}
    return {"CPU": resources.cpus, **accelerators}
