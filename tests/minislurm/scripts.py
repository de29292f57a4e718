"""The shell script that turns a process into a node. Pure functions: options in, text out.

One script per node, in three stages, each the `exec` of the one before:
  hold   on the machine itself: records the process, so that whoever cleans up after an aborted run finds it
  build  in new network, host name, mount and ipc namespaces: plugs the node in, builds its view of the files
  init   pid 1 of a new pid namespace: records itself, then only reaps; its death is the node's power-off
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from shlex import quote

from tests.minislurm.cgroups import NO_CGROUPS, PROCS, SLURMD_CGROUP, UNIFIED, Cgroups
from tests.minislurm.layout import Layout
from tests.minislurm.options import CONTROLLER, LAPTOP, SWITCH, Options
from tests.minislurm.preflight import SYSTEM_PATH, program

BRIDGE = "br0"
SLURM_COMMANDS = (
    "sacct sacctmgr salloc sattach sbatch sbcast scancel scontrol scrontab sdiag sinfo sprio squeue sreport srun "
    "sshare sstat strigger"
).split()
Lines = list[str]


def node_script(options: Options, layout: Layout, cgroups: Cgroups, node: str, switch_pid: int) -> str:
    """The whole script; run it with `sh`. `switch_pid` is a process in the switch's network."""
    again = f"sh {quote(str(layout.script(node)))}"
    options = replace(options, rootfs=None) if node == LAPTOP else options
    has_cgroup = cgroups.version and node not in (SWITCH, CONTROLLER, LAPTOP)
    cgroup_namespace = " --cgroup" if has_cgroup and cgroups.version == 2 else ""
    stages: dict[str, Lines] = {
        "hold": [
            f"exec >> {quote(str(layout.log(node)))} 2>&1",
            *_record_self(layout.holder(node)),
            *_publish(layout.holder(node)),
            *(_make_cgroups(options, cgroups, node) if has_cgroup else []),
            f"exec unshare --net --uts --mount --ipc{cgroup_namespace} --propagation private {again} build",
        ],
        "build": [
            f"hostname {quote(node)}",
            *(_switch_network() if node == SWITCH else _node_network(options, node, switch_pid)),
            *_files(options, layout, node),
            *_mount_sys(options, layout, cgroups if has_cgroup else NO_CGROUPS, node),
            *(_enter_root(options.rootfs) if options.rootfs else []),
            f"exec unshare --pid --fork --kill-child {again} init",
        ],
        "init": [
            *_record_self(layout.init(node)),  # /proc is the machine's up to here: it knows our outer pid
            "mount -t proc proc /proc",
            *_publish(layout.init(node)),
            "# with SIGCHLD ignored the kernel reaps every orphan",
            "exec env --ignore-signal=CHLD sleep infinity",
        ],
    }
    cases = [f"{name})\n  " + "\n  ".join(lines) + " ;;" for name, lines in stages.items()]
    return "\n".join(["set -eu", f"export PATH=$PATH:{SYSTEM_PATH}", "case ${1:-hold} in", *cases, "esac", ""])


def switch_batch(options: Options, nodes: list[str]) -> str:
    """Commands for `ip -batch` in the switch: plug the nodes' cables into the bridge."""
    return "".join(f"link set {options.port_of(node)} master {BRIDGE} up\n" for node in nodes)


def _new(record: Path) -> str:
    return quote(f"{record}.new")


def _record_self(record: Path) -> Lines:
    """Note "PID START" of this shell (builtins only, else it would be another process)."""
    return ["read -r line < /proc/self/stat", "set -- $line", f'echo "$1 ${{22}}" > {_new(record)}']


def _publish(record: Path) -> Lines:
    return [f"mv {_new(record)} {quote(str(record))}"]


def _ip(*commands: str) -> Lines:
    return ["ip -batch - <<'END'\n" + "\n".join(commands) + "\nEND"]


def _switch_network() -> Lines:
    return _ip("link set lo up", f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up")


def _node_network(options: Options, node: str, switch_pid: int) -> Lines:
    """A cable to the switch. The hardware address is fixed, so that peers find a node that was off and on."""
    address = options.address_of(node)
    last = int(address.rsplit(".", 1)[1])
    cable = f"type veth peer name {options.port_of(node)} netns {switch_pid}"
    return _ip(
        "link set lo up",
        f"link add eth0 address 02:00:00:00:00:{last:02x} {cable}",
        f"addr add {address}/24 dev eth0",
        "link set eth0 up",
    )


def _bind(source: str | Path, target: str, *, recursive: bool = False) -> str:
    return f"mount --{'rbind' if recursive else 'bind'} {quote(str(source))} {quote(target)}"


def _files(options: Options, layout: Layout, node: str) -> Lines:
    """The node's view: its own /dev/shm, /sys, hosts file and private folders; all else is the machine's."""
    top = options.rootfs or ""
    lines = _root_binds(options, layout) if top else []
    if layout.nodev:  # the gpus must work there
        lines += [] if top else [_bind(layout.root, str(layout.root), recursive=True)]
        lines += [f"mount -o remount,bind,dev {quote(f'{top}{layout.root}')}"]
    lines += [
        _bind(layout.hosts, f"{top}/etc/hosts"),
        f"mount -t tmpfs -o size={options.shm_mb}m,mode=1777 shm {quote(top + '/dev/shm')}",
        *(_hide(layout) if node == LAPTOP else bind_accounts(layout, top) if layout.passwd.exists() else []),
    ]
    for i, folder in enumerate(options.private_dirs):
        own = quote(str(layout.own(node) / f"private{i}"))
        seen = quote(top + folder)
        lines += [f"mkdir -p {own} {seen}", f"chmod --reference={seen} {own}", f"mount --bind {own} {seen}"]
    return lines


def bind_accounts(layout: Layout, top: str = "") -> Lines:
    """Let a node know our accounts; those of the machine stay as they are."""
    return [_bind(layout.passwd, f"{top}/etc/passwd"), _bind(layout.group, f"{top}/etc/group")]


def _hide(layout: Layout) -> Lines:
    """The laptop has no Slurm and does not see the homes: what it knows of the cluster it knows through ssh."""
    found = [path for name in SLURM_COMMANDS if (path := program(name))]
    empty = quote(f"{layout.own(LAPTOP)}/empty")  # a file that nobody may execute
    lines = [f"mkdir -p {quote(str(layout.own(LAPTOP)))}", f"touch {empty}", f"mkdir -p {quote(str(layout.homes))}"]
    lines += [f"mount --bind {empty} {quote(path)}" for path in found]
    return [*lines, f"mount -t tmpfs -o ro none {quote(str(layout.homes))}"]


def _root_binds(options: Options, layout: Layout) -> Lines:
    """The foreign root with the machine's devices, users and shared folders in it."""
    top = str(options.rootfs)
    shared = [*options.binds, str(layout.root)]
    lines = [_bind(top, top, recursive=True)]
    for folder in ["/proc", "/dev", *shared]:
        lines += [f"mkdir -p {quote(top + folder)}", _bind(folder, top + folder, recursive=True)]
    for name in ("hosts", "passwd", "group"):
        lines += [f"touch {quote(f'{top}/etc/{name}')}"]
    return lines + [_bind(f"/etc/{name}", f"{top}/etc/{name}") for name in ("passwd", "group")]


def _enter_root(rootfs: str) -> Lines:
    return [f"cd {quote(rootfs)}", "pivot_root . .", "umount -l .", "cd /"]


def _make_cgroups(options: Options, cgroups: Cgroups, node: str) -> Lines:
    """The node's own folder in every hierarchy, made on the machine."""
    if cgroups.version == 2:
        folder = cgroups.folder(UNIFIED, node)
        lines = _enable_controllers(str(folder.parent)) if options.constrain else []
        # the root of a cgroup namespace is the cgroup in which it was made
        return [*lines, f"mkdir -p {quote(str(folder))}", f"echo 0 > {quote(str(folder / PROCS))}"]
    lines = []
    for controller in cgroups.hierarchies:
        folder = cgroups.folder(controller, node)
        lines.append(f"mkdir -p {quote(str(folder))}")
        if controller == "cpuset":  # a new cpuset is empty and takes no process
            for name in ("cpuset.cpus", "cpuset.mems"):
                lines.append(f"cat {quote(f'{folder.parent}/{name}')} > {quote(f'{folder}/{name}')}")
    return lines


def _enable_controllers(folder: str) -> Lines:
    """cgroup v2: let the children of a folder use every controller it has."""
    control = quote(f"{folder}/cgroup.subtree_control")
    each = f"for c in $(cat {quote(f'{folder}/cgroup.controllers')})"
    return [f"{each}; do echo +$c > {control} || echo $c cannot be had; done"]


def _mount_sys(options: Options, layout: Layout, cgroups: Cgroups, node: str) -> Lines:
    """A /sys of the node's own network, with the node's own cgroup folders as the whole hierarchy. The machine's
    must go, not just be covered: Slurm reads the list of mounts."""
    sys, tree = f"{options.rootfs or ''}/sys", str(layout.own(node) / "cgroup")
    lines: Lines = []
    if cgroups.version == 1:
        lines += [f"mkdir -p {quote(tree)}", f"mount -t tmpfs cgroup {quote(tree)}"]
        for controller in cgroups.hierarchies:
            point = f"{tree}/{controller}"
            lines += [f"mkdir {quote(point)}", _bind(cgroups.folder(controller, node), point)]
    lines += [] if options.rootfs else ["umount -R -l /sys"]
    lines += [f"mount -t sysfs sysfs {quote(sys)}"]
    if cgroups.version == 1:
        lines += [_bind(tree, f"{sys}/fs/cgroup", recursive=True)]
    return lines + (_mount_unified(f"{sys}/fs/cgroup") if cgroups.version == 2 else [])


def _mount_unified(top: str) -> Lines:
    """cgroup v2 as Slurm knows it from systemd: pid 1 in init.scope, slurmd in system.slice."""
    service = quote(f"{top}/{SLURMD_CGROUP}")
    return [
        f"mount -t cgroup2 cgroup2 {quote(top)}",
        f"mkdir -p {quote(f'{top}/init.scope')} {service}",
        f"echo 0 > {quote(f'{top}/init.scope/{PROCS}')}",
        *_enable_controllers(top),
        *_enable_controllers(f"{top}/{os.path.dirname(SLURMD_CGROUP)}"),
    ]
