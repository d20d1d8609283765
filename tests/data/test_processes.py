"""Batches that processes load, beside those that threads load."""

import os
import signal
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shoal.core.errors import DataError
from shoal.data.loader import Loader
from shoal.data.loading.shared import SharedSlot, dump, load, shared_memory
from tests.data.packs import rows_pack


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def everything(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "pair": Pair(torch.full((3,), float(index)), f"sample {index}"),
        "numbers": [np.arange(index % 3 + 1), torch.ones(2, dtype=torch.bfloat16), None],
    }


def as_list(samples: list[Any]) -> dict[str, Any]:
    return {"pid": os.getpid(), "samples": samples}


class Dataset:
    def __init__(self, *, num_samples: int = 60, bad: int = -1, deadly: int = -1) -> None:
        self.num_samples, self.bad, self.deadly = num_samples, bad, deadly

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            raise ValueError("a broken row")
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return everything(index)


def flat(value: Any) -> Any:
    """Return `value` with its tensors and arrays as lists, so that it can be compared."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: flat(each) for key, each in value.items() if key != "pid"}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [flat(each) for each in value]
    return value


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_processes_give_what_threads_give_in_the_same_order(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 7, "collate": as_list, "epochs": 2}
    wanted = [flat(batch) for batch in Loader(Dataset(), **options)]
    pids = set()
    found = []
    for batch in Loader(Dataset(), workers=workers, **options):
        pids.add(batch["pid"])
        found.append(flat(batch))
    assert found == wanted
    assert len(pids) == workers
    assert os.getpid() not in pids


def test_the_memory_of_a_batch_is_filled_again_unless_it_is_copied() -> None:
    data = torch.arange(600.0).view(60, 10)
    kept = list(Loader(data, batch_size=5, workers=2, shuffle=False, copy=True))
    assert torch.equal(torch.cat(kept), data)
    addresses = {batch.data_ptr() for batch in Loader(data, batch_size=5, workers=2)}
    assert len(addresses) < 12


def test_a_pack_is_gathered_and_transformed_in_processes(tmp_path: Path) -> None:
    def doubled(batch: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * batch["label"], "pid": os.getpid(), **batch}

    path = rows_pack(tmp_path / "rows.pack", 80)
    options: dict[str, Any] = {"batch_size": 9, "columns": ["label", "x", "text"], "transform": doubled}
    wanted = [flat(batch) for batch in Loader(path, **options)]
    assert [flat(batch) for batch in Loader(path, workers=2, **options)] == wanted


def test_resuming_with_another_number_of_processes_goes_on_where_it_stood() -> None:
    whole = [batch.tolist() for batch in Loader(torch.arange(50), batch_size=6)]
    for taken in range(9):
        loader = Loader(torch.arange(50), batch_size=6, workers=2)
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        state = loader.state_dict()
        batches.close()  # type: ignore[attr-defined]
        resumed = Loader(torch.arange(50), batch_size=6, workers=1 + taken % 3)
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == whole[taken:]


def test_what_fails_in_a_process_is_named_here() -> None:
    with pytest.raises(
        DataError, match=r"sample 17 cannot be loaded for step \d+ on worker 0: ValueError: a broken row"
    ):
        list(Loader(Dataset(bad=17), batch_size=4, workers=2, collate=as_list))


def test_a_process_that_is_killed_is_missed() -> None:
    with pytest.raises(DataError, match=r"a loading process ended by itself \(killed by SIGKILL; out of memory\?\)"):
        list(Loader(Dataset(deadly=17), batch_size=4, workers=2, collate=as_list))


def test_the_processes_end_with_the_iteration() -> None:
    batches = iter(Loader(Dataset(), batch_size=4, workers=2, collate=as_list))
    pids = {next(batches)["pid"] for _ in range(2)}
    batches.close()  # type: ignore[attr-defined]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_processes_of_one_loader_end_while_those_of_another_that_began_later_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(ForkProcess, "kill", lambda process: killed.append(process.name))
    first, second = (iter(Loader(Dataset(), batch_size=4, workers=1, collate=as_list)) for _ in range(2))
    next(first)
    next(second)
    first.close()  # type: ignore[attr-defined]
    assert killed == [], "it had to be, as it had not seen its pipe closed"
    second.close()  # type: ignore[attr-defined]
    assert killed == []


def test_a_batch_that_does_not_fit_is_refused_in_one_sentence() -> None:
    memory = shared_memory(4096)
    with pytest.raises(DataError, match=r"a batch takes more than the 4,096 bytes"):
        dump(torch.zeros(2000), SharedSlot(memory))


def test_tensors_that_lie_in_the_memory_are_not_copied() -> None:
    memory = shared_memory(1 << 16)
    slot = SharedSlot(memory)
    inside = slot.tensor("x", (10, 3), torch.float32)
    inside.copy_(torch.arange(30.0).view(10, 3))
    message = dump({"x": inside, "part": inside[2:4], "empty": torch.empty(0, 3)}, slot)
    found = load(message, memory)
    inside[2] = 7.0
    assert torch.equal(found["x"], inside)
    assert torch.equal(found["part"], inside[2:4])
    assert found["empty"].shape == (0, 3)
