"""What travels to a Ray cluster, as the packages that Ray hands to its nodes: zip files, named by what they hold."""

from __future__ import annotations

import hashlib
import importlib.resources
import io
import posixpath
import shlex
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from codegen.spec import SpecError
from gangrun.snapshot import Snapshot

DATE = (1980, 1, 1, 0, 0, 0)
FOLDER = "gangrun_launch"  # of the driver's package: who adds it to Python's path must not find our names at the top
ENTRY, MAIN = "ray_entry.py", "__main__.py"
PREFIX = "_ray_pkg_"  # Ray takes what is named so for its own, and removes it when no job needs it
NAME_LENGTH = 32
# ray_constants.DASHBOARD_CLIENT_MAX_SIZE; the dashboard reads no larger request
LARGEST_BYTES = 100 * 1024**2
MOST_LINKS = 40  # as the kernel has it: a chain that is longer is a loop
PRIVATE, PLAIN, EXECUTABLE = 0o600, 0o644, 0o755
FILE_TYPE = 0o100000
NAMES_IN_NOTE = 3


class Package(NamedTuple):
    """A zip file as Ray's server stores it. `notes` are what a person should know of it."""

    name: str
    content: bytes
    notes: tuple[str, ...] = ()

    @property
    def uri(self) -> str:
        return f"gcs://{self.name}"


def tree_package(snapshot: Snapshot | None) -> Package:
    """The work directory; without one an empty directory. Raises SpecError for more than Ray takes."""
    digest = snapshot.digest if snapshot else hashlib.sha256(b"").hexdigest()
    content, notes = _zip_of_tar(snapshot.path) if snapshot else (_zip({}), ())
    if len(content) >= LARGEST_BYTES:
        size, most = len(content) / 1e6, LARGEST_BYTES / 1e6
        raise SpecError(
            f"workdir: {size:.0f} MB when packed, and Ray's server takes less than {most:.0f} MB; leave out what the"
            " job does not need (.gitignore), or put it where the nodes can read it"
        )
    return Package(_name(digest), content, notes)


def launch_package(files: Mapping[str, bytes]) -> Package:
    """The driver and what belongs to it, with a small program that starts it; all of it for its owner only."""
    entry = importlib.resources.files("gangrun").joinpath(ENTRY).read_bytes()
    own = {MAIN: entry, **files}
    content = _zip({f"{FOLDER}/{name}": (body, PRIVATE) for name, body in sorted(own.items())})
    return Package(_name(hashlib.sha256(content).hexdigest()), content)


def entrypoint(package: Package, python: str, run: str) -> str:
    """The command that becomes the driver. Ray unpacks the package to a place that only PYTHONPATH tells; -I, since a
    module of the work directory would come before Python's own."""
    folder = package.name.rpartition(".")[0]
    parts = (
        f"p=${{PYTHONPATH%%{folder}*}}",
        f'exec {shlex.quote(python)} -I "${{p##*:}}{folder}/{FOLDER}/{MAIN}" {run}',
    )
    return "; ".join(parts)


def _name(digest: str) -> str:
    return f"{PREFIX}{digest[:NAME_LENGTH]}.zip"


def _zip(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (content, mode) in files.items():
            _add(archive, name, content, mode)
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, name: str, content: bytes, mode: int) -> None:
    info = zipfile.ZipInfo(name, DATE)
    info.external_attr = (FILE_TYPE | mode) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, content)


def _zip_of_tar(path: str) -> tuple[bytes, tuple[str, ...]]:
    """A tree as Ray unpacks it: it knows no symlinks, so those to files of the tree become copies."""
    buffer, lost = io.BytesIO(), []
    with tarfile.open(path) as tree, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        members = {member.name: member for member in tree}
        for name, member in members.items():
            source = _target(members, member)
            if source is None or not _is_portable(name):
                lost.append(name)
                continue
            file = tree.extractfile(source)
            mode = EXECUTABLE if source.mode & 0o100 else PLAIN
            _add(archive, name, file.read() if file else b"", mode)
    return buffer.getvalue(), (*_notes(lost), *_hiding(members))


def _is_portable(name: str) -> bool:
    """Ray skips names with a backslash, and a zip file's names are Unicode."""
    return "\\" not in name and name.encode("utf-8", "replace").decode() == name


def _target(members: Mapping[str, tarfile.TarInfo], member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The file that a member stands for; None for a link that leads to none in the tree."""
    for _ in range(MOST_LINKS):
        if not member.issym():
            return member
        name = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
        found = members.get(name)
        if found is None:
            return None
        member = found
    return None


def _hiding(names: Iterable[str]) -> tuple[str, ...]:
    """Ray puts the work directory before Python's own modules in its workers, which then fail to start, without a word
    for minutes."""
    own: frozenset[str] = getattr(sys, "stdlib_module_names", frozenset())  # since Python 3.10
    tops = (name[: -len(".py")] for name in names if name.endswith(".py") and "/" not in name)
    packages = (name.partition("/")[0] for name in names if name.count("/") == 1 and name.endswith("/__init__.py"))
    hidden = sorted({name for name in (*tops, *packages) if name in own})
    if not hidden:
        return ()
    shown = ", ".join(hidden[:NAMES_IN_NOTE])
    return (f"the work directory hides modules of Python's own from Ray ({shown}); its workers may never start",)


def _notes(lost: list[str]) -> tuple[str, ...]:
    if not lost:
        return ()
    shown = ", ".join(repr(name)[1:-1] for name in lost[:NAMES_IN_NOTE])
    more = f" and {len(lost) - NAMES_IN_NOTE} more" if len(lost) > NAMES_IN_NOTE else ""
    return (f"Ray cannot carry symlinks to directories or to outside, nor odd names; left out ({shown}{more})",)
