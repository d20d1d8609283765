"""Every algorithm against the plain sum, on real processes: counts, sizes, dtypes, gaps, staging, and who has what.

Numbers are small and whole, so that every order of adding gives the same in every dtype: results are compared exactly.
"""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    Wire,
    broadcast,
    reduce,
    two_level_with,
)
from shoal.comm.algorithms import run as run_module
from shoal.comm.algorithms.steps import part
from shoal.comm.algorithms.two_level import levels, over_wire
from shoal.comm.group import joined, new_group
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.errors import PeerLost, PlanError
from shoal.planner.collectives.allreduce import ALLREDUCE
from tests.support.ranks import RankPool

CPU = torch.device("cpu")
SIZES = (0, 1, 5, 1000, 100_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
COUNTS = (1, 2, 3, 4, 5, 7, 8)
PIECE_BYTES = 30_000
"""Small, so that the largest size travels in many pieces."""


def made(index: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return what worker `index` has. The sum of 8 of them is below 256, which bfloat16 counts exactly."""
    return ((torch.arange(numel) * 7 + index * 5) % 31).to(dtype)


def total(count: int, numel: int, dtype: torch.dtype) -> Tensor:
    whole = torch.zeros(numel, dtype=torch.float64)
    for index in range(count):
        whole += made(index, numel, torch.float64)
    return whole.to(dtype)


def wire_of_all(**options: Any) -> Wire:
    assert dist.group.WORLD is not None
    return Wire(dist.group.WORLD, **options)


def on_wire(rank: Rank, *, does: Any, **options: Any) -> Any:
    """Return what `does(wire)` returns; a worker alone has a group of one. Runs in the pool."""
    store = connect(rank, timeout_s=60)
    with joined(rank, store, device=CPU, timeout_s=60):
        return does(wire_of_all(**{"piece_bytes": PIECE_BYTES, **options}))


def reduced(wire: Wire, *, stages: bool) -> list[str]:
    """Return what is wrong with any all-reduce, reduce-scatter or all-gather; nothing, it is hoped."""
    wrong = []
    for numel in SIZES:
        for dtype in DTYPES if not stages else (torch.float32,):
            want, mine = total(wire.count, numel, dtype), part(numel, wire.index, wire.count)
            for name, all_reduce in ALL_REDUCE.items():
                tensor = made(wire.index, numel, dtype)
                all_reduce(tensor, wire)
                wrong += [f"{name} of {numel} {dtype}"] * (not torch.equal(tensor, want))
            for name, reduce_scatter in REDUCE_SCATTER.items():
                tensor = made(wire.index, numel, dtype)
                reduce_scatter(tensor, wire)
                good = torch.equal(tensor[slice(*mine)], want[slice(*mine)])
                wrong += [f"reduce-scatter {name} of {numel} {dtype}"] * (not good)
            for name, all_gather in ALL_GATHER.items():
                tensor = torch.zeros(numel, dtype=dtype)
                tensor[slice(*mine)] = want[slice(*mine)]
                all_gather(tensor, wire)
                wrong += [f"all-gather {name} of {numel} {dtype}"] * (not torch.equal(tensor, want))
    return wrong


@pytest.mark.parametrize("count", COUNTS)
def test_every_algorithm_gives_the_plain_sum(ranks: RankPool, count: int) -> None:
    assert ranks.run(on_wire, workers=count, does=partial(reduced, stages=False)) == [[]] * count


def test_tensors_that_the_group_cannot_carry_are_copied_down_and_up(ranks: RankPool) -> None:
    """As a GPU's are over Gloo; here it is told to treat the processor's so."""
    assert ranks.run(on_wire, workers=3, does=partial(reduced, stages=True), stages_cpu=True) == [[]] * 3


def in_batches(wire: Wire) -> list[str]:
    """Return what is wrong with what is sent as NCCL takes it: the messages of a step as one batch."""
    with patch.object(run_module, "_run_pieces", run_module._run_batches):
        told(wire)
        return reduced(wire, stages=True)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_messages_of_a_step_sent_as_one_batch_give_the_plain_sum(ranks: RankPool, count: int) -> None:
    """As NCCL takes them; here Gloo does."""
    assert ranks.run(on_wire, workers=count, does=in_batches) == [[]] * count


def odd_tensors(wire: Wire) -> None:
    for all_reduce in ALL_REDUCE.values():
        base = torch.zeros(4, 6)
        base.t()[1:3].fill_(wire.index + 1)
        all_reduce(base.t()[1:3], wire)  # not contiguous
        assert (base.t()[1:3] == 3).all()
        assert base.sum() == 3 * 8
        all_reduce(parameter := torch.nn.Parameter(torch.ones(3)), wire)
        assert (parameter == 2).all()
        assert parameter.grad_fn is None
        all_reduce(imaginary := torch.full((7,), 1j), wire)
        assert (imaginary == 2j).all()
        all_reduce(truth := torch.tensor([wire.index == 0, False]), wire)
        assert truth.tolist() == [True, False]


def test_tensors_with_gaps_parameters_and_odd_dtypes_are_summed_in_place(ranks: RankPool) -> None:
    ranks.run(on_wire, workers=2, does=odd_tensors)


def bits(wire: Wire) -> dict[str, list[int]]:
    """Return the bits of a sum that depends on its order, by algorithm."""
    mine = torch.rand(3001, generator=torch.Generator().manual_seed(wire.index)) * 10.0**wire.index
    sums: dict[str, list[int]] = {}
    for name, all_reduce in ALL_REDUCE.items():
        for _ in range(3):
            all_reduce(tensor := mine.clone(), wire)
            bits = tensor.view(torch.int32).tolist()
            assert sums.setdefault(name, bits) == bits  # not by who was early
        torch.testing.assert_close(tensor, _plain(wire.count), rtol=1e-6, atol=0)  # float32: 8 sums of 6e-8 each
    return sums


def _plain(count: int) -> Tensor:
    parts = [torch.rand(3001, generator=torch.Generator().manual_seed(k)) * 10.0**k for k in range(count)]
    return torch.stack(parts).double().sum(0).float()


@pytest.mark.parametrize("count", [2, 5, 8])
def test_all_workers_have_the_same_bits_each_time(ranks: RankPool, count: int) -> None:
    first, *others = ranks.run(on_wire, workers=count, does=bits)
    assert all(other == first for other in others)


def reduced_to_each(wire: Wire) -> None:
    for to in range(wire.count):
        tensor = made(wire.index, 1000, torch.float32)
        reduce(tensor, wire, to=to)
        if wire.index == to:
            assert torch.equal(tensor, total(wire.count, 1000, torch.float32))


@pytest.mark.parametrize("count", [2, 5, 6])
def test_a_reduce_puts_the_sum_where_it_is_asked_for(ranks: RankPool, count: int) -> None:
    ranks.run(on_wire, workers=count, does=reduced_to_each)


def told(wire: Wire) -> None:
    for algorithm in BROADCAST:
        for source in range(wire.count):
            for numel in SIZES:
                tensor = made(wire.index, numel, torch.float64)
                receipts = broadcast(tensor, wire, source=source, algorithm=algorithm)
                assert torch.equal(tensor, made(source, numel, torch.float64))
                receipts.wait(30)
                assert receipts.missing() == set()
                assert all(receipts.has(worker) for worker in range(wire.count))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_broadcast_reaches_all_and_all_acknowledge(ranks: RankPool, count: int) -> None:
    ranks.run(on_wire, workers=count, does=told)


def not_yet_told(wire: Wire, *, name: str = "") -> None:
    """Worker 2, the last of the chain, takes part only when the source has asked who is missing."""
    store = dist.PrefixStore(f"asked {name}", wire.store)
    if wire.index == 2:
        store.wait(["asked"])
    receipts = broadcast(torch.zeros(10), wire, algorithm="chain")
    if wire.index == 0:
        assert 2 in receipts.missing()
        assert not receipts.has(2)
        with pytest.raises(PeerLost, match=r"2 did not acknowledge the broadcast of worker 0 within 0\.1 s"):
            receipts.wait(0.1)
        store.set("asked", "")
        receipts.wait(30)
        assert receipts.has(2)


def test_a_receipt_is_missing_until_the_worker_has_it(ranks: RankPool) -> None:
    ranks.run(on_wire, workers=3, does=not_yet_told)


def told_over_another(wire: Wire) -> None:
    """Ask about a second wire among workers to whom something was broadcast over the first."""
    broadcast(torch.zeros(10), wire).wait(30)
    not_yet_told(wire_of_all(), name="a wire of its own")
    not_yet_told(wire.among(range(wire.count)), name="made of the first")


def test_a_receipt_of_one_wire_is_none_of_another_among_the_same_workers(ranks: RankPool) -> None:
    ranks.run(on_wire, workers=3, does=told_over_another)


def in_two_levels(wire: Wire) -> int:
    wire.hosts = tuple("ab"[worker % 2] for worker in range(wire.count))
    inside, between = levels(wire)
    for outer in ALL_REDUCE.values():
        tensor = made(wire.index, 1000, torch.float32)
        two_level_with(tensor, wire, inside=over_wire(inside), between=between, all_reduce=outer)
        assert torch.equal(tensor, total(wire.count, 1000, torch.float32))
    wire.sent_bytes = between.sent_bytes = 0
    ALL_REDUCE["two-level"](torch.zeros(1000), wire)
    return wire.sent_bytes


def test_two_levels_take_hosts_in_any_order_and_any_algorithm_between(ranks: RankPool) -> None:
    # Inside 2 * 1/2 of 4000 bytes, between 2 * 1/2 of 2000 bytes, for 2 hosts of 2.
    assert ranks.run(on_wire, workers=4, does=in_two_levels) == [4000 + 2000] * 4


def with_unequal_hosts(wire: Wire) -> str:
    wire.hosts = ("a", "a", "b")
    with pytest.raises(PlanError) as raised:
        ALL_REDUCE["two-level"](torch.zeros(3), wire)
    return str(raised.value)


def test_two_levels_refuse_hosts_with_different_numbers_of_workers(ranks: RankPool) -> None:
    said = ranks.run(on_wire, workers=3, does=with_unequal_hosts)
    assert (
        said == ["two-level needs as many workers on every host, but there are 2 on a, 1 on b. Use ring instead."] * 3
    )


def without_the_last(wire: Wire) -> str:
    if wire.index == wire.count - 1:
        return ""
    try:
        while True:
            ALL_REDUCE["naive"](torch.zeros(10), wire)
    except PeerLost as error:
        return str(error)


def test_an_error_of_the_engine_names_the_worker_that_does_not_answer(ranks: RankPool) -> None:
    first, second, _ = ranks.run(on_wire, workers=3, does=without_the_last)
    assert first.startswith("worker 2 does not answer worker 0: ")
    assert second.startswith("worker 0 does not answer worker 1: ")  # the others it has to be told of: see alive.py


def test_the_table_has_the_names_of_the_planner() -> None:
    assert set(ALL_REDUCE) == set(ALLREDUCE) - {"parameter-server"} | {"two-level"}


def sums_of_large_tensors(rank: Rank, *, name: str) -> list[bool]:
    """Return whether each of some sums of 4 MB, one after the other, is right. Runs in the pool."""
    with joined(rank, connect(rank, timeout_s=60.0), device=torch.device("cpu"), timeout_s=60.0):
        wire = Wire(new_group())
        expected = torch.full((1 << 20,), float(sum(range(1, rank.workers + 1))))
        found = []
        for _ in range(10):
            tensor = torch.full((1 << 20,), float(rank.index + 1))
            ALL_REDUCE[name](tensor, wire)
            found.append(torch.equal(tensor, expected))
        del wire
    return found


@pytest.mark.parametrize("name", [name for name in ALL_REDUCE if name != "two-level"])
def test_what_is_still_leaving_is_not_added_to(name: str, ranks: RankPool) -> None:
    """In recursive doubling a worker adds to the very numbers that it sends: the other must not see the sum."""
    assert ranks.run(sums_of_large_tensors, workers=2, name=name) == [[True] * 10] * 2
