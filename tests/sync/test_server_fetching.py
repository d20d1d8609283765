"""Parameters that come beside forward are those that forward needs, before it needs them."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.spec.sync import Sync
from shoal.sync.mode import Trained
from shoal.sync.server.copies import Copies
from shoal.sync.server.fetching import Fetching
from tests.sync.server_cluster import Bench, Worker, adamw, batch_of, part_of, together

CUTS = (6, 4, 2)


class Borrowing(nn.Module):
    """A model whose first layer is used by hand, after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.second(x), self.first.weight)
        return self.third(self.first(y))  # type: ignore[no-any-return]


class Slow:
    """Fetches of three slices that are done when they are waited for, in a list of which were."""

    def __init__(self, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.copies = Copies(Trained(dict(model.named_parameters()), {}, optimizer, None), servers=3)
        self.waited: list[int] = []
        self.fetching = Fetching(model, self.copies, self._wait)
        self._fetches: list[Future[None]] = []

    def begin(self, value: float) -> None:
        """Fetch parameters that are all of one value."""
        self._value, self._fetches = value, [Future() for _ in self.copies.slices]
        self.waited.clear()
        self.fetching.begin(self._fetches)

    def _wait(self, fetches: Any) -> None:
        for fetch in fetches:
            number = self._fetches.index(fetch)
            self.waited.append(number)
            of = self.copies.slices[number]
            self.copies.row[of.begin : of.end] = self._value


def test_each_module_waits_for_its_own_and_what_is_borrowed_comes_first() -> None:
    model = Borrowing()
    slow = Slow(model)
    seen: list[tuple[str, list[int]]] = []
    for name, module in model.named_children():
        module.register_forward_hook(lambda *_, name=name: seen.append((name, list(slow.waited))))
    slow.begin(1.0)
    model(torch.ones(1, 4))
    assert seen[0] == ("second", [0, 1, 2])  # the first time, all
    assert slow.fetching.early == [0]  # first.weight
    seen.clear()
    slow.begin(2.0)
    model(torch.ones(1, 4))
    assert seen == [("second", [0, 1]), ("first", [0, 1]), ("third", [0, 1, 2])]
    assert all(torch.equal(parameter, torch.full_like(parameter, 2.0)) for parameter in model.parameters())
    slow.fetching.close()


def test_what_forward_did_not_need_is_there_when_it_is_finished() -> None:
    model = Borrowing()
    slow = Slow(model)
    slow.begin(3.0)
    slow.fetching.finish()
    assert slow.waited == [0, 1, 2]
    assert all(torch.equal(parameter, torch.full_like(parameter, 3.0)) for parameter in model.parameters())
    slow.fetching.finish()
    assert slow.waited == [0, 1, 2]


@pytest.mark.parametrize("servers", [1, 3])
def test_steps_with_everything_beside_them_are_exact(servers: int) -> None:
    def do(worker: Worker) -> Any:
        worker.servers.fetch_beside(worker.bench.model)
        for step in range(1, 9):
            loss = worker.bench.forward(part_of(step, worker.rank.index, CUTS))
            with worker.servers.sending():
                loss.backward()  # type: ignore[no-untyped-call]
            worker.meet(step, float(loss.detach()), CUTS[worker.rank.index])
        return worker.bench.row(), worker.bench.kept()

    found = together(3, do, Sync(mode="server", servers=servers), build=adamw, boundaries={8})
    bench = Bench(adamw)
    for step in range(1, 9):
        bench.step(batch_of(step))
    for row, kept in found:
        assert torch.allclose(row, bench.row(), atol=1e-6)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(kept, bench.kept(), strict=True))
