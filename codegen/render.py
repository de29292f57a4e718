"""The one Jinja2 environment. One filter owns Python quoting, one owns shell quoting."""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from codegen.spec import Job
from executor import protocol


def render(template: str, **values: Any) -> str:
    """A template's text; Python is compiled first, so that no broken driver is ever returned."""
    text = _environment().get_template(template).render(**values)
    if template.endswith(".py.j2"):
        compile(text, template, "exec")
    return text


def render_driver_of(job: Job, template: str, secrets_name: str, **values: Any) -> str:
    """A job's driver; its scripts' own variables come with what every driver tells them."""
    told = {protocol.ENV_NUM_GPUS_PER_NODE: str(job.resources.gpus), protocol.ENV_INTERNAL_JOB_ID: job.job_id}
    env_vars = {**job.env_vars, **told}
    setup_env_vars = {**job.setup_env_vars, protocol.ENV_NUM_NODES: str(job.num_nodes), **told}
    known = {"secrets_name": secrets_name, "env_vars": env_vars, "setup_env_vars": setup_env_vars}
    return render(template, job=job, protocol=protocol, **known, **values)


def render_page(template: str, **values: Any) -> str:
    """A page of HTML: every value is escaped, but those that the template itself calls safe."""
    return _environment().overlay(autoescape=True).get_template(template).render(**values)


def template_text(name: str) -> str:
    """A file beside the templates, as it is."""
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]


def python_literal(value: Any, indent: int = 0) -> str:
    """A literal that evaluates to `value`. Long texts and collections take a line an item."""
    pad = " " * (indent + 4)
    if isinstance(value, str) and "\n" in value:
        return "(\n{}{})".format("".join(f"{pad}{line!r}\n" for line in value.splitlines(keepends=True)), " " * indent)
    if isinstance(value, (list, tuple)) and value:
        return "[\n{}{}]".format("".join(f"{pad}{item!r},\n" for item in value), " " * indent)
    if isinstance(value, dict) and value:
        return "{{\n{}{}}}".format("".join(f"{pad}{key!r}: {item!r},\n" for key, item in value.items()), " " * indent)
    return repr(value)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("driver_templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["py"] = python_literal
    environment.filters["sh"] = shlex.quote
    return environment
