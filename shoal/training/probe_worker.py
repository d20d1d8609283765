"""A worker of `shoal probe`: measures its device while the others do the same, then the link to them.

It writes to its event log:

    progress   what                                          what is measured now
    measured   seconds, title, memory_bytes, reserved_bytes  seconds by probe (see `profile.host`)
    link       times                                         [bytes, seconds of an all-reduce], where it is not alone
    memory     in_place, copied                              the same in shared memory, on a processor
    error, end                                               as a worker of a run does
"""

import torch
from torch.distributed import Store

from shoal.comm.device import pick_device, set_threads
from shoal.comm.group import barrier, joined
from shoal.comm.link import (
    agree_least,
    can_share_memory,
    time_all_reduces,
    time_shared_shards,
    time_shared_sums,
)
from shoal.comm.rank import ALONE, Rank, read_rank
from shoal.comm.shm.group import join
from shoal.comm.store import connect
from shoal.core.events import EventLog
from shoal.core.host import memory_bytes, processor_name
from shoal.core.run_folder import RunFolder
from shoal.profile.host import measure_device
from shoal.training.memory import return_freed_tensors
from shoal.training.worker import report_error

TIMEOUT_S = 60.0
_LINK_SHARE = 0.25
"""How much of the time the link gets."""
_MEMORY_SHARE = 0.5
"""How much of that shared memory gets, which is fast."""


def probe_work(folder: RunFolder, *, seconds: float) -> int:
    """Be one worker of a probe, measure for about `seconds`, and return the exit code."""
    rank = read_rank() or ALONE
    log = EventLog(folder.events_of(rank.index))
    try:
        _measure(rank, log, seconds=seconds)
        log.write("end")
    except Exception as error:
        return report_error(error, log).exit_code
    finally:
        log.close()
    return 0


def _measure(rank: Rank, log: EventLog, *, seconds: float) -> None:
    set_threads(rank)
    device = pick_device(rank)
    facts = _facts(device)
    if rank.workers == 1:
        log.write("progress", what="products, memory, copies")
        log.write("measured", seconds=measure_device(device, seconds=seconds), **facts)
        return
    store = connect(rank, timeout_s=TIMEOUT_S)
    with joined(rank, store, device=device, timeout_s=TIMEOUT_S):
        barrier()
        log.write("progress", what="products, memory, copies")
        rates_s = (1 - _LINK_SHARE) * seconds
        measured = measure_device(device, seconds=rates_s, together=barrier, agree_least=agree_least)
        log.write("measured", seconds=measured, **facts)
        log.write("progress", what="the link between workers")
        shares_memory = can_share_memory(device)
        link_s = _LINK_SHARE * seconds * (1 - _MEMORY_SHARE * shares_memory)
        log.write("link", times=time_all_reduces(device, seconds=link_s))
        if shares_memory:
            log.write("progress", what="shared memory between workers")
            log.write("memory", **_memory_times(rank, store, seconds=_LINK_SHARE * seconds - link_s))
        barrier()


def _memory_times(rank: Rank, store: Store, *, seconds: float) -> dict[str, list[tuple[int, float]]]:
    """Return what sums in shared memory take, and what shards do. Called by every worker."""
    with join(store, index=rank.index, count=rank.workers, timeout_s=TIMEOUT_S) as group:
        in_place = time_shared_sums(group, seconds=seconds / 2)
        return_freed_tensors()  # as workers with shards do: the memory of every gather is new to them
        return {"in_place": in_place, "copied": time_shared_shards(group, seconds=seconds / 2)}


def _facts(device: torch.device) -> dict[str, object]:
    """Return the device's name, its memory, and what of that the driver takes for a process with its first tensor."""
    if device.type != "cuda":
        return {"title": processor_name(), "memory_bytes": memory_bytes(), "reserved_bytes": 0}
    torch.ones(1, device=device)  # loads the kernels
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    title = torch.cuda.get_device_name(device)
    reserved_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    return {"title": title, "memory_bytes": total_bytes, "reserved_bytes": reserved_bytes}
