"""A Ray cluster's dashboard over HTTP: its job API, its packages and its log files. Ray itself is not needed here.

https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from codegen.spec import SpecError
from executor import protocol
from gangrun.remote import UPLOAD_BYTES_PER_S, RemoteError, Unreachable

SCHEMES = ("http", "https")
ADDRESS_FORM = "the URL of a Ray dashboard such as http://127.0.0.1:8265"
CALL_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 10.0
PIECE_BYTES = 1 << 16
PIECES_HELD = 16  # of a log that comes faster than it is printed
FOLLOW_INTERVAL_S = 0.25  # how often Ray looks for more of a log that is followed
WHOLE_LOG = -1
LONGEST_WORDS = 300
GONE = "A file is not found"
HEADERS_VARIABLE = "RAY_JOB_HEADERS"  # as for `ray job submit`: JSON
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
LOOPBACK_NAME = "localhost"


class Answer(NamedTuple):
    """What the server said; `body` is all of it."""

    status: int
    body: bytes

    @property
    def words(self) -> str:
        """One line for a person: of a traceback, or of a page, the end."""
        lines = [line.strip() for line in self.body.decode("utf-8", "replace").splitlines()]
        said = [line for line in lines if len(line.strip(".")) > 1]
        return (said[-1] if said else "")[:LONGEST_WORDS]


class NotRay(RemoteError):
    """Something answered that is no Ray dashboard."""


class Refused(RemoteError):
    """Ray said no to what was asked for."""

    exit_code = protocol.EXIT_USAGE


def checked_address(text: str, where: str = "ray") -> str:
    """The address without what does not matter. Raises SpecError for what is no URL, or holds a password."""
    try:
        parts = urlsplit(text)
        is_whole = parts.scheme in SCHEMES and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_whole = False
    if not is_whole or not text.isprintable() or " " in text:
        raise SpecError(f"{where}={text!r}: use {ADDRESS_FORM}")
    if parts.username is not None or parts.query or parts.fragment:
        raise SpecError(f"{where}: use {ADDRESS_FORM}, without a name, a password or a query")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def is_private(address: str) -> bool:
    """Whether nobody on the way can read what is sent: it is encrypted, or never leaves this machine."""
    parts = urlsplit(address)
    return parts.scheme == "https" or parts.hostname == LOOPBACK_NAME or _is_loopback(parts.hostname or "")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Dashboard:
    """One Ray cluster's dashboard. Every call ends within its time. Raises Unreachable where nobody answers."""

    def __init__(self, address: str, environ: Mapping[str, str] = os.environ) -> None:
        self.address = checked_address(address)
        self._headers = _headers(environ)

    # --- the cluster

    def version(self) -> Mapping[str, Any]:
        """Ray's version and the name of its session, which every start of the cluster changes. Raises NotRay."""
        answer = self._json("/api/version")
        if not isinstance(answer, dict) or "ray_version" not in answer:
            raise self._not_ray("/api/version", "an answer without a version")
        return answer

    def nodes(self) -> list[Mapping[str, Any]]:
        """Those that are alive."""
        query = urlencode(
            [("limit", 10000), ("filter_keys", "state"), ("filter_predicates", "="), ("filter_values", "ALIVE")]
        )
        return self._listing(f"/api/v0/nodes?{query}")

    def placement_groups(self) -> list[Mapping[str, Any]]:
        return self._listing("/api/v0/placement_groups?limit=10000")

    def _listing(self, path: str) -> list[Mapping[str, Any]]:
        answer = self._json(path)
        try:
            return list(answer["data"]["result"]["result"])
        except (TypeError, KeyError):
            raise self._not_ray(path, "an answer of another form") from None

    # --- packages

    def has_package(self, name: str) -> bool:
        """Asking also keeps it from being removed for the next minutes."""
        return self._call("GET", f"/api/packages/gcs/{name}", expected=(200, 404)).status == 200

    def put_package(self, name: str, content: bytes) -> None:
        limit_s = CALL_TIMEOUT_S + len(content) / UPLOAD_BYTES_PER_S
        self._call("PUT", f"/api/packages/gcs/{name}", content, limit_s=limit_s)

    # --- jobs

    def jobs(self) -> list[Mapping[str, Any]]:
        """All that the cluster knows of, those of others too."""
        answer = self._json("/api/jobs/")
        if not isinstance(answer, list) or not all(isinstance(job, dict) for job in answer):
            raise self._not_ray("/api/jobs/", "an answer that is no list of jobs")
        return answer

    def job(self, run: str) -> Mapping[str, Any] | None:
        """None: the cluster does not know it."""
        answer = self._call("GET", f"/api/jobs/{quote(run, safe='')}", expected=(200, 404))
        if answer.status == 404 and b"does not exist" not in answer.body:
            raise self._not_ray("/api/jobs/", f"404 {answer.words}")
        if answer.status == 404:
            return None
        found = self._parsed("/api/jobs/", answer)
        if not isinstance(found, dict):
            raise self._not_ray("/api/jobs/", "an answer that is no job")
        return found

    def submit(self, request: Mapping[str, Any]) -> Answer:
        return self._exchange("POST", "/api/jobs/", json.dumps(request).encode(), CALL_TIMEOUT_S)

    def stop(self, run: str) -> None:
        """TERM to the driver, if it runs, and KILL after the time that its job allows."""
        self._call("POST", f"/api/jobs/{quote(run, safe='')}/stop", b"", expected=(200, 404))

    def delete(self, run: str) -> None:
        """Forget a job that has ended."""
        self._call("DELETE", f"/api/jobs/{quote(run, safe='')}", expected=(200, 404))

    # --- log files

    def logs(self, node: str, pattern: str) -> list[str]:
        """The names of a node's log files that match."""
        query = urlencode({"node_id": node, "glob": pattern})
        answer = self._json(f"/api/v0/logs?{query}")
        try:
            return [str(name) for names in answer["data"]["result"].values() for name in names]
        except (TypeError, KeyError, AttributeError):
            return []

    def log(self, node: str, name: str, lines: int = WHOLE_LOG, limit_s: float | None = None) -> bytes | None:
        """What a log file holds now, or its last lines; None: there is no such file."""
        answer = self._call("GET", _log_path("file", node, name, lines), expected=(200, 500), limit_s=limit_s)
        if answer.status == 200:
            return answer.body
        if GONE in answer.body.decode("utf-8", "replace"):
            return None
        raise RemoteError(f"{self.address}: cannot read {name}: {answer.words}")

    def open_log(self, node: str, name: str, lines: int = WHOLE_LOG, *, follow: bool) -> LogStream:
        """The bytes of a log file as they come. Raises RemoteError where there is none."""
        path = _log_path("stream" if follow else "file", node, name, lines)
        return LogStream(lambda: self._open(path), self.address)

    def _open(self, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connect(CALL_TIMEOUT_S)
        try:
            connection.request("GET", self._base + path, headers=self._headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    # --- one call

    @property
    def _base(self) -> str:
        return urlsplit(self.address).path

    def _json(self, path: str) -> Any:
        return self._parsed(path, self._call("GET", path))

    def _parsed(self, path: str, answer: Answer) -> Any:
        try:
            return json.loads(answer.body)
        except ValueError:
            raise self._not_ray(path, answer.words) from None

    def _not_ray(self, path: str, words: str) -> NotRay:
        return NotRay(f"{self.address}: is no Ray dashboard: {path.partition('?')[0]} gave {words or 'nothing'!r}")

    def _call(
        self, method: str, path: str, body: bytes | None = None, *, expected: Sequence[int] = (200,),
        limit_s: float | None = None,
    ) -> Answer:  # fmt: skip
        answer = self._exchange(method, path, body, limit_s or CALL_TIMEOUT_S)
        if answer.status in expected:
            return answer
        if answer.status in (401, 403):
            ways = f"{TOKEN_VARIABLE} or {HEADERS_VARIABLE} in gangrun's environment"
            raise RemoteError(f"{self.address}: it does not let us in ({answer.status} {answer.words}); use {ways}")
        if answer.status in (502, 503, 504):
            raise Unreachable(f"{self.address}: what stands before Ray answered {answer.status} {answer.words}")
        if answer.status >= 500:
            raise RemoteError(f"{self.address}: Ray failed: {answer.words}")
        raise self._not_ray(path, f"{answer.status} {answer.words}")

    def _exchange(self, method: str, path: str, body: bytes | None, limit_s: float) -> Answer:
        deadline = time.monotonic() + limit_s
        headers = {**self._headers, **({"Content-Type": "application/json"} if body is not None else {})}
        with self._trouble(limit_s):
            connection = self._connect(limit_s)
            with contextlib.closing(connection), _ended_after(connection, deadline - time.monotonic()):
                connection.request(method, self._base + path, body, headers)
                response = connection.getresponse()
                return Answer(response.status, response.read())

    def _connect(self, limit_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(parts.hostname), parts.port, timeout=min(CONNECT_TIMEOUT_S, limit_s))
        connection.connect()
        connection.sock.settimeout(limit_s)
        return connection

    @contextlib.contextmanager
    def _trouble(self, limit_s: float) -> Iterator[None]:
        try:
            yield
        except (socket.timeout, TimeoutError) as error:
            raise Unreachable(f"{self.address}: no answer within {limit_s:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.address}: cannot be asked: {_reason(error)}") from error


class LogStream:
    """A log that is being read, by a thread of its own, so that whoever waits for it may stop waiting."""

    def __init__(
        self, open_it: Callable[[], tuple[http.client.HTTPConnection, http.client.HTTPResponse]], address: str
    ) -> None:
        self._address = address
        self._pieces: queue.Queue[bytes | None] = queue.Queue(PIECES_HELD)
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._trouble = ""
        threading.Thread(target=self._read, args=(open_it,), daemon=True).start()

    def _read(self, open_it: Callable[[], tuple[http.client.HTTPConnection, http.client.HTTPResponse]]) -> None:
        try:
            self._connection, response = open_it()
            self._socket = self._connection.sock or getattr(getattr(response.fp, "raw", None), "_sock", None)
            if self._socket is not None:
                self._socket.settimeout(None)  # a program may be silent for hours
            if response.status != 200:
                self._trouble = Answer(response.status, response.read(PIECE_BYTES)).words
            while not self._is_closed and not self._trouble and (piece := response.read1(PIECE_BYTES)):
                self._put(piece)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._trouble = _reason(error)
        self._put(None)

    def _put(self, piece: bytes | None) -> None:
        while not self._is_closed:
            with contextlib.suppress(queue.Full):
                self._pieces.put(piece, timeout=1.0)
                return

    def read(self, wait_s: float) -> bytes | None:
        """The next bytes; b"": none yet; None: there will be no more. Raises Unreachable if it broke off."""
        try:
            piece = self._pieces.get(timeout=wait_s) if wait_s > 0 else self._pieces.get_nowait()
        except queue.Empty:
            return b""
        if piece is None:
            self._is_closed = True
            if self._trouble and GONE not in self._trouble:
                raise Unreachable(f"{self._address}: the log broke off: {self._trouble}")
        return piece

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._connection is not None:
            self._connection.close()


@contextlib.contextmanager
def _ended_after(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """A server that sends a byte now and then would keep a socket's own timeout from ever passing."""
    end, is_late = connection.sock, threading.Event()

    def stop() -> None:
        is_late.set()
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(seconds, 0.1), stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if is_late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()


def _log_path(kind: str, node: str, name: str, lines: int) -> str:
    asked: dict[str, Any] = {"node_id": node, "filename": name, "lines": lines}
    if kind == "stream":
        asked["interval"] = FOLLOW_INTERVAL_S
    return f"/api/v0/logs/{kind}?{urlencode(asked)}"


def _headers(environ: Mapping[str, str]) -> dict[str, str]:
    """What a site asks for. Raises SpecError, which never shows a value."""
    try:
        headers = json.loads(environ.get(HEADERS_VARIABLE) or "{}")
        own = {str(name): str(value) for name, value in headers.items()}
    except (ValueError, AttributeError):
        raise SpecError(f'{HEADERS_VARIABLE}: use JSON such as {{"Authorization": "Bearer ..."}}') from None
    token = environ.get(TOKEN_VARIABLE)
    bad = re.compile(r"[^\x20-\x7e]")
    if any(bad.search(text) for text in (*own, *own.values(), token or "")):
        raise SpecError(f"{HEADERS_VARIABLE} or {TOKEN_VARIABLE}: use printable ASCII")
    return {**({"Authorization": f"Bearer {token}"} if token else {}), **own}


def _reason(error: Exception) -> str:
    if isinstance(error, (http.client.IncompleteRead, http.client.RemoteDisconnected)):
        return "the connection was cut"
    if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
        return f"its answer is no HTTP ({type(error).__name__}): is that the dashboard's port?"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
