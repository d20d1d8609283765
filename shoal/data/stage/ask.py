"""Getting a file from another node."""

import contextlib
import socket
from typing import Any

from shoal.data.stage.arrivals import PIECE_BYTES, Incoming
from shoal.data.stage.frames import (
    DATA,
    END,
    REFUSED,
    RESTART,
    SILENT_S,
    WAITING,
    be_greeted,
    receive_answer,
    receive_header,
    receive_into,
    send_request,
)

_CONNECT_S = 2.0
_STALLED_FRAMES = 60
"""So many times in a row, a second each, a node may say that it is still waiting; then we ask another."""

_MOST_RESTARTS = 10


class Refused(Exception):
    """The node will not have this file, or has waited too long for it."""


class Neighbour:
    """A connection to the server of another node."""

    def __init__(self, address: tuple[str, int], token: bytes) -> None:
        self._token = token
        self._connection = socket.create_connection(address, timeout=_CONNECT_S)
        self._connection.settimeout(SILENT_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._nonce = be_greeted(self._connection)
        except OSError:
            self._connection.close()
            raise
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        self.received_bytes = 0

    def fetch(self, name: str, incoming: Incoming) -> None:
        """Put file `name` into `incoming`. Raises OSError if the node is gone or silent, Refused if it has it not."""
        self._ask({"get": name})
        waited = restarts = 0
        while True:
            kind, num_bytes = receive_header(self._connection)
            waited = waited + 1 if kind == WAITING else 0
            restarts += kind == RESTART
            if kind == DATA:
                self._take(num_bytes, incoming)
            elif kind == END:
                return
            elif kind == REFUSED or waited > _STALLED_FRAMES or restarts > _MOST_RESTARTS:
                raise Refused(name)
            elif kind == RESTART:
                incoming.begin()
            elif kind != WAITING:
                raise ConnectionError(f"an answer of kind {kind}")

    def who_has(self) -> Any:
        """Return what the node knows of all nodes."""
        self._ask({"who": "has what"})
        return receive_answer(self._connection)

    def interrupt(self) -> None:
        """Make a `fetch` of another thread raise OSError."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def __enter__(self) -> "Neighbour":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> None:
        send_request(self._connection, request, nonce=self._nonce, token=self._token)

    def _take(self, num_bytes: int, incoming: Incoming) -> None:
        while num_bytes > 0:
            piece = self._buffer[: min(num_bytes, len(self._buffer))]
            receive_into(self._connection, piece)
            incoming.write(piece)
            num_bytes -= len(piece)
            self.received_bytes += len(piece)
