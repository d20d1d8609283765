"""The live view as a page in a browser: a small server for whoever has its address, on this machine only.

1. It listens on 127.0.0.1, and answers nobody who calls it by another name: a page of another site, whose name an
   attacker made to point here, gets nothing (DNS rebinding).
2. The address has a token in it, new for each watch; without it nothing is answered but 403. It is compared in constant
   time, and sent nowhere: the page has no links, and asks for no referrer.
3. There are four things to be had, by name: no path of a request ever becomes a path of a file.
4. The page asks for the state again and again; the run's folder is read only then, and as seldom as for any other view
   (pace.py).
5. It answers `_MOST_AT_ONCE` requests at a time, and ends a connection that takes too long over its own: other users of
   this machine, who can connect but lack the token, can keep neither threads nor memory.

From elsewhere it is reached by way of ssh: `ssh -L 8000:127.0.0.1:PORT HOST`, then the same address with port 8000.
"""

import hmac
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from socketserver import TCPServer
from string import Template
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder
from shoal.report.live.follow import Follower
from shoal.report.live.pace import Pace

LOOPBACK = "127.0.0.1"
_NAMES = frozenset({LOOPBACK, "localhost"})
_READ_EVERY_S = 0.5
_CLIENT_S = 10.0
"""How long a browser may take to send its request, and as long again to take the answer."""
_MOST_AT_ONCE = 16
"""A browser opens 6 connections to one server at most; whoever comes beyond these is asked to come again."""
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class WatchServer(ThreadingHTTPServer):
    """Serves the page of one run. `serve_forever` until `shutdown`; then `server_close`."""

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, folder: RunFolder, *, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._source = _StateSource(folder)
        self._open: dict[Any, float] = {}
        """The connections that are being answered, and when each was opened."""
        self.contents: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html", self._page),
            "/watch.js": ("text/javascript", lambda: _resource("watch.js")),
            "/plotly.js": ("text/javascript", _plotly),
            "/state": ("application/json", self._source.read),
        }
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be had: {error.strerror}. Leave it out: a free one is taken."
            ) from None

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/?token={self.token}"

    @property
    def connections(self) -> int:
        """How many are being answered."""
        return len(self._open)

    def server_bind(self) -> None:
        """Bind, without the base class's look for this machine's name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, unless too many are being answered."""
        if self.connections < _MOST_AT_ONCE:
            self._open[request] = time.monotonic()
            super().process_request(request, client_address)
            return
        with suppress(OSError):  # it has gone away
            request.sendall(_BUSY)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End the connections that take too long: one that sends a byte now and then never times out by itself."""
        for request, opened_s in list(self._open.items()):
            if time.monotonic() - opened_s > 2 * _CLIENT_S:
                with suppress(OSError):  # it has just ended
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless it is that a browser has gone away in the middle of an answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _page(self) -> bytes:
        return Template(_resource("watch.html").decode()).substitute(token=self.token).encode()


class _StateSource:
    """The run's state as JSON, the same for all who ask within a moment."""

    def __init__(self, folder: RunFolder) -> None:
        self._follower = Follower(folder)
        self._lock = threading.Lock()
        self._pace = Pace(_READ_EVERY_S)
        self._json = b""

    def read(self) -> bytes:
        with self._lock:
            if self._pace.is_due:
                with self._pace.look():
                    self._json = json.dumps(self._follower.look().as_json(), allow_nan=False).encode()
            return self._json


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.0"  # a connection for each answer: none stays open when the watch ends
    server_version, sys_version = "shoal", ""
    timeout = _CLIENT_S  # shoal's names have units; this one is the base class's

    def do_GET(self) -> None:  # the base class's name
        """Answer a request."""
        parts = _address_in(self.path)
        if not _is_local(self.headers.get_all("Host") or []):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"This page is only for 127.0.0.1.\n")
        elif parts is None:
            self._answer(HTTPStatus.BAD_REQUEST, "text/plain", b"This is no address.\n")
        elif not hmac.compare_digest(_token_in(parts.query).encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"This address lacks its token.\n")
        elif parts.path not in self.server.contents:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is no such page.\n")
        else:
            self._give(*self.server.contents[parts.path])

    def _give(self, kind: str, content: Callable[[], bytes]) -> None:
        try:
            body = content()
        except Exception:
            self._answer(
                HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"This went wrong; see where it was started.\n"
            )
            raise
        self._answer(HTTPStatus.OK, kind, body)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Log nothing: the token would be in it."""


def _is_local(hosts: list[str]) -> bool:
    """Return whether the one name by which this server was called is this machine's own, with whatever port.

    The port may be another: that of an ssh tunnel.
    """
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].partition(":")
    return name.lower() in _NAMES and (not port or (port.isascii() and port.isdigit()))


def _address_in(path: str) -> SplitResult | None:
    try:
        return urlsplit(path)
    except ValueError:  # such as "http://[", whose host is none
        return None


def _token_in(query: str) -> str:
    try:
        values = parse_qs(query, max_num_fields=4).get("token", [])
    except ValueError:  # more fields than any of ours has
        return ""
    return values[0] if len(values) == 1 else ""


def _resource(name: str) -> bytes:
    return resources.files("shoal.report.live").joinpath(name).read_bytes()


def _plotly() -> bytes:
    from shoal.report.page.write import plotly_source

    return plotly_source()
