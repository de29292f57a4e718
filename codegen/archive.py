"""One file that holds the executor and its two small libraries, so that nothing is installed on the nodes.

A zip with compiled code beside the source: Python reads the compiled code if it is of its own version, else the
source. Stored, not deflated: a node reads it in a few requests instead of looking up hundreds of files.
"""

import importlib.util
import io
import os
import py_compile
import tempfile
import zipfile
from functools import lru_cache
from typing import Dict, Iterator, Tuple

from executor import protocol

PACKAGED = ("executor", "hostlist", "colorama")
# Any Python must be able to read this: it may be the one that is too old.
MAIN = """\
import sys
if sys.version_info < OLDEST:
    sys.stderr.write("gangrun: %s is too old: every node needs Python %d.%d or newer\\n" % ((sys.executable,) + OLDEST))
    sys.exit(INFRASTRUCTURE)
if sys.argv[1:2] == ["local"]:
    from executor import local as program
    del sys.argv[1]
else:
    from executor import slurm as program
program.run_as_program()
"""
MAIN = MAIN.replace("OLDEST", repr(protocol.OLDEST_PYTHON)).replace("INFRASTRUCTURE", str(protocol.EXIT_INFRASTRUCTURE))


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


def _members() -> Dict[str, bytes]:
    members = {"__main__.py": MAIN.encode()}
    for module in PACKAGED:
        for name, path in _sources(module):
            with open(path, "rb") as file:
                members[name] = file.read()
            members[name + "c"] = _compiled(path, name)
    return members


def _sources(module: str) -> Iterator[Tuple[str, str]]:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, "%s is not installed" % module
    if not spec.submodule_search_locations:
        yield module + ".py", spec.origin
        return
    directory = os.path.dirname(spec.origin)
    for name in sorted(os.listdir(directory)):
        if name.endswith(".py"):
            yield "%s/%s" % (module, name), os.path.join(directory, name)


def _compiled(path: str, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        target = os.path.join(directory, "code")
        py_compile.compile(
            path, target, dfile=name, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
        with open(target, "rb") as file:
            return file.read()
