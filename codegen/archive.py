"""One file that holds the executor and its two small libraries, so that nothing is installed on the nodes.

A zip with compiled code beside the source: Python reads the compiled code if it is of its own version, else the
source. Stored, not deflated: a node reads it in a few requests instead of looking up hundreds of files.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import lru_cache

from codegen import recompile
from executor import protocol

PACKAGED = ("executor", "hostlist", "__future__")
# Of colorama only its ANSI table: the rest is for Windows, and its import of ctypes costs a node 5 ms of CPU.
COLORAMA = "from colorama.ansi import Fore, Style\n"
# Any Python must be able to read this: it may be the one that is too old. zipimport opens the archive twice for
# every module; a shared file system feels that, so all compiled code is also in one member that is read once.
MAIN = """\
import sys
if sys.version_info < OLDEST:
    sys.stderr.write("gangrun: %s is too old: every node needs Python %d.%d or newer\\n" % ((sys.executable,) + OLDEST))
    sys.exit(INFRASTRUCTURE)

import marshal
from importlib import import_module
from importlib.util import MAGIC_NUMBER


class Bundle:
    def __init__(self, modules):
        self.modules = modules

    def find_spec(self, name, path=None, target=None):
        if name in self.modules:
            return type(__spec__)(name, self, origin=name, is_package=self.modules[name][0])

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(marshal.loads(self.modules[module.__name__][1]), module.__dict__)


magic, modules = marshal.loads(__loader__.get_data("BUNDLE"))
if magic == MAGIC_NUMBER:
    sys.meta_path.insert(0, Bundle(modules))
program = sys.argv.pop(1) if sys.argv[1:2] and sys.argv[1] in PROGRAMS else RANK
import_module("executor." + program.replace("-", "_")).run_as_program()
"""
for _name, _value in (
    ("OLDEST", repr(protocol.OLDEST_PYTHON)),
    ("INFRASTRUCTURE", str(protocol.EXIT_INFRASTRUCTURE)),
    ("BUNDLE", recompile.BUNDLE),
    ("PROGRAMS", repr(protocol.PROGRAMS)),
    ("RANK", repr(protocol.RANK)),
):
    MAIN = MAIN.replace(_name, _value)


@lru_cache(maxsize=1)
def executor_archive() -> bytes:
    """The archive's bytes; the same code gives the same bytes."""
    return recompile.packed(_members())


def _members() -> dict[str, bytes]:
    members = {name: source for package in PACKAGED for name, source in _sources(package)}
    members.update(item for item in _sources("colorama") if item[0] == "colorama/ansi.py")
    members["colorama/__init__.py"] = COLORAMA.encode()
    members[recompile.PROGRAM] = MAIN.encode()
    members[recompile.NAME] = _content(recompile.__file__)
    return members


def _sources(package: str) -> Iterator[tuple[str, bytes]]:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    directory = os.path.dirname(spec.origin)
    names = os.listdir(directory) if spec.submodule_search_locations else []
    files = [f"{package}/{name}" for name in names if name.endswith(".py")] or [package + ".py"]
    for name in files:
        yield name, _content(os.path.join(directory, os.path.basename(name)))


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
