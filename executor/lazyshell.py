"""`conda` and `module` for a shell that reads no rc file: functions that load the real ones at their first use.

They travel in the environment, as bash exports functions, so that nothing stands before the script's own text, and only
where the script speaks of them, the site has not brought them, and the file that defines them is there.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PROFILE = "/etc/profile.d"
MODULE_FILES = (
    *(f"{PROFILE}/{name}.sh" for name in ("modules", "lmod", "z00_lmod", "00-modulepath", "zz_modules")),
    "/usr/share/lmod/lmod/init/bash",
    "/usr/share/modules/init/bash",
)
CONDA_ROOTS = (
    *("~/miniconda3", "~/anaconda3", "~/miniforge3", "~/mambaforge"),
    *("/opt/conda", "/opt/miniconda3", "/opt/miniforge3"),
)
CONDA_SCRIPT = "etc/profile.d/conda.sh"


def shell_functions(script: bytes, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that define the functions the script may need."""
    found: dict[str, str] = {}
    for name, files in (("module", _module_files), ("conda", _conda_files)):
        if name.encode() in script and not _is_there(name, environ):
            path = next((file for file in files(environ) if os.path.isfile(file)), None)
            if path is not None:
                found[_variable(name)] = f'() {{ unset -f {name}; . {_quoted(path)}; {name} "$@"; }}'
    return found


def _is_there(name: str, environ: Mapping[str, str]) -> bool:
    return _variable(name) in environ or f"BASH_FUNC_{name}()" in environ


def _variable(name: str) -> str:
    return f"BASH_FUNC_{name}%%"


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def _module_files(environ: Mapping[str, str]) -> Iterator[str]:
    yield from MODULE_FILES


def _conda_files(environ: Mapping[str, str]) -> Iterator[str]:
    directories = environ.get("PATH", "").split(os.pathsep)
    for program in (environ.get("CONDA_EXE", ""), *(os.path.join(directory, "conda") for directory in directories)):
        if os.path.isabs(program) and os.path.isfile(program):
            yield os.path.join(os.path.dirname(os.path.dirname(program)), CONDA_SCRIPT)
    home = environ.get("HOME") or "/nonexistent"
    yield from (os.path.join(root.replace("~", home, 1), CONDA_SCRIPT) for root in CONDA_ROOTS)
