"""What benchmarks/gpu/loader.py measures on a GPU, on the processor: the same path but for the copies."""

from typing import Any

import pytest
import torch

import shoal
from benchmarks.gpu import loader


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return loader.make_packs(tmp_path_factory.mktemp("packs"), 400_000)


@pytest.mark.parametrize("kind", ["rows", "tokens", "images"])
def test_batches_on_the_device_are_those_of_the_processor(cases: dict[str, dict[str, Any]], kind: str) -> None:
    case = cases[kind]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_device = loader.checksums(shoal.Loader(**case, seed=1, device=device), lambda: None, 20)
    on_host = loader.checksums(shoal.Loader(**case, seed=1, threads=1), lambda: None, 20)
    assert on_device == on_host
    assert len(on_device) >= 2


def test_both_sides_of_the_comparison_give_batches_of_one_shape(cases: dict[str, dict[str, Any]]) -> None:
    for case in cases.values():
        sides = [side(case, torch.device("cpu"), threads=0) for side in (loader.shoal_side, loader.torch_side)]
        ours, theirs = map(next, sides)
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
