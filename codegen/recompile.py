"""The compiled code in the archive: made with the archive, and again where a Python of another version will run it.

Also a member of the archive, so that it can be renewed on a cluster: python -I -S -c CODE ARCHIVE.
"""

from __future__ import annotations

import io
import marshal
import os
import sys
import zipfile
from importlib.util import MAGIC_NUMBER

BUNDLE = "bundle"
PROGRAM = "__main__.py"
NAME = "recompile.py"
CODE = "import sys; sys.path.insert(0, sys.argv[1]); import recompile; recompile.renew(sys.argv[1])"
PYC_HEADER = MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)  # PEP 552: by hash, never checked


def packed(sources: dict[str, bytes]) -> bytes:
    """An archive of modules, with the compiled code beside each and all of it once more in one member."""
    members = {**sources, **{name + "c": PYC_HEADER + _code(source, name) for name, source in sources.items()}}
    bundle = {
        _module_name(name): (name.endswith("/__init__.py"), _code(source, name))
        for name, source in sorted(sources.items())
        if name != PROGRAM
    }
    members[BUNDLE] = marshal.dumps((MAGIC_NUMBER, bundle), 2)  # version 2: every Python reads it
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(members.items()):
            info = zipfile.ZipInfo(name)  # dated 1980: reproducible
            info.external_attr = 0o644 << 16
            archive.writestr(info, content)
    return buffer.getvalue()


def renew(path: str) -> None:
    """Compile an archive's modules with this Python, if it was made by another."""
    with zipfile.ZipFile(path) as archive:
        if marshal.loads(archive.read(BUNDLE))[0] == MAGIC_NUMBER:
            return
        sources = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
    with open(path + ".tmp", "wb") as file:
        file.write(packed(sources))
    os.replace(path + ".tmp", path)


def _module_name(name: str) -> str:
    return name[: -len(".py")].replace("/__init__", "").replace("/", ".")


def _code(source: bytes, name: str) -> bytes:
    return marshal.dumps(compile(source, name, "exec", dont_inherit=True))


if __name__ == "__main__":
    renew(sys.argv[1])
