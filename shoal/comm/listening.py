"""Where workers will meet, before there is a store: a socket that listens. No torch is imported: that takes seconds."""

import socket

from shoal.core.errors import ConfigError

_WAITING = 1024
"""How many may connect before somebody answers: all workers, while the store is being loaded."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on `host` alone; port 0 takes a free one. ConfigError where that cannot be."""
    try:
        return socket.create_server((host, port), backlog=_WAITING)
    except OSError as error:
        raise ConfigError(f"the rendezvous store cannot listen on {host}:{port}: {error}.") from None
