"""What the machine must offer before anything is started."""

from __future__ import annotations

import os
import shutil

from tests.minislurm.errors import Unsupported

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGE_OF = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
}
TOOLS = ("unshare", "nsenter", "setpriv", "mount", "ip")  # util-linux and iproute2 of the machine itself


def program(name: str, rootfs: str | None = None) -> str | None:
    """Absolute path of a program as a node sees it, or None."""
    top = rootfs or ""
    path = os.pathsep.join(top + folder for folder in SYSTEM_PATH.split(":"))
    found = shutil.which(name, path=path if top else f"{os.environ.get('PATH', '')}:{path}")
    return found[len(top) :] if found else None


def missing(rootfs: str | None = None, *, slurm: bool = True) -> str | None:
    """Why no cluster can be booted here, as one line; None if it can. Without `slurm`: why none can be used."""
    if os.geteuid() != 0:
        return "a Slurm on this machine needs root, for namespaces and mounts (try: sudo -E)"
    if lost := [name for name in TOOLS if not program(name)]:
        return f"missing {', '.join(lost)}: apt-get install util-linux iproute2"
    if rootfs and not os.path.isdir(rootfs):
        return f"{rootfs} is no folder; build it with: python -m tests.minislurm debootstrap {rootfs}"
    if slurm and (packages := [package for name, package in PACKAGE_OF.items() if not program(name, rootfs)]):
        inside = f"chroot {rootfs} " if rootfs else ""
        return f"missing Slurm packages: {inside}apt-get install {' '.join(packages)}"
    return None


def demand(rootfs: str | None = None, *, slurm: bool = True) -> None:
    """Raise Unsupported with the one line if something is missing."""
    if why := missing(rootfs, slurm=slurm):
        raise Unsupported(why)
