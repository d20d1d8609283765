"""What benchmarks/gpu/algorithms.py does on a GPU, on the processor: with tensors copied as a GPU's would be."""

import pytest
import torch

from benchmarks.gpu import algorithms
from shoal.comm.algorithms import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER
from tests.support.ranks import RankPool


def test_every_algorithm_is_exact_by_way_of_copies(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "WORKERS", (3,))
    ((workers, wrong, rates),) = algorithms.measured(ranks, 400_000)
    assert workers == 3
    assert wrong == []
    assert len(rates) == len(ALL_REDUCE) + len(REDUCE_SCATTER) + len(ALL_GATHER) + len(BROADCAST) + 1
    assert min(rates.values()) > 0


def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        index, count = 0, 2

    def forgets(tensor: torch.Tensor, _: object) -> None:
        tensor.zero_()

    monkeypatch.setattr(algorithms, "calls", lambda _: {"all-reduce ring": forgets})
    wrong = algorithms.wrong_of(Two(), torch.device("cpu"))  # type: ignore[arg-type]
    assert "all-reduce ring of 1000 torch.bfloat16" in wrong
    assert "all-reduce ring of 0 torch.float32" not in wrong
