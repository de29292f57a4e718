"""The work directory as one archive, built on this machine and named by the SHA-256 of its bytes.

Equal trees give equal bytes, whatever the commit, the dates, the owner, the umask or the version of git. Committed
content is read from git's objects and never passes through a filter or an attribute; working files are read as they
are. What does not travel, or is not what it seems, is said in the notes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tarfile
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, NamedTuple

from codegen.spec import SpecError
from executor.protocol import GangrunError

GB = 10**9
LARGE_BYTES = 2 * GB
LARGEST_BYTES = 20 * GB
DIFF_BYTES = 10**6
NAMES_IN_DIFF = 1000
NAMES_IN_NOTE = 3
ATTEMPTS = 3
PAUSE_S = 0.2
STALE_S = 24 * 3600.0
BLOCK_BYTES = 1 << 20
PARTIAL = ".part"
# All the same, and after 1980: zip files, and so wheels built in the job, cannot hold what is older.
DATE = 946684800
# What says where git and its configuration are stays; what says where a repository is goes.
KEPT_VARIABLES = ("GIT_EXEC_PATH", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM")
SUBMODULE, LINK = b"160000", b"120000"
UNREAD = "could not open directory"  # git goes on without it, and succeeds
BYTECODE = (b"__pycache__/", b".pyc")
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
LFS_START = b"version https://git-lfs.github.com/spec/v1\n"
LFS_POINTER = re.compile(re.escape(LFS_START) + rb"oid sha256:([0-9a-f]{64})\nsize ([0-9]+)\n")
NO_DIFF = b"git diff failed: the changes above are not all\n"
LFS_SIZES = range(100, 1024)
CRYPT_START = b"\0GITCRYPT\0"

NOT_GIT = "not a git repository: all files were taken"
NO_GIT = "git is not installed: all files were taken, committed or not, ignored or not"
EMPTY_SUBMODULE = "submodules without a checkout are empty (%s): git submodule update --init --recursive"
LOST_SUBMODULE = "submodules that lack the recorded commit are empty (%s): git submodule update --init --recursive"
LFS = "of these LFS files only the pointer travels (%s): git lfs pull"
CRYPT = "files that git-crypt encrypts travel encrypted (%s): --dirty takes them as they are here"
OUTSIDE = "symlinks that point outside the work directory travel as they are (%s)"
SPECIAL = "sockets, pipes and devices are left out (%s)"
NESTED = "git repositories inside that are no submodules: their files were taken (%s)"
BROKEN = "directories that are broken git repositories are left out (%s)"
IGNORED = "ignored files do not travel (%s)"
HIDDEN_COMMITTED = "files hidden from git status travel as committed (%s): git update-index --no-assume-unchanged"
HIDDEN_DIRTY = "files hidden from git status travel as they are here, without a diff (%s)"
CUT_DIFF = "the recorded diff is cut after %s"
CHANGED = "uncommitted changes do not travel (%s): commit them or use --dirty"
UNKNOWN_CHANGES = "whether there are uncommitted changes is unknown: %s"


class Snapshot(NamedTuple):
    """An archive in the cache, and where its content comes from."""

    path: str
    digest: str
    size: int
    files: int
    commit: str | None
    branch: str | None
    is_dirty: bool  # the archive holds what no commit does
    diff: str  # from `commit` to the archive, with the names of untracked files; "" when not dirty
    notes: tuple[str, ...]


class Blob(NamedTuple):
    """An object of the repository that git finds from this directory."""

    directory: bytes
    object_id: bytes


class File(NamedTuple):
    """A file as it was found: who reads it later must find it unchanged."""

    path: bytes
    state: tuple[int, ...]


class Entry(NamedTuple):
    """A file of the archive and the source of its bytes, or a symlink with its target."""

    name: bytes
    size: int
    source: Blob | File | bytes
    is_executable: bool = False


class Repository(NamedTuple):
    """A work tree, or a part of one, as git shows it from `directory`; `prefix` is its place in the archive."""

    directory: bytes
    prefix: bytes
    commit: str | None


class Tracked(NamedTuple):
    """An entry of git's index."""

    tag: bytes
    mode: bytes
    object_id: bytes
    name: bytes

    @property
    def is_hidden(self) -> bool:
        """From `git status`, as assume-unchanged (a tag in lower case) or skip-worktree (S)."""
        return self.tag == b"S" or self.tag.islower()


class Changes(NamedTuple):
    """What `git status` says, as names relative to the work directory."""

    modified: tuple[bytes, ...] = ()
    untracked: tuple[bytes, ...] = ()
    ignored: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.modified or self.untracked)


class Unusable(Exception):
    """Why there is no snapshot of this directory."""


class Changed(Unusable):
    """A file is not what it was a moment ago."""

    def __init__(self, path: bytes) -> None:
        ways = "stop what writes it, or leave it out with .gitignore"
        super().__init__(f"{_shown(path)} changes while it is read: {ways}")


class GitFailed(Unusable):
    """A git command failed."""


def take(workdir: str, cache_dir: str, *, dirty: bool = False) -> Snapshot:
    """Archive the committed tree of a work directory, or with `dirty` the tree as it is now.

    Outside git all files are taken. Raises SpecError for a directory of which there can be no snapshot, GangrunError
    for a cache that cannot be written.
    """
    root = os.path.realpath(os.path.expanduser(workdir))
    if not os.path.isdir(root):
        raise SpecError(f"workdir={workdir!r}: use a directory; {root} is none")
    try:
        cache = _cache(cache_dir)
        return _take_unchanged(os.fsencode(root), cache, dirty)
    except Unusable as error:
        raise SpecError(f"workdir={workdir!r}: {error}") from error
    except OSError as error:
        raise GangrunError(f"cannot write a snapshot in {cache_dir}: {error.strerror or error}") from error


def _take_unchanged(root: bytes, cache: str, dirty: bool) -> Snapshot:
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(Changed):
            return _take(root, cache, dirty)
        time.sleep(PAUSE_S)
    return _take(root, cache, dirty)


def _take(root: bytes, cache: str, dirty: bool) -> Snapshot:
    with Objects() as objects:
        survey = Survey(root, os.fsencode(cache), objects)
        repository = _repository_of(root, survey.general)
        if repository is None:
            return _archived(survey.of_plain_directory(), cache, None)
        if dirty:
            return _archived(survey.of_working_tree(repository), cache, repository)
        return _archived(survey.of_commit(repository), cache, repository)


def _archived(survey: Survey, cache: str, repository: Repository | None) -> Snapshot:
    notes = (*survey.notes(), *_size_notes(survey.entries.values(), repository is not None))
    path, digest, size = _write(survey, cache)
    commit, branch = (repository.commit, _branch(repository)) if repository else (None, None)
    return Snapshot(path, digest, size, len(survey.entries), commit, branch, survey.is_dirty, survey.diff, notes)


# --- what is in the tree


class Survey:
    """Finds the entries of one archive, reading little: later reads must find the files unchanged."""

    def __init__(self, root: bytes, cache: bytes, objects: Objects) -> None:
        self.root = root
        self.cache = cache
        self.objects = objects
        self.entries: dict[bytes, Entry] = {}
        self.is_dirty = False
        self.diff = ""
        self.general: list[str] = []
        self._found: defaultdict[str, list[bytes]] = defaultdict(list)
        self._repositories: list[Repository] = []
        self._untracked: list[bytes] = []
        self._links: dict[bytes, bool] = {}
        self._stores: dict[bytes, bytes] = {}

    def of_commit(self, repository: Repository) -> Survey:
        if repository.commit is None:
            raise Unusable("the repository has no commit yet: commit first, or use --dirty")
        self._add_commit(repository, repository.commit)
        if not self.entries and _prefix(repository.directory):
            raise Unusable("nothing in it is committed: commit first, or use --dirty")
        self._note_hidden(repository)
        changes = self._changes(repository)
        if changes:
            self.general.append(CHANGED % _summary(changes))
        return self

    def of_working_tree(self, repository: Repository) -> Survey:
        self._add_working_tree(repository)
        if not self.entries and _prefix(repository.directory):
            raise Unusable("git ignores all of it: use a directory of its own, or change .gitignore")
        changes = self._changes(repository)
        self.is_dirty = bool(changes is None or changes or self._found[HIDDEN_DIRTY])
        if self.is_dirty:
            self.diff = self._diff()
        return self

    def of_plain_directory(self) -> Survey:
        pending = [b""]
        while pending:
            prefix = pending.pop()
            for found in _listed(os.path.join(self.root, prefix)):
                name = prefix + found.name
                if found.name == b".git":
                    self._found[NESTED].extend([prefix] if prefix else [])
                elif found.is_dir(follow_symlinks=False):
                    pending.append(name + b"/")
                else:
                    self._add_file(name, found.path)
        return self

    def notes(self) -> tuple[str, ...]:
        found = (text % _counted(sorted(names)) for text, names in self._found.items() if names)
        return (*self.general, *found)

    # --- as committed

    def _add_commit(self, repository: Repository, commit: str) -> None:
        for record in _records(_git(repository.directory, "ls-tree", "-r", "-l", "-z", commit)):
            facts, name = record.split(b"\t", 1)
            mode, _, object_id, size = facts.split()
            if mode == SUBMODULE:
                self._add_submodule(repository, name, object_id.decode())
            else:
                blob = Blob(repository.directory, object_id)
                if not size.isdigit():
                    raise Unusable(_missing(blob))
                self._add_blob(repository, name, mode, blob, int(size))

    def _add_submodule(self, parent: Repository, name: bytes, commit: str) -> None:
        repository = _repository_at(os.path.join(parent.directory, name), parent.prefix + name + b"/")
        if repository is None:
            self._found[EMPTY_SUBMODULE].append(parent.prefix + name)
        elif not _has_commit(repository, commit):
            self._found[LOST_SUBMODULE].append(parent.prefix + name)
        else:
            self._add_commit(repository, commit)

    def _add_blob(self, repository: Repository, name: bytes, mode: bytes, blob: Blob, size: int) -> None:
        place, start = repository.prefix + name, b""
        if mode == LINK:
            self._add_link(place, self.objects.content(blob))
            return
        if size in LFS_SIZES:
            start = self.objects.content(blob)
        entry = Entry(place, size, blob, int(mode, 8) & stat.S_IXUSR != 0)
        self._add(self._without_pointer(repository, entry, start, os.path.join(repository.directory, name)))
        if start.startswith(CRYPT_START):
            self._found[CRYPT].append(place)

    # --- as it is now

    def _add_working_tree(self, repository: Repository) -> None:
        self._repositories.append(repository)
        has_modes = _setting(repository, "core.fileMode", "--bool") != "false"
        for tracked in _tracked(repository):
            if tracked.mode == SUBMODULE:
                self._add_checkout(repository, tracked.name, EMPTY_SUBMODULE)
            elif not self._is_behind_link(repository.directory, tracked.name):
                self._add_tracked(repository, tracked, has_modes)
        for name in _others(repository):
            self._add_untracked(repository, name)

    def _add_tracked(self, repository: Repository, tracked: Tracked, has_modes: bool) -> None:
        place, path = repository.prefix + tracked.name, os.path.join(repository.directory, tracked.name)
        is_here = os.path.lexists(path)
        if tracked.tag in b"Ss" and not is_here:  # not deleted: a sparse checkout leaves it out
            blob = Blob(repository.directory, tracked.object_id)
            self._add_blob(repository, tracked.name, tracked.mode, blob, sum(map(len, self.objects.blocks(blob))))
            return
        if tracked.is_hidden and is_here:
            self._found[HIDDEN_DIRTY].append(place)
        self._add_file(place, path, repository, None if has_modes else tracked.mode)

    def _add_untracked(self, repository: Repository, name: bytes) -> None:
        place = repository.prefix + name
        if self._is_cache(os.path.join(repository.directory, name)):
            return
        self._untracked.append(place)
        if not name.endswith(b"/"):
            self._add_file(place, os.path.join(repository.directory, name), repository)
        elif self._add_checkout(repository, name.rstrip(b"/"), BROKEN):
            self._found[NESTED].append(place)

    def _add_checkout(self, parent: Repository, name: bytes, note: str) -> bool:
        repository = _repository_at(os.path.join(parent.directory, name), parent.prefix + name + b"/")
        if repository is None:
            self._found[note].append(parent.prefix + name)
            return False
        self._add_working_tree(repository)
        return True

    def _add_file(
        self, place: bytes, path: bytes, repository: Repository | None = None, mode: bytes | None = None
    ) -> None:
        try:
            found = os.lstat(path)
            target = os.readlink(path) if stat.S_ISLNK(found.st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            return  # deleted
        except OSError as error:
            raise _unreadable(path, error) from error
        if target is not None:
            self._add_link(place, target)
        elif stat.S_ISREG(found.st_mode):
            self._add_regular(place, File(path, _state(found)), found, repository, mode)
        elif not stat.S_ISDIR(found.st_mode):
            self._found[SPECIAL].append(place)

    def _add_regular(
        self, place: bytes, file: File, found: os.stat_result, repository: Repository | None, mode: bytes | None
    ) -> None:
        if self._is_cache(file.path):
            return
        permissions = int(mode, 8) if mode else found.st_mode
        entry = Entry(place, found.st_size, file, permissions & stat.S_IXUSR != 0)
        start = b"".join(_blocks_of_file(file)) if found.st_size in LFS_SIZES else b""
        self._add(self._without_pointer(repository, entry, start, file.path))

    def _add_link(self, place: bytes, target: bytes) -> None:
        self._add(Entry(place, 0, target))
        end = os.path.normpath(os.path.join(os.path.dirname(place), target))
        if end == b".." or end.startswith((b"/", b"../")):
            self._found[OUTSIDE].append(place + b" -> " + target)

    def _add(self, entry: Entry) -> None:
        self.entries[entry.name] = entry

    def _is_cache(self, path: bytes) -> bool:
        return path.startswith(self.cache + b"/")

    def _is_behind_link(self, directory: bytes, name: bytes) -> bool:
        """A directory of the index that is now a symlink: what lies behind it is not in the tree any more."""
        parent = os.path.dirname(name)
        if not parent:
            return False
        path = os.path.join(directory, parent)
        if path not in self._links:
            self._links[path] = os.path.islink(path) or self._is_behind_link(directory, parent)
        return self._links[path]

    # --- LFS

    def _without_pointer(self, repository: Repository | None, entry: Entry, start: bytes, path: bytes) -> Entry:
        """With the file itself instead of an LFS pointer, if it is on this machine."""
        if not start.startswith(LFS_START):
            return entry
        match = LFS_POINTER.fullmatch(start)
        for candidate in self._lfs_files(repository, match.group(1), path) if match else ():
            file = _verified(candidate, match.group(1), int(match.group(2))) if match else None
            if file:
                return entry._replace(size=file.state[0], source=file)
        self._found[LFS].append(entry.name)
        return entry

    def _lfs_files(self, repository: Repository | None, digest: bytes, path: bytes) -> Iterator[bytes]:
        if repository is not None:
            if repository.directory not in self._stores:
                self._stores[repository.directory] = _lfs_store(repository)
            yield os.path.join(self._stores[repository.directory], b"objects", digest[:2], digest[2:4], digest)
        yield path

    # --- what is not in the commit

    def _changes(self, repository: Repository) -> Changes | None:
        """None if git cannot tell."""
        try:
            changes = _status(repository)
        except GitFailed as error:
            self.general.append(UNKNOWN_CHANGES % error)
            return None
        self._found[IGNORED].extend(changes.ignored)
        own = {name for name in changes.untracked if self._is_cache(os.path.join(self.root, name))}
        return changes._replace(untracked=tuple(name for name in changes.untracked if name not in own))

    def _note_hidden(self, repository: Repository) -> None:
        for tracked in _tracked(repository):
            if tracked.is_hidden and os.path.lexists(os.path.join(repository.directory, tracked.name)):
                self._found[HIDDEN_COMMITTED].append(tracked.name)

    def _diff(self) -> str:
        text = b""
        for repository in self._repositories:
            text += _bounded_diff(repository, max(0, DIFF_BYTES + 1 - len(text)))
        if len(text) > DIFF_BYTES:
            note = CUT_DIFF % _amount(DIFF_BYTES)
            self.general.append(note)
            text = text[:DIFF_BYTES] + b"\n" + note.encode() + b"\n"
        names = [_shown(name) for name in sorted(self._untracked)]
        more = ["and %d more" % (len(names) - NAMES_IN_DIFF)] if len(names) > NAMES_IN_DIFF else []
        lines = ["untracked: " + name for name in names[:NAMES_IN_DIFF] + more]
        return text.decode("utf-8", "backslashreplace") + "".join(line + "\n" for line in lines)


def _listed(directory: bytes) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Changed(directory) from error
    except OSError as error:
        raise _unreadable(directory, error) from error


def _state(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _verified(path: bytes, digest: bytes, size: int) -> File | None:
    """The file, if it has this size and SHA-256."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    file = File(path, _state(found))
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        return None
    read = hashlib.sha256()
    with contextlib.suppress(Unusable):
        for block in _blocks_of_file(file):
            read.update(block)
    return file if read.hexdigest().encode() == digest else None


# --- git


def _git(directory: bytes, *words: str) -> bytes:
    """What a git command says. Raises GitFailed."""
    with _readable(directory):
        done = subprocess.run(
            _git_argv(words), cwd=directory, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True
        )
    lines = done.stderr.decode("utf-8", "backslashreplace").splitlines()
    unread = [line for line in lines if UNREAD in line]
    if done.returncode != 0 or unread:
        reason = (unread or lines or ["exit code %d" % done.returncode])[0]
        raise GitFailed("git {}: {}".format(words[0], re.sub("^(fatal|error|warning): ", "", reason)))
    return done.stdout


def _git_argv(words: Iterable[str]) -> list[str]:
    # A file system monitor is a program of the user's that may be wrong or away.
    return ["git", "--no-replace-objects", "-c", "core.fsmonitor=false", *words]


def _environment() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GIT_") or name in KEPT_VARIABLES}
    return {**kept, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}


def _repository_of(root: bytes, notes: list[str]) -> Repository | None:
    """None outside of git, with a note."""
    if shutil.which("git") is None:
        notes.append(NO_GIT)
        return None
    try:
        is_inside = _git(root, "rev-parse", "--is-inside-work-tree").strip() == b"true"
    except GitFailed as error:
        if not _is_outside(error) or os.path.lexists(os.path.join(root, b".git")):
            raise Unusable(_refusal(root, error)) from error
        notes.append(NOT_GIT)
        return None
    if not is_inside:
        raise Unusable("it is the inside of a repository, not a work tree: use a directory with a checkout")
    return Repository(root, b"", _head(root))


def _repository_at(directory: bytes, prefix: bytes) -> Repository | None:
    """The repository whose work tree this directory is, and not only a part of."""
    if not os.path.lexists(os.path.join(directory, b".git")) or os.path.islink(directory):
        return None
    try:
        inside = _prefix(directory)
    except GitFailed as error:
        if not _is_outside(error):
            raise Unusable(_refusal(directory, error)) from error
        return None
    return None if inside else Repository(directory, prefix, _head(directory))


def _is_outside(error: GitFailed) -> bool:
    return "not a git repository" in str(error)


def _refusal(directory: bytes, error: GitFailed) -> str:
    if "dubious ownership" in str(error) or "unsafe repository" in str(error):
        named = re.search("'(/.*)'", str(error))
        where = shlex.quote(named.group(1) if named else _shown(directory))
        return f"git refuses {where}, another user's: git config --global --add safe.directory {where}"
    return f"{error}: repair the repository, or remove its .git to take all files"


def _prefix(directory: bytes) -> bytes:
    """Where in its repository a directory is; empty for the top."""
    return _git(directory, "rev-parse", "--show-prefix")[:-1]


def _head(directory: bytes) -> str | None:
    try:
        return _git(directory, "rev-parse", "-q", "--verify", "HEAD^{commit}").decode().strip()
    except GitFailed:
        return None


def _has_commit(repository: Repository, commit: str) -> bool:
    with contextlib.suppress(GitFailed):
        _git(repository.directory, "cat-file", "-e", commit + "^{commit}")
        return True
    return False


def _branch(repository: Repository) -> str | None:
    with contextlib.suppress(GitFailed):
        name = _git(repository.directory, "symbolic-ref", "-q", "HEAD").decode("utf-8", "backslashreplace").strip()
        return name[len("refs/heads/") :] if name.startswith("refs/heads/") else name
    return None


def _setting(repository: Repository, name: str, kind: str = "--path") -> str | None:
    with contextlib.suppress(GitFailed):
        return os.fsdecode(_git(repository.directory, "config", kind, "--get", name)[:-1])
    return None


def _tracked(repository: Repository) -> Iterator[Tracked]:
    for record in _records(_git(repository.directory, "ls-files", "-s", "-v", "-z")):
        facts, name = record.split(b"\t", 1)
        tag, mode, object_id, _ = facts.split()
        yield Tracked(tag, mode, object_id, name)


def _others(repository: Repository) -> list[bytes]:
    """Untracked files that are not ignored; a repository inside is one name with a slash at its end."""
    return _records(_git(repository.directory, "ls-files", "--others", "--exclude-standard", "-z"))


def _lfs_store(repository: Repository) -> bytes:
    common = _git(repository.directory, "rev-parse", "--git-common-dir")[:-1]
    return os.path.join(repository.directory, common, os.fsencode(_setting(repository, "lfs.storage") or "lfs"))


def _status(repository: Repository) -> Changes:
    prefix = _prefix(repository.directory)
    options = ("--porcelain", "-z", "--untracked-files=all", "--ignored=matching", "--ignore-submodules=none")
    found: dict[bytes, list[bytes]] = {b"??": [], b"!!": []}
    modified: list[bytes] = []
    records = iter(_records(_git(repository.directory, "status", *options, "--", ".")))
    for record in records:
        code, name = record[:2], record[3:]
        name = name[len(prefix) :] if name.startswith(prefix) else name
        found.get(code, modified).append(name)
        if b"R" in code or b"C" in code:
            next(records, None)  # the old name
    ignored = (name for name in found[b"!!"] if not name.endswith(BYTECODE))
    return Changes(tuple(modified), tuple(found[b"??"]), tuple(ignored))


def _bounded_diff(repository: Repository, most: int) -> bytes:
    """The start of the difference between the commit, or nothing, and the working tree."""
    base = repository.commit or _git(repository.directory, "hash-object", "-t", "tree", "--stdin").decode().strip()
    prefix = repository.prefix.decode("utf-8", "surrogateescape")
    options = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--relative")
    about = (
        *options,
        "--ignore-submodules=none",
        "--submodule=short",
        f"--src-prefix=a/{prefix}",
        f"--dst-prefix=b/{prefix}",
    )
    with _started(repository.directory, "diff", *about, base, "--", ".") as process:
        assert process.stdout is not None
        text = process.stdout.read(most)
        failed = len(text) < most and process.wait() != 0
    return text + NO_DIFF if failed else text


@contextlib.contextmanager
def _started(directory: bytes, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with _readable(directory):
        process = subprocess.Popen(
            _git_argv(words), cwd=directory, env=_environment(), stdin=pipe, stdout=pipe, stderr=nowhere
        )
    with process:
        yield process


@contextlib.contextmanager
def _readable(directory: bytes) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unusable(f"cannot run git in {_shown(directory)}: {error.strerror}") from error


def _records(text: bytes) -> list[bytes]:
    return text.split(b"\0")[:-1]


class Objects:
    """Reads git's objects, with one `git cat-file` for each repository in turn."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._directory: bytes | None = None

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def content(self, blob: Blob) -> bytes:
        return b"".join(self.blocks(blob))

    def blocks(self, blob: Blob) -> Iterator[bytes]:
        stdin, stdout = self._pipes(blob.directory)
        with contextlib.suppress(BrokenPipeError):
            os.write(stdin.fileno(), blob.object_id + b"\n")
        facts = stdout.readline().split()
        if len(facts) != 3:
            raise Unusable(_missing(blob))
        left = int(facts[2])
        while left:
            block = stdout.read(min(left, BLOCK_BYTES))
            if not block:
                raise Unusable(_missing(blob))
            left -= len(block)
            yield block
        stdout.read(1)

    def _pipes(self, directory: bytes) -> tuple[IO[bytes], IO[bytes]]:
        if directory != self._directory:
            self._stack.close()
            self._process = self._stack.enter_context(_started(directory, "cat-file", "--batch"))
            self._directory = directory
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def _missing(blob: Blob) -> str:
    return f"git cannot read object {blob.object_id.decode()} of {_shown(blob.directory)}: see git fsck, or fetch it"


# --- the archive


class Sink:
    """A file being written, and what it holds so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def fill(self, multiple: int) -> None:
        self.write(bytes(-self.size % multiple))

    def digest(self) -> str:
        return self._hash.hexdigest()


def _cache(directory: str) -> str:
    path = os.path.realpath(os.path.expanduser(directory))
    os.makedirs(path, mode=0o700, exist_ok=True)
    os.chmod(path, 0o700)
    with os.scandir(path) as found:
        stale = [each.path for each in found if each.name.endswith((PARTIAL, ".tar")) and _age(each) > STALE_S]
    for left_over in stale:
        with contextlib.suppress(OSError):
            os.unlink(left_over)
    return path


def _age(found: os.DirEntry[str]) -> float:
    try:
        return time.time() - found.stat().st_mtime
    except OSError:
        return 0.0


def _write(survey: Survey, cache: str) -> tuple[str, str, int]:
    """Path, digest and size of the archive. An older file of its name is replaced: it may be damaged."""
    descriptor, temporary = tempfile.mkstemp(suffix=PARTIAL, dir=cache)
    try:
        with open(descriptor, "wb") as file:
            sink = Sink(file)
            _write_entries(survey, sink)
        path = os.path.join(cache, sink.digest() + ".tar")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path, sink.digest(), sink.size


def _write_entries(survey: Survey, sink: Sink) -> None:
    for _, entry in sorted(survey.entries.items()):
        sink.write(_header(entry))
        if not isinstance(entry.source, bytes):
            _write_content(survey.objects, entry, entry.source, sink)
            sink.fill(tarfile.BLOCKSIZE)
    sink.write(bytes(2 * tarfile.BLOCKSIZE))
    sink.fill(tarfile.RECORDSIZE)


def _write_content(objects: Objects, entry: Entry, source: Blob | File, sink: Sink) -> None:
    end = sink.size + entry.size
    for block in objects.blocks(source) if isinstance(source, Blob) else _blocks_of_file(source):
        sink.write(block)
        if sink.size > end:
            break
    if sink.size != end:
        raise Changed(entry.name)


def _header(entry: Entry) -> bytes:
    info = tarfile.TarInfo(entry.name.decode("utf-8", "surrogateescape"))
    info.mtime = DATE
    info.size = entry.size
    info.mode = 0o755 if entry.is_executable else 0o644
    if isinstance(entry.source, bytes):
        info.type, info.mode = tarfile.SYMTYPE, 0o777
        info.linkname = entry.source.decode("utf-8", "surrogateescape")
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _blocks_of_file(file: File) -> Iterator[bytes]:
    """Raises Changed if it is not the file that was found, or is another one at the end."""
    try:
        with open(os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as stream:
            _require_unchanged(file, stream)
            while block := stream.read(BLOCK_BYTES):
                yield block
            _require_unchanged(file, stream)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Changed(file.path) from error
    except OSError as error:
        raise Changed(file.path) if error.errno == errno.ELOOP else _unreadable(file.path, error) from error


def _require_unchanged(file: File, stream: IO[bytes]) -> None:
    if _state(os.fstat(stream.fileno())) != file.state:
        raise Changed(file.path)


def _unreadable(path: bytes, error: OSError) -> Unusable:
    return Unusable(f"cannot read {_shown(path.rstrip(b'/'))}: {error.strerror}")


# --- words


def _size_notes(entries: Iterable[Entry], is_git: bool) -> tuple[str, ...]:
    """Raises Unusable for what nobody wants to upload."""
    sizes: Counter[bytes] = Counter()
    for entry in entries:
        top, slash, _ = entry.name.partition(b"/")
        sizes[top + slash] += entry.size
    total = sum(sizes.values())
    biggest = ", ".join(f"{_shown(name)} {_amount(size)}" for name, size in sizes.most_common(NAMES_IN_NOTE))
    if total > LARGEST_BYTES:
        way = ".gitignore or git rm --cached" if is_git else "git init and a .gitignore"
        much = f"{_amount(total)} are more than {_amount(LARGEST_BYTES)} ({biggest})"
        raise Unusable(f"{much}: leave out what the job does not need ({way})")
    return (f"large: {_amount(total)} ({biggest})",) if total > LARGE_BYTES else ()


def _summary(changes: Changes) -> str:
    counts = ((len(changes.modified), "modified"), (len(changes.untracked), "untracked"))
    return ", ".join("%d %s" % item for item in counts if item[0]) + ": " + _names(changes.modified + changes.untracked)


def _counted(names: Sequence[bytes]) -> str:
    return "%d: %s" % (len(names), _names(names))


def _names(names: Sequence[bytes]) -> str:
    more = " and %d more" % (len(names) - NAMES_IN_NOTE) if len(names) > NAMES_IN_NOTE else ""
    return ", ".join(map(_shown, names[:NAMES_IN_NOTE])) + more


def _amount(size: int) -> str:
    return "%.1f GB" % (size / GB) if size >= GB else "%.1f MB" % (size / 10**6)


def _shown(name: bytes) -> str:
    text = name.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else repr(text)[1:-1]
