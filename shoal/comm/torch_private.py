"""The private parts of torch that comm/ stands on. When they move, tests/comm/test_torch_private.py says which."""

import contextlib
import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute


def timeout_of(group: Any) -> timedelta:
    """Return how long an operation of `group` waits."""
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def set_timeout(group: Any, limit: timedelta) -> None:
    """Make the operations of `group` wait `limit` at most: those of DeviceMesh wait half an hour by themselves."""
    dist.distributed_c10d._set_pg_timeout(limit, group)


def forget_meshes() -> None:
    """Make DTensor forget what it has worked out so far.

    It keeps that by the shape of the mesh, groups included: in a process that leaves its groups and forms them anew, it
    would go on with the old ones ("Could not resolve the process group registered under the name ..."), and keep their
    threads alive, which wake 100 times a second.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:  # since torch 2.10
        clear()
    for function in (_redistribute._gen_transform_infos, _collective_utils.MeshTopoInfo.build_from_mesh):
        getattr(function, "cache_clear", lambda: None)()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # not in torch 2.11


def backend_name(group: Any, device: torch.device) -> str:
    """Return which engine carries the tensors of `device` in `group`, such as "gloo", or "" where none does."""
    try:
        name: str = group._get_backend(device).name()
    except RuntimeError:  # "No backend type associated with device type ..."
        return ""
    return name


def store_of(group: Any) -> dist.Store:
    """Return the store through which the workers of `group` found each other."""
    store: dist.Store = group.get_group_store()
    return store


def own_connection(store: Any) -> dist.Store:
    """Return another connection to `store`, for a thread whose calls nobody else is to wait for."""
    clone: dist.Store = store.clone()
    return clone


def calm_gloo() -> None:
    """Let Gloo's threads not interrupt the ones that call it; for those it has so far, where the system can do that.

    Such a thread tries for the lock of a connection, and if the caller holds it, tries again at once, and on and on. If
    it was woken on the caller's core, and put before the caller, it does that for a whole time slice of about 4 ms.
    Batch threads are not put before others. 4 KB between two workers, 2 busy cores: 1.6 ms before, 0.07 ms after, and
    Gloo's own all-reduce 1.4 ms before and 0.25 ms after (torch 2.13, Linux 6, 2026-11).
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile, or not permitted
            if (thread / "comm").read_text().startswith("gloo_tcp_loop"):
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def end_operations() -> bool:
    """Make every pending and every later operation of this process's groups fail; return whether that could be done.

    Called by a thread while another waits. NCCL has `abort` for it. Gloo's does nothing (torch 2.11 to 2.13), so its
    connections are shut down here, upon which it says "Connection closed by peer". They are found by way of /proc, so
    on Linux alone: elsewhere operations of Gloo end with their timeout.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        for kind in ("cuda", "cpu"):
            if backend_name(group, torch.device(kind)) == "nccl":
                group._get_backend(torch.device(kind)).abort()
    found = gloo_sockets()
    for descriptor in found or []:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    return found is not None


def gloo_sockets() -> list[int] | None:
    """Return the descriptors of Gloo's connections to other workers, or None where they cannot be told.

    Gloo's thread waits for them with an epoll that is not closed on exec and gives pointers back. Those of libuv, which
    serves the store, and of Python's own event loops are closed on exec, and give the descriptor back.
    """
    if not Path("/proc/self/fdinfo").is_dir():
        return None
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile
            if entry.readlink().name == "anon_inode:[eventpoll]":
                found += _watched_by_gloo(Path("/proc/self/fdinfo", entry.name).read_text())
    return [descriptor for descriptor in found if _is_connected(descriptor)]


def _watched_by_gloo(epoll: str) -> list[int]:
    flags = re.search(r"flags:\s*(\d+)", epoll)
    if flags is None or int(flags[1], 8) & os.O_CLOEXEC:
        return []
    entries = re.findall(r"tfd:\s*(\d+)\s+events:\s*\S+\s+data:\s*(\S+)", epoll)
    return [int(descriptor) for descriptor, data in entries if int(data, 16) & 0xFFFFFFFF != int(descriptor)]


def _is_connected(descriptor: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.getpeername()
        return connection.family in (socket.AF_INET, socket.AF_INET6)
    return False
