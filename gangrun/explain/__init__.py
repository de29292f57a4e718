"""Why a job waits, and why one failed, in its owner's terms. `ask` asks the cluster; the rest is pure."""
