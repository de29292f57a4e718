"""One file that holds the executor and its two small libraries, so that nothing is installed on the nodes.

A zip with compiled code beside the source: Python reads the compiled code if it is of its own version, else the
source. Stored, not deflated: a node reads it in a few requests instead of looking up hundreds of files.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import os
import py_compile
import tempfile
import zipfile
from collections.abc import Iterator
from functools import lru_cache

from executor import protocol

PACKAGED = ("executor", "hostlist", "colorama")
BUNDLE = "bundle"
PYC_HEADER_BYTES = 16  # PEP 552
# Any Python must be able to read this: it may be the one that is too old. zipimport opens the archive twice for
# every module; a shared file system feels that, so all compiled code is also in one member that is read once.
MAIN = """\
import sys
if sys.version_info < OLDEST:
    sys.stderr.write("gangrun: %s is too old: every node needs Python %d.%d or newer\\n" % ((sys.executable,) + OLDEST))
    sys.exit(INFRASTRUCTURE)

import marshal
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
if sys.argv[1:2] == ["local"]:
    from executor import local as program
    del sys.argv[1]
else:
    from executor import slurm as program
program.run_as_program()
"""
for _name, _value in (
    ("OLDEST", repr(protocol.OLDEST_PYTHON)),
    ("INFRASTRUCTURE", str(protocol.EXIT_INFRASTRUCTURE)),
    ("BUNDLE", BUNDLE),
):
    MAIN = MAIN.replace(_name, _value)


@lru_cache(maxsize=1)
def executor_archive() -> bytes:
    """The archive's bytes; the same code gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(_members().items()):
            info = zipfile.ZipInfo(name)  # dated 1980: reproducible
            info.external_attr = 0o644 << 16
            archive.writestr(info, content)
    return buffer.getvalue()


def _members() -> dict[str, bytes]:
    members = {"__main__.py": MAIN.encode()}
    modules: dict[str, tuple[bool, bytes]] = {}
    for package in PACKAGED:
        for name, path in _sources(package):
            with open(path, "rb") as file:
                members[name] = file.read()
            members[name + "c"] = _compiled(path, name)
            module = name[: -len(".py")].replace("/", ".")
            is_package = module.endswith(".__init__")
            modules[module[: -len(".__init__")] if is_package else module] = (
                is_package,
                members[name + "c"][PYC_HEADER_BYTES:],
            )
    members["__main__.pyc"] = _compiled_text(MAIN)
    members[BUNDLE] = marshal.dumps((importlib.util.MAGIC_NUMBER, modules), 2)  # version 2: every Python reads it
    return members


def _sources(package: str) -> Iterator[tuple[str, str]]:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    if not spec.submodule_search_locations:
        yield package + ".py", spec.origin
        return
    directory = os.path.dirname(spec.origin)
    for name in sorted(os.listdir(directory)):
        if name.endswith(".py"):
            yield f"{package}/{name}", os.path.join(directory, name)


def _compiled_text(text: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        source = os.path.join(directory, "__main__.py")
        with open(source, "w", encoding="utf-8") as file:
            file.write(text)
        return _compiled(source, "__main__.py")


def _compiled(path: str, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        target = os.path.join(directory, "code")
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(path, target, dfile=name, doraise=True, invalidation_mode=mode)
        with open(target, "rb") as file:
            return file.read()
