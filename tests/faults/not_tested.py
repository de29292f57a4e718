"""Faults that cannot be provoked on one machine, with the reason."""

NOT_TESTED = (
    (
        "kernel NFS: attribute and lookup caches, lost locks, silly renames",
        "no NFS server can run here; FUSE stands in",
    ),
    ("a container runtime (pyxis, enroot) that fails", "pyxis cannot be installed here; its command lines are checked"),
    ("a GPU that falls off the bus", "the test bed's GPUs are device files only"),
)
