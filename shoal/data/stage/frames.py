"""How nodes talk: one asks for a file, the other sends what it has of it, as it comes.

1. The server sends 16 random bytes. The asker answers with its request, a line of JSON, and the HMAC of both under the
   token, which all nodes have from the store. So nobody else is answered, and no recording of a request is good twice.
2. Each request gets frames: a letter, a length, and so many bytes.
     d  data, the next bytes of the file        r  restart: what was sent so far was wrong, begin again
     w  waiting: nothing yet, but I am alive    n  no: I will not have this file
     e  the end of the file                     j  JSON: the answer to "who has what"
3. Without a frame for SILENT_S the other is given up; a server that has nothing sends `w` every WAITING_S.
"""

import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any

SILENT_S = 5.0
WAITING_S = 1.0
DATA, WAITING, RESTART, REFUSED, END, ANSWER = b"dwrnej"
_HEADER = struct.Struct("!BQ")
_NONCE_BYTES, _MAC_BYTES = 16, hashlib.sha256().digest_size
_MOST_REQUEST_BYTES = 4096
_MOST_ANSWER_BYTES = 16 << 20


def greet(connection: socket.socket) -> bytes:
    """Send the server's random bytes, and return them."""
    nonce = os.urandom(_NONCE_BYTES)
    connection.sendall(nonce)
    return nonce


def be_greeted(connection: socket.socket) -> bytes:
    """Return the random bytes of the server."""
    return receive_exactly(connection, _NONCE_BYTES)


def send_request(connection: socket.socket, request: dict[str, Any], *, nonce: bytes, token: bytes) -> None:
    """Ask; `request` is {"get": name} or {"who": "has what"}."""
    text = json.dumps(request).encode()
    connection.sendall(struct.pack("!I", len(text)) + _mac(nonce, text, token) + text)


def receive_request(connection: socket.socket, *, nonce: bytes, token: bytes) -> dict[str, Any] | None:
    """Return what is asked, or None where the other side has closed, or does not know the token."""
    try:
        (size,) = struct.unpack("!I", receive_exactly(connection, 4))
        if size > _MOST_REQUEST_BYTES:
            return None
        mac, text = receive_exactly(connection, _MAC_BYTES), receive_exactly(connection, size)
        if not hmac.compare_digest(mac, _mac(nonce, text, token)):
            return None
        request = json.loads(text)
    except (ConnectionError, ValueError):
        return None
    return request if isinstance(request, dict) else None


def send_frame(connection: socket.socket, kind: int, content: bytes = b"") -> None:
    """Send a frame."""
    connection.sendall(_HEADER.pack(kind, len(content)) + content)


def send_header(connection: socket.socket, kind: int, num_bytes: int) -> None:
    """Send the beginning of a frame whose `num_bytes` follow from a file."""
    connection.sendall(_HEADER.pack(kind, num_bytes))


def receive_header(connection: socket.socket) -> tuple[int, int]:
    """Return the kind and the length of the next frame."""
    kind, num_bytes = _HEADER.unpack(receive_exactly(connection, _HEADER.size))
    return kind, num_bytes


def receive_answer(connection: socket.socket) -> Any:
    """Return the JSON of a frame."""
    kind, num_bytes = receive_header(connection)
    if kind != ANSWER or num_bytes > _MOST_ANSWER_BYTES:
        raise ConnectionError("no answer that can be read")
    return json.loads(receive_exactly(connection, num_bytes))


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill `buffer`; raise ConnectionError if the other side closes before."""
    got = 0
    while got < len(buffer):
        count = connection.recv_into(buffer[got:])
        if count == 0:
            raise ConnectionResetError("the connection was closed by the other side")
        got += count


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Return the next `num_bytes`."""
    buffer = bytearray(num_bytes)
    receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def _mac(nonce: bytes, text: bytes, token: bytes) -> bytes:
    return hmac.digest(token, nonce + text, "sha256")
