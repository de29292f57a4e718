"""Accounts of ordinary people on a cluster, each with another login shell.

They are in a passwd and a group file of the cluster's own, which its nodes see instead of the machine's.
Nothing of the machine changes, and they are gone with the cluster.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.minislurm.errors import BadInput
from tests.minislurm.layout import Layout
from tests.minislurm.preflight import program

FIRST_UID = 50000
LONG = "a-home-whose-path-is-far-too-long-for-the-address-of-a-socket"
NOISE = "echo '*** NEWS: the file system is full again ***'\necho 'warning: your password is old' >&2\n"


class Account(NamedTuple):
    """What is particular about one account."""

    alias: str  # the Host in ssh_config
    name: str
    shell: str = "bash"
    home: str = ""  # below the folder of the homes, instead of the name
    startup: str = ""  # the text of .bashrc and .profile


ACCOUNTS = (
    Account("head", "gangrun-bash"),
    Account("head-tcsh", "gangrun-tcsh", shell="tcsh"),
    Account("head-fish", "gangrun-fish", shell="fish"),
    Account("head-noisy", "gangrun-noisy", startup=NOISE),
    Account("head-longhome", "gangrun-longhome", home=f"{LONG}/{LONG}"),
)


def present(rootfs: str | None) -> list[Account]:
    """The accounts whose shell the nodes have."""
    return [account for account in ACCOUNTS if program(account.shell, rootfs)]


def home(account: Account, layout: Layout) -> Path:
    return layout.homes / (account.home or account.name)


def create(layout: Layout, rootfs: str | None) -> None:
    """Make the homes and the two files; fine if they are there. Nodes that are on have to be told."""
    if layout.passwd.exists():
        return
    layout.homes.mkdir(exist_ok=True)
    layout.passwd.parent.mkdir(exist_ok=True)
    machine = pwd.getpwall()
    entries = [
        pwd.struct_passwd((one.name, "*", uid, uid, "", str(home(one, layout)), program(one.shell, rootfs)))
        for one, uid in zip(present(rootfs), _free_uids({entry.pw_uid for entry in machine}))
    ]
    for account, entry in zip(present(rootfs), entries):
        _make_home(account, entry)
    _write(layout.group, "/etc/group", [f"{entry.pw_name}:x:{entry.pw_gid}:" for entry in entries])
    _write(layout.passwd, "/etc/passwd", [":".join(map(str, entry)) for entry in entries])


def _free_uids(taken: set[int]) -> Sequence[int]:
    return [uid for uid in range(FIRST_UID, FIRST_UID + len(taken) + len(ACCOUNTS)) if uid not in taken]


def _make_home(account: Account, entry: pwd.struct_passwd) -> None:
    folder = Path(entry.pw_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (".bashrc", ".profile") if account.startup else ():
        (folder / name).write_text(account.startup)
        os.chown(folder / name, entry.pw_uid, entry.pw_gid)
    folder.chmod(0o700)
    os.chown(folder, entry.pw_uid, entry.pw_gid)


def _write(path: Path, source: str, lines: Sequence[str]) -> None:
    new = path.with_suffix(".new")
    new.write_text(Path(source).read_text().rstrip("\n") + "\n" + "".join(f"{line}\n" for line in lines))
    new.chmod(0o644)
    new.replace(path)


def find(name: str, layout: Layout) -> pwd.struct_passwd:
    """A user as the nodes know them."""
    try:
        lines = layout.passwd.read_text().splitlines()
    except OSError:
        lines = []
    for word in (line.split(":") for line in lines):
        if word[0] == name and len(word) == 7:
            return pwd.struct_passwd((*word[:2], int(word[2]), int(word[3]), *word[4:]))
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise BadInput(f"no user {name!r} on this machine") from None
