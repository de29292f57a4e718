"""Who am I, and who are my peers? Answered from Slurm's variables and this host's own addresses.

Slurm's commands are not used: they may not exist inside a container.
"""

from __future__ import annotations

import _socket as socket  # `socket` itself costs every node 9 ms: enums, selectors

from executor import interfaces, protocol
from executor.protocol import GangrunError, UsageError

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Callable, Optional

    Environ = dict[str, str]
    Resolver = Callable[[str], Optional[str]]


LARGEST_HOST_LIST = 65536
JOB_NODELIST = protocol.SLURM_JOB_NODELIST


class Identity:
    """One rank of the step, and the node it runs on. `node_index` is the node's place in the cluster's list."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        node_index: int,
        address: str,
        host: str,
        hosts: tuple[str, ...],
        job_hosts: tuple[str, ...] = (),
        ranks_are_shuffled: bool = False,
        warning: str = "",
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.node_index = node_index
        self.address = address
        self.host = host  # SLURMD_NODENAME
        self.hosts = hosts  # of the step; rank r runs on hosts[r], unless ranks_are_shuffled
        self.job_hosts = job_hosts
        self.ranks_are_shuffled = ranks_are_shuffled
        self.warning = warning

    @property
    def node(self) -> str:
        return protocol.node_name(self.node_index)


def resolve(
    environ: Environ,
    cluster_ips: Sequence[str],
    lookup: Resolver | None = None,
    local_addresses: Callable[[], list[str]] | None = None,
) -> Identity:
    """Find this process's place. Raises GangrunError that shows every value that was tried."""
    lookup = lookup or address_of
    hosts = step_hosts(environ)
    rank = _number(environ, protocol.SLURM_PROCID)
    num_ranks = _number(environ, protocol.SLURM_STEP_NUM_TASKS, len(hosts))
    if num_ranks != len(hosts):
        raise UsageError(
            "%s=%d tasks on %d nodes: gangrun runs one task per node; give srun --ntasks-per-node=1"
            % (protocol.SLURM_STEP_NUM_TASKS, num_ranks, len(hosts))
        )
    if rank >= num_ranks:
        raise GangrunError("%s=%d but the step has %d tasks" % (protocol.SLURM_PROCID, rank, num_ranks))
    shuffled = environ.get(protocol.SLURM_DISTRIBUTION, "").startswith("arbitrary") and num_ranks > 1
    here = environ.get(protocol.SLURMD_NODENAME) or (hosts[rank] if not shuffled else socket.gethostname())
    job_hosts = expand_hosts(environ[JOB_NODELIST], JOB_NODELIST) if environ.get(JOB_NODELIST) else []
    addresses = local_addresses or interfaces.addresses
    index, address, warning = _find_node(here, job_hosts, cluster_ips, lookup, addresses)
    return Identity(rank, num_ranks, index, address, here, tuple(hosts), tuple(job_hosts), shuffled, warning)


def step_hosts(environ: Environ) -> list[str]:
    """The nodes of this step in Slurm's order; of the job where the step is not told (an older site)."""
    for name in (protocol.SLURM_STEP_NODELIST, protocol.SLURM_JOB_NODELIST, protocol.SLURM_NODELIST):
        if environ.get(name):
            return expand_hosts(environ[name], name)
    raise UsageError(f"{protocol.SLURM_STEP_NODELIST} is not set: start this under srun")


def expand_hosts(text: str, name: str = "host list") -> list[str]:
    """`n[001-003],m1` as Slurm writes it -> its hosts. Raises UsageError that quotes the text."""
    import hostlist

    try:
        if not text.strip() or text != text.strip() or ",," in text or text[:1] == "," or text.endswith(","):
            raise hostlist.BadHostlist("empty element")
        hosts: list[str] = hostlist.expand_hostlist(text, allow_duplicates=True)
    except hostlist.BadHostlist as error:
        raise UsageError(f"{name}={text!r} is not a host list: {error}") from error
    bad = [host for host in hosts if not host or any(c in host for c in "[]{}(), \t\n")]
    if bad or not hosts or len(hosts) > LARGEST_HOST_LIST:
        raise UsageError(f"{name}={text!r} is not a host list: {bad[:1] or len(hosts)!r}")
    if len(set(hosts)) != len(hosts):
        raise UsageError(f"{name}={text!r} names a host twice")
    return hosts


def node_ips(
    me: Identity, cluster_ips: Sequence[str], hosts_by_rank: Sequence[str], lookup: Resolver | None = None
) -> list[str]:
    """The address of every rank, in rank order. Every rank gives the same answer: it is a rule for all hosts."""
    entries = [normal(entry) for entry in cluster_ips]
    return [_address_of_rank(host, me, entries, lookup or address_of) for host in hosts_by_rank]


def _address_of_rank(host: str, me: Identity, entries: Sequence[str], lookup: Resolver) -> str:
    """The entry that the host's address is; or the address of the name that is listed; or the entry in its place."""
    if host == me.host and me.address in entries:
        return me.address
    address = lookup(host)
    is_known = address in entries or host in entries or len(me.job_hosts) != len(entries)
    if not is_known and host in me.job_hosts:
        entry = entries[me.job_hosts.index(host)]
        address = entry if is_address(entry) else lookup(entry) or address
    if host == me.host and not is_usable(address):
        address = me.address
    if address is None:
        raise GangrunError(f"no address for host {host!r} of {protocol.SLURM_STEP_NODELIST}: it does not resolve here")
    return address


def _find_node(
    here: str,
    job_hosts: Sequence[str],
    cluster_ips: Sequence[str],
    lookup: Resolver,
    local_addresses: Callable[[], list[str]],
) -> tuple[int, str, str]:
    """Index in the cluster's list, own address, and a warning if the place had to be inferred."""
    own_name = socket.gethostname()
    entries = [normal(entry) for entry in cluster_ips]
    # Addresses first, then names, cheapest first: a list of names costs a look-up an entry.
    by_name = lookup(own_name)
    if by_name in entries and is_usable(by_name):
        return entries.index(by_name or ""), by_name or "", ""
    own = [normal(address) for address in local_addresses()]
    for position, entry in enumerate(entries):
        if entry in own:
            return position, entry, ""
    named = _place_of_name(entries, here, own_name)
    if named is not None:
        return named, _own_address(entries[named], here, own, lookup), ""
    by_node_name = lookup(here)
    if by_node_name in entries:
        return entries.index(by_node_name or ""), by_node_name or "", ""
    resolved = [entry if is_address(entry) else lookup(entry) for entry in entries]
    for position, found in enumerate(resolved):
        if found is not None and (found in own or found == by_node_name):
            return position, found, ""
    if here in job_hosts and len(job_hosts) == len(entries):  # the order of `scontrol show hostnames`
        position = list(job_hosts).index(here)
        if not _is_anothers(entries[position], here, job_hosts, lookup):
            place = f"took entry {position} ({entries[position]}), the place of {here} in {protocol.SLURM_JOB_NODELIST}"
            address = _own_address(entries[position], here, own, lookup)
            return position, address, "no address of this host is in the cluster's list; " + place
    raise GangrunError(
        f"this node is not in --cluster-ips={','.join(cluster_ips)}; tried: host name {own_name} -> {by_name}, "
        f"interface addresses {own}, {protocol.SLURMD_NODENAME}={here} -> {by_node_name}"
    )


def _is_anothers(entry: str, here: str, job_hosts: Sequence[str], lookup: Resolver) -> bool:
    return any(host != here and entry in (host, lookup(host)) for host in job_hosts)


def _place_of_name(entries: Sequence[str], here: str, own_name: str) -> int | None:
    """Where the list has this node by name: exactly, or by a short name that only one entry has."""
    for name in (here, own_name):
        if name in entries:
            return entries.index(name)
    for name in (here, own_name):
        short = name.split(".")[0]
        alike = [p for p, entry in enumerate(entries) if not is_address(entry) and entry.split(".")[0] == short]
        # Two full names that differ are two hosts, whatever their short names.
        if len(alike) == 1 and not ("." in name and "." in entries[alike[0]]):
            return alike[0]
    return None


def _own_address(entry: str, here: str, own: Sequence[str], lookup: Resolver) -> str:
    """Our address where the list has our name: what the peers resolve, never loopback if there is another."""
    if is_address(entry):
        return entry
    for name in (entry, here):
        address = lookup(name)
        if address is not None and (address in own or is_usable(address)):
            return address
    return own[0] if own else entry


def is_usable(address: str | None) -> bool:
    return address is not None and not address.startswith(protocol.LOOPBACK_PREFIX) and address != "::1"


def address_of(name: str) -> str | None:
    """The address of a host name, IPv4 before IPv6, or None. An address stands for itself."""
    if is_address(name):
        return normal(name)
    plain = name.encode() if name.isascii() else name  # bytes: a text would load the IDNA codec, 2 ms
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            return normal(str(socket.getaddrinfo(plain, None, family, socket.SOCK_STREAM)[0][4][0]))
        except OSError:
            continue
    return None


def normal(entry: str) -> str:
    """One spelling for one address: `FD00:0::1` -> `fd00::1`. A name is only stripped."""
    text = entry.strip()
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            return socket.inet_ntop(family, socket.inet_pton(family, text))
        except OSError:
            continue
    return text


def is_address(text: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text.strip())
        except OSError:
            continue
        return True
    return False


def _number(environ: Environ, name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdigit():
        raise UsageError(f"{name}={text!r} is not a number: start this under srun")
    return int(text)
