"""Faults that cannot be provoked on one machine, with the reason."""

NOT_TESTED = (
    (
        "kernel NFS: attribute and lookup caches, lost locks, silly renames",
        "no NFS server can run here; FUSE stands in",
    ),
    ("a container runtime (pyxis, enroot) that fails", "pyxis cannot be installed here; its command lines are checked"),
    ("a GPU that falls off the bus", "the test bed's GPUs are device files only"),
    (
        "a node that loses its power and is back before Slurm notices",
        "the test bed's nodes share the machine's boot time, by which Slurm would see it",
    ),
    (
        "slurmctld killed with -9 in the seconds after a job's start, before it has saved its state",
        "Slurm itself forgets that the job began and holds it (launch_failed_requeued_held); no launcher can help",
    ),
    ("a process in uninterruptible sleep (state D) that not even KILL ends", "needs a driver or a disk that hangs"),
    (
        "quotas and read-only remounts by a real file server",
        "their error codes (EDQUOT, EROFS, ENOSPC, EIO, ESTALE) are injected by a FUSE file system instead",
    ),
    (
        "nodes without any IPv4 address",
        "the test bed's Slurm daemons talk IPv4; names and lists with IPv6 addresses only are tested",
    ),
    (
        "what sacct says of a job that has ended: several rows after a requeue, COMPLETED or 0:125 against the facts",
        "driver and executor never ask it: the ranks' own records, and srun, decide",
    ),
    ("a script that hangs the node's kernel or its epilog for ever", "an epilog that hangs for seconds is tested"),
)
