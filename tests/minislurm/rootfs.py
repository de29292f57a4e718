"""A Debian root with another Slurm in it, built by debootstrap: Options.rootfs boots the nodes from there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.minislurm.errors import BadInput, BedError, Unsupported

STAMP = "2"  # of PACKAGES: a root with another one is completed
SUITE = "trixie"  # Slurm 24.11
PACKAGES = (
    *("slurmd", "slurmctld", "slurm-client", "slurm-wlm-basic-plugins", "munge"),
    *("iproute2", "procps", "python3-minimal"),
    *("sshfs", "openssh-sftp-server", "python3-fusepy"),  # for mount_nfs_like and mount_faulty
    *("openssh-server", "tcsh", "fish"),  # for login
    *("slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server-core", "mariadb-client-core"),  # for accounting
)
SOURCES = Path("/etc/apt")
DEFAULT_MIRROR = "http://deb.debian.org/debian"


def find_mirror(sources: str) -> str:
    """The first archive named in apt's sources, of either format, that is not the security one."""
    urls = re.findall(r"^(?:deb\s+(?:\[[^]]*\]\s*)?|URIs:\s*)(\S+)", sources, re.MULTILINE)
    return next((url for url in urls if "security" not in url), DEFAULT_MIRROR)


def apt_sources(folder: Path = SOURCES) -> str:
    """The text of all apt sources of this machine."""
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    return "\n".join(file.read_text() for file in files if file.suffix in (".list", ".sources") and file.is_file())


def debootstrap(folder: Path, suite: str = SUITE) -> None:
    """Build the root in a new folder. It takes about a minute; a failure leaves its log there."""
    if not shutil.which("debootstrap"):
        raise Unsupported("missing debootstrap: apt-get install debootstrap")
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"{folder} is not empty")
    mirror = find_mirror(apt_sources())
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, str(folder), mirror]
    done = subprocess.run(argv, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        last = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-5:])
        raise BedError(f"debootstrap failed; its log is {folder}/debootstrap/debootstrap.log\n{last}")


def prepare(folder: Path, suite: str) -> None:
    """Have a root with all packages: build it, or add what one of an earlier time lacks. The caller holds a lock."""
    mark = folder / "complete"  # whole, with the packages of this stamp
    if mark.exists() and mark.read_text() == STAMP:
        return
    add_packages(folder) if mark.exists() else debootstrap(folder, suite)
    mark.write_text(STAMP)


def add_packages(folder: Path) -> None:
    """Install what is missing; what is there stays as it is, also for those who run on it. Starts no daemon."""
    policy = folder / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    shutil.copyfile("/etc/resolv.conf", folder / "etc/resolv.conf")
    install = f"apt-get -qq update && apt-get -qq -y --no-install-recommends install {' '.join(PACKAGES)}"
    script = f"mount -t proc proc /proc; export DEBIAN_FRONTEND=noninteractive; {install}"
    argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "chroot", str(folder), "sh", "-c", script]
    done = subprocess.run(argv, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        last = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-5:])
        raise BedError(f"{folder}: its packages cannot be completed\n{last}")
