"""The rendezvous store: where workers find each other before they have a group."""

import socket
from datetime import timedelta

import torch.distributed as dist

from shoal.comm.listening import listen
from shoal.comm.rank import Rank

LOOPBACK = "127.0.0.1"


def host_store(*, host: str, port: int = 0, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Host a store on `host` alone and return it with its port; port 0 takes a free one.

    The socket is bound here and handed over: TCPStore by itself would listen on every interface, and a port that was
    free a moment ago can be taken when it comes to bind it.
    """
    server = listen(host, port)
    bound = server.getsockname()[1]
    return serve(server, timeout_s=timeout_s), bound


def serve(server: socket.socket, *, timeout_s: float) -> dist.TCPStore:
    """Return a store for those who connect to `server`, or have already; the socket is the store's from now on."""
    host, port = server.getsockname()[:2]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=server.detach(),
    )


def connect(rank: Rank, *, timeout_s: float) -> dist.Store:
    """Return a connection to the store, which worker 0 hosts where the launcher does not. Called by every worker."""
    if rank.index == 0 and not rank.store_is_hosted:
        return host_store(host=rank.store_host, port=rank.store_port, timeout_s=timeout_s)[0]
    return reach_store(rank.store_host, rank.store_port, timeout_s=timeout_s)


def reach_store(host: str, port: int, *, timeout_s: float) -> dist.Store:
    """Return a connection to a store that another process hosts."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def lone_store() -> dist.Store:
    """Return a store for a worker alone, whose engine wants a group all the same: nobody else can reach it."""
    return dist.HashStore()
