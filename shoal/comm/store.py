"""The rendezvous store: where workers find each other before they have a group."""

import socket
from datetime import timedelta

import torch.distributed as dist

from shoal.comm.rank import Rank
from shoal.core.errors import ConfigError

LOOPBACK = "127.0.0.1"


def host_store(*, host: str, port: int = 0, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Host a store on `host` alone and return it with its port; port 0 takes a free one.

    The socket is bound here and handed over: TCPStore by itself would listen on every interface, and a port that was
    free a moment ago can be taken when it comes to bind it.
    """
    try:
        server = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"the rendezvous store cannot listen on {host}:{port}: {error}.") from None
    port = server.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=server.detach(),
    )
    return store, port


def connect(rank: Rank, *, timeout_s: float) -> dist.Store:
    """Return a connection to the store, which worker 0 hosts where the launcher does not. Called by every worker."""
    if rank.index == 0 and not rank.store_is_hosted:
        return host_store(host=rank.store_host, port=rank.store_port, timeout_s=timeout_s)[0]
    return dist.TCPStore(
        rank.store_host,
        rank.store_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
