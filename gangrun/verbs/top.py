"""`gangrun top`: a host's jobs, or one job's ranks, again and again on a terminal; once elsewhere."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Union

import click

from codegen.spec import SpecError
from executor import protocol
from gangrun import show
from gangrun import top as watching
from gangrun.cluster import is_ray, open_cluster, usual_host
from gangrun.records import Records, Run
from gangrun.remote import LoginNeeded, RemoteError
from gangrun.show import say
from gangrun.top import Rank, Voice, Watcher
from gangrun.verbs.common import jobs_named

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

PLAIN_ROWS = 20  # without a terminal, whose height says how many there is room for
FRAME_ROWS = 5  # blank lines, the heads of tables, what is not shown, the foot
LEAST_ROWS = 3
TELL_WAIT_S = 2.0
REDRAW_S = 1.0
OF_QUEUE = ("RUN", "JOB", "STATE", "NODES", "AGE", "WHAT")
OF_VOICE = ("SILENT", "RATE", "LAST LINE")
OF_RANK = ("RANK", "NODE", "PHASE", "STATE")
AT_WORK = (protocol.SETTING_UP, protocol.RUNNING)
SHARES = {"WHAT": 1, "LAST LINE": 2}  # of the width that the other columns leave
LEAST_WIDTHS = {"WHAT": len("9/9 ranks done"), "LAST LINE": 12}
NARROW, LEFT_OUT = 100, ("JOB", "NODES", "AGE")  # on a narrow terminal, beside a last line
NARROWEST, LEFT_OUT_FIRST = 60, ("JOB", "NODES", "AGE", "PHASE", "RATE")  # or nobody knew whose line it is
COLOURS = {**show.COLOURS, protocol.FAILED: "red", **dict.fromkeys(watching.BAD_STATES, "bold red")}


class Grid(NamedTuple):
    """A table; `alarms` are the rows whose silence is a sign."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    alarms: Sequence[bool] = ()


class Sign(NamedTuple):
    """Words that want to be seen."""

    words: str


View = Sequence[Union[str, Sign, Grid]]  # what is on the screen, from top to bottom


def top(word: str | None, host: str | None, *, once: bool, rows: int | None, as_json: bool) -> int:
    watcher = _watcher(word, host)
    if watcher is None:
        return _nothing_anywhere(as_json)
    is_live = not (once or as_json) and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    try:
        if is_live:
            _live(watcher, rows)
            return 0
        _ask_once(watcher)
    except KeyboardInterrupt:
        return 0
    if as_json:
        every = watcher.run_id is not None
        show.print_json(watching.to_json(watcher.look, watcher.cluster.name, watcher.runs, every))
        return 0
    _print(_view(watcher, rows or PLAIN_ROWS))
    return 0


def _watcher(word: str | None, host: str | None) -> Watcher | None:
    """None where no host was named, none is usual, and no run is in flight on any."""
    if word is None:
        records = Records.of_user()
        hosts = sorted({run.host for run in records.in_flight()})
        host = host or (hosts[0] if len(hosts) == 1 else usual_host())
        if host is None and hosts:
            raise SpecError(f"host: runs are in flight on {' and '.join(hosts)}; use --host with one of them")
        return Watcher(open_cluster(host, records=records), None) if host else None
    jobs = jobs_named([word], host)
    if len(jobs) != 1:
        raise SpecError(f"job={word!r}: there are {len(jobs)}; name one, or leave it out")
    if is_ray(jobs[0].cluster.name):
        why = "whose dashboard does not tell when a rank spoke last"
        raise SpecError(f"job={word!r}: is on Ray, {why}; use `gangrun logs {jobs[0].run_id} -f`")
    return Watcher(jobs[0].cluster, jobs[0].run_id)


def _nothing_anywhere(as_json: bool) -> int:
    if as_json:
        show.print_json({"host": None, "now": None, "runs": []})
    else:
        click.echo("no runs in flight; `gangrun queue -a` shows those that have ended")
    return 0


def _ask_once(watcher: Watcher) -> None:
    while not watcher.ask():
        wait_s = _until_allowed_s(watcher)
        if wait_s > TELL_WAIT_S:
            say(f"{watcher.cluster.name} was asked a moment ago; the next look is in {show.age(wait_s)}")
        time.sleep(wait_s)


def _until_allowed_s(watcher: Watcher) -> float:
    cluster = watcher.cluster
    since_s = abs(time.time() - cluster.records.poll_of(cluster.name).polled)
    return min(max(0.1, cluster.least_interval_s - since_s), cluster.least_interval_s)


# --- what is shown


def _view(watcher: Watcher, rows: int) -> View:
    return _jobs_view(watcher, rows) if watcher.run_id is None else _job_view(watcher, rows)


def _jobs_view(watcher: Watcher, rows: int) -> View:
    runs = watcher.runs
    if not runs:
        return [f"no runs in flight on {watcher.cluster.name}; `gangrun queue -a` shows those that have ended"]
    found = [row for run in runs for row in _queue_rows(watcher, run)]
    cells = [row for row, _ in found[:rows]]
    hidden = [f"and {len(found) - rows} more"] if len(found) > rows else []
    return [Grid((*OF_QUEUE, *OF_VOICE), cells, [is_alarm for _, is_alarm in found[:rows]]), *hidden]


def _queue_rows(watcher: Watcher, run: Run) -> Iterator[tuple[list[str], bool]]:
    """The rows of `queue`, with what is said."""
    now = watcher.look.now if watcher.look else time.time()
    names: list[str | None] = [None, *(str(task["name"]) for task in run.tasks)]
    for name, cells in zip(names, show.queue_rows(run, now)):
        by_column = dict(zip(show.COLUMNS, cells))
        voice = watching.voice_of(watcher.look, watcher.before, run, name) if watcher.look else Voice()
        is_alarm = by_column["STATE"] in AT_WORK and (voice.silent_s or 0.0) >= watching.SILENT_S
        by_column["WHAT"] = watching.plain(by_column["WHAT"])
        yield [*(by_column[column] for column in OF_QUEUE), *_voice_cells(voice)], is_alarm


def _job_view(watcher: Watcher, rows: int) -> View:
    """The run and its tasks as in `queue`, the sign of a hang, and as many ranks as there is room for."""
    runs = watcher.runs
    if not runs:
        return [f"{watcher.run_id} is not recorded here any more; `gangrun queue --adopt` may find it"]
    run = runs[0]
    head = [cells[: len(OF_QUEUE)] for cells, _ in _queue_rows(watcher, run)]
    most = max(LEAST_ROWS, rows // 2)
    ranks = watching.ranks(watcher.look, watcher.before, run) if watcher.look else []
    above: list[str | Sign | Grid] = [Grid(OF_QUEUE, head[:most])]
    above += [f"and {len(head) - most} more task{'s' * (len(head) - most > 1)}"] if len(head) > most else []
    words = watching.silence(ranks)
    above += ["", Sign(words)] if words else [""]
    room = max(LEAST_ROWS, rows - min(len(head), most) - len(above) + 2)
    below = [_rank_grid(ranks[:room], bool(run.tasks))] if ranks else []
    return [*above, *below, *([watching.rest(ranks[room:])] if len(ranks) > room else [])]


def _rank_grid(ranks: Sequence[Rank], of_group: bool) -> Grid:
    columns = (*(["TASK"] if of_group else []), *OF_RANK, *OF_VOICE)
    alarms = [rank.is_at_work and (rank.voice.silent_s or 0.0) >= watching.SILENT_S for rank in ranks]
    return Grid(columns, [([rank.task] if of_group else []) + _rank_cells(rank) for rank in ranks], alarms)


def _rank_cells(rank: Rank) -> list[str]:
    code = f" ({rank.exit_code})" if rank.exit_code else ""
    return [str(rank.rank), rank.node, rank.phase, rank.state + code, *_voice_cells(rank.voice)]


def _voice_cells(voice: Voice) -> list[str]:
    silent = "" if voice.silent_s is None else show.age(voice.silent_s)
    return [silent, "" if voice.rate is None else _rate(voice.rate), voice.line]


def _rate(rate: float) -> str:
    """`0`, `12 B/s`, `3.4 kB/s`."""
    for size, unit in ((show.GB, "GB"), (show.MB, "MB"), (1e3, "kB")):
        if rate >= size:
            return f"{rate / size:.1f} {unit}/s"
    return f"{rate:.0f} B/s" if rate >= 0.5 or rate == 0 else f"{rate:.1g} B/s"


def _print(view: View) -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(_renderable(view, console.width))
        return
    for part in view:
        for line in _plain_lines(part):
            click.echo(line)


def _plain_lines(part: str | Sign | Grid) -> list[str]:
    if isinstance(part, Grid):
        return show.plain_table(part.columns, part.rows)
    return [part.words if isinstance(part, Sign) else part]


def _renderable(view: View, width: int, foot: str = "") -> Group:
    from rich.console import Group
    from rich.text import Text

    parts = [_rich(part, width) for part in view]
    return Group(*parts, *([Text(foot, style="dim", no_wrap=True, overflow="ellipsis")] if foot else []))


def _rich(part: str | Sign | Grid, width: int) -> Table | Text:
    from rich.text import Text

    if isinstance(part, Grid):
        is_full = OF_VOICE[-1] in part.columns
        return _rich_grid(part, LEFT_OUT_FIRST if width < NARROWEST else LEFT_OUT if width < NARROW and is_full else ())
    words, style = (part.words, "yellow") if isinstance(part, Sign) else (part, "")
    return Text(words, style=style, no_wrap=True, overflow="ellipsis")


def _rich_grid(grid: Grid, left_out: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, expand=True)
    shown = [(index, column) for index, column in enumerate(grid.columns) if column not in left_out]
    for _, column in shown:
        least = LEAST_WIDTHS.get(column)
        table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=SHARES.get(column), width=least)
    for row, is_alarm in zip(grid.rows, grid.alarms or [False] * len(grid.rows)):
        table.add_row(*(_rich_cell(row[index], column, is_alarm) for index, column in shown))
    return table


def _rich_cell(cell: str, column: str, is_alarm: bool) -> Text:
    from rich.text import Text

    style = COLOURS.get(cell.partition(" ")[0], "") if column == "STATE" else ""
    return Text(cell, style="yellow" if is_alarm and column == OF_VOICE[0] else style)


# --- live


def _live(watcher: Watcher, rows: int | None) -> None:
    """Until q, Ctrl-C, or the end of the one job. The last view stays on the terminal."""
    watcher.ask()  # before the screen is taken: a password may be asked for
    screen = _Screen(watcher, rows)
    try:
        screen.run()
    except KeyboardInterrupt:
        pass
    _print(_view(watcher, screen.room))


class _Screen:
    """The terminal while it is ours."""

    def __init__(self, watcher: Watcher, rows: int | None) -> None:
        from rich.console import Console

        self._watcher, self._rows, self._console = watcher, rows, Console()
        self._trouble = ""
        self._asked = time.monotonic()

    @property
    def room(self) -> int:
        return self._rows or max(LEAST_ROWS, self._console.size.height - FRAME_ROWS)

    def run(self) -> None:
        from rich.live import Live

        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        with _taken_down_on_term(), _given_back_on_ctrl_z(self._live), self._live:
            pause_s = self._watcher.pause_s(0.0)
            while not self._is_over() and not self._wait(pause_s):
                pause_s = self._ask()

    def _is_over(self) -> bool:
        runs = self._watcher.runs
        return self._watcher.run_id is not None and (not runs or runs[0].is_final)

    def _ask(self) -> float:
        """Seconds until the next look. Trouble is shown, and the last look stays."""
        self._draw("asking ...")
        begun = time.monotonic()
        try:
            if not self._watcher.ask():
                return _until_allowed_s(self._watcher)
            self._trouble, self._asked = "", time.monotonic()
        except LoginNeeded as error:  # nothing is tried until a person has logged in
            self._trouble = watching.plain(str(error))
            self._draw("waiting for the login", "Ctrl-C ends")
            self._watcher.cluster.host.wait_for_login()
        except RemoteError as error:
            self._trouble = watching.plain(str(error))
        return self._watcher.pause_s(time.monotonic() - begun)

    def _wait(self, pause_s: float) -> bool:
        """Until the next look; True if a person wants to leave."""
        until = time.monotonic() + pause_s
        with _single_keys() as keys:
            while (left_s := until - time.monotonic()) > 0:
                self._draw(f"next look in {show.age(left_s)}")
                if keys.pressed(min(REDRAW_S, left_s)) in ("q", "Q"):
                    return True
        return False

    def _draw(self, then: str, ends: str = "q or Ctrl-C ends") -> None:
        seen = f"{self._watcher.cluster.name} {show.age(time.monotonic() - self._asked)} ago; {then}; {ends}"
        trouble: View = ["", Sign(self._trouble + ". The jobs are not affected")] if self._trouble else []
        view = [*_view(self._watcher, self.room - len(trouble)), *trouble]
        self._live.update(_renderable(view, self._console.width, seen), refresh=True)


class _Keys:
    """What is typed, key by key."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def pressed(self, wait_s: float) -> str:
        if self._fd is None or not select.select([self._fd], [], [], wait_s)[0]:
            time.sleep(wait_s if self._fd is None else 0)
            return ""
        data = os.read(self._fd, 1)
        if not data:  # its other end is gone
            self._fd = None
        return data.decode("latin-1")


@contextlib.contextmanager
def _single_keys() -> Iterator[_Keys]:
    """Keys without Enter while we wait; during a call the terminal is as ever, as ssh may ask something."""
    if not sys.stdin.isatty():
        yield _Keys(None)
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd, termios.TCSADRAIN)  # what was typed during the call still counts
    try:
        yield _Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _given_back_on_ctrl_z(live: Live) -> Iterator[None]:
    """The shell that takes over finds its own screen and a cursor; with `fg` ours comes back."""

    def stop(number: int, frame: object) -> None:
        live.stop()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # here we stay until SIGCONT
        signal.signal(number, stop)
        live.start()

    before = signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


@contextlib.contextmanager
def _taken_down_on_term() -> Iterator[None]:
    """TERM gives the terminal back, too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(protocol.exit_code_of_signal(number))

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
