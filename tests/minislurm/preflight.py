"""What the machine must offer before anything is started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from tests.minislurm.errors import Unsupported

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGE_OF = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
}
LOGIN_PACKAGE_OF = {"sshd": "openssh-server"}
ACCOUNTING_PACKAGE_OF = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",  # for mariadb-install-db
}
CLIENT_PACKAGE_OF = {"ssh": "openssh-client", "ssh-keygen": "openssh-client"}  # on the machine itself
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
    return lacking(PACKAGE_OF, "Slurm packages", rootfs) if slurm else None


def lacking(package_of: Mapping[str, str], what: str, rootfs: str | None = None) -> str | None:
    """Which packages to install for these programs, as one line; None if all are there."""
    packages = dict.fromkeys(package for name, package in package_of.items() if not program(name, rootfs))
    inside = f"chroot {rootfs} " if rootfs else ""
    return f"missing {what}: {inside}apt-get install {' '.join(packages)}" if packages else None


def missing_login(rootfs: str | None = None) -> str | None:
    """Why `Cluster.login` cannot work here; None if it can."""
    return lacking(LOGIN_PACKAGE_OF, "an sshd", rootfs) or lacking(CLIENT_PACKAGE_OF, "an ssh client")


def missing_accounting(rootfs: str | None = None) -> str | None:
    """Why no cluster with accounting can be booted here; None if it can."""
    return lacking(ACCOUNTING_PACKAGE_OF, "what accounting needs", rootfs)


def demand(rootfs: str | None = None, *, slurm: bool = True, accounting: bool = False) -> None:
    """Raise Unsupported with the one line if something is missing."""
    if why := missing(rootfs, slurm=slurm) or (missing_accounting(rootfs) if accounting else None):
        raise Unsupported(why)
