"""The private parts of torch that comm/ stands on. When they move, tests/comm/test_torch_private.py says which."""

import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

from shoal.comm.endable import end_futures_soon


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


def cuttable_connection(store: Any) -> tuple[dist.Store, Callable[[], None]]:
    """Return another connection to `store`, a TCPStore, and what ends it: a call that waits in it fails at once.

    A thread that waits in the store cannot be told otherwise that it waits in vain. The socket is found by way of
    /proc, so on Linux alone: elsewhere nothing is cut, and the wait ends with its timeout.
    """
    before = _sockets_to(store.port)
    clone = own_connection(store)
    clone.check(["anything"])  # by now it is connected
    made = _sockets_to(store.port) - before

    def cut() -> None:
        if len(made) == 1:  # else another thread has made one meanwhile, and nobody knows which is which
            _shut_down(next(iter(made))[0])

    return clone, cut


def _sockets_to(port: int) -> set[tuple[int, str]]:
    """Return the descriptors of this process that are connected to that `port`, with what the system calls each."""
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()) if Path("/proc/self/fd").is_dir() else []:
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if (name := entry.readlink().name).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if is_inet and connection.getpeername()[1] == port:
                        found.add((int(entry.name), name))
    return found


def _shut_down(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


_ABANDONED: list[Any] = []
_has_abandoned = False


def abandon_groups() -> None:
    """Leave all groups of this process without freeing them, because a worker of theirs is gone; others can be made.

    Freeing a Gloo group joins its threads, and one of these may wait for the lost worker until the group's timeout, or
    for Python's lock. Its sockets are shut down; the rest is `free_abandoned_groups`, later. The process must then end
    without Python's own way out, which would wait for that (`has_abandoned_groups`).
    """
    global _has_abandoned  # noqa: PLW0603
    world = dist.distributed_c10d._world
    _ABANDONED.extend(world.pg_map)
    _has_abandoned = True
    end_operations()
    if dist.is_initialized():
        dist.destroy_process_group()
    world.group_count = 0  # which names groups: one that could not be formed was counted, on this worker alone


def has_abandoned_groups() -> bool:
    """Return whether this process has left groups without waiting for their threads."""
    return _has_abandoned


def free_abandoned_groups() -> None:
    """Free them in a thread, in which nobody minds waiting. Called when nothing else holds them.

    Their threads would go on to wake 100 times a second. Python's lock is let go by what frees a group (torch 2.13), so
    that a thread of Gloo that waits for the lost worker holds up no other.
    """
    groups = list(_ABANDONED)
    _ABANDONED.clear()
    if groups:
        timer = threading.Timer(1.0, groups.clear)  # by then their threads have seen that their sockets are closed
        timer.daemon = True
        timer.start()


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
    connections are shut down here, upon which it says "Connection closed by peer", but for what is in the middle of a
    message (endable.py). They are found by way of /proc, so on Linux alone: elsewhere it takes Gloo's timeout.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        for kind in ("cuda", "cpu"):
            if backend_name(group, torch.device(kind)) == "nccl":
                group._get_backend(torch.device(kind)).abort()
    found = gloo_sockets()
    for descriptor in found or []:
        _shut_down(descriptor)
    end_futures_soon()
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


RECORDED = 100
"""How many of the last collectives the engine's recorder keeps: more than are ever pending."""


class Recorded(NamedTuple):
    """A collective, as the engine's recorder has it."""

    group: str
    number: int
    name: str
    shape: tuple[int, ...]
    is_done: bool


def record_collectives() -> None:
    """Let the engine number its collectives. Called before the first group is made.

    Its recorder ("flight recorder") takes no measurable time: 17.4 us an all-reduce of one worker with it and without
    (torch 2.13, Gloo, 2026-11). It reads its size once, when the first group is made.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))


def collective_moves() -> int:
    """Return a number that changes whenever this process enters a collective or is done with one; 20 us."""
    status = _recording(with_collectives=False).get("pg_status", {}).values()
    return sum(int(of["last_enqueued_collective"]) + int(of["last_completed_collective"]) for of in status)


def recorded_collectives(*, since_ns: int) -> list[Recorded]:
    """Return the last collectives of this process since then, oldest first, without messages between two; 1 ms."""
    return [
        Recorded(
            entry["process_group"][0],
            int(entry["collective_seq_id"]),
            _plain_name(entry["profiling_name"]),
            tuple((entry["input_sizes"] or [[]])[0]),
            is_done=entry["retired"],
        )
        for entry in _recording(with_collectives=True).get("entries", [])
        if not entry["is_p2p"] and entry["time_created_ns"] >= since_ns
    ]


def collective_counts(*, since_ns: int) -> dict[str, int]:
    """Return how many collectives this process has entered in each of its groups."""
    here, status = groups_of(), _recording(with_collectives=False).get("pg_status", {})
    # That counts messages between two as well, so what is recorded of a group goes before.
    counts = {group: int(of["last_enqueued_collective"]) for group, of in status.items() if group in here}
    return counts | {one.group: one.number for one in recorded_collectives(since_ns=since_ns)}


def groups_of() -> dict[str, tuple[int, ...]]:
    """Return the groups that this process is in, by name, and their workers."""
    world = dist.distributed_c10d._world
    with contextlib.suppress(RuntimeError):  # another thread makes a group just now
        return {pg.group_name: tuple(world.pg_group_ranks.get(pg, ())) for pg in list(world.pg_map)}
    return {}


def _recording(*, with_collectives: bool) -> dict[str, Any]:
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # not in builds without it
    if dump is None:
        return {}
    found: dict[str, Any] = json.loads(dump(includeCollectives=with_collectives))
    return found


def _plain_name(name: str) -> str:
    """Return "gloo:all_reduce" as "all-reduce"."""
    return name.partition(":")[2].strip("_").removesuffix("_base").replace("allgather", "all_gather").replace("_", "-")
