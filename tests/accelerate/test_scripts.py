"""The examples for people who come from Accelerate: before and after train the same; a pack feeds both."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.comm.rank import Rank
from shoal.data.pack.progress import Quiet
from tests.support.ranks import RankPool
from tests.support.torchrun import as_torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_script(rank: Rank, *, name: str, folder: str, arguments: tuple[Path, ...] = ()) -> list[float]:
    """Run an example's main as torchrun would, and return its losses."""
    before = Path.cwd()
    os.chdir(folder)  # where its run folder goes
    sys.path.insert(0, str(EXAMPLES))
    try:
        with as_torchrun(rank):
            return runpy.run_path(str(EXAMPLES / name))["main"](*arguments)  # type: ignore[no-any-return]
    finally:
        assert leave_accelerate() in (None, rank.workers)
        sys.path.remove(str(EXAMPLES))
        os.chdir(before)


def leave_accelerate() -> int | None:
    """Leave the group, and return how many processes Accelerate has seen, if it was asked."""
    state = sys.modules.get("accelerate.state")
    seen = state.PartialState().num_processes if state is not None and state.PartialState._shared_state else None
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("accelerate"))


def test_the_script_that_was_moved_over_trains_with_the_same_losses(ranks: RankPool, folder: str) -> None:
    before = ranks.run(run_script, workers=2, name="accelerate_before.py", folder=folder)[0]
    after = ranks.run(run_script, workers=2, name="accelerate_after.py", folder=folder)[0]
    assert len(after) == len(before) > 20
    torch.testing.assert_close(after, before, rtol=1e-4, atol=0)  # AdamW passes a rounding error on


def test_a_pack_feeds_an_accelerate_script_the_same_with_any_number_of_workers(ranks: RankPool, folder: str) -> None:
    pack = (Path(folder) / "digits.pack",)
    one = ranks.run(run_script, workers=1, name="accelerate_pack.py", folder=folder, arguments=pack)[0]
    two = ranks.run(run_script, workers=2, name="accelerate_pack.py", folder=folder, arguments=pack)[0]
    assert len(one) == -(-1437 // 64)
    torch.testing.assert_close(two, one, rtol=1e-4, atol=0)


WAYS: dict[str, dict[str, Any]] = {
    "shares": {"expected": [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]},
    "prepared loader": {"expected": [list(range(10))] * 2},
    "prepared": {"expected": [[0, 1, 2, 3, 8, 9, 0, 1], [4, 5, 6, 7, 2, 3, 4, 5]]},
    "split_batches": {"split_batches": True, "expected": [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 0, 1]]},
    "drop_last": {"split_batches": True, "drop_last": True, "expected": [[0, 1, 4, 5], [2, 3, 6, 7]]},
}
"""The table of docs/accelerate.md."""


def samples_of(rank: Rank, *, path: str, way: str, split_batches: bool = False, drop_last: bool = False) -> list[int]:
    """Return the samples that a worker gets."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    with as_torchrun(rank):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split_batches))
        view: Any = shoal.View(path)
        loader: Any = DataLoader(view, batch_size=4, drop_last=drop_last)
        if way in ("shares", "prepared loader"):
            told = {"shares": (0.5, 0.5), "index": accelerator.process_index} if way == "shares" else {}
            loader = shoal.Loader(path, batch_size=4, shuffle=False, **told)
        if way != "shares":
            loader = accelerator.prepare(loader)
        found = [sample for batch in loader for sample in batch["number"].tolist()]
        leave_accelerate()
        return found


class Noted(Dataset[Any]):
    """The samples of a pack, and which of them were read here."""

    def __init__(self, path: str) -> None:
        self._view = shoal.View(path)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self._view[index]


def dispatched(rank: Rank, *, path: str) -> tuple[list[int], list[int]]:
    """Return the samples that a worker gets with dispatch_batches=True, and those that it has read."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    with as_torchrun(rank):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        data = Noted(path)
        loader = accelerator.prepare(DataLoader(data, batch_size=4))
        found = [sample for batch in loader for sample in batch["number"].tolist()]
        leave_accelerate()
        return found, data.read


def test_the_first_process_reads_all_batches_that_are_dispatched(ranks: RankPool, tmp_path: Path) -> None:
    shoal.pack([{"number": number} for number in range(10)], tmp_path / "ten.pack", report=Quiet())
    (first, all_of_it), (second, nothing) = ranks.run(dispatched, workers=2, path=str(tmp_path / "ten.pack"))
    assert (first, second) == ([0, 1, 2, 3, 8], [4, 5, 6, 7, 9])
    assert (all_of_it, nothing) == (list(range(10)), [])


@pytest.mark.parametrize("way", WAYS)
def test_what_accelerate_gives_to_each_worker_is_what_the_documentation_says(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    shoal.pack([{"number": number} for number in range(10)], tmp_path / "ten.pack", report=Quiet())
    options = {name: value for name, value in WAYS[way].items() if name != "expected"}
    found = ranks.run(samples_of, workers=2, path=str(tmp_path / "ten.pack"), way=way, **options)
    assert found == WAYS[way]["expected"]
