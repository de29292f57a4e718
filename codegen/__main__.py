"""`python -m codegen job.yaml`: print the driver of a job, or write it with its archive into a directory."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from codegen.bundle import Bundle
from codegen.slurm import render_driver
from codegen.spec import Job, Resources, SpecError
from codegen.yamlfile import YamlMapping, read
from executor import protocol

FIELDS = [field.name for field in dataclasses.fields(Job)]
RESOURCE_FIELDS = [field.name for field in dataclasses.fields(Resources)]


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m codegen", description=__doc__)
    parser.add_argument("job", help="a YAML file with the fields " + ", ".join(FIELDS))
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="write driver and archive into DIR instead of printing the driver"
    )
    arguments = parser.parse_args(argv)
    try:
        job = job_from_file(arguments.job)
        driver = render_driver(job)
        if arguments.output:
            print(Bundle(job, driver).write(arguments.output))
        else:
            sys.stdout.write(driver)
    except SpecError as error:
        print(f"codegen: {error}", file=sys.stderr)
        return protocol.EXIT_USAGE
    return 0


def job_from_file(path: str) -> Job:
    """The job described in a YAML file. Raises SpecError that names the file and, where it can, the line."""
    mapping = read(path, "job")
    mapping.allow(FIELDS)
    values: dict[str, Any] = dict(mapping.values)
    for name in ("job_id", "num_nodes", "log_dir"):
        if values.get(name) is None:
            raise SpecError(f"{path}: {name} is required")
    for name in ("slurm_job_id", "job_id", "task_name"):
        if isinstance(values.get(name), int):
            values[name] = str(values[name])
    for name in ("env_vars", "setup_env_vars", "secrets"):
        mapping.get(name, dict, "a mapping")
    values["cluster_ips"] = _texts(mapping)
    try:
        if "resources" in values:
            values["resources"] = _resources(mapping)
        return Job(**values)
    except SpecError as error:
        if str(error).startswith(path):
            raise
        field = str(error).split("=")[0].split("[")[0]
        raise SpecError(f"{path}:{mapping.lines.get(field, 1)}: {error}") from error


def _texts(mapping: YamlMapping) -> Any:
    entries = mapping.get("cluster_ips", list, "a list of addresses or host names", [])
    if not all(isinstance(entry, str) for entry in entries):
        mapping.fail("cluster_ips", f"cluster_ips={entries!r}: use a list of texts")
    return tuple(entries)


def _resources(mapping: YamlMapping) -> Resources:
    nested = mapping.nested.get("resources")
    if nested is None:
        mapping.fail("resources", "resources: use a mapping of {}".format(", ".join(RESOURCE_FIELDS)))
    nested.allow(RESOURCE_FIELDS)
    for name in ("cpus", "gpus"):
        nested.get(name, int, "a whole number")
    return Resources(**nested.values)


if __name__ == "__main__":
    sys.exit(main())
