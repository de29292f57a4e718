"""Turns a job description into a driver script that runs it on the head node of an allocation."""

from __future__ import annotations

from codegen.base import CallOrderError, TaskCodeGen
from codegen.bundle import Bundle
from codegen.ray import RayCodeGen, render_ray_driver
from codegen.slurm import SlurmCodeGen, render_driver, render_sbatch
from codegen.spec import Job, Ray, Resources, SpecError

__all__ = [
    "Bundle",
    "CallOrderError",
    "Job",
    "Ray",
    "RayCodeGen",
    "Resources",
    "SlurmCodeGen",
    "SpecError",
    "TaskCodeGen",
    "render_driver",
    "render_ray_driver",
    "render_sbatch",
]
