"""Whether another host can be reached at all."""

import contextlib
import socket

_CONNECT_S = 0.5
ASKED_HOSTS = 3
"""No more are asked, one after the other: each may take as long as LOOK_AROUND_S has room for."""
LOOK_AROUND_S = _CONNECT_S * (ASKED_HOSTS + 1)


def address_towards(host: str, port: int) -> str:
    """Return the address of this host as it is seen from `host`, or "" without a way; nothing is sent to find it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        return str(probe.getsockname()[0])
    return ""


def answers(host: str, port: int) -> bool:
    """Return whether `host` answers at all: a refusal is an answer."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
