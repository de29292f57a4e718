"""When a task of a group counts as ready, what is said until then, and that no look keeps the driver waiting."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executor.process import reap
from executor.protocol import UsageError
from executor.ready import LINE_BYTES, LOG_BYTES, Probe, last_lines
from tests.bench import eventually

HOST = "127.0.0.1"
LONGEST_LOOK_S = 1.0


def probe(ready: dict[str, Any], output: Path = Path("/nonexistent"), **more: Any) -> Probe:
    return Probe(ready, "server", more.pop("addresses", [HOST]), str(output), **more)


@contextmanager
def listening(backlog: int = 5) -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen(backlog)
        yield server


@contextmanager
def serving(status: int, location: str = "") -> Iterator[tuple[int, list[str]]]:
    """A real HTTP server; its port, and the requests it gets."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers['Host']}")
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port, asked
        server.shutdown()
        thread.join()


def free_port() -> int:
    with listening() as server:
        return int(server.getsockname()[1])


def looks(wanted: Probe, timeout_s: float = 10) -> bool:
    """Look until it is ready, and see to it that no look takes long."""

    def once() -> bool:
        begun = time.monotonic()
        answer = wanted.look()
        assert time.monotonic() - begun < LONGEST_LOOK_S
        return answer

    return eventually(once, timeout_s, wanted.last_problem)


# --- port


def test_a_port_is_ready_once_somebody_listens() -> None:
    port = free_port()
    wanted = probe({"port": port})
    assert not wanted.look() and wanted.last_problem == "connection refused"
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((HOST, port))
        server.listen()
        assert looks(wanted) and wanted.last_problem == ""
    assert wanted.describe() == f"port {port} of server"


def test_every_node_of_the_task_has_to_listen_and_the_missing_one_is_named() -> None:
    with listening() as first:
        port = first.getsockname()[1]
        wanted = probe({"port": str(port)}, addresses=[HOST, "127.0.0.2"])
        assert not wanted.look() and wanted.last_problem == "127.0.0.2: connection refused"
        with socket.create_server(("127.0.0.2", port)):
            assert looks(wanted)


def test_a_node_that_does_not_answer_costs_no_look_its_time() -> None:
    with listening(backlog=0) as full:
        port = full.getsockname()[1]
        crowd = [socket.socket() for _ in range(4)]
        for client in crowd:
            client.setblocking(False)
            client.connect_ex((HOST, port))  # what does not fit into the backlog is dropped, as a dead node would
        wanted = probe({"port": port}, addresses=[HOST] * 8)
        begun = time.monotonic()
        assert not wanted.look() and time.monotonic() - begun < LONGEST_LOOK_S / 2
        assert wanted.last_problem == f"{HOST}: no connection yet"
        wanted.close()
        for client in crowd:
            client.close()


def test_ipv6_is_an_address_like_any_other() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        assert looks(probe({"port": server.getsockname()[1]}, addresses=["::1"]))


# --- http


@pytest.mark.parametrize("form", [":%d/health?a=b", "%d/health?a=b", "http://localhost:%d/health?a=b"])
def test_http_is_ready_with_an_answer_of_2xx(form: str) -> None:
    with serving(200) as (port, asked):
        assert looks(probe({"http": form % port}))
    assert asked == [f"/health?a=b {HOST}:{port}"]


@pytest.mark.parametrize("status, is_ready", [(204, True), (302, True), (404, False), (503, False)])
def test_http_tells_the_status_that_kept_it_waiting(status: int, is_ready: bool) -> None:
    with serving(status) as (port, asked):
        wanted = probe({"http": f":{port}"})
        said = eventually(lambda: "ready" if wanted.look() else wanted.last_problem.partition("no answer yet")[0])
        assert said == ("ready" if is_ready else f"HTTP {status}")
    assert asked[0].startswith("/ ")


@pytest.mark.parametrize(
    "answer, problem",
    [(b"", "no answer at all"), (b"SSH-2.0-OpenSSH_9\r\n", "the answer is not HTTP"), (b"HTTP/1.1", "no answer yet")],
)
def test_a_server_that_speaks_something_else_is_not_ready(answer: bytes, problem: str) -> None:
    with listening() as server:
        wanted = probe({"http": ":%d/" % server.getsockname()[1]})
        wanted.look()
        peer, _ = server.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(answer)
            if problem != "no answer yet":
                peer.shutdown(socket.SHUT_WR)
            eventually(lambda: wanted.look() or wanted.last_problem == problem)
        wanted.close()


def test_a_server_that_sends_a_letter_at_a_time_keeps_nobody_waiting() -> None:
    with listening() as server:
        wanted = probe({"http": ":%d/" % server.getsockname()[1]})
        wanted.look()
        peer, _ = server.accept()

        def drip() -> None:
            for letter in b"HTTP/1.1 200 OK\r\n":
                peer.send(bytes([letter]))
                time.sleep(0.03)

        thread = threading.Thread(target=drip)
        thread.start()
        assert looks(wanted)
        thread.join()
        peer.close()


# --- log


def test_words_are_found_when_they_are_printed(tmp_path: Path) -> None:
    log = tmp_path / "server.out"
    wanted = probe({"log": r"listening on :\d+"}, log)
    assert not wanted.look() and wanted.last_problem == "nothing printed yet"
    log.write_bytes(b"loading\nliste")
    assert not wanted.look() and wanted.last_problem == "not printed yet"
    with log.open("ab") as file:
        file.write(b"ning on :8000\n")
    assert wanted.look()
    assert wanted.describe() == r"'listening on :\\d+' in the log of server"


def test_a_pattern_with_anchors_sees_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "server.out"
    wanted = probe({"log": "^ready$"}, log)
    log.write_bytes(b"not ready\nready")
    assert not wanted.look()
    log.write_bytes(b"not ready\nready to fail\n")
    assert not wanted.look()
    log.write_bytes(b"not ready\nready to fail\nready\n")
    assert wanted.look()


def test_a_prompt_without_a_newline_counts_when_it_stands(tmp_path: Path) -> None:
    log = tmp_path / "server.out"
    log.write_bytes(b"\xff\xfe login: ")
    wanted = probe({"log": "login: $"}, log)
    assert not wanted.look() and wanted.look()


def test_what_an_earlier_start_printed_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "server.out"
    log.write_bytes(b"listening\n")
    wanted = probe({"log": "listening"}, log, log_from=log.stat().st_size)
    assert not wanted.look() and not wanted.look()
    with log.open("ab") as file:
        file.write(b"listening\n")
    assert wanted.look()


def test_a_log_that_begins_anew_is_read_from_its_begin(tmp_path: Path) -> None:
    log = tmp_path / "server.out"
    log.write_bytes(b"a long line of words\n" * 10)
    wanted = probe({"log": "listening"}, log)
    assert not wanted.look()
    log.write_bytes(b"listening\n")
    assert wanted.look()


@pytest.mark.parametrize("line", [b"x" * 200 + b"\n", b"x" * 200], ids=["lines", "one line without an end"])
def test_a_large_log_is_read_in_pieces_and_in_constant_memory(tmp_path: Path, line: bytes) -> None:
    log = tmp_path / "server.out"
    with log.open("wb") as file:
        for _ in range(32):
            file.write(line * (LOG_BYTES // len(line)))
        file.write(b"\nlistening\n")
    wanted = probe({"log": "listening"}, log)
    tracemalloc.start()
    assert not wanted.look()
    assert looks(wanted)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * LOG_BYTES + LINE_BYTES


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    wanted = probe({"log": "listening"}, tmp_path)
    assert not wanted.look() and wanted.last_problem == f"cannot read {tmp_path}: Is a directory"


# --- command


def test_a_command_is_run_until_it_succeeds(tmp_path: Path) -> None:
    wanted = probe(
        {"command": f"echo run >>{tmp_path}/runs; test -e {tmp_path}/$NAME"}, environ={**os.environ, "NAME": "up"}
    )
    eventually(lambda: wanted.look() or wanted.last_problem == "exit code 1")
    (tmp_path / "up").touch()
    assert looks(wanted)
    assert (tmp_path / "runs").read_text().count("run") >= 2


def test_a_commands_last_line_says_what_is_wrong() -> None:
    wanted = probe({"command": "echo one; echo 'no route to host' >&2; echo; exit 7"})
    eventually(lambda: wanted.look() or wanted.last_problem == "exit code 7: no route to host")
    wanted.close()


def test_a_command_runs_beside_the_driver_and_ends_with_its_probe(tmp_path: Path) -> None:
    wanted = probe({"command": f"sleep 4328 & echo $! >{tmp_path}/pid; wait"})
    eventually(lambda: wanted.look() or (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    wanted.close()
    eventually(lambda: not os.path.exists(f"/proc/{pid}") or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_whoever_reaps_a_command_its_code_is_known() -> None:
    """The driver's loop takes the end of every child."""
    reaped: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda *_: reaped.extend(pid for pid, _ in reap()))
    try:
        wanted = probe({"command": "sleep 0.3; exit 4"})
        eventually(lambda: wanted.look() or wanted.last_problem == "exit code 4")
        assert looks(probe({"command": "sleep 0.3"}))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_command_that_floods_keeps_nobody_waiting() -> None:
    wanted = probe({"command": "timeout 1 yes; exit 3"})
    eventually(lambda: not looks_once(wanted) and wanted.last_problem == "exit code 3: y")
    wanted.close()


def looks_once(wanted: Probe) -> bool:
    begun = time.monotonic()
    answer = wanted.look()
    assert time.monotonic() - begun < LONGEST_LOOK_S
    return answer


# --- time, and what is told


def test_the_time_counts_from_the_tasks_start() -> None:
    assert probe({"port": 1, "timeout_s": 5}, started=time.monotonic() - 6).is_late
    assert not probe({"port": 1, "timeout_s": 5}, started=time.monotonic() - 4).is_late
    assert not probe({"port": 1}).is_late


def test_a_failure_names_the_task_the_probe_and_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "server.out"
    log.write_text("".join("line %d\n" % number for number in range(10000)))
    port = free_port()
    wanted = probe({"port": port, "timeout_s": 0.5}, log, started=time.monotonic() - 1)
    assert not wanted.look() and wanted.is_late
    assert wanted.failure() == f"server was not ready after 0.5 s: port {port} of server: connection refused"
    assert wanted.last_lines(2) == ["line 9998", "line 9999"]
    assert last_lines(str(tmp_path / "nothing"), 3) == []


@pytest.mark.parametrize(
    "ready, complaint",
    [
        ({}, "give one of port, http, log, command, not none"),
        ({"port": 1, "log": "x"}, "not port, log"),
        ({"port": 0}, "port=0 is not a port: use 1 to 65535"),
        ({"port": "http"}, "port='http' is not a port"),
        ({"http": "/health"}, "http='/health' is not of the form :PORT/PATH"),
        ({"http": ":70000/"}, "is not a port"),
        ({"log": "("}, "log='(' is not a regular expression"),
    ],
)
def test_what_cannot_be_probed_is_one_clear_line(ready: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        probe(ready)
    assert str(caught.value).startswith("ready of server: ") and complaint in str(caught.value)
