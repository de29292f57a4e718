"""Runs on the head of a Ray cluster as the entry point of a job, `__main__.py RUN`, and becomes the driver.

Ray has unpacked it, with the driver beside it, to a directory of its own which it may hand to other jobs. It moves the
driver's files to a private directory of the run, puts the logs where Ray's dashboard can read them, and starts the
driver with the Python that Ray itself runs with. Standard library only.
"""

import importlib.util
import json
import os
import shutil
import sys

NAMES = "names.json"  # what the launcher calls things
OWN = ("__main__.py", "__pycache__", NAMES)
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what this job's own tasks and actors inherit
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
    except OSError as error:
        fail("cannot write in %s: %s" % (home, error.strerror))
    inherit_less()
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
    output = os.readlink("/proc/self/fd/1")
    if os.path.basename(output).startswith("job-driver-"):
        directory = os.path.join(os.path.dirname(output), folder, run)
    else:
        directory = os.path.join(directory, folder)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    return directory


def name_logs(driver: str, mark: str, logs: str) -> None:
    with open(driver, encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    with open(driver, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text.replace(mark, repr(logs)[1:-1].replace('"', '\\"')))


def show_status(link: str, status: str) -> None:
    if not os.path.islink(link):
        os.symlink(status, link)


def inherit_less() -> None:
    """The driver's package holds its variables and secrets: no other node needs it."""
    try:
        config = json.loads(os.environ[JOB_CONFIG])
        config["runtime_env"].pop("py_modules", None)
        config["runtime_env"].pop("env_vars", None)
    except (KeyError, TypeError, ValueError, AttributeError):
        return
    os.environ[JOB_CONFIG] = json.dumps(config)


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
