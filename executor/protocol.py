"""The contract between client, code generator, driver and executor. Imports nothing.

Every name that two parts share has its one home here: environment variables, file names, states,
exit codes, and the form of what is written into shared files.
"""

from __future__ import annotations

VERSION = "0.1.0"

# --- What Slurm tells us (https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES)
SLURM_JOB_ID = "SLURM_JOB_ID"
SLURM_JOB_END_TIME = "SLURM_JOB_END_TIME"
SLURM_JOB_NAME = "SLURM_JOB_NAME"
SLURM_JOB_NODELIST = "SLURM_JOB_NODELIST"
SLURM_JOB_NUM_NODES = "SLURM_JOB_NUM_NODES"
SLURM_PROCID = "SLURM_PROCID"
SLURM_STEP_ID = "SLURM_STEP_ID"
SLURM_STEP_NODELIST = "SLURM_STEP_NODELIST"
SLURM_STEP_NUM_TASKS = "SLURM_STEP_NUM_TASKS"
SLURM_NNODES = "SLURM_NNODES"
SLURM_NODELIST = "SLURM_NODELIST"
SLURM_GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
SLURM_STEP_GPUS = "SLURM_STEP_GPUS"  # as the node numbers them
SLURM_GPUS_PER_NODE = "SLURM_GPUS_PER_NODE"  # what a step asks for that says nothing
SLURM_RESTART_COUNT = "SLURM_RESTART_COUNT"
SLURM_DISTRIBUTION = "SLURM_DISTRIBUTION"
SLURM_SRUN_COMM_PORT = "SLURM_SRUN_COMM_PORT"
SLURM_JOB_ID_HET_GROUP = (
    "SLURM_JOB_ID_HET_GROUP_%s"  # the job id of a component, https://slurm.schedmd.com/heterogeneous_jobs.html
)
SLURM_JOB_NODELIST_HET_GROUP = "SLURM_JOB_NODELIST_HET_GROUP_%s"
SLURM_CONF = "SLURM_CONF"
SLURMD_NODENAME = "SLURMD_NODENAME"

# --- What the script is told. Names kept from SkyPilot, so that its task scripts run unchanged.
ENV_NODE_RANK = "SKYPILOT_NODE_RANK"
ENV_NUM_NODES = "SKYPILOT_NUM_NODES"
ENV_NODE_IPS = "SKYPILOT_NODE_IPS"
ENV_NUM_GPUS_PER_NODE = "SKYPILOT_NUM_GPUS_PER_NODE"
ENV_SETUP_NODE_RANK = "SKYPILOT_SETUP_NODE_RANK"
ENV_SETUP_NODE_IPS = "SKYPILOT_SETUP_NODE_IPS"
ENV_SETUP_NUM_GPUS_PER_NODE = "SKYPILOT_SETUP_NUM_GPUS_PER_NODE"
ENV_INTERNAL_JOB_ID = "SKYPILOT_INTERNAL_JOB_ID"
ENV_ATTEMPT = "GANGRUN_ATTEMPT"
RUN_VARIABLES = (ENV_NODE_RANK, ENV_NODE_IPS, ENV_NUM_GPUS_PER_NODE, ENV_ATTEMPT)
SETUP_VARIABLES = (ENV_SETUP_NODE_RANK, ENV_SETUP_NODE_IPS, ENV_SETUP_NUM_GPUS_PER_NODE, ENV_ATTEMPT)
ENV_CHECKPOINTS = "GANGRUN_CHECKPOINTS"  # the file in which a script notes its checkpoints
ENV_DEADLINE = "GANGRUN_DEADLINE"  # when Slurm will end the job, in seconds since 1970
ENV_MEMBER_NODES = "GANGRUN_MEMBER_NODES"  # of a task of a group: its nodes, with commas
ENV_HET_GROUP = "GANGRUN_HET_GROUP"  # of a task of a group: its component of a heterogeneous job
ENV_MEMBER_ENV = "GANGRUN_MEMBER_ENV"  # of a task of a group: what its scripts find, in JSON
ENV_GROUP_DRIVER = "GANGRUN_GROUP_DRIVER"  # the pid of the group's driver, with which a task's driver ends
ENV_HOSTS_FILE = "GANGRUN_HOSTS_FILE"  # of a task of a group: the names of its peers
ENV_HOSTS_MEANS = "GANGRUN_HOSTS_MEANS"
ENV_ADDRESS_PREFIX = "GANGRUN_ADDR_"  # the address of a task's first node; the task's name in capitals follows
ENV_GROUP_DIRECTORY = "GANGRUN_GROUP_DIR"  # where a script of a group asks for more tasks
ENV_COMPONENT = "GANGRUN_COMPONENT"  # of a group's task: its component of a heterogeneous job
ENV_RESTARTS = "GANGRUN_RESTARTS"  # of a group's task: how often its group has started it again
ENV_TASK_NAME = "GANGRUN_TASK"  # the name of the group's task that this is
ENV_GROUP_NAME = "SKYPILOT_JOBGROUP_NAME"
ENV_NODE_GPUS = "GANGRUN_NODE_GPUS"  # of a task on nodes that it shares: the GPUs that its group has on each
ENV_LOCAL_LAUNCHER = "GANGRUN_LOCAL_LAUNCHER"  # its pid
BETWEEN_DRIVERS = (  # no script sees these
    ENV_MEMBER_NODES,
    ENV_HET_GROUP,
    ENV_MEMBER_ENV,
    ENV_GROUP_DRIVER,
    ENV_HOSTS_FILE,
    ENV_HOSTS_MEANS,
    ENV_NODE_GPUS,
    ENV_LOCAL_LAUNCHER,
)

# --- Exit codes of ours. 125 and 2 follow env(1), timeout(1) and most command lines.
EXIT_USAGE = 2
EXIT_INFRASTRUCTURE = 125
EXIT_SIGNAL_BASE = 128
SIGINT = 2
SIGPIPE = 13
SIGTERM = 15
EXIT_TERMINATED = EXIT_SIGNAL_BASE + SIGTERM
EXIT_KILLED = EXIT_SIGNAL_BASE + 9
LAST_SIGNAL = 64
LAST_PORT = 65535

# --- States of a job
PENDING = "PENDING"
SETTING_UP = "SETTING_UP"
RUNNING = "RUNNING"
SUCCEEDED = "SUCCEEDED"
FAILED = "FAILED"
FAILED_SETUP = "FAILED_SETUP"
FAILED_DRIVER = "FAILED_DRIVER"
CANCELLED = "CANCELLED"
TERMINAL_STATES = (SUCCEEDED, FAILED, FAILED_SETUP, FAILED_DRIVER, CANCELLED)

# --- States of a rank, as its record tells them
RANK_WAITING = "waiting"
RANK_RUNNING = "running"
RANK_STOPPING = "stopping"
RANK_STOPPED = "stopped"
RANK_DONE = "done"
RANK_FAILED = "failed"
RANK_BROKEN = "broken"
RANK_LOST = "lost"  # in reports only: it left no word
RANK_ENDED_STATES = (RANK_STOPPED, RANK_DONE, RANK_FAILED, RANK_BROKEN)

# --- What events.jsonl tells. Times of ranks are of their own nodes' clocks, all others of the driver's.
EVENT_STATE = "state"  # the job's; at the end of an attempt with its exit code and reason
EVENT_QUEUED = "queued"  # when Slurm took the job and when it gave it its nodes, on the controller's clock
EVENT_STEP_STARTED = "step_started"
EVENT_STEP_ENDED = "step_ended"
EVENT_RANK_STARTED = "rank_started"  # as soon as the driver sees it
EVENT_RANK_DONE = "rank_done"  # its script has ended; in the run step only while others' go on
EVENT_RANK_ENDED = "rank_ended"  # all that is known of a rank, at the end of the attempt
EVENT_TASK_STARTED = "task_started"  # of a group: also when it starts again
EVENT_TASK_ENDED = "task_ended"
EVENT_DRIVER_LOST = "driver_lost"  # of the attempt before: it was last heard of at `seen`
STEP_SETUP, STEP_RUN = "setup", "run"

# --- What signal files say. A file that exists beforehand holds ARMED.
ARMED = "armed"
GO = "go"
ABORT = "abort"
GANG_DONE = "done"
GANG_FAILED = "failed"
GANG_STOP = "stop"

# --- Intervals and limits
DEFAULT_GRACE_S = 30.0
DEFAULT_LIVENESS_TIMEOUT_S = 600.0
FILE_SYSTEM_PATIENCE_S = 300.0  # longer than any NFS attribute cache (acdirmax is 60 s)
BEAT_FIRST_S = 2.0
BEAT_LONGEST_S = 30.0
POLL_FIRST_S = 0.005
POLL_STEADY_S = 0.02
POLL_LONGEST_S = 1.0
POLLS_PER_S = 500  # of a whole gang: what a shared file system is asked, however many nodes wait
SIGNAL_BYTES = 256  # signals and records are padded, so that a rewrite in place covers the old text
RECORD_BYTES = 512
# srun passes lines of up to 1,024 bytes whole and cuts longer ones into one another.
STREAM_PIECE_BYTES = 1000
# The kernel's MAX_ARG_STRLEN: the longest single argument or NAME=value of execve(2).
LONGEST_ENV_BYTES = 131071

PROCTRACK_LINUXPROC = "linuxproc"
PROCTRACK_PGID = "pgid"
LOOPBACK_PREFIX = "127."
UNSPECIFIED_PROCTRACK = "unknown"

RAY_ROOM = "gangrun.ray."  # in /tmp: what a rank's Ray keeps while it lives
HOME_DIRECTORY = ".gangrun"
ENGINE_RAY = "ray"  # in it, in the place of a Slurm job's id: the jobs of a Ray cluster
ARCHIVE_NAME = "gangrun-executor.pyz"
DRIVER_NAME = "driver.py"
LOCK_NAME = "lock"
STATUS_NAME = "status.json"
EVENTS_NAME = "events.jsonl"
EXIT_CODE_NAME = "exit_code"
CHECKPOINTS_NAME = "checkpoints"  # of a job, all its attempts: one line per checkpoint
HEARTBEAT_NAME = "heartbeat"  # of an attempt: its driver rewrites it every few seconds
SECRETS_NAME = "secrets.json"
REQUESTS_NAME = "requests.jsonl"  # of a group: the tasks that were asked for while it runs, one line each
TASKS_NAME = "tasks"  # of a group: a directory with the output of each task
SINGLE_LOG_NAME = "run.log"  # of a job of one node
OLDEST_PYTHON = (3, 9)

LOCAL, RAY_NODE, RAY_RANK = PROGRAMS = "local", "ray-node", "ray-rank"  # words that ask the archive for one
RANK = "slurm"  # what it runs without such a word


class GangrunError(Exception):
    """Something around the script failed, not the script. The text says what was tried, and what to do."""

    exit_code = EXIT_INFRASTRUCTURE


class UsageError(GangrunError):
    """A flag, a field or a value that was given is not usable; nothing was started."""

    exit_code = EXIT_USAGE


def variable_problem(name: object, value: object) -> str | None:
    """Why a script cannot have this variable, as what it is and what to use; None if it can. Never shows the value."""
    if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
        return " is not allowed: use a name of letters, digits and _, not starting with a digit"
    if not isinstance(value, (str, int, float)):
        return f"={type(value).__name__!r}: use a string or a number"
    if "\0" in str(value):
        return "='a NUL byte': use text without NUL, which no environment can carry"
    try:
        size = len(f"{name}={value}".encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return "='half of a surrogate pair': use text that is Unicode"
    if size > LONGEST_ENV_BYTES:
        return f"='{size} bytes': use at most {LONGEST_ENV_BYTES} bytes, name included, the kernel's limit"
    return None


class Launch:
    """The names inside the directory that one attempt of one launch shares."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.alloc = directory + "/alloc"
        self.setup_done = directory + "/setup_done"
        self.gang = directory + "/gang"
        self.heartbeat = directory + "/" + HEARTBEAT_NAME
        self.addresses = directory + "/addresses.json"
        self.hosts = directory + "/hosts"
        self.ray = directory + "/ray"  # `go <address> <token>`, then `done <exit code>`
        self.ray_records = directory + "/ray-ranks"
        self.run_script = directory + "/run.sh"
        self.setup_script = directory + "/setup.sh"
        self.run_env = directory + "/run.env.json"
        self.setup_env = directory + "/setup.env.json"

    def records(self, is_setup: bool) -> str:
        """The directory of the rank records of the run step, or of the setup step."""
        return self.directory + ("/setup-ranks" if is_setup else "/ranks")

    def record(self, rank: int, is_setup: bool = False) -> str:
        return "%s/%d" % (self.records(is_setup), rank)

    def ray_record(self, rank: int) -> str:
        """What a rank says of its part of the Ray cluster: {"state": "running"}, {"state": "broken", "why": "..."}."""
        return "%s/%d" % (self.ray_records, rank)


def beat_interval_s(liveness_timeout_s: float, longest_s: float = BEAT_LONGEST_S) -> float:
    """Seconds between two signs of life, or two looks for them: several fit into the time until one is given up."""
    return min(longest_s, liveness_timeout_s / 4)


def python_arguments(archive: str | None, program: str = RANK) -> list[str]:
    """What makes Python run a program of the archive, or where there is none, of the installed `executor`."""
    if archive is None:
        return ["-m", "executor." + program.replace("-", "_")]
    word = [] if program == RANK else [program]
    return ["-I", "-S", "-X", "utf8", archive, *word]  # no locale of the site matters


def job_directory(cluster_home: str, slurm_job_id: str, name: str) -> str:
    """Where everything of one job lies: <cluster_home>/.gangrun/<slurm_job_id>/<name>."""
    return "%s/%s/%s/%s" % (cluster_home.rstrip("/"), HOME_DIRECTORY, slurm_job_id, name)


def member_job_id(group_id: str, task: str) -> str:
    """The id of a task of a group, as its driver knows it."""
    return f"{group_id}.{task}"


def address_variable(task: str) -> str:
    """`replay-buffer` -> GANGRUN_ADDR_REPLAY_BUFFER."""
    return ENV_ADDRESS_PREFIX + task.upper().replace("-", "_").replace(".", "_")


def task_output(task: str) -> str:
    """Where the output of a group's task is, in the group's directory."""
    return f"{TASKS_NAME}/{task}.out"


def member_driver_name(task: str) -> str:
    return f"driver-{task}.py"


def member_secrets_name(task: str) -> str:
    return f"secrets-{task}.json"


def node_name(index: int) -> str:
    return "head" if index == 0 else "worker%d" % index


def attempt_name(restart_count: int | str) -> str:
    return f"attempt-{restart_count}"


def step_name(job_id: str, is_setup: bool) -> str:
    """The name of a driver's step in Slurm's lists."""
    return f"gangrun-{job_id}-setup" if is_setup else f"gangrun-{job_id}"


def local_address(index: int) -> str:
    """The address of a local "node": 127.0.0.1, 127.0.0.2, ...; Linux answers on all of 127.0.0.0/8."""
    number = index + 1
    return "127.%d.%d.%d" % (number >> 16, number >> 8 & 255, number & 255)


def log_name(rank: int, index: int, num_nodes: int, is_setup: bool) -> str:
    """The name of a node's log; `index` is the node's place in the cluster of `num_nodes`."""
    if is_setup:
        return f"setup-{node_name(index)}.log"
    return SINGLE_LOG_NAME if num_nodes == 1 else "%d-%s.log" % (rank, node_name(index))


def exit_code_of_signal(number: int) -> int:
    return EXIT_SIGNAL_BASE + number


def describe_code(code: int) -> str:
    """`exit code 7`, or `exit code 137, signal 9`: only 129..192 can mean a signal."""
    if EXIT_SIGNAL_BASE < code <= EXIT_SIGNAL_BASE + LAST_SIGNAL:
        return "exit code %d, signal %d" % (code, code - EXIT_SIGNAL_BASE)
    return "exit code %d" % code
