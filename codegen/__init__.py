"""Turns a job description into a driver script that runs it on the head node of an allocation."""

from __future__ import annotations

from codegen.base import CallOrderError, TaskCodeGen
from codegen.bundle import Bundle
from codegen.slurm import SlurmCodeGen, render_driver, render_sbatch
from codegen.spec import Job, Resources, SpecError

__all__ = [
    "Bundle",
    "CallOrderError",
    "Job",
    "Resources",
    "SlurmCodeGen",
    "SpecError",
    "TaskCodeGen",
    "render_driver",
    "render_sbatch",
]
