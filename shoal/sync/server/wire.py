"""Messages over a TCP connection: a small header in JSON, and the bytes of tensors behind it; nothing is unpickled.

    length of the header (4 bytes) | header | payload, `header["bytes"]` of it

Plain sockets, and not a group of the engine: a peer that is killed closes its connection, which the other side sees at
once, as it sees it nowhere else; a new peer needs nobody's consent but the server's; and a wait can be left every
half second to look whether it is in vain. Tensors go from and to their own memory.
"""

import contextlib
import json
import math
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOOK_S = 0.5
"""How often a wait looks up."""
_LENGTH = struct.Struct("!I")
_LONGEST_HEADER_BYTES = 16 << 20


class Ended(Exception):
    """This side has stopped waiting, because it closes or because somebody is lost."""


class Connection:
    """One TCP connection. Its waits end with Ended when `in_vain`, with OSError when it breaks or lasts too long."""

    def __init__(self, peer: socket.socket, *, in_vain: Callable[[], bool], timeout_s: float) -> None:
        self._socket, self._in_vain, self._timeout_s = peer, in_vain, timeout_s
        peer.settimeout(LOOK_S)
        with contextlib.suppress(OSError):  # it broke already: the first message will tell
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, header: dict[str, Any], *tensors: Tensor) -> None:
        """Send a header and, behind it, the bytes of `tensors`, which lie in the processor's memory."""
        views = [bytes_of(tensor) for tensor in tensors]
        text = json.dumps({**header, "bytes": sum(len(view) for view in views)}).encode()
        for data in (memoryview(_LENGTH.pack(len(text)) + text), *views):
            self._send(data)

    def receive(self, *, may_idle: bool = False) -> dict[str, Any]:
        """Return the next header; its payload is then taken by `receive_into`.

        With `may_idle` it is waited for as long as the connection stands: the other side may have nothing to say.
        """
        size = bytearray(_LENGTH.size)
        self._move(memoryview(size), self._socket.recv_into, timeout_s=math.inf if may_idle else self._timeout_s)
        length = _LENGTH.unpack(size)[0]
        if length > _LONGEST_HEADER_BYTES:
            raise ConnectionError(f"a header of {length} bytes: this is no server of ours.")
        text = bytearray(length)
        self._receive(memoryview(text))
        header: dict[str, Any] = json.loads(text)
        return header

    def receive_into(self, *tensors: Tensor) -> None:
        """Fill `tensors` with the payload of the header that came last."""
        for tensor in tensors:
            self._receive(bytes_of(tensor))

    def request(self, header: dict[str, Any], *tensors: Tensor) -> dict[str, Any]:
        """Send a message and return the header of the answer."""
        self.send(header, *tensors)
        return self.receive()

    def close(self) -> None:
        """End it: whoever waits on either side is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, data: memoryview) -> None:
        self._move(data, self._socket.send, timeout_s=self._timeout_s)

    def _receive(self, data: memoryview) -> None:
        self._move(data, self._socket.recv_into, timeout_s=self._timeout_s)

    def _move(self, data: memoryview, call: Callable[[memoryview], int], *, timeout_s: float) -> None:
        at, end_s = 0, time.monotonic() + timeout_s
        while at < len(data):
            try:
                moved = call(data[at:])
            except TimeoutError:
                if self._in_vain():
                    raise Ended("nobody waits for it any more.") from None
                if time.monotonic() > end_s:
                    raise TimeoutError(f"nothing has moved for {timeout_s:g} s.") from None
                continue
            if moved == 0:
                raise ConnectionError("the other side has closed the connection.")
            at, end_s = at + moved, time.monotonic() + timeout_s


def listen(address: str) -> tuple[socket.socket, int]:
    """Return a socket that listens at `address`, and its port."""
    listener = socket.create_server((address, 0), backlog=256)
    listener.settimeout(LOOK_S)
    return listener, listener.getsockname()[1]


def connect(address: str, port: int, *, in_vain: Callable[[], bool], timeout_s: float) -> Connection:
    """Return a connection to whoever listens there; OSError if nobody does."""
    peer = socket.create_connection((address, port), timeout=min(timeout_s, 5.0))
    return Connection(peer, in_vain=in_vain, timeout_s=timeout_s)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
