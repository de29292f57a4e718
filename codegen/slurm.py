"""The driver for a Slurm allocation: a background `srun --exclusive` for the run, `srun --overlap` for setup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from codegen.base import TaskCodeGen
from codegen.render import render, render_driver_of
from codegen.spec import Job, Resources, SpecError
from executor import protocol

TEMPLATE = "slurm_driver.py.j2"
# Options that ask for the same thing: sbatch takes one of them, or refuses two ("mutually exclusive").
TWINS: Mapping[str, tuple[str, ...]] = {
    "gpus": ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-socket", "--gpus-per-task"),
    "cpus": ("--cpus-per-task", "--cpus-per-gpu"),
    "memory_gb": ("--mem", "--mem-per-cpu", "--mem-per-gpu"),
}

MOST = 2**31 - 1  # sbatch keeps counts in 32 bits, and takes 4294967297 for 1 without a word (measured)


class SlurmCodeGen(TaskCodeGen):
    """Renders a driver for one job inside the running Slurm job `slurm_job_id`, to be run with `python3`.

    None stands for the job that the driver finds itself in. `container_name` is the pyxis container that the allocation
    keeps; every srun enters it.
    """

    def __init__(self, slurm_job_id: str | None, container_name: str | None = None) -> None:
        super().__init__()
        text = str(slurm_job_id) if isinstance(slurm_job_id, int) else slurm_job_id
        self._fields.update(slurm_job_id=text, container_name=container_name)

    def _render(self, job: Job) -> str:
        return render_driver(job)


def render_driver(job: Job, secrets_name: str = protocol.SECRETS_NAME) -> str:
    """The driver of a typed job description. Compiled before it is returned: never a broken script.

    `secrets_name` is the file beside it that holds the secrets.
    """
    return render_driver_of(
        job,
        TEMPLATE,
        secrets_name,
        run_srun=step_options(job, is_setup=False),
        setup_srun=step_options(job, is_setup=True),
        gpus=job.resources.gpus,
        ray=ray_options(job.resources),
    )


def step_options(job: Job, is_setup: bool) -> list[str]:
    """srun's options for a step. Setup shares the nodes that the run step already holds.

    `--wait=0`: a rank that ends early does not end the others.
    """
    container = [f"--container-name={job.container_name}:exec", "--container-remap-root"] if job.container_name else []
    return [
        "--job-name=" + protocol.step_name(job.job_id, is_setup),
        "--nodes=%d" % job.num_nodes,
        "--ntasks=%d" % job.num_nodes,
        "--ntasks-per-node=1",
        "--export=ALL",
        "--kill-on-bad-exit=1",
        "--wait=0",
        *container,
        "--overlap" if is_setup else "--exclusive",
        "--cpus-per-task=%d" % job.resources.cpus,
        "--mem=0",
    ]


def ray_options(resources: Resources) -> dict[str, Any] | None:
    """What each rank must know of the Ray cluster that it is a part of, or None without one."""
    if resources.ray is None:
        return None
    counts = [f"--num-cpus={resources.cpus}", f"--num-gpus={resources.gpus}"]
    return {"activate": resources.ray.activate or "", "start_args": [*counts, *resources.ray.start_args]}


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
    """What a job asks of sbatch; an option in `extra` stands instead of ours of that name.

    Raises SpecError for numbers that Slurm would take for others.
    """
    for name, count in (("nodes", job.num_nodes), ("cpus", job.resources.cpus), ("gpus", job.resources.gpus)):
        if count > MOST:
            raise SpecError(f"{job.task_name} asks for {name}={count}: Slurm knows numbers up to {MOST}")
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
