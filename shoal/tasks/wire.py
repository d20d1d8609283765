"""Messages between a pool and its workers: a length of 8 bytes, then a pickle, over a socket of their own."""

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")
_MOST_AT_ONCE = 1 << 20


def send(end: socket.socket, message: Any) -> None:
    """Send `message`; OSError where nobody listens any more."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    if len(data) < _MOST_AT_ONCE:
        end.sendall(_LENGTH.pack(len(data)) + data)
    else:  # no copy of what is large
        end.sendall(_LENGTH.pack(len(data)))
        end.sendall(data)


def receive(end: socket.socket) -> bytes | bytearray | None:
    """Return the next message, pickled; None where the other side is gone."""
    head = _exactly(end, _LENGTH.size)
    return None if head is None else _exactly(end, _LENGTH.unpack(head)[0])


def _exactly(end: socket.socket, count: int) -> bytes | bytearray | None:
    try:
        first = end.recv(min(count, _MOST_AT_ONCE))
        if len(first) == count:
            return first
        data = bytearray(count)
        data[: len(first)] = first
        view, got = memoryview(data), len(first)
        while first and got < count:
            step = end.recv_into(view[got:])
            if step == 0:
                return None
            got += step
    except ConnectionError:
        return None
    return data if first else None
