"""The driver for a Slurm allocation: a background `srun --exclusive` for the run, `srun --overlap` for setup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from codegen.base import BUILD, ORDER, TaskCodeGen
from codegen.bundle import Bundle
from codegen.render import render
from codegen.spec import Job, Resources, SpecError
from executor import protocol

TEMPLATE = "slurm_driver.py.j2"
# Options that ask for the same thing: sbatch takes one of them, or refuses two ("mutually exclusive").
TWINS: Mapping[str, tuple[str, ...]] = {
    "gpus": ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-socket", "--gpus-per-task"),
    "cpus": ("--cpus-per-task", "--cpus-per-gpu"),
    "memory_gb": ("--mem", "--mem-per-cpu", "--mem-per-gpu"),
}


class SlurmCodeGen(TaskCodeGen):
    """Renders a driver for one job inside the running Slurm job `slurm_job_id`.

    None stands for the job that the driver finds itself in. `container_name` is the pyxis container that the allocation
    keeps; every srun enters it.
    """

    def __init__(self, slurm_job_id: str | None, container_name: str | None = None) -> None:
        super().__init__()
        text = str(slurm_job_id) if isinstance(slurm_job_id, int) else slurm_job_id
        self._fields.update(slurm_job_id=text, container_name=container_name)

    def build(self) -> str:
        """The driver's text; run it on the head node with `python3`, the archive of `bundle()` beside it."""
        return render_driver(self.job())

    def bundle(self) -> Bundle:
        """The driver and the files it needs beside it."""
        return Bundle(self.job(), self.build())

    def job(self) -> Job:
        """The typed description behind the calls."""
        self._require_calls(ORDER, BUILD)
        return Job(**self._fields)

    def _set_resources(self, resources: Mapping[str, float]) -> None:
        self._fields["resources"] = Resources.from_dict(resources)


def render_driver(job: Job, secrets_name: str = protocol.SECRETS_NAME) -> str:
    """The driver of a typed job description. Compiled before it is returned: never a broken script.

    `secrets_name` is the file beside it that holds the secrets.
    """
    return render(
        TEMPLATE,
        secrets_name=secrets_name,
        job=job,
        protocol=protocol,
        run_srun=run_options(job),
        setup_srun=setup_options(job),
        env_vars=script_variables(job, job.env_vars),
        setup_env_vars=script_variables(job, {**job.setup_env_vars, protocol.ENV_NUM_NODES: str(job.num_nodes)}),
        gpus=job.resources.gpus,
        ray=ray_options(job.resources),
    )


def run_options(job: Job) -> list[str]:
    """srun's options for the run step. `--wait=0`: a rank that ends early does not end the others."""
    return [
        *_common_options(job, protocol.step_name(job.job_id, is_setup=False)),
        "--exclusive",
        "--cpus-per-task=%d" % job.resources.cpus,
        "--mem=0",
    ]


def setup_options(job: Job) -> list[str]:
    """srun's options for the setup step, which shares the nodes that the run step already holds."""
    return [
        *_common_options(job, protocol.step_name(job.job_id, is_setup=True)),
        "--overlap",
        "--cpus-per-task=%d" % job.resources.cpus,
        "--mem=0",
    ]


def ray_options(resources: Resources) -> dict[str, Any] | None:
    """What each rank must know of the Ray cluster that it is a part of, or None without one."""
    if resources.ray is None:
        return None
    counts = [f"--num-cpus={resources.cpus}", f"--num-gpus={resources.gpus}"]
    return {"activate": resources.ray.activate or "", "start_args": [*counts, *resources.ray.start_args]}


def _common_options(job: Job, name: str) -> list[str]:
    container = [f"--container-name={job.container_name}:exec", "--container-remap-root"] if job.container_name else []
    return [
        "--job-name=" + name,
        "--nodes=%d" % job.num_nodes,
        "--ntasks=%d" % job.num_nodes,
        "--ntasks-per-node=1",
        "--export=ALL",
        "--kill-on-bad-exit=1",
        "--wait=0",
        *container,
    ]


def script_variables(job: Job, own: Mapping[str, str]) -> Mapping[str, str]:
    """A script's own variables with what every driver tells it."""
    injected = {protocol.ENV_NUM_GPUS_PER_NODE: str(job.resources.gpus), protocol.ENV_INTERNAL_JOB_ID: job.job_id}
    return {**own, **injected}


def render_sbatch(job: Job, driver: str, output: str, extra: Sequence[str] = (), tombstone: str | None = None) -> str:
    """A batch script that asks for the job's nodes and becomes its driver. Raises SpecError.

    `driver` is the driver's path on the shared home, `output` the file for the driver's own output; its directory
    must exist when the job starts (sbatch(1), --output). `extra` are further sbatch options. Where a file `tombstone`
    exists when the job starts, the job was cancelled before, and ends.
    """
    return render_batch(sbatch_options(job, output, extra), job.python, driver, tombstone)


def render_batch(options: Sequence[str], python: str | None, driver: str, tombstone: str | None = None) -> str:
    """A batch script with these options; `:` stands between the components of a heterogeneous job."""
    return render(
        "job.sbatch.j2",
        options=[_directive(option) for option in options],
        python=python or "python3",
        driver=driver,
        tombstone=tombstone,
        exit_cancelled=protocol.EXIT_TERMINATED,
    )


def sbatch_options(job: Job, output: str, extra: Sequence[str] = ()) -> list[str]:
    """What a job asks of sbatch; an option in `extra` stands instead of ours of that name."""
    options = [
        "--job-name=" + job.task_name,
        "--nodes=%d" % job.num_nodes,
        "--ntasks-per-node=1",
        "--cpus-per-task=%d" % job.resources.cpus,
        "--output=" + output.replace("%", "%%"),
        "--open-mode=append",
        "--requeue" if job.requeue else "--no-requeue",
    ]
    options += ["--signal=B:" + job.warn_signal] if job.warn_signal else []
    options += ["--gpus-per-node=%d" % job.resources.gpus] if job.resources.gpus else []
    given = {option.partition("=")[0] for option in extra}
    for twins in TWINS.values():
        given |= set(twins) if given & set(twins) else set()
    return [*(option for option in options if option.partition("=")[0] not in given), *extra]


def _directive(option: str) -> str:
    """An option as a #SBATCH line carries it: one line, quoted where it holds blanks."""
    if option == ":":
        return "hetjob"
    if "\n" in option or '"' in option:
        raise SpecError(f"sbatch option {option!r}: a line break or a double quote cannot stand in a batch script")
    name, separator, value = option.partition("=")
    return f'{name}{separator}"{value}"' if any(c in value for c in " \t#'\\") else option
