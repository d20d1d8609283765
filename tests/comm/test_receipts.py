"""When a broadcast is acknowledged: only once it is there, also where the stream of a GPU alone has waited for it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.comm.algorithms import Wire, broadcast
from shoal.comm.algorithms.receipts import Receipts
from tests.comm.test_algorithms import on_wire
from tests.support.ranks import RankPool


def received_when_awaited(wire: Wire) -> list[bool]:
    """Return whether the source could read this worker's receipt by when it waited for the numbers to be there."""
    found = []

    def look(_: torch.Tensor) -> None:
        found.append(Receipts(wire.store, number=1, source=0, workers={wire.index}).has(wire.index))

    wire.await_stream = look  # type: ignore[assignment, method-assign]
    broadcast(torch.zeros(10), wire).wait(30)
    return found


def test_a_worker_acknowledges_after_it_has_waited_for_the_numbers_to_be_there(ranks: RankPool) -> None:
    assert ranks.run(on_wire, workers=3, does=received_when_awaited) == [[], [False], [False]]


@pytest.mark.parametrize(
    ("is_nccl", "is_cuda", "waits"), [(True, True, 1), (True, False, 0), (False, True, 0), (False, False, 0)]
)
def test_the_stream_is_awaited_where_nccl_has_carried_a_tensor_of_a_gpu(
    is_nccl: bool, is_cuda: bool, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tensor and a stream that only play a GPU's."""
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: stream)
    wire: Any = object.__new__(Wire)
    wire._is_nccl = is_nccl
    wire.await_stream(SimpleNamespace(is_cuda=is_cuda, device="cuda:0"))
    assert len(waited) == waits
