"""Lightning's checkpoints under a plan are those of one process: anybody goes on with them."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.data.pack.progress import Quiet
from shoal.data.pack.writer import pack
from shoal.spec.plan import Mesh, Plan
from tests.lightning.modules import BATCH, NUM_SAMPLES, Numbers, fit, loader
from tests.lightning.test_strategy import PLANS, TOLERANCE, workers_of
from tests.support.ranks import RankPool

STEPS = 4
"""After so many steps of 6 in the epoch, the checkpoint that is gone on with was written."""


@pytest.fixture(scope="module")
def cut_off(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A checkpoint from the middle of an epoch, written by two workers under ZeRO-3, and what its run came to."""
    folder = tmp_path_factory.mktemp("checkpoints")
    results = ranks.run(
        fit, workers=2, plan=PLANS["ZeRO-3"], folder=str(folder), save_every=STEPS, loading={"shuffle": True}
    )
    return results[0]["checkpoints"][-1], results[0]


@pytest.mark.parametrize("name", ["one worker", "two copies", "ZeRO-2", "ZeRO-3"])
def test_any_plan_goes_on_in_the_middle_of_an_epoch(
    ranks: RankPool, cut_off: tuple[str, dict[str, Any]], name: str
) -> None:
    path, whole = cut_off
    assert path.endswith("step=8.ckpt")
    (*_,) = results = ranks.run(
        fit, workers=workers_of(PLANS[name]), plan=PLANS[name], ckpt_path=path, loading={"shuffle": True}
    )
    left = whole["losses"][8:]
    torch.testing.assert_close(results[0]["losses"], left, rtol=TOLERANCE, atol=1e-7)
    for key, value in whole["state"].items():
        torch.testing.assert_close(results[0]["state"][key], value, rtol=TOLERANCE, atol=1e-6)


def test_lightning_alone_goes_on_with_the_same_losses_after_an_epoch_and_reads_a_cut_off_one_from_its_begin(
    ranks: RankPool, tmp_path: Path
) -> None:
    steps = -(-NUM_SAMPLES // BATCH)
    whole, _ = ranks.run(fit, workers=2, plan=PLANS["ZeRO-3"], folder=str(tmp_path), save_every=2)
    (rest,) = ranks.run(fit, workers=1, plan=None, ckpt_path=str(tmp_path / f"step={steps}.ckpt"))
    torch.testing.assert_close(rest["losses"], whole["losses"][steps:], rtol=TOLERANCE, atol=1e-7)
    (cut_off,) = ranks.run(fit, workers=1, plan=None, ckpt_path=str(tmp_path / f"step={steps + 2}.ckpt"))
    assert cut_off["seen"] == rest["seen"][: steps - 2]


def test_lightning_alone_reads_a_checkpoint_of_shards(cut_off: tuple[str, dict[str, Any]]) -> None:
    path, whole = cut_off
    saved = torch.load(path, weights_only=False)
    assert {name: value.shape for name, value in saved["state_dict"].items()} == {
        name: value.shape for name, value in whole["state"].items()
    }
    assert torch.equal(saved["state_dict"]["net.4.weight"], saved["state_dict"]["net.7.weight"])
    shapes = [tuple(value.shape) for name, value in saved["state_dict"].items() if name != "net.7.weight"]
    states = saved["optimizer_states"][0]["state"]
    assert sorted(tuple(state["exp_avg"].shape) for state in states.values()) == sorted(shapes)  # tied: once


@pytest.mark.parametrize("workers", [1, 2])
def test_an_order_drawn_from_a_generator_of_ones_own_goes_on(ranks: RankPool, tmp_path: Path, workers: int) -> None:
    (whole,) = ranks.run(fit, workers=1, plan="auto", load=generated, folder=str(tmp_path), save_every=STEPS)
    rest = ranks.run(fit, workers=workers, plan="auto", load=generated, ckpt_path=whole["checkpoints"][-1])
    together = [list(chain(*parts)) for parts in zip(*(worker["seen"] for worker in rest), strict=True)]
    assert together == whole["seen"][2 * STEPS :]


def generated() -> Any:
    return loader(shuffle=True, generator=torch.Generator().manual_seed(9))


def test_a_pack_is_loaded_by_parts_and_gone_on_with(ranks: RankPool, tmp_path: Path) -> None:
    data = Numbers()
    rows = [{"x": data.x[i].numpy(), "y": data.y[i].numpy(), "number": i} for i in range(NUM_SAMPLES)]
    pack(rows, tmp_path / "rows.pack", report=Quiet())
    load = PackLoader(str(tmp_path / "rows.pack"))
    (one,) = ranks.run(fit, workers=1, plan="auto", load=load, folder=str(tmp_path), save_every=5)
    two = ranks.run(fit, workers=2, plan=Plan(mesh=Mesh(replicate=2)), load=load)
    assert [[*a, *b] for a, b in zip(two[0]["seen"], two[1]["seen"], strict=True)] == one["seen"]
    torch.testing.assert_close(two[0]["losses"], one["losses"], rtol=TOLERANCE, atol=1e-7)
    rest = ranks.run(fit, workers=2, plan=PLANS["ZeRO-3"], load=load, ckpt_path=one["checkpoints"][-1])
    torch.testing.assert_close(rest[0]["losses"], one["losses"][5:], rtol=TOLERANCE, atol=1e-7)


class PackLoader:
    """Makes a shoal.Loader whose batches are those of the other tests."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> Any:
        import shoal

        return shoal.Loader(self.path, batch_size=8, transform=as_tuple)


def as_tuple(batch: dict[str, Any]) -> tuple[Any, ...]:
    return batch["x"], batch["y"], batch["number"]
