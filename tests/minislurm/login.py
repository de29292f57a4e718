"""The way a person gets to a cluster: an sshd on `ctl` with accounts, and a laptop to come from.

The laptop is a node of its own on the same switch. It is the machine itself without Slurm's commands, without
SLURM_CONF and without the homes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from shlex import quote

from tests.minislurm import accounts
from tests.minislurm.accounts import Account
from tests.minislurm.daemons import Daemons
from tests.minislurm.errors import BadInput, BedError, Unsupported
from tests.minislurm.options import CONTROLLER, LAPTOP
from tests.minislurm.preflight import SYSTEM_PATH, missing_login, program
from tests.minislurm.proc import Pid, end_all, kill_all, processes_of
from tests.minislurm.room import Room
from tests.minislurm.scripts import bind_accounts

BANNER = "*** Authorized users only. All activity is monitored. ***\n"
# sshd wants a folder of its own, and writes down who logs in and out: neither is for the machine's files
PRIVATE_FOLDERS = "[ -e /run/minislurm ] || { %s; touch /run/minislurm; mkdir /run/sshd; }" % "; ".join(
    f"mount -t tmpfs -o mode=755 none {folder}" for folder in ("/run", "/var/log")
)
# https://man.openbsd.org/ssh: it takes the home folder from the user database, whatever HOME says
HOME_WRAPPER = """\
#!/bin/sh
[ -e "$HOME/.ssh/config" ] || exec {program} "$@"
exec {program} -F "$HOME/.ssh/config" "$@"
"""


class Login:
    """The sshd of one cluster, and its clients' side. `Cluster.login` gives it."""

    def __init__(self, room: Room, daemons: Daemons) -> None:
        self.room, self.layout, self._daemons = room, room.layout, daemons
        self.config: Path = self.layout.login / "ssh_config"
        self._accounts = {account.alias: account for account in accounts.present(room.options.rootfs)}

    # -- what a test asks

    @property
    def aliases(self) -> list[str]:
        """Every Host of the ssh_config; one is missing if its login shell is not installed."""
        return list(self._accounts)

    def user(self, alias: str) -> str:
        """The account's name."""
        return self._account(alias).name

    def home(self, alias: str) -> Path:
        """The account's home folder, as all nodes but the laptop see it."""
        return accounts.home(self._account(alias), self.layout)

    def sessions(self) -> int:
        """How many logins sshd has accepted since it was first started. One shared connection is one login."""
        return len(re.findall(r"^Accepted \S+ for ", self.layout.log("sshd").read_text(), re.MULTILINE))

    def environ(self, home: Path) -> dict[str, str]:
        """The environment of somebody on the laptop whose home folder is `home`: their ssh knows our hosts, and
        this checkout's commands are on their PATH."""
        folder = home / ".ssh"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = folder / "config"
        include = f"Include {self.config}\n"
        text = config.read_text() if config.exists() else ""
        if include not in text:
            config.write_text(include + text)
        path = [str(self.layout.login / "bin"), str(Path(sys.executable).parent), SYSTEM_PATH]
        return {"HOME": str(home), "USER": "root", "LOGNAME": "root", "LANG": "C.UTF-8", "PATH": ":".join(path)}

    # -- faults

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Stop listening: new connections are refused, those there are go on."""
        if listener := self._listener():
            end_all([listener], signum)
        self._pid_file.unlink(missing_ok=True)

    def start(self) -> None:
        """Listen (again); returns when connections are accepted."""
        if self._listener():
            return
        self._pid_file.unlink(missing_ok=True)
        self._run("sh", "-ec", PRIVATE_FOLDERS)
        options = ["-f", str(self.layout.sshd_config), "-E", str(self.layout.log("sshd"))]
        # since OpenSSH 9.8 a client whose session crashed (`cut`) is locked out for a while; before, no such option
        penalties = ["-o", "PerSourcePenalties=no"]
        known = not self._run(self._sshd, "-t", *options[:2], *penalties, check=False).returncode
        self._daemons.start(CONTROLLER, "sshd", *options, *(penalties if known else []))
        self._daemons.wait("sshd", lambda: self._listener() is not None)

    def cut(self) -> None:
        """Break every connection at once; sshd listens on. As on a real cluster, programs that were started
        through them are not told: what does not read or write lives on."""
        listener = self._listener()
        if left := kill_all(set(self._sshd_processes()) - {listener}):
            raise BedError(f"these sessions did not die of SIGKILL: {[pid.pid for pid in left]}")

    # -- how it is made

    @classmethod
    def open(cls, room: Room, daemons: Daemons) -> Login:
        """The one login of a cluster, made by whoever comes first; the caller holds a lock."""
        if why := missing_login(room.options.rootfs):
            raise Unsupported(why)
        login = cls(room, daemons)
        if not (login.layout.login / "complete").exists():
            login._make()
            (login.layout.login / "complete").touch()
        return login

    def _make(self) -> None:
        accounts_are_new = not self.layout.passwd.exists()
        accounts.create(self.layout, self.room.options.rootfs)
        if accounts_are_new:
            self._tell_nodes()
        for folder in (self.layout.login, self.layout.login / "bin"):
            folder.mkdir(exist_ok=True)
        for name in ("host", "client"):
            self._make_key(self.layout.login / name)
        for account in self._accounts.values():
            self._authorize(account)
        self._write_settings()
        if not self.room.is_on(LAPTOP):
            self.room.power_on([LAPTOP])
        self.start()

    def _tell_nodes(self) -> None:
        command = ["sh", "-ec", "\n".join(bind_accounts(self.layout))]
        told = [self.room.popen(node, command, cwd="/") for node in self.room.nodes_on]
        codes = [process.wait() for process in told]
        if any(codes):
            raise BedError("a node cannot be told about the accounts")

    def _make_key(self, path: Path) -> None:
        if not path.exists():
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "minislurm", "-f", str(path)]
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)

    def _authorize(self, account: Account) -> None:
        keys = accounts.home(account, self.layout) / ".ssh" / "authorized_keys"
        keys.parent.mkdir(mode=0o755, exist_ok=True)
        keys.write_text((self.layout.login / "client.pub").read_text())

    def _write_settings(self) -> None:
        folder, address = self.layout.login, self.room.options.addresses[CONTROLLER]
        (folder / "banner").write_text(BANNER)
        (folder / "known_hosts").write_text(f"{address} {(folder / 'host.pub').read_text()}")
        noisy = [account.name for account in self._accounts.values() if account.startup]
        self.layout.sshd_config.write_text(f"""\
ListenAddress {address}
HostKey {folder}/host
PidFile {self._pid_file}
UsePAM no
UseDNS no
PasswordAuthentication no
AuthorizedKeysFile .ssh/authorized_keys
SetEnv SLURM_CONF={self.layout.slurm_conf}
Subsystem sftp internal-sftp
MaxSessions 100
MaxStartups 100
Match User {",".join(noisy)}
    Banner {folder}/banner
""")
        self.config.write_text(self._ssh_config(address))
        for name in ("ssh", "scp", "sftp"):
            wrapper = folder / "bin" / name
            wrapper.write_text(HOME_WRAPPER.format(program=quote(program(name) or name)))
            wrapper.chmod(0o755)

    def _ssh_config(self, address: str) -> str:
        hosts = "".join(f"Host {alias}\n    User {self.user(alias)}\n" for alias in self.aliases)
        return f"""\
{hosts}
Host {" ".join(self.aliases)}
    HostName {address}
    IdentityFile {self.layout.login}/client
    IdentitiesOnly yes
    UserKnownHostsFile {self.layout.login}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""

    # -- the processes

    @property
    def _sshd(self) -> str:
        return program("sshd", self.room.options.rootfs) or "sshd"

    @property
    def _pid_file(self) -> Path:
        return self.layout.runs / "sshd.pid"

    def _listener(self) -> Pid | None:
        """The sshd that listens; its pid file comes when it does."""
        try:
            inner_pid = int(self._pid_file.read_text())
        except (OSError, ValueError):
            return None
        found = self._sshd_processes()
        return next((pid for pid, inner in found.items() if inner == inner_pid), None)

    def _sshd_processes(self) -> dict[Pid, int]:
        """Every sshd on `ctl` (sshd-session and so on since OpenSSH 9.8), with its pid as the node sees it."""
        found = processes_of(self.room.init(CONTROLLER))
        ours = {Pid.of(one.pid): one.inner_pid for one in found if re.match(r"(\S*/)?sshd\b", one.cmdline)}
        return {pid: inner for pid, inner in ours.items() if pid}

    def _run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.room.run(CONTROLLER, argv, cwd="/", check=check)

    def _account(self, alias: str) -> Account:
        try:
            return self._accounts[alias]
        except KeyError:
            raise BadInput(f"no login {alias!r}; there are {', '.join(self._accounts)}") from None
