"""The snapshot of a work directory: what travels, under which name, and what is said about the rest."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from codegen import SpecError
from executor.protocol import GangrunError
from gangrun import snapshot
from gangrun.snapshot import Snapshot, take

NOBODY = 65534
HOSTILE = (
    b"a b",
    b'q"uote',
    b"it's",
    b"new\nline",
    b"$(touch x)",
    b"-rf",
    b"\xff\xfe",
    "dédé-日本".encode(),
    b"back\\s",
)


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this user's git configuration nor this machine's plays a part."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


class Work:
    """A git repository, and the cache of its snapshots."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.cache = directory.parent / "cache"
        directory.mkdir(parents=True, exist_ok=True)

    @classmethod
    def new(cls, directory: Path, **files: str) -> Work:
        work = cls(directory)
        work.git("init", "-q", "-b", "main")
        for name, text in files.items():
            work.write(name.replace("__", "/").replace("_py", ".py"), text)
        if files:
            work.commit()
        return work

    def git(self, *words: str | bytes, at: str = ".", **variables: str) -> str:
        settings = (
            "user.name=A B",
            "user.email=a@example.org",
            "protocol.file.allow=always",
            "advice.detachedHead=false",
        )
        options = [word for setting in settings for word in ("-c", setting)]
        done = subprocess.run(
            ["git", *options, *words],
            cwd=self.path / at,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def commit(self, **variables: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "m", **variables)
        return self.git("rev-parse", "HEAD")

    def take(self, at: str = ".", dirty: bool = False) -> Snapshot:
        return take(str(self.path / at), str(self.cache), dirty=dirty)

    def complaint(self, at: str = ".", dirty: bool = False) -> str:
        with pytest.raises(SpecError) as error:
            self.take(at, dirty)
        said = str(error.value)
        assert "\n" not in said and said.startswith(f"workdir={str(self.path / at)!r}: ")
        assert not self.cache.exists() or not list(self.cache.iterdir()), "something was published"
        return said


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work.new(tmp_path / "work", train_py="print(1)\n", src__a_py="a = 1\n")


def members(taken: Snapshot) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(taken.path, encoding="utf-8", errors="surrogateescape") as archive:
        return {member.name: member for member in archive}


def contents(taken: Snapshot) -> dict[str, str]:
    """What the archive holds, as text; `-> target` for a symlink."""
    held = {}
    with tarfile.open(taken.path, encoding="utf-8", errors="surrogateescape") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            held[member.name] = file.read().decode("latin-1") if file else "-> " + member.linkname
    return held


def note(taken: Snapshot, words: str) -> str:
    """The one note with these words."""
    (found,) = [line for line in taken.notes if words in line]
    assert "\n" not in found
    return found


# --- the archive


def test_the_committed_tree_is_archived_under_the_hash_of_its_bytes(work: Work) -> None:
    taken = work.take()
    assert contents(taken) == {"train.py": "print(1)\n", "src/a.py": "a = 1\n"}
    data = Path(taken.path).read_bytes()
    assert taken.digest == hashlib.sha256(data).hexdigest()
    assert (taken.path, taken.size, taken.files) == (str(work.cache / (taken.digest + ".tar")), len(data), 2)
    assert (taken.commit, taken.branch) == (work.git("rev-parse", "HEAD"), "main")
    assert (taken.is_dirty, taken.diff, taken.notes) == (False, "", ())


def test_nobody_else_can_read_a_snapshot(work: Work) -> None:
    work.cache.mkdir(mode=0o755)
    taken = work.take()
    assert stat.S_IMODE(os.stat(taken.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(work.cache).st_mode) == 0o700


def test_an_equal_tree_has_an_equal_name_whatever_commit_date_and_umask(work: Work, tmp_path: Path) -> None:
    first = work.take()
    other = Work(tmp_path / "elsewhere" / "other")
    other.git("init", "-q", "-b", "dev")
    mask = os.umask(0o077)
    try:
        other.write("src/a.py", "a = 1\n")
        other.write("train.py", "print(1)\n")
        other.commit(GIT_AUTHOR_DATE="2001-01-01T00:00:00Z", GIT_COMMITTER_DATE="2001-01-01T00:00:00Z")
        second = other.take()
    finally:
        os.umask(mask)
    assert first.commit != second.commit and first.digest == second.digest


def test_the_form_of_the_archive_does_not_change(work: Work) -> None:
    """A new name for every tree would upload everything again: change this on purpose only."""
    assert work.take().digest == "ace94611aa0a150eaec411c2d8995ae75af9778314bf82f88052dc1604223a75"


def test_a_clean_tree_is_the_same_committed_dirty_and_outside_of_git(work: Work) -> None:
    work.write("run.sh", "true\n").chmod(0o755)
    (work.path / "link").symlink_to("run.sh")
    work.commit()
    committed, dirty = work.take(), work.take(dirty=True)
    shutil.rmtree(work.path / ".git")
    assert committed.digest == dirty.digest == work.take().digest
    assert (dirty.is_dirty, dirty.diff) == (False, "")


def test_modes_links_and_owners_are_plain(work: Work) -> None:
    work.write("run.sh", "true\n").chmod(0o700)
    work.write("data.txt", "x").chmod(0o600)
    (work.path / "link").symlink_to("src/a.py")
    work.commit()
    held = members(work.take())
    assert (held["run.sh"].mode, held["data.txt"].mode) == (0o755, 0o644)
    assert held["link"].issym() and held["link"].linkname == "src/a.py"
    facts = {(each.uid, each.gid, each.uname, each.gname, each.mtime) for each in held.values()}
    assert facts == {(0, 0, "", "", snapshot.DATE)}
    assert not any(each.pax_headers for each in held.values())
    assert list(held) == sorted(held)


@pytest.mark.parametrize("dirty", [False, True])
def test_names_of_any_bytes_and_any_length_survive_tar(work: Work, tmp_path: Path, dirty: bool) -> None:
    root = os.fsencode(work.path)
    long = b"/".join([b"d" * 200] * 4) + b"/" + b"f" * 250
    os.makedirs(os.path.dirname(os.path.join(root, long)))
    for name in (*HOSTILE, long):
        with open(os.path.join(root, name), "wb") as file:
            file.write(name)
    os.symlink(b"x" * 300 + b"\xff", os.path.join(root, b"\xfe-link"))
    work.commit()
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(["tar", "-xf", work.take(dirty=dirty).path, "-C", str(out)], check=True)
    for name in (*HOSTILE, long):
        assert Path(os.fsdecode(os.path.join(os.fsencode(out), name))).read_bytes() == name
    assert os.readlink(os.path.join(os.fsencode(out), b"\xfe-link")) == b"x" * 300 + b"\xff"
    found = sum(len(files) for _, _, files in os.walk(os.fsencode(out)))
    assert found == len(HOSTILE) + 1 + 1 + 2


def test_a_large_file_is_streamed(work: Work) -> None:
    with open(work.path / "big", "wb") as file:
        file.truncate(300 * 10**6)
    work.git("-c", "core.bigFileThreshold=1m", "add", "big")
    work.git("commit", "-q", "-m", "big")
    program = (
        "import sys, resource; from gangrun.snapshot import take; taken = take(*sys.argv[1:3]);"
        "print(taken.size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        ["python", "-c", program, work.path, work.cache], stdout=-1, text=True, check=True, env=ours()
    )
    size, peak_kb = map(int, done.stdout.split())
    assert size > 300 * 10**6 and peak_kb < 150_000


def ours() -> dict[str, str]:
    import sys

    here = str(Path(snapshot.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": here, "PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"]}


def test_an_empty_repository_and_an_empty_directory_are_archives_too(tmp_path: Path) -> None:
    work = Work.new(tmp_path / "work")
    work.commit()
    assert contents(work.take()) == contents(Work(tmp_path / "plain").take()) == {}


# --- what git's surroundings must not change


@pytest.mark.parametrize(
    "setting",
    ["core.autocrlf=true", "core.quotePath=true", "status.short=true"]
    + ["diff.noprefix=true", "diff.external=/bin/false", "color.ui=always", "status.showUntrackedFiles=no"],
)
def test_the_users_configuration_changes_nothing(work: Work, setting: str) -> None:
    work.write("dédé", "x\r\ny\n")
    work.commit()
    work.write("train.py", "print(2)\n")
    work.write("new", "n")
    plain, dirty = work.take(), work.take(dirty=True)
    work.git("config", "--global", *setting.split("="))
    assert (work.take(), work.take(dirty=True)) == (plain, dirty)


def test_a_file_system_monitor_is_not_believed(work: Work, tmp_path: Path) -> None:
    monitor = tmp_path / "monitor"
    monitor.write_text("#!/bin/sh\nprintf 'token\\0'\n")  # nothing has changed, it says
    monitor.chmod(0o755)
    work.git("config", "core.fsmonitor", str(monitor))
    work.git("update-index", "--fsmonitor")
    work.git("status")
    work.write("train.py", "print(2)\n")
    assert work.git("status", "--porcelain") == ""
    assert "1 modified: train.py" in note(work.take(), "uncommitted")
    assert "+print(2)" in work.take(dirty=True).diff


def test_attributes_change_nothing(work: Work) -> None:
    work.write(".gitattributes", "train.py export-ignore\nid.txt export-subst ident\n*.txt text eol=crlf\n")
    work.write("id.txt", "$Format:%H$ $Id$\n")
    work.commit()
    held = contents(work.take())
    assert (held["train.py"], held["id.txt"]) == ("print(1)\n", "$Format:%H$ $Id$\n")


def test_variables_of_git_change_nothing(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Work.new(tmp_path / "other", wrong="wrong")
    plain = work.take()
    monkeypatch.setenv("GIT_DIR", str(other.path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other.path))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.path / ".git/index"))
    monkeypatch.setenv("GIT_LITERAL_PATHSPECS", "1")
    monkeypatch.setenv("GIT_TRACE", "1")
    assert work.take() == plain


def test_replaced_objects_are_not_what_was_committed(work: Work) -> None:
    blob = work.git("rev-parse", "HEAD:train.py")
    other = work.git("rev-parse", "HEAD:src/a.py")
    work.git("replace", blob, other)
    assert contents(work.take())["train.py"] == "print(1)\n"


def test_the_repository_is_not_written_to(work: Work) -> None:
    os.utime(work.path / "train.py", (1, 1))  # makes git want to refresh its index
    before = {path: path.stat().st_mtime_ns for path in work.path.rglob("*")}
    work.take(), work.take(dirty=True)
    assert {path: path.stat().st_mtime_ns for path in work.path.rglob("*")} == before


def test_a_repository_of_another_user_is_refused_with_the_way_out(shared_dir: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    work = Work.new(shared_dir / "wo rk", a="a", sub__b="b")
    for path in [work.path, *work.path.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    for at in (".", "sub"):
        said = work.complaint(at)
        assert f"git config --global --add safe.directory '{work.path}'" in said
    work.git("config", "--global", "--add", "safe.directory", str(work.path), at="..")
    assert contents(work.take()) == {"a": "a", "sub/b": "b"}


# --- where the work directory is


def test_a_subdirectory_is_archived_alone_with_its_content_at_the_root(work: Work) -> None:
    work.write("src/deep/b.py", "b = 1\n")
    work.commit()
    work.write("src/a.py", "a = 2\n")
    work.write("train.py", "print(2)\n")
    work.write("src/new.py", "new\n")
    committed, dirty = work.take("src"), work.take("src", dirty=True)
    assert contents(committed) == {"a.py": "a = 1\n", "deep/b.py": "b = 1\n"}
    assert contents(dirty) == {"a.py": "a = 2\n", "deep/b.py": "b = 1\n", "new.py": "new\n"}
    assert note(committed, "uncommitted").startswith(
        "uncommitted changes do not travel (1 modified, 1 untracked: a.py, new.py)"
    )
    assert "a/a.py" in dirty.diff and "train.py" not in dirty.diff
    assert work.take("src/deep", dirty=True).is_dirty is False


def test_a_subdirectory_without_a_commit_is_no_empty_job(work: Work) -> None:
    work.write("new/x.py", "x")
    work.write(".gitignore", "build\n")
    work.write("build/y.py", "y")
    assert "nothing in it is committed: commit first, or use --dirty" in work.complaint("new")
    assert "git ignores all of it" in work.complaint("build", dirty=True)
    assert contents(work.take("new", dirty=True)) == {"x.py": "x"}


def test_a_linked_worktree_is_a_work_directory(work: Work, tmp_path: Path) -> None:
    work.git("worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    side = Work(tmp_path / "side")
    side.write("train.py", "print(3)\n")
    side.commit()
    taken = side.take()
    assert (contents(taken)["train.py"], taken.branch) == ("print(3)\n", "side")


def test_a_detached_head_has_no_branch(work: Work) -> None:
    work.git("checkout", "-q", "--detach")
    assert (work.take().branch, work.take().commit) == (None, work.git("rev-parse", "HEAD"))


def test_a_shallow_clone_and_a_sparse_checkout_are_complete(work: Work, tmp_path: Path) -> None:
    work.commit()
    plain = work.take()
    work.git("clone", "-q", "--depth=1", f"file://{work.path}", str(tmp_path / "shallow"))
    shallow = Work(tmp_path / "shallow")
    assert shallow.take().digest == plain.digest
    shallow.git("sparse-checkout", "set", "--no-cone", "/train.py")
    assert not (shallow.path / "src").exists()
    assert shallow.take() == plain._replace(path=str(shallow.cache / (plain.digest + ".tar")))
    dirty = shallow.take(dirty=True)
    assert (dirty.digest, dirty.is_dirty) == (plain.digest, False)


def test_a_link_to_the_work_directory_is_the_work_directory(work: Work, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(work.path)
    assert take(str(tmp_path / "link"), str(work.cache)) == work.take()


def test_sha256_repositories_work(tmp_path: Path) -> None:
    work = Work(tmp_path / "work")
    work.git("init", "-q", "--object-format=sha256")
    work.write("a", "a")
    work.commit()
    taken = work.take()
    assert contents(taken) == {"a": "a"} and len(taken.commit or "") == 64


def test_a_repository_without_a_commit_needs_dirty(tmp_path: Path) -> None:
    work = Work.new(tmp_path / "work")
    work.write("a", "staged\n")
    work.git("add", "a")
    work.write("b", "new\n")
    assert "has no commit yet: commit first, or use --dirty" in work.complaint()
    taken = work.take(dirty=True)
    assert contents(taken) == {"a": "staged\n", "b": "new\n"}
    assert (taken.commit, taken.branch, taken.is_dirty) == (None, "main", True)
    assert "+staged" in taken.diff and "untracked: b\n" in taken.diff


def test_what_is_no_work_directory_is_said(work: Work, tmp_path: Path) -> None:
    for path in ("missing", "train.py"):
        with pytest.raises(SpecError, match=f"^workdir='{work.path}/{path}': use a directory"):
            work.take(path)
    assert "not a work tree" in work.complaint(".git")
    work.git("clone", "-q", "--bare", ".", str(tmp_path / "bare.git"))
    with pytest.raises(SpecError, match="not a work tree"):
        take(str(tmp_path / "bare.git"), str(work.cache))


def test_a_broken_repository_is_not_taken_for_a_plain_directory(work: Work) -> None:
    shutil.rmtree(work.path / ".git")
    work.write(".git", "gitdir: /nowhere\n")
    assert "remove its .git to take all files" in work.complaint()


def test_an_object_that_git_lost_is_an_error_and_no_archive(work: Work) -> None:
    blob = work.git("rev-parse", "HEAD:train.py")
    (work.path / ".git/objects" / blob[:2] / blob[2:]).unlink()
    assert f"git cannot read object {blob}" in work.complaint()


def test_a_damaged_object_is_an_error_and_no_archive(work: Work) -> None:
    work.write("train.py", os.urandom(3 * 10**6))
    work.commit()
    blob = work.git("rev-parse", "HEAD:train.py")
    path = work.path / ".git/objects" / blob[:2] / blob[2:]
    path.chmod(0o600)
    os.truncate(path, 10**6)
    assert f"git cannot read object {blob}" in work.complaint()


# --- changes that are not committed


def test_code_edited_after_the_commit_does_not_travel_and_this_is_said(work: Work) -> None:
    work.write("train.py", "print(2)\n")
    work.git("rm", "-q", "src/a.py")
    for number in range(3):
        work.write(f"new{number}", "")
    taken = work.take()
    assert contents(taken) == {"train.py": "print(1)\n", "src/a.py": "a = 1\n"}
    said = "uncommitted changes do not travel (2 modified, 3 untracked: src/a.py, train.py, new0 and 2 more)"
    assert taken.notes == (said + ": commit them or use --dirty",)
    assert (taken.is_dirty, taken.diff) == (False, "")


def test_dirty_takes_the_tree_as_it_is_and_records_the_difference(work: Work) -> None:
    work.write(".gitignore", "*.log\n")
    work.write("gone", "x")
    work.commit()
    work.write("train.py", "print(2)\n")
    work.write("staged", "s")
    work.git("add", "staged")
    work.write("new\nline", "n")
    work.write("x.log", "l")
    (work.path / "gone").unlink()
    taken = work.take(dirty=True)
    expected = {"train.py": "print(2)\n", "src/a.py": "a = 1\n", "staged": "s", "new\nline": "n"}
    assert contents(taken) == {**expected, ".gitignore": "*.log\n"}
    assert taken.is_dirty and taken.commit == work.git("rev-parse", "HEAD")
    assert "-print(1)\n+print(2)\n" in taken.diff and "deleted file" in taken.diff and "+s\n" in taken.diff
    assert taken.diff.endswith("untracked: new\\nline\n")
    assert taken.notes == ("ignored files do not travel (1: x.log)",)


def test_the_recorded_difference_can_be_applied(work: Work, tmp_path: Path) -> None:
    work.write("data.bin", bytes(range(256)))
    work.commit()
    work.write("data.bin", bytes(range(255, -1, -1)))
    work.write("train.py", "print(2)\n")
    taken = work.take(dirty=True)
    work.git("stash", "-q")
    (tmp_path / "diff").write_text(taken.diff)
    work.git("apply", str(tmp_path / "diff"))
    assert work.take(dirty=True).digest == taken.digest


def test_a_long_difference_is_cut_and_this_is_said(work: Work) -> None:
    work.write("train.py", "print(2) # é\n" * 200_000)
    taken = work.take(dirty=True)
    assert len(taken.diff) < 1_100_000 and "the recorded diff is cut after 1.0 MB\n" in taken.diff
    assert "the recorded diff is cut after 1.0 MB" in taken.notes


def test_a_directory_that_became_a_link_does_not_bring_its_old_files_back(work: Work, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("not in the tree")
    shutil.rmtree(work.path / "src")
    (work.path / "src").symlink_to(tmp_path / "src")
    assert contents(work.take(dirty=True)) == {"train.py": "print(1)\n", "src": f"-> {tmp_path}/src"}


def test_a_file_that_became_a_directory_and_a_conflict_are_taken_as_they_are(work: Work) -> None:
    work.git("checkout", "-q", "-b", "other")
    work.write("src/a.py", "a = 3\n")
    work.commit()
    work.git("checkout", "-q", "main")
    work.write("src/a.py", "a = 4\n")
    work.commit()
    with pytest.raises(AssertionError):
        work.git("merge", "-q", "other")
    (work.path / "train.py").unlink()
    work.write("train.py/x", "x")
    held = contents(work.take(dirty=True))
    assert set(held) == {"src/a.py", "train.py/x"} and "<<<<<<<" in held["src/a.py"]


def test_files_hidden_from_git_status_are_said(work: Work) -> None:
    work.git("update-index", "--assume-unchanged", "train.py")
    work.write("train.py", "print(2)\n")
    committed, dirty = work.take(), work.take(dirty=True)
    assert contents(committed)["train.py"] == "print(1)\n" and contents(dirty)["train.py"] == "print(2)\n"
    assert "(1: train.py)" in note(committed, "travel as committed")
    assert "(1: train.py)" in note(dirty, "as they are here") and dirty.is_dirty


def test_without_executable_bits_on_disk_those_of_the_index_count(work: Work) -> None:
    work.write("run.sh", "true\n").chmod(0o755)
    work.commit()
    plain = work.take()
    work.git("config", "core.fileMode", "false")
    for name in ("run.sh", "train.py"):
        (work.path / name).chmod(0o666)
    assert work.take(dirty=True).digest == plain.digest


@pytest.fixture
def meddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a shell command run each time that git has just been asked for the difference."""
    real, shim = shutil.which("git"), tmp_path / "bin" / "git"

    def install(command: str) -> None:
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nfor word; do [ "$word" = diff ] && {{ {command}; }}; done\nexec {real} "$@"\n')
        shim.chmod(0o755)
        monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")

    return install


def test_a_file_that_changes_meanwhile_is_taken_whole(work: Work, meddle: Callable[[str], None]) -> None:
    work.write("train.py", "old\n")
    meddle("[ -e .git/once ] || { touch .git/once; echo new > train.py; }")
    taken = work.take(dirty=True)
    assert contents(taken)["train.py"] == "new\n" and "+new" in taken.diff
    assert [path.name for path in work.cache.iterdir()] == [taken.digest + ".tar"]


@pytest.mark.parametrize("command", ["rm -f train.py", "rm -f train.py; ln -s src/a.py train.py"])
def test_a_file_that_vanishes_meanwhile_is_no_error(work: Work, meddle: Callable[[str], None], command: str) -> None:
    work.write("train.py", "old\n")
    meddle("[ -e .git/once ] || { touch .git/once; " + command + "; }")
    assert contents(work.take(dirty=True)).get("train.py") in (None, "-> src/a.py")


def test_a_file_that_never_rests_is_an_error_and_no_archive(work: Work, meddle: Callable[[str], None]) -> None:
    work.write("train.py", "old\n")
    meddle("echo more >> train.py")
    said = work.complaint(dirty=True)
    assert f"{work.path}/train.py changes while it is read" in said and ".gitignore" in said


# --- submodules and repositories inside


@pytest.fixture
def module(work: Work, tmp_path: Path) -> Work:
    """A submodule at libs/mod that has a submodule at inner."""
    inner = Work.new(tmp_path / "inner", i="inner\n")
    module = Work.new(tmp_path / "module", m="module\n")
    module.git("submodule", "--quiet", "add", str(inner.path), "inner")
    module.commit()
    work.git("submodule", "--quiet", "add", str(module.path), "libs/mod")
    work.git("submodule", "--quiet", "update", "--init", "--recursive")
    work.commit()
    return Work(work.path / "libs/mod")


def test_submodules_travel_with_the_recorded_commit(work: Work, module: Work) -> None:
    taken = work.take()
    held = contents(taken)
    assert (held["libs/mod/m"], held["libs/mod/inner/i"], taken.notes) == ("module\n", "inner\n", ())
    assert work.take(dirty=True).digest == taken.digest
    module.write("m", "later\n")
    module.commit()
    module.write("inner/i", "edited\n")
    later = work.take()
    assert later.digest == taken.digest and "1 modified: libs/mod" in note(later, "uncommitted")


def test_dirty_takes_submodules_as_they_are(work: Work, module: Work) -> None:
    module.write("m", "later\n")
    module.write("inner/new", "new\n")
    taken = work.take(dirty=True)
    held = contents(taken)
    assert (held["libs/mod/m"], held["libs/mod/inner/new"]) == ("later\n", "new\n")
    assert taken.is_dirty and "+++ b/libs/mod/m\n" in taken.diff and "untracked: libs/mod/inner/new\n" in taken.diff


def test_a_submodule_is_a_work_directory(module: Work) -> None:
    taken = module.take()
    assert set(contents(taken)) == {".gitmodules", "m", "inner/i"}


def test_a_submodule_without_a_checkout_is_said(work: Work, module: Work) -> None:
    work.git("submodule", "--quiet", "deinit", "--force", "libs/mod")
    for dirty in (False, True):
        taken = work.take(dirty=dirty)
        assert set(contents(taken)) == {".gitmodules", "train.py", "src/a.py"}
        (module.path / ".git").mkdir(exist_ok=True)  # as an interrupted clone leaves it
        assert work.take(dirty=dirty).digest == taken.digest
        assert "(1: libs/mod): git submodule update --init" in note(taken, "without a checkout")


def test_a_submodule_without_the_recorded_commit_is_said(work: Work, module: Work) -> None:
    work.git("update-index", "--cacheinfo", "160000," + "1" * 40 + ",libs/mod")
    work.git("commit", "-q", "-m", "a commit that nobody has")
    taken = work.take()
    assert "libs/mod/m" not in contents(taken) and "(1: libs/mod)" in note(taken, "lack the recorded commit")


def test_a_repository_inside_is_taken_with_dirty_only(work: Work) -> None:
    nested = Work.new(work.path / "nested", n="n")
    nested.write(".gitignore", "ignored\n")
    nested.write("ignored", "")
    nested.write("more", "m")
    assert "nested/" in note(work.take(), "uncommitted")
    taken = work.take(dirty=True)
    held = contents(taken)
    assert (held["nested/n"], held["nested/more"], taken.is_dirty) == ("n", "m", True)
    assert not any(name.startswith(("nested/.git/", "nested/ignored")) for name in held)
    assert "(1: nested/)" in note(taken, "git repositories inside")
    assert "untracked: nested/more\n" in taken.diff


# --- LFS


def pointer(content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n"


def store(work: Work, name: bytes, content: bytes, under: str = ".git/lfs") -> None:
    digest = hashlib.sha256(name).hexdigest()
    work.write(f"{under}/objects/{digest[:2]}/{digest[2:4]}/{digest}", content)


BIG = b"weights" * 1000


@pytest.fixture
def lfs(work: Work) -> Work:
    """A repository with an LFS file, of which no content is here yet."""
    work.write("big.bin", pointer(BIG)).chmod(0o755)
    work.commit()
    return work


@pytest.mark.parametrize("dirty", [False, True])
def test_an_lfs_pointer_travels_as_the_file_it_means(lfs: Work, dirty: bool) -> None:
    store(lfs, BIG, BIG)
    taken = lfs.take(dirty=dirty)
    assert (contents(taken)["big.bin"], taken.notes) == (BIG.decode(), ())
    assert members(taken)["big.bin"].mode == 0o755


@pytest.mark.parametrize("dirty", [False, True])
def test_a_pointer_without_its_file_or_with_a_wrong_one_is_said(lfs: Work, dirty: bool) -> None:
    assert contents(lfs.take(dirty=dirty))["big.bin"] == pointer(BIG)
    store(lfs, BIG, BIG[:-1] + b"X")
    taken = lfs.take(dirty=dirty)
    assert contents(taken)["big.bin"] == pointer(BIG)
    assert "(1: big.bin): git lfs pull" in note(taken, "pointer")


def test_the_checked_out_lfs_file_will_do(lfs: Work) -> None:
    lfs.git("config", "filter.lfs.clean", "cat >/dev/null; cat " + str(lfs.write(".git/pointer", pointer(BIG))))
    lfs.write(".git/info/attributes", "big.bin filter=lfs\n")
    lfs.write("big.bin", BIG)
    lfs.git("add", "big.bin")
    taken = lfs.take()
    assert (contents(taken)["big.bin"], taken.notes) == (BIG.decode(), ())
    assert lfs.take(dirty=True).digest == taken.digest


def test_lfs_files_are_found_where_the_repository_keeps_them(lfs: Work, tmp_path: Path) -> None:
    lfs.git("worktree", "add", "-q", str(tmp_path / "side"))
    store(lfs, BIG, BIG)
    assert contents(Work(tmp_path / "side").take())["big.bin"] == BIG.decode()
    shutil.rmtree(lfs.path / ".git/lfs")
    store(lfs, BIG, BIG, under="../elsewhere")
    lfs.git("config", "lfs.storage", str(tmp_path / "elsewhere"))
    assert contents(lfs.take())["big.bin"] == BIG.decode()


def test_files_that_git_crypt_encrypted_are_said(work: Work) -> None:
    work.write("secret", b"\0GITCRYPT\0" + b"x" * 200)
    work.commit()
    assert "(1: secret)" in note(work.take(), "git-crypt")


# --- what else does not travel, or is not what it seems


def test_ignored_files_are_counted_and_bytecode_is_not_worth_a_word(work: Work) -> None:
    work.write(".gitignore", "/data/\n*.log\n__pycache__/\n*.pyc\n")
    work.commit()
    for name in ("data/1", "data/2", "a.log", "b.log", "src/c.log", "src/__pycache__/a.pyc", "a.pyc"):
        work.write(name, "")
    for dirty in (False, True):
        taken = work.take(dirty=dirty)
        assert taken.notes == ("ignored files do not travel (4: a.log, b.log, data/ and 1 more)",)
        assert set(contents(taken)) == {".gitignore", "train.py", "src/a.py"}


@pytest.mark.parametrize("dirty", [False, True])
def test_links_out_of_the_tree_travel_and_are_said(work: Work, dirty: bool) -> None:
    for name, target in {"in": "src", "src/in": "../..x", "out": "..", "src/out": "../../x", "abs": "/data"}.items():
        (work.path / name).symlink_to(target)
    work.write("..x", "x")
    work.commit()
    taken = work.take(dirty=dirty)
    assert "(3: abs -> /data, out -> .., src/out -> ../../x)" in note(taken, "outside")
    assert contents(taken)["src/out"] == "-> ../../x"


def test_special_files_are_left_out_and_said(work: Work) -> None:
    (work.path / "train.py").unlink()
    os.mkfifo(work.path / "train.py")
    taken = work.take(dirty=True)
    assert set(contents(taken)) == {"src/a.py"} and "(1: train.py)" in note(taken, "sockets, pipes")
    shutil.rmtree(work.path / ".git")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(work.path / "sock"))
    assert "(2: sock, train.py)" in note(work.take(), "sockets, pipes")


@pytest.fixture
def unprivileged(shared_dir: Path) -> Iterator[Path]:
    """A directory of somebody whom file permissions stop."""
    if os.getuid() != 0:
        yield shared_dir
        return
    os.chown(shared_dir, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    yield shared_dir
    os.seteuid(0)


@pytest.mark.parametrize("name", ["secret", "deep/secret"])
def test_a_file_that_cannot_be_read_is_named(unprivileged: Path, name: str) -> None:
    work = Work(unprivileged / "work")
    path = work.write(name, "x")
    path.chmod(0)
    assert f"cannot read {path}: Permission denied" in work.complaint()
    path.chmod(0o600)
    path.parent.chmod(0)
    try:
        said = work.complaint()
        assert "cannot " in said and f"{path.parent}: Permission denied" in said
    finally:
        path.parent.chmod(0o700)


def test_an_unreadable_directory_in_git_is_named(unprivileged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(unprivileged))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(unprivileged))
    work = Work.new(unprivileged / "work", a="a")
    path = work.write("deep/secret", "x")
    path.parent.chmod(0)
    try:
        assert "could not open directory 'deep/': Permission denied" in work.complaint(dirty=True)
        taken = work.take()
        assert contents(taken) == {"a": "a"} and "deep/" in note(taken, "unknown")
    finally:
        path.parent.chmod(0o700)


# --- outside of git


def test_outside_of_git_all_files_are_taken(tmp_path: Path) -> None:
    work = Work(tmp_path / "work")
    for name in ("a", "b/c", "b/.hidden", ".gitignore", "clone/x", "clone/.git/HEAD"):
        work.write(name, "a\n")
    for taken in (work.take(), work.take(dirty=True)):
        assert set(contents(taken)) == {"a", "b/c", "b/.hidden", ".gitignore", "clone/x"}
        assert taken.notes[0] == "not a git repository: all files were taken"
        assert "(1: clone/)" in note(taken, "git repositories inside")
        assert (taken.commit, taken.branch, taken.is_dirty, taken.diff) == (None, None, False, "")


def test_without_git_all_files_are_taken(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = work.take()
    monkeypatch.setenv("PATH", "/nonexistent")
    taken = work.take()
    assert taken.digest == plain.digest and taken.notes == (snapshot.NO_GIT,)


@pytest.mark.parametrize("with_git", [True, False])
def test_the_cache_is_no_part_of_the_work_directory(work: Work, with_git: bool) -> None:
    if not with_git:
        shutil.rmtree(work.path / ".git")
    work.cache = work.path / "cache"
    first = work.take(dirty=True)
    assert work.take(dirty=True)[:-1] == first[:-1] and not first.is_dirty
    assert not any("uncommitted" in line for line in work.take().notes)
    assert set(contents(first)) == {"train.py", "src/a.py"}


# --- size


def test_what_nobody_wants_to_upload_is_refused_before_it_is_read(tmp_path: Path) -> None:
    work = Work(tmp_path / "work")
    for name, gigabytes in (("data/a", 15), ("data/b", 5), ("model", 3)):
        os.truncate(work.write(name, ""), gigabytes * 10**9)
    said = work.complaint()
    assert "23.0 GB are more than 20.0 GB (data/ 20.0 GB, model 3.0 GB)" in said and "git init" in said
    work.git("init", "-q")
    assert "leave out what the job does not need (.gitignore" in work.complaint(dirty=True)


def test_a_large_work_directory_is_said_with_its_biggest_parts() -> None:
    entries = [snapshot.Entry(name, size, b"") for name, size in ((b"data/a", 2 * 10**9), (b"b/c/d", 10**8), (b"e", 1))]
    assert snapshot._size_notes(entries, True) == ("large: 2.1 GB (data/ 2.0 GB, b/ 100.0 MB, e 0.0 MB)",)
    assert snapshot._size_notes(entries[1:], True) == ()


# --- the cache


def test_a_damaged_archive_in_the_cache_is_replaced(work: Work) -> None:
    taken = work.take()
    Path(taken.path).write_bytes(b"damaged")
    assert work.take() == taken
    assert hashlib.sha256(Path(taken.path).read_bytes()).hexdigest() == taken.digest


def test_what_a_killed_launch_left_is_removed_after_a_day(work: Work) -> None:
    work.cache.mkdir()
    old, new = work.cache / "old.part", work.cache / "new.part"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    work.take()
    assert (old.exists(), new.exists()) == (False, True)


def test_a_cache_that_cannot_be_written_is_no_usage_error(work: Work) -> None:
    work.cache.write_text("a file")
    with pytest.raises(GangrunError, match=f"^cannot write a snapshot in {work.cache}: ") as error:
        work.take()
    assert not isinstance(error.value, SpecError)


def test_a_full_disk_leaves_nothing_behind(work: Work) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can mount")
    work.write("big", os.urandom(3 * 10**6))
    work.commit()
    work.cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(work.cache)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("no mounts here")
    try:
        with pytest.raises(GangrunError, match="No space left on device"):
            work.take()
        assert list(work.cache.iterdir()) == []
    finally:
        subprocess.run(["umount", str(work.cache)], check=True)


# --- speed


def test_five_thousand_files_take_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Work.new(tmp_path / "work")
    for number in range(5000):
        work.write(f"d{number % 50}/f{number}", f"{number}\n" * (number % 400))
    work.commit()
    for dirty in (False, True):
        start = time.monotonic()
        taken = work.take(dirty=dirty)
        took_s = time.monotonic() - start
        with capsys.disabled():
            print("\n5000 files, dirty=%s: %.2f s" % (dirty, took_s))
        assert taken.files == 5000 and took_s < 60
