"""Beside torchdata's StatefulDataLoader: what a state means, and where the next iteration begins."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from shoal.data.loader import Loader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
SAMPLES, BATCH = [torch.tensor(number) for number in range(22)], 4
MAKERS: dict[str, Callable[[], Any]] = {
    "torchdata": lambda: StatefulDataLoader(SAMPLES, batch_size=BATCH),
    "shoal": lambda: Loader(SAMPLES, batch_size=BATCH, shuffle=False),
}


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def taken_from(loader: Any, count: int) -> list[list[int]]:
    """Return the first batches of an iteration that is left there; one more is asked for if that is its end."""
    iterator = iter(loader)
    found = [next(iterator).tolist() for _ in range(min(count, 6))]
    return found + [batch.tolist() for batch in iterator] if count > 6 else found


def after(make: Callable[[], Any], count: int) -> dict[str, Any]:
    """Return all that a loader gives, and one that goes on with its state, when `count` batches have been taken."""
    loader, resumed = make(), make()
    said: dict[str, Any] = {"taken": taken_from(loader, count)}
    resumed.load_state_dict(loader.state_dict())
    said["resumed"] = batches(resumed)
    said["and then"] = batches(resumed)
    said["left and begun again"] = batches(loader)
    return said


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7], ids=lambda count: f"{count} of 6" if count < 7 else "and its end")
def test_a_state_means_what_it_means_there(count: int) -> None:
    theirs, ours = after(MAKERS["torchdata"], count), after(MAKERS["shoal"], count)
    assert ours == theirs
    assert len(ours["resumed"]) == (6 if count == 7 else 6 - count)
