# ruff: noqa: UP006, UP035, FA100
"""Runs on the login node, fed on standard input to that host's Python: one request, one answer, gone.

It alone touches the cluster: files below the work directory and Slurm's commands. Standard library only, and
nothing that Python 3.6 lacks: that is what many login nodes still call `python3`.
"""

import base64
import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

# What lies in the work directory, in this program's words; `launch` builds on them. What the driver names comes with
# each request: NAMES["home"], NAMES["status"], NAMES["conf"].
RUNS, SNAPSHOTS = "runs", "snapshots"
OUTPUT, META, TOMBSTONE, WORK, LOGS = "output", "meta.json", "cancelled", "work", "logs"
JOB, SUBMITTING = "job", "submitting"
LOCK = "submit.lock"
NAMES = {}  # type: Dict[str, str]
Answer = Dict[str, Any]
Job = Tuple[str, Optional[str]]  # id and cluster, if sbatch named one
SLURM_FOLDERS = (
    "/usr/bin",
    "/usr/local/bin",
    "/opt/slurm/bin",
    "/usr/local/slurm/bin",
    "/cm/shared/apps/slurm/current/bin",
)
# What a login environment says to Slurm's commands: the request is on the command line, and nothing else counts.
# Nor is a job that a task of ours submits a part of that task's gang or group.
FOREIGN = (
    "SBATCH_", "SLURM_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SALLOC_", "SRUN_", "PMI_", "PMIX_",
    "GANGRUN_", "SKYPILOT_",
)  # fmt: skip
SECONDS = {"SLURM_TIME_FORMAT": "%s"}  # of what Slurm prints; a job must not inherit it
JOB_ID = re.compile(r"^(\d+)(?:;([\w.-]+))?$")
SUBMITTED = re.compile(r"^Submitted batch job (\d+)(?: on cluster ([\w.-]+))?")
# sbatch's words when nobody knows whether the job is queued (facebookincubator/submitit#1659, nextflow-io/nextflow#970)
UNCERTAIN = (
    "timed out",
    "Unable to contact",
    "Connection refused",
    "Zero Bytes",
    "onnection failure",
    "Transport endpoint",
)
CHUNK = 1 << 20
SETTLE_S = 3.0  # how long a job may take to show up in squeue after a submission whose answer was lost
TRIES = 3
SBATCH_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 20.0
NO_ANSWER = 124  # the code of a command that took too long, as timeout(1) has it
DAY_S = 86400
MOST_IDS = 1000
MOST_SINGLE_QUERIES = 20
KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)  # of `scontrol show config`
FIRST_NUMBER = re.compile(r"^\s*(\d+)", re.MULTILINE)
UNKNOWN = "UNKNOWN: "  # begins a refusal after which the same request may be made again
NEWEST_PYTHON = 14
OLDEST_PYTHON = 9


class Refused(Exception):
    """What was asked cannot be done; the text says why, in words for the user."""


# --- files


def expand(root: str) -> str:
    path = os.path.expanduser(root)
    if not os.path.isabs(path) or not os.path.isdir(path):
        raise Refused("work directory %r is not a directory on this host" % path)
    return path.rstrip("/") or "/"


def regular(path: str, flags: int) -> int:
    """The opener of what shall be a file: a pipe's reader would wait, and a device may have no end."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "no regular file", path)


def read_bytes(path: str) -> Optional[bytes]:
    """The content, asked of the server by open(2): a cached size or a cached absence is not believed."""
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read()
    except OSError:
        return None


def read_text(path: str) -> Optional[str]:
    content = read_bytes(path)
    return None if content is None else content.decode("utf-8", "replace")


def write_private(path: str, content: bytes, mode: int = 0o600) -> None:
    """All of it or nothing, under a name of this process's own until it is whole."""
    fd, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".tmp-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def sha256_of(path: str) -> Optional[str]:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(CHUNK), b""):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def snapshot_path(home: str, digest: str) -> str:
    return os.path.join(home, SNAPSHOTS, digest + ".tar")


def run_path(home: str, run: str) -> str:
    return os.path.join(home, RUNS, run)


def status_path(home: str, job: str, run: str) -> str:
    return os.path.join(home, job, run, NAMES["status"])


def home_of(root: str) -> str:
    """<work directory>/.gangrun, made if missing, for this user alone."""
    home = os.path.join(expand(root), NAMES["home"])
    for path in (home, os.path.join(home, RUNS), os.path.join(home, SNAPSHOTS)):
        os.makedirs(path, mode=0o700, exist_ok=True)
    return home


# --- Slurm's commands


def clean_environment() -> Dict[str, str]:
    kept_names = NAMES["conf"]  # where Slurm's configuration is
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(FOREIGN) or name.startswith(kept_names)
    }
    found = kept.get("PATH", os.defpath).split(os.pathsep)
    kept["PATH"] = os.pathsep.join(found + [folder for folder in SLURM_FOLDERS if folder not in found])
    return kept


def command(argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S, variables: Dict[str, str] = SECONDS) -> Answer:
    """Run a command in a process group of its own; a controller that is away makes Slurm's hang."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(clean_environment(), **variables),
            preexec_fn=os.setpgrp,
        )
    except OSError as error:
        return {"rc": 127, "stdout": "", "stderr": "%s: %s" % (argv[0], error.strerror)}
    try:
        out, err = process.communicate(timeout=timeout_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        code, err = NO_ANSWER, err + b"\n%s did not answer within %d s" % (os.fsencode(argv[0]), timeout_s)
    return {"rc": code, "stdout": out.decode("utf-8", "replace"), "stderr": err.decode("utf-8", "replace")}


def of_cluster(cluster: Optional[str]) -> List[str]:
    return ["--clusters=" + cluster] if cluster else []


def in_queue(run: str, cluster: Optional[str]) -> Optional[List[Job]]:
    """The jobs of this name, oldest first; None if the controller did not answer."""
    answer = command(["squeue", *of_cluster(cluster), "--noheader", "--states=all", "--name=" + run, "--format=%A"])
    return None if answer["rc"] != 0 else jobs_in(answer["stdout"], cluster)


def jobs_in(text: str, cluster: Optional[str]) -> List[Job]:
    ids = sorted({int(line) for line in text.splitlines() if line.strip().isdigit()})
    return [(str(number), cluster) for number in ids]


def parse_job_id(text: str) -> Optional[Job]:
    """sbatch --parsable's `ID[;CLUSTER]`, wherever a site's wrapper printed it."""
    for line in reversed(text.splitlines()):
        match = JOB_ID.match(line.strip()) or SUBMITTED.match(line.strip())
        if match:
            return match.group(1), match.group(2)
    return None


# --- requests


def op_prepare(root: str, digests: List[str], commands: Dict[str, List[str]], python: Optional[str]) -> Answer:
    """What a launch must know: where it goes, which snapshots are here and whole, what the cluster has."""
    home = home_of(root)
    room = os.statvfs(home)
    return {
        "home": home,
        "snapshots": [digest for digest in digests if is_whole(snapshot_path(home, digest), digest)],
        "python": interpreter(python),
        "free_bytes": room.f_bavail * room.f_frsize,
        "host": socket.gethostname(),
        "missing": [name for name in ("sbatch", "squeue", "scancel") if not which(name)],
        "answers": {name: command(argv) for name, argv in commands.items()},
    }


def is_whole(path: str, digest: str) -> bool:
    if sha256_of(path) != digest:
        remove(path)
        return False
    os.utime(path, None)  # gc goes by age
    return True


def which(name: str) -> Optional[str]:
    return shutil.which(name, path=clean_environment()["PATH"])


def interpreter(chosen: Optional[str]) -> Optional[str]:
    """An absolute path for the nodes: their own `python3` may be another one (dask/dask-jobqueue#409)."""
    if chosen:
        return chosen
    if sys.version_info >= (3, OLDEST_PYTHON):
        return sys.executable
    return next(
        filter(None, (which("python3.%d" % minor) for minor in range(NEWEST_PYTHON, OLDEST_PYTHON - 1, -1))), None
    )


def op_upload(root: str, digest: str, size: int, payload: BinaryIO) -> Answer:
    """Take a snapshot in, verified, under its final name only when it is whole (a cut stream looks like its end)."""
    path = snapshot_path(home_of(root), digest)
    fd, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".tmp-")
    try:
        with os.fdopen(fd, "wb") as file:
            found = copy_digest(payload, file, size)
        if found != digest:
            raise Refused("the upload arrived damaged or cut short; nothing was kept")
        os.replace(temporary, path)
    finally:
        remove(temporary)
    return {"path": path}


def copy_digest(source: BinaryIO, target: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    while size > 0:
        block = source.read(min(size, CHUNK))
        if not block:
            break
        digest.update(block)
        target.write(block)
        size -= len(block)
    target.flush()
    os.fsync(target.fileno())
    return digest.hexdigest()


def op_submit(
    root: str,
    run: str,
    files: Dict[str, str],
    trees: Dict[str, Optional[str]],
    prepare: List[str],
    sbatch: List[str],
    cluster: Optional[str],
) -> Answer:
    """Submit a run once, however often this is asked: an answer that was lost is found again by the job's name."""
    home = home_of(root)
    directory = run_path(home, run)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if os.path.exists(os.path.join(directory, TOMBSTONE)):
        raise Refused("run %s was cancelled before it was submitted" % run)
    with locked(os.path.join(directory, LOCK)), removed_if_refused(directory):
        known = known_job(directory)
        if known is None and os.path.exists(os.path.join(directory, SUBMITTING)):
            known = adopt(directory, run, cluster)
        if known is None:
            lay_out(home, directory, files, trees)
            command(prepare)  # the interpreter may be on the nodes only: then the files stay as they are
            known = submit(directory, run, sbatch, cluster)
    return {"job": known[0], "cluster": known[1], "directory": directory}


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the job's name still tells twins
            fcntl.lockf(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def removed_if_refused(directory: str) -> Iterator[None]:
    """Nothing stays of a run that will never be, least of all secrets; a job that turns up late finds no driver."""
    try:
        yield
    except Refused as error:
        if UNKNOWN not in str(error):
            shutil.rmtree(directory, ignore_errors=True)
        raise


def known_job(directory: str) -> Optional[Job]:
    text = read_text(os.path.join(directory, JOB))
    return parse_job_id(text) if text else None


def adopt(directory: str, run: str, cluster: Optional[str]) -> Optional[Job]:
    """The job that an earlier try left in the queue, if it did; of twins the oldest stays. Raises Refused."""
    deadline = time.time() + SETTLE_S
    found = in_queue(run, cluster)
    while not found and time.time() < deadline:
        time.sleep(0.5)
        found = in_queue(run, cluster)
    if found is None:
        raise Refused(UNKNOWN + "the Slurm controller does not answer, so nobody knows whether the job is queued")
    found = found or in_accounting(directory, run, cluster)
    for twin, _ in found[1:]:
        command(["scancel", *of_cluster(cluster), twin])
    if found:
        keep(directory, found[0])
    return found[0] if found else None


def in_accounting(directory: str, run: str, cluster: Optional[str]) -> List[Job]:
    """A job so short that squeue has forgotten it."""
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(os.stat(directory).st_ctime - DAY_S))
    argv = ["sacct", *of_cluster(cluster), "-X", "-n", "-P", "--name=" + run, "-S", since, "-o", "JobIDRaw"]
    return jobs_in(command(argv)["stdout"], cluster)


def keep(directory: str, job: Job) -> None:
    text = job[0] + (";" + job[1] if job[1] else "")
    write_private(os.path.join(directory, JOB), text.encode() + b"\n")


def lay_out(home: str, directory: str, files: Dict[str, str], trees: Dict[str, Optional[str]]) -> None:
    for name, content in files.items():
        write_private(os.path.join(directory, name), zlib.decompress(base64.b64decode(content)))
    os.makedirs(os.path.join(directory, LOGS), mode=0o700, exist_ok=True)
    for name, digest in trees.items():
        work = os.path.join(directory, name)
        if os.path.isdir(work):
            continue
        if digest is None:
            os.mkdir(work, 0o700)
        else:
            extract(snapshot_path(home, digest), digest, work)


def extract(archive: str, digest: str, work: str) -> None:
    """Into a directory that gets its name when it is complete."""
    if sha256_of(archive) != digest:
        raise Refused(
            "snapshot %s is missing or damaged on this host; launch again and it is uploaded anew" % digest[:12]
        )
    temporary = tempfile.mkdtemp(dir=os.path.dirname(work), prefix=".work-")
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "fully_trusted_filter"):
                tar.extractall(temporary, filter="fully_trusted")  # our own archive, and verified
            else:
                tar.extractall(temporary)
        os.rename(temporary, work)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def submit(directory: str, run: str, sbatch: List[str], cluster: Optional[str]) -> Job:
    """sbatch, until it has said yes or a definite no."""
    write_private(os.path.join(directory, SUBMITTING), b"%d\n" % os.getpid())
    words = ""
    for _ in range(TRIES):
        answer = command(["sbatch", "--parsable", *sbatch], SBATCH_TIMEOUT_S, {})
        job = parse_job_id(answer["stdout"]) if answer["rc"] == 0 else None
        if job:
            keep(directory, job)
            return job
        words = (answer["stderr"] or answer["stdout"]).strip() or "sbatch ended with code %d" % answer["rc"]
        is_uncertain = answer["rc"] in (0, NO_ANSWER) or any(word in words for word in UNCERTAIN)
        if not is_uncertain:
            remove(os.path.join(directory, SUBMITTING))
            raise Refused("sbatch refused the job: " + words)
        found = adopt(directory, run, cluster)
        if found:
            return found
    raise Refused("sbatch did not take the job after %d tries: %s" % (TRIES, words))


# --- following


def op_poll(
    root: str, runs: List[Dict[str, Any]], squeue: List[str], sacct: List[str], watch: Optional[Answer] = None
) -> Answer:
    """All that can be known of these runs now: the drivers' records, one squeue, one sacct for those that it lacks.
    With `watch` also what `op_watch` says."""
    home = home_of(root)
    answer: Answer = {"now": time.time(), "records": {}, "jobs": {}, "submitting": {}, "cancelled": []}
    for run in runs:
        gather(home, run, answer)
    answer["squeue"], answer["sacct"] = {}, {}
    for name in sorted({run["cluster"] or "" for run in runs}):
        rows = command(["squeue", *of_cluster(name), *squeue, "--user=%d" % os.getuid()])
        answer["squeue"][name] = rows
        seen = {line.rpartition("|")[2].strip() for line in rows["stdout"].splitlines()}  # by name: ids are used again
        here = [run for run in runs if (run["cluster"] or "") == name and run["job"]]
        absent = sorted({run["job"] for run in here if run["run"] not in seen})
        if rows["rc"] == 0 and absent:
            answer["sacct"][name] = account(name, sacct, absent)
    if watch is not None:
        watched = {run["run"]: run["job"] for run in runs if run["run"] in watch["runs"]}  # others lie elsewhere
        answer["watched"] = op_watch(root, **dict(watch, runs=watched))
    return answer


def account(cluster: str, sacct: List[str], ids: List[str]) -> List[Answer]:
    """In pieces that any sacct takes; one id at a time where a site's wrapper refuses lists (BSC-ES/autosubmit#657)."""
    parts = [ids[begin : begin + MOST_IDS] for begin in range(0, len(ids), MOST_IDS)]
    answers = [command(["sacct", *of_cluster(cluster), *sacct, "--jobs=" + ",".join(part)]) for part in parts]
    if 1 < len(ids) <= MOST_SINGLE_QUERIES and makes_no_sense(answers[0]):
        return [command(["sacct", *of_cluster(cluster), *sacct, "--jobs=" + one]) for one in ids]
    return answers


def makes_no_sense(answer: Answer) -> bool:
    """A refusal, or a text without any job; not: accounting is disabled."""
    is_help = bool(answer["stdout"].strip()) and not FIRST_NUMBER.search(answer["stdout"])
    return is_help or (answer["rc"] != 0 and "isabled" not in answer["stderr"])


def gather(home: str, run: Dict[str, Any], answer: Answer) -> None:
    name = run["run"]
    directory = run_path(home, name)
    job = run["job"]
    if job is None:
        found = known_job(directory) or started_job(home, name)
        answer["jobs"][name] = found
        answer["submitting"][name] = is_locked(os.path.join(directory, LOCK))
        job = found[0] if found else None
    if os.path.exists(os.path.join(directory, TOMBSTONE)):
        answer["cancelled"].append(name)
    if job is not None:
        answer["records"][name] = read_text(status_path(home, job, name))


def started_job(home: str, run: str) -> Optional[Job]:
    """The job of a run whose submission nobody lived to note, by what its driver left."""
    found = glob.glob(os.path.join(glob.escape(home), "[0-9]*", run))
    return (os.path.basename(os.path.dirname(found[0])), None) if found else None


def is_locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def op_read(
    root: str,
    run: str,
    job: Optional[str],
    name: str,
    inode: Optional[int],
    offset: int,
    size: int,
    wait_s: float,
    before: Optional[str],
) -> Answer:
    """The bytes of one log from an offset on, as soon as there are some, or the record is not as before; within wait_s
    in any case."""
    home = home_of(root)
    path = os.path.join(run_path(home, run), name)
    status = status_path(home, job, run) if job else os.devnull
    deadline = time.time() + wait_s
    while True:
        found = read_part(path, inode, offset, size)
        record = read_text(status)
        if found["data"] or found["is_new"] or record != before or time.time() >= deadline:
            break
        time.sleep(0.25)
    found["record"] = record
    return found


def read_part(path: str, inode: Optional[int], offset: int, size: int) -> Answer:
    """A file that shrank or became another one is read anew; `offset` below zero counts lines from the end."""
    try:
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            is_new = inode is not None and (state.st_ino != inode or state.st_size < offset)
            begin = 0 if is_new else offset if offset >= 0 else last_lines(file, -offset)
            known = min(begin, 1)  # a client of FUSE may trust an old size until it has read something
            file.seek(begin - known)
            data = file.read(size + known)[known:]
    except OSError:
        return {"inode": inode, "offset": offset, "size": 0, "data": "", "is_new": False, "is_there": False}
    text = base64.b64encode(data).decode()
    return {
        "inode": state.st_ino,
        "offset": begin + len(data),
        "size": state.st_size,
        "data": text,
        "is_new": is_new,
        "is_there": True,
    }


def last_lines(file: BinaryIO, count: int) -> int:
    """Where the last `count` lines begin, read from the end: logs are long."""
    end = file.seek(0, os.SEEK_END)
    position, missing = end, count
    while position > 0:
        step = min(CHUNK, position)
        position -= step
        file.seek(position)
        block = file.read(step)
        if position + step == end and block.endswith(b"\n"):
            missing += 1
        if block.count(b"\n") < missing:
            missing -= block.count(b"\n")
            continue
        at = step
        for _ in range(missing):
            at = block.rindex(b"\n", 0, at)
        return position + at + 1
    return 0


def op_list_logs(root: str, run: str) -> Answer:
    directory = run_path(home_of(root), run)
    sizes = {}
    for top in (LOGS, NAMES["tasks"]):
        for folder, _, names in os.walk(os.path.join(directory, top)):
            paths = [os.path.join(folder, name) for name in names]
            sizes.update({os.path.relpath(path, directory): os.path.getsize(path) for path in paths})
    output = os.path.join(directory, OUTPUT)
    if os.path.exists(output):
        sizes[OUTPUT] = os.path.getsize(output)
    return {"logs": sizes}


def op_cancel(root: str, runs: List[Dict[str, Any]], how: str) -> Answer:
    """Mark the runs first: a job that starts in spite of all sees the mark and leaves. `how`: a key of CANCEL, or
    `force`, which leaves the driver alive to say how it ended."""
    home, answers = home_of(root), {}
    for run in runs:
        directory = run_path(home, run["run"])
        os.makedirs(directory, mode=0o700, exist_ok=True)  # its submission may still be on the way
        write_private(os.path.join(directory, TOMBSTONE), b"%d\n" % int(time.time()))
        job = run["job"] or (known_job(directory) or (None, None))[0]
        if not run["has_driver"]:  # and with the mark there will be none, which would remove them
            for path in glob.glob(os.path.join(glob.escape(directory), "secrets*")):
                remove(path)
        if job:
            answers[run["run"]] = end(run, job, how)
    return {"answers": answers}


# Slurm kills a cancelled job's programs after the site's KillWait, the driver after the task's own grace; and the steps
# of a job that Slurm itself ends cannot be signalled any more.
CANCEL = {"soft": ["--batch", "--signal=TERM"], "hard": [], "kill": ["--full", "--signal=KILL"]}


def end(run: Dict[str, Any], job: str, how: str) -> Answer:
    where = of_cluster(run["cluster"])
    if how in ("soft", "force") and run["has_driver"]:
        config = command(["scontrol", *where, "show", "config"])
        if config["rc"] == NO_ANSWER:
            return config  # nor would scancel get one
        how = how if needs_driver(config["stdout"], run["grace_s"]) else "hard"
    elif how in ("soft", "force"):
        how = "hard"
    if how != "force":
        return command(["scancel", *where, *CANCEL[how], job])
    own = command(["squeue", *where, "--noheader", "--jobs=" + job, "--format=%A"])  # each component has an id
    jobs = ",".join(own["stdout"].split()) or job
    rows = command(["squeue", *where, "--steps", "--noheader", "--jobs=" + jobs, "--format=%i"])
    steps = [step for step in rows["stdout"].split() if step.partition(".")[2].isdigit()]
    return command(["scancel", *where, "--signal=KILL", *steps]) if steps else rows


def needs_driver(config: str, grace_s: Optional[float]) -> bool:
    """Whether Slurm's own way to end a job does not leave `grace_s` seconds; None is less than anybody's."""
    said = KILL_WAIT.search(config)
    return grace_s is None or said is None or grace_s > int(said.group(1))


def op_tidy(root: str, runs: List[str]) -> Answer:
    """Take away what a driver that was killed could not."""
    home = home_of(root)
    for run in runs:
        for path in glob.glob(os.path.join(glob.escape(run_path(home, os.path.basename(run))), "secrets*")):
            remove(path)
    return {}


def op_ask(root: str, run: str, line: str) -> Answer:
    """Ask a running group's driver for something."""
    path = os.path.join(run_path(home_of(root), run), NAMES["requests"])
    if not os.path.exists(path):
        raise Refused("%s is not a group that runs" % run)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        with contextlib.suppress(OSError):
            fcntl.lockf(fd, fcntl.LOCK_EX)
        os.write(fd, line.encode() + b"\n")
    finally:
        os.close(fd)
    return {}


def op_commands(commands: Dict[str, List[str]], limit_s: float) -> Answer:
    """What Slurm's commands say to people: with dates."""
    return {name: command(argv, limit_s, {}) for name, argv in commands.items()}


# --- what `top` shows

MOST_LOGS = 4096  # of one task
FEW_LOGS = 16  # of a task that is only counted; over NFS each costs a question to the server
END_BYTES, LONGEST_LINE = 4096, 400
LOG_END = ".log"
LINE_ENDS = re.compile(r"[\r\n]+")


def op_watch(root: str, runs: Dict[str, Optional[str]], every: bool, attempt: str, steps: Dict[str, str]) -> Answer:
    """How the tasks of these runs and their logs stand. `every`: each rank's; else only each task's newest logs.
    `attempt` begins the names of the driver's attempts, `steps` are what it calls each step's records in one."""
    home = home_of(root)
    found = {run: watch_run(home, run, job, attempt, steps if every else {}) for run, job in runs.items()}
    return {"now": time.time(), "runs": packed(found, 1)}


def packed(answer: Any, level: int) -> str:
    return base64.b64encode(zlib.compress(json.dumps(answer).encode(), level)).decode()


def watch_run(home: str, run: str, job: Optional[str], attempt: str, steps: Dict[str, str]) -> Answer:
    """By the names of a group's tasks; of a single task, and of the group as such, the name is empty."""
    job = job or (known_job(run_path(home, run)) or (None, None))[0]
    if job is None:
        return {}
    own, logs = os.path.join(home, job, run), os.path.join(run_path(home, run), LOGS)
    parts = {}  # type: Dict[str, Answer]
    for path in [own] + sorted(glob.glob(glob.escape(own) + ".*")):
        task = os.path.basename(path)[len(run) + 1 :]
        parts[task] = log_ends(os.path.join(logs, task), MOST_LOGS if steps else FEW_LOGS)
        if steps:
            parts[task]["status"] = read_text(os.path.join(path, NAMES["status"]))
            parts[task]["ranks"] = {step: rank_records(path, attempt, name) for step, name in steps.items()}
    return parts


def rank_records(directory: str, attempt: str, name: str) -> Dict[str, Optional[str]]:
    """Each rank's own record, of the attempt that runs."""
    attempts = glob.glob(os.path.join(glob.escape(directory), attempt + "*", name))
    newest = max(attempts, key=changed, default="")
    with contextlib.suppress(OSError):
        return {rank: read_text(os.path.join(newest, rank)) for rank in os.listdir(newest) if rank.isdigit()}
    return {}


def changed(path: str) -> float:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def log_ends(folder: str, most: int) -> Answer:
    """The bytes of all logs, and of the newest ones the size, the time of the last output and the last line.
    Opening a file asks the server; what is listed may be a minute old."""
    listed = {}  # type: Dict[str, os.stat_result]
    with contextlib.suppress(OSError):
        for name in filter(lambda name: name.endswith(LOG_END), os.listdir(folder)):
            with contextlib.suppress(OSError):
                listed[name] = os.stat(os.path.join(folder, name))
    listed = {name: state for name, state in listed.items() if stat.S_ISREG(state.st_mode)}  # a pipe's reader waits
    newest_first = sorted(listed, key=lambda name: listed[name].st_mtime, reverse=True)
    ends = {name: log_end(os.path.join(folder, name)) for name in newest_first[:most]}
    logs = {name: end for name, end in ends.items() if end}
    sizes = [logs[name]["bytes"] if name in logs else state.st_size for name, state in listed.items()]
    return {"bytes": sum(sizes), "logs": logs}


def log_end(path: str) -> Optional[Answer]:
    try:
        with open(path, "rb", opener=regular) as file:
            state = os.fstat(file.fileno())
            file.seek(max(0, state.st_size - END_BYTES))
            text = file.read(END_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    line = next((part for part in reversed(LINE_ENDS.split(text)) if part.strip()), "")
    return {"bytes": state.st_size, "changed": state.st_mtime, "line": line[-LONGEST_LINE:]}


# --- what lies here


def op_runs(root: str) -> Answer:
    """Every run's own description, its job and its record: what a client that lost its records finds again."""
    home = home_of(root)
    return {"runs": [describe(home, name) for name in sorted(os.listdir(os.path.join(home, RUNS)))]}


def op_describe(root: str, run: str) -> Answer:
    return describe(home_of(root), run)


def describe(home: str, name: str) -> Answer:
    directory = run_path(home, name)
    job = known_job(directory)
    record = read_text(status_path(home, job[0], name)) if job else None
    return {"run": name, "job": job, "meta": read_text(os.path.join(directory, META)), "record": record}


def op_sizes(root: str) -> Answer:
    home = home_of(root)
    now = time.time()
    found = []
    for kind in (RUNS, SNAPSHOTS):
        for path in sorted(glob.glob(os.path.join(glob.escape(home), kind, "*"))):
            found.append(
                {"kind": kind, "name": os.path.basename(path), "bytes": tree_size(path), "age_s": now - newest(path)}
            )
    queued = command(["squeue", "--noheader", "--user=%d" % os.getuid(), "--format=%j"])
    if queued["rc"] != 0:
        raise Refused("the Slurm controller does not answer, so nobody knows which runs are over")
    return {"entries": found, "used": used_snapshots(home), "live": queued["stdout"].splitlines()}


def used_snapshots(home: str) -> Dict[str, List[str]]:
    found = {}
    for run in op_runs(os.path.dirname(home))["runs"]:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found[run["run"]] = list(json.loads(run["meta"])["digests"])
    return found


def tree_size(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    with contextlib.suppress(OSError):
        total += 0 if os.path.isdir(path) else os.lstat(path).st_size
    return total


def newest(path: str) -> float:
    inside = [os.path.join(path, name) for name in (OUTPUT, JOB, META)]
    times = [os.stat(one).st_mtime for one in [path, *inside] if os.path.exists(one)]
    return max(times) if times else 0.0


def op_remove(root: str, runs: List[Dict[str, Any]], snapshots: List[str]) -> Answer:
    home, removed = home_of(root), []
    for run in runs:
        name = os.path.basename(run["run"])
        job = run["job"] or (known_job(run_path(home, name)) or (None, None))[0]
        shutil.rmtree(run_path(home, name), ignore_errors=True)
        if job and job.isdigit():
            for path in glob.glob(os.path.join(glob.escape(os.path.join(home, job, name)) + "*")):
                if os.path.basename(path) == name or os.path.basename(path).startswith(name + "."):
                    shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(home, job))
        removed.append(name)
    for name in snapshots:
        remove(os.path.join(home, SNAPSHOTS, os.path.basename(name)))
    return {"removed": removed + snapshots}


# --- what a report is made from

MOST_EVENT_BYTES = 64 << 20  # of one job, of the end of the file
MOST_TAILS, TAIL_BYTES = 20, 4096
MOST_MARKED, LONGEST_MARKED = 20000, 500
LONGEST_SEARCHED = 1 << 16  # of a log that has no lines, a piece at a time
ALIVE_S = 120.0  # a driver beats every few seconds; a shared file system may be late
LOG_NAME = re.compile(r"^(run|setup-[\w.-]+|\d+-[\w.-]+)\.log$")
UNWELL = ("failed", "broken", "lost")


def op_report(root: str, run: str, pattern: Optional[str]) -> Answer:
    """All that the drivers of a run have told, of a group's tasks too."""
    home = home_of(root)
    job = known_job(run_path(home, run)) or started_job(home, run)
    parts = report_parts(os.path.join(home, job[0], run), pattern) if job else []
    return {"now": time.time(), "utc_offset_s": time.localtime().tm_gmtoff, "parts": packed(parts, 6)}


def report_parts(directory: str, pattern: Optional[str]) -> List[Answer]:
    """One answer for a job's directory, and one for each task's of a group."""
    tasks = sorted(glob.glob(glob.escape(directory) + ".*"))
    return [report_part(path, pattern) for path in [directory] + tasks if os.path.isdir(path)]


def report_part(directory: str, pattern: Optional[str]) -> Answer:
    status = read_text(os.path.join(directory, NAMES["status"])) or ""
    answer: Answer = {"name": os.path.basename(directory), "status": status, "now": last_moment(directory)}
    for name in ("events", "checkpoints"):
        answer[name] = read_end(os.path.join(directory, NAMES[name]), MOST_EVENT_BYTES)
    answer.update(log_parts(status, pattern))
    return answer


def last_moment(directory: str) -> float:
    """Now, if a driver is at work; else when one was heard of last: 0 where that is not known."""
    beats = glob.glob(os.path.join(glob.escape(directory), "attempt-*", NAMES["heartbeat"]))
    heard = max(map(changed, beats), default=0.0)
    return time.time() if abs(time.time() - heard) < ALIVE_S else heard


def read_end(path: str, size: int) -> str:
    try:
        with open(path, "rb", opener=regular) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


def log_parts(status: str, pattern: Optional[str]) -> Answer:
    """The ends of the failed ranks' logs, and what of rank 0's log matches. Only names that are logs are opened."""
    try:
        told = json.loads(status)
        folder = os.path.expanduser(str(told["log_dir"]))
        ranks = [rank for rank in told.get("ranks") or () if LOG_NAME.match(str(rank.get("log")))]
    except (ValueError, TypeError, KeyError, AttributeError):
        return {"tails": {}, "marked": []}
    unwell = [rank["log"] for rank in ranks if rank.get("state") in UNWELL][:MOST_TAILS]
    tails = {name: read_end(os.path.join(folder, name), TAIL_BYTES) for name in unwell}
    own = [path for name in ("0-*.log", NAMES["log"]) for path in glob.glob(os.path.join(glob.escape(folder), name))]
    marked = matching(own[0], pattern) if pattern and own else []
    return {"tails": {name: text for name, text in tails.items() if text}, "marked": marked}


def matching(path: str, pattern: str) -> List[str]:
    """The last of the lines that match."""
    search, found = re.compile(pattern).search, []  # type: Any, List[str]
    try:
        with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
            for line in iter(lambda: file.readline(LONGEST_SEARCHED), ""):
                if search(line):
                    found.append(line[:LONGEST_MARKED].rstrip("\n"))
                    del found[:-MOST_MARKED]
    except OSError:
        pass
    return found


def op_tar(root: str, run: str, logs: List[str]) -> Answer:
    """Logs for a download, as one compressed archive."""
    directory = run_path(home_of(root), run)
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name in logs:
                tar.add(os.path.join(directory, name), arcname=name)
        file.seek(0)
        return {"archive": base64.b64encode(file.read()).decode()}


# --- one request


def main() -> None:
    stdin = sys.stdin.buffer
    request = json.loads(stdin.readline().decode())
    mark, timeout_s = request.pop("mark"), request.pop("timeout_s")
    signal.alarm(int(timeout_s) + 1)  # nothing of us outlives the one who asked
    answer: Dict[str, Any]
    try:
        answer = {"result": serve(request, stdin)}
    except Refused as error:
        answer = {"refused": str(error)}
    except Exception as error:
        answer = {"failed": "%s: %s" % (type(error).__name__, error)}
    sys.stdout.write("\n%s%s%s\n" % (mark, json.dumps(answer), mark))
    sys.stdout.flush()


def serve(request: Dict[str, Any], stdin: BinaryIO) -> Answer:
    NAMES.update(request.pop("names"))
    operation: Callable[..., Answer] = globals()["op_" + request.pop("op")]
    if request.pop("has_payload"):
        request["payload"] = stdin
    return operation(**request)


if __name__ == "__main__":
    main()
