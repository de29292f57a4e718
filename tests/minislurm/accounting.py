"""Slurm's records of jobs: slurmdbd and its MariaDB, both on `ctl`."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence

from tests.minislurm import config
from tests.minislurm.daemons import Daemons
from tests.minislurm.options import CONTROLLER
from tests.minislurm.preflight import program

ACCOUNT = "lab"
# a test's database is small, and need not survive the machine: `ctl` losing its power is only a SIGKILL
SMALL_AND_QUICK = (
    *("--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M"),
    *("--innodb-flush-log-at-trx-commit=2", "--innodb-doublewrite=0", "--skip-log-bin"),
)


class Accounting:
    """The records of one cluster."""

    def __init__(self, daemons: Daemons) -> None:
        self.daemons, self.room, self.layout = daemons, daemons.room, daemons.layout

    def create(self, users: Sequence[str]) -> None:
        """An empty database in which the cluster, one account and its users are registered."""
        self.layout.slurmdbd_conf.write_text(config.slurmdbd_conf(self.layout))
        self.layout.slurmdbd_conf.chmod(0o600)
        self._install_database()
        self.start_mariadb()
        self.start()
        self._sacctmgr("add", "cluster", self.room.options.name)
        self._sacctmgr("add", "account", ACCOUNT)
        self._sacctmgr("add", "user", ",".join(users), f"account={ACCOUNT}")

    def _install_database(self) -> None:
        options = [f"--datadir={self.layout.database}", "--skip-test-db", "--skip-name-resolve"]
        as_root = ["--user=root", "--auth-root-authentication-method=normal"]
        self.room.run(CONTROLLER, ["mariadb-install-db", "--no-defaults", *as_root, *options], cwd="/")
        # A folder is a database. slurmdbd would make it, but its next connection fails with Debian 13's libmariadb
        # 11.8.9 (error 5027): that one forgets its limits when a connection to an unknown database was refused.
        (self.layout.database / config.DATABASE).mkdir()

    def start_mariadb(self) -> None:
        """Returns when the database can be asked; it has everything it had before."""
        path = program("mariadbd", self.room.options.rootfs) or "mariadbd"
        address = [f"--bind-address={config.DATABASE_ADDRESS}", f"--port={config.DATABASE_PORT}"]
        files = [
            f"--datadir={self.layout.database}",
            f"--socket={self.layout.database_socket}",
            f"--pid-file={self.layout.runs}/mariadbd.pid",
            f"--log-error={self.layout.log('mariadbd')}",
        ]
        options = ["--no-defaults", "--user=root", "--skip-grant-tables", *address, *files, *SMALL_AND_QUICK]
        self.daemons.start(CONTROLLER, "setsid", "--fork", path, *options)
        self.daemons.wait("mariadbd", self._database_listens)

    def _database_listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.layout.database_socket)) == 0

    def start(self) -> None:
        """Start slurmdbd; returns when it answers."""
        self._acknowledge_at_once()
        self.daemons.start(CONTROLLER, "slurmdbd")
        self.daemons.wait("slurmdbd", self._answers)

    def _acknowledge_at_once(self) -> None:
        """slurmdbd and its clients write in small pieces and wait for TCP's delayed acknowledgements in between,
        40 ms each: that is 0.4 s for every sacct."""
        address = self.room.options.addresses[CONTROLLER]
        route = ["local", address, "dev", "eth0", "table", "local", "proto", "kernel", "scope", "host", "src", address]
        self.room.run(
            CONTROLLER,
            [program("ip", self.room.options.rootfs) or "ip", "route", "change", *route, "quickack", "1"],
            cwd="/",
        )

    def _answers(self) -> bool:
        argv = ["sacctmgr", "-n", "list", "cluster"]
        return self.room.run(CONTROLLER, argv, cwd="/", check=False).returncode == 0

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Stop slurmdbd and wait until it is dead."""
        self.daemons.stop(CONTROLLER, "slurmdbd", signum)

    def _sacctmgr(self, *words: str) -> None:
        self.room.run(CONTROLLER, ["sacctmgr", "-i", *words], cwd="/")
