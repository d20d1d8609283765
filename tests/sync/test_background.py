"""Exchanges on a thread: in their order, with their errors."""

import pytest
import torch

from shoal.core.errors import PeerLost
from shoal.sync.background import Background


def test_work_is_done_in_the_order_in_which_it_is_given() -> None:
    background = Background(timeout_s=10)
    done: list[int] = []

    def work(number: int) -> torch.Tensor:
        done.append(number)
        return torch.tensor(number)

    futures = [background.start(lambda number=number: work(number)) for number in range(20)]  # type: ignore[misc]
    assert [int(future.wait()) for future in futures] == done == list(range(20))
    background.close()


def test_the_first_error_is_what_is_raised_and_stops_what_follows() -> None:
    background = Background(timeout_s=10)

    def lose() -> torch.Tensor:
        raise PeerLost("worker 3 is gone")

    first, second = background.start(lose), background.start(lambda: torch.zeros(1))
    with pytest.raises(PeerLost, match="worker 3"), background.explained():
        first.wait()
    with pytest.raises(PeerLost, match="worker 3"), background.explained():
        second.wait()
    background.close()


def test_other_errors_pass_through() -> None:
    background = Background(timeout_s=10)
    with pytest.raises(RuntimeError, match="something else"), background.explained():
        raise RuntimeError("something else")
    background.close()
