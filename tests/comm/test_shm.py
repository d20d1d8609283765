"""Collectives in shared memory against the plain sum, on 1 to 8 workers (more than most test machines have cores)."""

import contextlib
import functools
import gc
import json
import secrets
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.comm.calls import CALLS
from shoal.comm.rank import Rank
from shoal.comm.shm.group import SharedGroup, join
from shoal.comm.shm.sums import slice_of
from shoal.comm.store import connect
from shoal.core.errors import PeerLost, PlanError
from tests.support.ranks import RankPool

SIZES = (0, 1, 7, 1000, 1_000_003)
SEVERAL_TURNS = 600_007
"""More float32 than a slot holds."""
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64)
CARRIED = (*SUMMED, torch.bool, torch.uint8, torch.complex64)


def joined_group(rank: Rank, *, timeout_s: float = 60) -> SharedGroup:
    return join(connect(rank, timeout_s=60), index=rank.index, count=rank.workers, timeout_s=timeout_s)


@functools.cache
def _noise(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


def data_of(worker: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what `worker` brings: every worker can compute it, so each has its own reference."""
    noise = _noise(8 * SEVERAL_TURNS + 8)[worker : worker + numel] * (worker + 1)
    return noise > 0 if dtype is torch.bool else noise.abs().to(dtype) if dtype is torch.uint8 else noise.to(dtype)


def plain_sum(workers: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return worker 0 + worker 1 + ...: 16-bit types in 32 bits, rounded once."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = data_of(0, numel, dtype).to(wide)
    for worker in range(1, workers):
        total = total + data_of(worker, numel, dtype)
    return total.to(dtype)


def test_slices_are_disjoint_and_cover_the_range() -> None:
    for begin, end in ((0, 0), (0, 1), (3, 200), (5, 1_000_003)):
        for count in (1, 2, 3, 5, 8):
            slices = [slice_of(begin, end, index=index, count=count) for index in range(count)]
            covered = [element for first, last in slices for element in range(first, last)]
            assert covered == list(range(begin, end))


def wrong_sums(rank: Rank) -> list[str]:
    """Return where a sum is not bit for bit the plain one: the order of additions is the same, so nothing may differ.

    Runs in the pool.
    """
    wrong = []
    with joined_group(rank) as group:
        for dtype in SUMMED:
            for numel in SIZES if dtype in (torch.float32, torch.bfloat16) else SIZES[:-1]:
                want = plain_sum(rank.workers, numel, dtype)
                own = data_of(rank.index, numel, dtype)
                group.all_reduce(own)
                buffer = group.buffer(numel, dtype)
                buffer.tensor.copy_(data_of(rank.index, numel, dtype))
                buffer.all_reduce()
                if not torch.equal(own, want) or not torch.equal(buffer.tensor, want):
                    wrong.append(f"{dtype} {numel}")
    return wrong


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_every_worker_has_the_plain_sum_to_the_bit(ranks: RankPool, workers: int) -> None:
    assert ranks.run(wrong_sums, workers=workers) == [[]] * workers


def wrong_parts(rank: Rank) -> list[str]:
    """Return where reduce-scatter, all-gather or broadcast is not bit for bit what it should be. Runs in the pool."""
    wrong, index, count = [], rank.index, rank.workers
    with joined_group(rank) as group:
        for numel in (*SIZES[:-1], SEVERAL_TURNS):
            for dtype in CARRIED if numel <= 1000 else CARRIED[:1]:
                gathered = torch.empty(count * numel, dtype=dtype)
                group.all_gather(gathered, data_of(index, numel, dtype))
                told = data_of(index, numel, dtype)
                group.broadcast(told, count - 1)
                everything = torch.cat([data_of(worker, numel, dtype) for worker in range(count)])
                if not torch.equal(gathered, everything) or not torch.equal(told, everything[numel * (count - 1) :]):
                    wrong.append(f"gather or broadcast {dtype} {numel}")
            for dtype in (torch.float32, torch.bfloat16, torch.int64) if numel <= 1000 else CARRIED[:1]:
                out = torch.empty(numel, dtype=dtype)
                group.reduce_scatter(out, data_of(index, numel * count, dtype))
                want = plain_sum(count, numel * count, dtype)[index * numel : (index + 1) * numel]
                in_place = data_of(index, numel * count, dtype)
                group.reduce_scatter(in_place[index * numel : (index + 1) * numel], in_place)
                if not torch.equal(out, want) or not torch.equal(in_place[index * numel : (index + 1) * numel], want):
                    wrong.append(f"reduce_scatter {dtype} {numel}")
    return wrong


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_reduce_scatter_all_gather_and_broadcast_carry_every_bit(ranks: RankPool, workers: int) -> None:
    assert ranks.run(wrong_parts, workers=workers) == [[]] * workers


def sums_of_a_range(rank: Rank) -> tuple[list[float], list[list[float]]]:
    """Return a buffer after the sum of its middle, and a tensor with holes after its sum. Runs in the pool."""
    with joined_group(rank) as group:
        buffer = group.buffer(6, torch.float32)
        buffer.tensor.copy_(torch.arange(6.0) * (rank.index + 1))
        buffer.all_reduce(2, 5)
        holed = torch.full((2, 4), float(rank.index + 1))[:, ::2]
        group.all_reduce(holed)
        return buffer.tensor.tolist(), holed.tolist()


def test_only_the_range_is_summed_and_tensors_may_have_holes(ranks: RankPool) -> None:
    answers = ranks.run(sums_of_a_range, workers=2)
    assert answers[0] == ([0, 1, 6, 9, 12, 5], [[3, 3], [3, 3]])
    assert answers[1] == ([0, 2, 6, 9, 12, 10], [[3, 3], [3, 3]])


def sums_of_two_groups(rank: Rank, *, rounds: int) -> list[float]:
    """Return sums of two groups that two threads use at once, at unequal speed. Runs in the pool."""
    store, sums = connect(rank, timeout_s=60), [0.0, 0.0]
    groups = [join(store, index=rank.index, count=rank.workers, timeout_s=60) for _ in range(2)]

    def add_up(number: int) -> None:
        for _ in range(rounds):
            tensor = torch.full((70_000,), float(number + rank.index))
            if rank.index == number:
                tensor = tensor.double().sqrt().square().round().float()  # this worker is the slow one here
            groups[number].all_reduce(tensor)
            sums[number] += float(tensor[-1])

    threads = [threading.Thread(target=add_up, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for group in groups:
        group.close()
    return sums


def test_two_groups_at_once_in_one_process_do_not_disturb_each_other(ranks: RankPool) -> None:
    # They sum 0 + 1 + 2 and 1 + 2 + 3. If a wait kept Python's lock, the threads would wait for each other for ever.
    assert ranks.run(sums_of_two_groups, workers=3, rounds=20) == [[60.0, 120.0]] * 3


def open_files() -> list[str]:
    """Return what this process's descriptors point to; those that are gone by then are left out."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    return links


def mapped_files() -> list[str]:
    """Return the files that this process maps, with their names as the kernel tells them."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [fields[5] for fields in lines if len(fields) == 6]


def descriptors_and_maps(rank: Rank) -> tuple[int, list[str], list[str]]:
    """Return how many descriptors a group leaves open, what is mapped, and what it has by name. Runs in the pool."""
    store = connect(rank, timeout_s=60)

    def live_once() -> tuple[list[str], list[str]]:
        with join(store, index=rank.index, count=rank.workers, timeout_s=60) as group:
            buffer = group.buffer(1000, torch.float32)
            buffer.all_reduce()
            group.all_reduce(torch.ones(10))
            return mapped_files(), open_files()

    live_once()  # whatever is opened once in a process
    gc.collect()
    before, others = len(open_files()), {*mapped_files(), *open_files()}  # of tests before, in this process
    maps, files = live_once()
    gc.collect()
    named = [name for name in maps + files if name not in others]
    return len(open_files()) - before, maps, named


def test_memory_has_no_name_and_no_descriptor_is_left_open(ranks: RankPool) -> None:
    for growth, maps, named in ranks.run(descriptors_and_maps, workers=3):
        assert growth == 0
        assert maps.count("/memfd:shoal (deleted)") == 3  # control, slots, buffer
        assert not any(name.startswith("/dev/shm/") for name in named)


def refusals(rank: Rank) -> list[str]:
    """Return what each mistake is answered with. Runs in the pool."""
    said = []
    with joined_group(rank) as group:
        for mistake in (
            lambda: group.all_reduce(torch.ones(3, dtype=torch.bool)),
            lambda: group.reduce_scatter(torch.ones(3), torch.ones(7)),
            lambda: group.all_gather(torch.ones(4), torch.ones(2, dtype=torch.int64)),
            lambda: group.all_reduce(torch.ones(3, device="meta")),
            lambda: group.buffer(1000 * (rank.index + 1) ** 4, torch.float32),
            lambda: group.all_reduce(torch.ones(3)) if rank.index else group.broadcast(torch.ones(4), 0),
            lambda: group.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[rank.index])),
            lambda: group.buffer(1000, (torch.float32, torch.int32)[rank.index]),
            lambda: group.barrier() if rank.index else group.all_reduce(torch.ones(3)),
        ):
            with pytest.raises(PlanError) as caught:
                mistake()
            said.append(str(caught.value))
        group.barrier()  # a refusal leaves the group as it was
    with pytest.raises(PeerLost, match="closed by its own worker"):
        group.barrier()
    return said


def test_mistakes_are_refused_alike_on_every_worker(ranks: RankPool) -> None:
    for said in ranks.run(refusals, workers=2):
        assert "bool cannot be summed" in said[0]
        assert "reduce_scatter(out, tensor) of 2 workers" in said[1]
        assert "torch.int64" in said[2]
        assert "not of meta" in said[3]
        assert "different buffers: worker 0 1000 of float32, worker 1 16000 of float32" in said[4]
        assert "worker 0 broadcast of 16 bytes of float32, worker 1 all_reduce of 12 bytes of float32" in said[5]
        assert "worker 0 all_reduce of 16 bytes of float32, worker 1 all_reduce of 16 bytes of int32" in said[6]
        assert "different buffers: worker 0 1000 of float32, worker 1 1000 of int32" in said[7]
        assert "worker 0 all_reduce of 12 bytes of float32, worker 1 barrier" in said[8]


def test_a_worker_that_does_not_come_is_named() -> None:
    begin_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"worker 7 has not joined .* within 0\.2 s"):
        join(dist.HashStore(), index=0, count=2, timeout_s=0.2, numbers=[4, 7])
    with pytest.raises(PeerLost, match=r"worker 4 has not joined .* within 0\.2 s"):
        join(dist.HashStore(), index=1, count=2, timeout_s=0.2, numbers=[4, 7])
    assert time.monotonic() - begin_s < 30


def test_who_waits_for_the_first_worker_hears_that_somebody_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(CALLS, "lost", "worker 3 (n2) has been silent for 15.0 s.")
    with pytest.raises(PeerLost, match=r"worker 3 \(n2\)"):  # before it listens
        join(store, index=1, count=2, timeout_s=60)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        first.bind("\0" + (name := f"shoal-{secrets.token_hex(16)}"))
        first.listen(1)
        dist.PrefixStore("shared memory", store).set("meeting 2", json.dumps([name, "a secret"]))
        with pytest.raises(PeerLost, match=r"worker 3 \(n2\)"):  # while it waits for others
            join(store, index=1, count=2, timeout_s=60)
