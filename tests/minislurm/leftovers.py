"""Taking a cluster away, whatever state it is in: after `down`, and after a run that was killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.minislurm.cgroups import Cgroups
from tests.minislurm.errors import BadInput, BedError
from tests.minislurm.layout import Layout
from tests.minislurm.proc import Pid, kill_all


def owner_now() -> list[int] | None:
    """This process, for the record: while it lives nobody else may take its cluster for a leftover."""
    me = Pid.of(os.getpid())
    return list(me) if me else None


def clean(layout: Layout, *, by_owner: bool = False) -> None:
    """Remove processes, mounts, cgroups and files of the cluster in this folder; fine if there is none.
    Unless `by_owner`, a cluster whose booting process still lives is an error. Only what provably is ours is
    killed: processes whose start time is the recorded one, or whose script is in this folder."""
    record = _read_record(layout)
    if record is None:
        return
    if not by_owner:
        _check_owner(record, layout)
    while ours := {pid for pid in (*_recorded(layout), *_running_our_scripts(layout)) if pid.alive()}:
        if not (left := kill_all(ours)):
            continue  # look again: one may just have started another
        raise BedError(f"{layout.root}: these processes do not die: {[one.pid for one in left]}")
    if folders := Cgroups.from_json(record["cgroups"]).remove():
        raise BedError(f"these cgroups cannot be removed: {', '.join(map(str, folders))}")
    _unmount_below(layout.root)
    _remove_files(layout)


def _remove_files(layout: Layout) -> None:
    """The record goes last: as long as it is there, an aborted removal can be taken up again."""
    for entry in layout.root.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != layout.record:
            entry.unlink()
    shutil.rmtree(layout.root)


def _read_record(layout: Layout) -> dict[str, Any] | None:
    """None if nothing of ours can be there."""
    try:
        record: dict[str, Any] = json.loads(layout.record.read_text())
        return record
    except (OSError, ValueError):
        files = set(os.listdir(layout.root)) if layout.root.is_dir() else set()
        if files - {layout.new_record.name}:
            raise BadInput(f"{layout.root} holds other files ({min(files)}): it is no cluster's folder") from None
        return None


def _check_owner(record: dict[str, Any], layout: Layout) -> None:
    owner = Pid(*record["owner"]) if record.get("owner") else None
    if owner and owner.pid != os.getpid() and owner.alive():
        raise BadInput(f"the cluster at {layout.root} belongs to process {owner.pid}, which still runs")


def _recorded(layout: Layout) -> list[Pid]:
    records = [*layout.runs.glob("*.holder"), *layout.runs.glob("*.init")]
    return [pid for record in records if (pid := Pid.read(record))]


def _running_our_scripts(layout: Layout) -> list[Pid]:
    """Processes that had no time to record themselves: `sh ROOT/run/NODE.sh`, perhaps behind an unshare."""
    ours = os.fsencode(f"{layout.runs}{os.sep}")
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] in (b"sh", b"setsid", b"unshare") and any(word.startswith(ours) for word in words[1:]):
            found.append(Pid.of(int(name)))
    return [pid for pid in found if pid]


def _unmount_below(root: Path) -> None:
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in reversed([p for p in points if p.startswith(f"{root}{os.sep}")]):
        subprocess.run(["umount", "-l", point], check=False)


def clean_all(folder: Path) -> None:
    """Remove every cluster directly below a folder, whoever booted it, and the folder."""
    for record in folder.glob("*/cluster.json"):
        clean(Layout(record.parent), by_owner=True)
    shutil.rmtree(folder, ignore_errors=True)
