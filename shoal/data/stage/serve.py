"""A node's server: gives other nodes what it has of each file, while the rest of it is still arriving."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from shoal.data.stage.arrivals import Arrivals, Offer
from shoal.data.stage.frames import (
    ANSWER,
    DATA,
    END,
    REFUSED,
    RESTART,
    SILENT_S,
    WAITING,
    WAITING_S,
    greet,
    receive_request,
    send_frame,
    send_header,
)

_ACCEPT_S = 0.2
_MOST_CONNECTIONS = 256
"""More at once are turned away: each has a thread, and nobody has that many children."""
_ASKED_EVERY_S = 3600.0
"""How long an asker may say nothing between two files: it may be fetching other ones elsewhere."""


class Server:
    """Serves the files of `arrivals` on `host`, to those who know `token`, until `close`."""

    def __init__(self, arrivals: Arrivals, *, host: str, token: bytes, who_has: Callable[[], Any]) -> None:
        self._arrivals, self._token, self._who_has = arrivals, token, who_has
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(_ACCEPT_S)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.sent_bytes = 0
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, bool] = {}  # whether a file is being sent
        self._is_closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, name="stage accept", daemon=True)]
        self._threads[0].start()

    def linger(self, seconds: float) -> None:
        """Return when no file is being sent, or after `seconds`."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and self._is_busy():
            time.sleep(0.02)

    def close(self) -> None:
        """Stop serving, at once."""
        self._is_closed.set()
        self._listener.close()
        with self._lock:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(SILENT_S + WAITING_S)

    def _is_busy(self) -> bool:
        with self._lock:
            return any(self._connections.values())

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if len(self._connections) >= _MOST_CONNECTIONS:
                connection.close()
                continue
            thread = threading.Thread(target=self._talk, args=(connection,), name="stage send", daemon=True)
            with self._lock:
                self._connections[connection] = False
                self._threads = [other for other in self._threads if other.is_alive()] + [thread]
            thread.start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(SILENT_S)  # until it has shown the token
            nonce = greet(connection)
            while (request := receive_request(connection, nonce=nonce, token=self._token)) is not None:
                self._answer(connection, request)
                connection.settimeout(_ASKED_EVERY_S)
        with self._lock:
            self._connections.pop(connection, None)

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        connection.settimeout(2 * SILENT_S)
        if "who" in request:
            send_frame(connection, ANSWER, json.dumps(self._who_has()).encode())
            return
        self._connections[connection] = True
        try:
            self._send_file(connection, str(request.get("get")))
        finally:
            self._connections[connection] = False

    def _send_file(self, connection: socket.socket, name: str) -> None:
        """Send the file as it comes, from the beginning each time that it begins again."""
        turn: int | None = None
        sent_bytes, file = 0, None
        with contextlib.ExitStack() as opened:
            while not self._is_closed.is_set():
                offer = self._arrivals.offer(name, turn=turn, sent_bytes=sent_bytes, timeout_s=WAITING_S)
                if offer is None:
                    send_frame(connection, WAITING)
                    continue
                if offer.is_refused:
                    send_frame(connection, REFUSED)
                    return
                if offer.turn != turn or file is None:
                    opened.close()
                    if sent_bytes > 0:
                        send_frame(connection, RESTART)
                    turn, sent_bytes, file = offer.turn, 0, _opened(offer, opened)
                    if file is None:  # it has just begun again, or got its name: ask anew
                        turn = None
                        continue
                self._send_bytes(connection, file, sent_bytes, offer.ready_bytes)
                sent_bytes = offer.ready_bytes
                if offer.is_whole:
                    send_frame(connection, END)
                    return

    def _send_bytes(self, connection: socket.socket, file: BinaryIO, begin: int, end: int) -> None:
        if end > begin:
            send_header(connection, DATA, end - begin)
            connection.sendfile(file, begin, end - begin)  # from the page cache to the network, without a copy here
            self.sent_bytes += end - begin


def _opened(offer: Offer, opened: contextlib.ExitStack) -> BinaryIO | None:
    try:
        return opened.enter_context(offer.path.open("rb"))
    except FileNotFoundError:
        return None
