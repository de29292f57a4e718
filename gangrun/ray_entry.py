"""Runs on the head of a Ray cluster as the entry point of a job, `__main__.py RUN`, and becomes the driver.

Ray has unpacked it, with the driver beside it, to a directory of its own which it may hand to other jobs. It moves the
driver's files to a private directory of the run, puts the logs where Ray's dashboard can read them, gives the run its
own work directory, and starts the driver with the Python that Ray itself runs with. Standard library only.
"""

import fcntl
import importlib.util
import json
import os
import shutil
import sys

NAMES = "names.json"  # what the launcher calls things
OWN = ("__main__.py", "__pycache__", NAMES)
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what this job's own tasks and actors inherit
# Ray leaves out what .gitignore names, and .venv and the like; the tree that was sent has been chosen already.
TAKE_ALL = {"RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1", "RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES": ""}
TREES, LOCK, MARK = "gangrun-trees", ".lock", ".gangrun-run"
RESOURCES = "/runtime_resources/"  # where Ray keeps the files of its jobs
LIBRARY = "/ray/_raylet.so"
CANNOT = 125


def main(run: str) -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, NAMES)) as file:
        names = json.load(file)
    home = os.path.expanduser("~")
    if not os.path.isabs(home) or not os.access(home, os.W_OK):
        fail("HOME=%r: use a directory that the user of Ray's head may write to" % home)
    try:
        directory = os.path.join(home, names["home"], names["runs"], run)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        move(here, directory)
        logs = log_directory(directory, names["logs"], run)
        driver = os.path.join(directory, names["driver"])
        name_logs(driver, names["mark"], logs)
        show_status(os.path.join(logs, names["status"]), os.path.join(home, names["job"], names["status"]))
        inherit_less(own_tree(os.path.join(session_directory() or directory, TREES), run))
    except OSError as error:
        fail("cannot write: %s" % error)
    import_nothing_of_the_user()
    sys.stdout.flush()
    python = ray_python()
    os.execv(python, [python, driver])


def move(here: str, directory: str) -> None:
    """Nothing of a run stays where Ray keeps what other jobs may use, secrets least of all."""
    for name in os.listdir(here):
        if name not in OWN:
            shutil.move(os.path.join(here, name), os.path.join(directory, name))


def log_directory(directory: str, folder: str, run: str) -> str:
    """Below the log directory of Ray's session, which has the same name on all nodes; our own output goes there."""
    session = session_directory()
    directory = os.path.join(session, "logs", folder, run) if session else os.path.join(directory, folder)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    return directory


def session_directory() -> str:
    """Of the Ray that runs us, by the name of the log that our output goes to; empty if it goes elsewhere."""
    logs, name = os.path.split(os.readlink("/proc/self/fd/1"))
    return os.path.dirname(logs) if name.startswith("job-driver-") and os.path.basename(logs) == "logs" else ""


def own_tree(trees: str, run: str) -> str:
    """A work directory that no other run has. Ray keeps one for all that were sent the same files, and what scripts
    write there is found by the next; so the run sends its own, which differs in one small file. It is ours until the
    driver ends: whoever comes next removes it."""
    os.makedirs(trees, mode=0o700, exist_ok=True)
    for name in os.listdir(trees):
        if name.endswith(LOCK):
            sweep(os.path.join(trees, name))
    path = os.path.join(trees, run)
    lock = os.open(path + LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, True)
    shutil.copytree(os.getcwd(), path, copy_function=link, dirs_exist_ok=True)
    with open(os.path.join(path, MARK), "w") as file:
        file.write(run + "\n")
    os.chdir(path)
    return path


def link(source: str, target: str) -> None:
    """No second copy where the file system allows it: nobody writes to either."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def sweep(path: str) -> None:
    try:
        lock = os.open(path, os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    shutil.rmtree(path[: -len(LOCK)], ignore_errors=True)
    os.unlink(path)
    os.close(lock)


def name_logs(driver: str, mark: str, logs: str) -> None:
    with open(driver, encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    with open(driver, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text.replace(mark, repr(logs)[1:-1].replace('"', '\\"')))


def show_status(link: str, status: str) -> None:
    if not os.path.islink(link):
        os.symlink(status, link)


def inherit_less(tree: str) -> None:
    """The driver's package holds its variables and secrets: no other node needs it. The work directory is our own."""
    try:
        config = json.loads(os.environ[JOB_CONFIG])
        config["runtime_env"].pop("py_modules", None)
        config["runtime_env"].pop("env_vars", None)
        config["runtime_env"]["working_dir"] = tree
    except (KeyError, TypeError, ValueError, AttributeError):
        return
    os.environ[JOB_CONFIG] = json.dumps(config)
    os.environ.update(TAKE_ALL)


def import_nothing_of_the_user() -> None:
    """A queue.py in the work directory would be the driver's `queue`."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path and RESOURCES not in path)


def ray_python() -> str:
    """The interpreter that has Ray: this one, or the one whose library our parent has loaded, if that is another."""
    if importlib.util.find_spec("ray") is None:
        with open("/proc/%d/maps" % os.getppid()) as file:
            loaded = [line.split()[-1] for line in file if line.rstrip().endswith(LIBRARY)]
        prefix = loaded[0].rsplit("/lib/", 1)[0] if loaded else ""
        python = os.path.join(prefix, "bin", "python")
        if prefix and os.access(python, os.X_OK):
            return python
    return sys.executable


def fail(words: str) -> None:
    print("gangrun: " + words, file=sys.stderr)
    sys.exit(CANNOT)


if __name__ == "__main__":
    main(sys.argv[1])
