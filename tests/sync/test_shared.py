"""Gradients that meet in shared memory, against those of one process and against torch's own all-reduce."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.shm.group import SharedGroup, join
from shoal.comm.store import connect
from shoal.core.errors import JobError
from shoal.sync.shared import SharedGradients
from tests.support.ranks import RankPool

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two dtypes, a convolution in channels-last memory, and two layers that are used now and then, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 48)
        self.seldom = nn.Linear(64, 48)
        self.never = nn.Linear(3, 3)
        self.image = nn.Conv2d(3, 8, 3)
        self.image.weight.data = self.image.weight.data.contiguous(memory_format=torch.channels_last)
        self.wide = nn.Linear(48, 8).double()

    def forward(self, x: torch.Tensor, *, uses_seldom: bool) -> torch.Tensor:
        hidden = self.first(x) + (self.seldom(x) if uses_seldom else 0.0)
        image = self.image(x[:, :48].reshape(-1, 3, 4, 4)).mean((2, 3))
        out: torch.Tensor = self.wide(torch.tanh(hidden).double()).float() + image
        return out.square().sum()


def sample(step: int, worker: int, piece: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + 10 * worker + piece))


def sums_of_steps(rank: Rank, *, pieces: int, sets_to_none: bool, bucket_bytes: int) -> list[str]:
    """Return where, in three steps, a gradient is not the sum over workers and pieces. Runs in the pool."""
    wrong: list[str] = []
    with joined_shared(rank) as group:
        torch.manual_seed(0)
        model, reference = Net(), Net()
        reference.load_state_dict(model.state_dict())
        exposed: list[float] = []
        gradients = SharedGradients(
            model.parameters(), group, bucket_bytes=bucket_bytes, report_exposed_s=exposed.append
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            optimizer.zero_grad(set_to_none=sets_to_none)
            reference.zero_grad(set_to_none=sets_to_none)
            for piece in range(pieces):
                for worker in range(rank.workers):
                    reference(sample(step, worker, piece), uses_seldom=worker == 0 and step > 0).backward()
            for piece in range(pieces - 1):
                with gradients.accumulating():
                    model(sample(step, rank.index, piece), uses_seldom=rank.index == 0 and step > 0).backward()
            model(sample(step, rank.index, pieces - 1), uses_seldom=rank.index == 0 and step > 0).backward()
            gradients.finish()
            wrong += [f"step {step}: {name}" for name in differing(model, reference, group)]
            optimizer.step()
            reference.load_state_dict(model.state_dict())
        if len(exposed) != 3 or min(exposed) < 0:
            wrong.append(f"exposed {exposed}")
        gradients.close()
    return wrong


def joined_shared(rank: Rank) -> SharedGroup:
    return join(connect(rank, timeout_s=60), index=rank.index, count=rank.workers, timeout_s=60)


def differing(model: nn.Module, reference: nn.Module, group: SharedGroup) -> list[str]:
    """Return the parameters whose gradient is not that of one process, or not the same bits on all workers.

    1e-5 of the largest: float32 sums of some hundred terms in another order.
    """
    names = []
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if ours.grad is None or theirs.grad is None:
            if ours.grad is not theirs.grad:
                names.append(f"{name} is None on one side")
            continue
        rows = torch.empty(group.count, ours.numel(), dtype=ours.dtype)
        group.all_gather(rows, ours.grad.contiguous())
        is_near = torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5 * float(theirs.grad.abs().max()))
        if not is_near or not all(torch.equal(row, rows[0]) for row in rows) or ours.grad.stride() != ours.stride():
            names.append(name)
    return names


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("pieces", [1, 3])
def test_gradients_are_those_of_one_process(ranks: RankPool, workers: int, pieces: int) -> None:
    answers = ranks.run(sums_of_steps, workers=workers, pieces=pieces, sets_to_none=True, bucket_bytes=4000)
    assert answers == [[]] * workers


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_gradients_that_are_zeroed_in_place_stay_where_they_are(ranks: RankPool, bucket_bytes: int) -> None:
    answers = ranks.run(sums_of_steps, workers=2, pieces=2, sets_to_none=False, bucket_bytes=bucket_bytes)
    assert answers == [[]] * 2


def differences_from_gloo(rank: Rank) -> float:
    """Return the largest relative difference of a summed gradient from Gloo's sum of the same. Runs in the pool."""
    store, largest = connect(rank, timeout_s=60), 0.0
    with (
        joined(rank, store, device=CPU, timeout_s=60),
        join(store, index=rank.index, count=rank.workers, timeout_s=60) as group,
    ):
        torch.manual_seed(0)
        plain, model = nn.Linear(300, 200), nn.Linear(300, 200)
        model.load_state_dict(plain.state_dict())
        gradients = SharedGradients(model.parameters(), group, bucket_bytes=1 << 16)
        x = torch.randn(8, 300, generator=torch.Generator().manual_seed(rank.index))
        for net in (plain, model):
            net(x).square().mean().backward()
        gradients.finish()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            dist.all_reduce(theirs.grad)
            largest = max(largest, float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()))
    return largest


def test_sums_are_those_of_gloo(ranks: RankPool) -> None:
    # 1e-6: three float32 terms in another order.
    assert max(ranks.run(differences_from_gloo, workers=3)) < 1e-6


def places_after_a_step(rank: Rank) -> list[int]:
    """Return three layers in the order in which their gradients lie in memory. Runs in the pool."""
    with joined_shared(rank) as group:
        model = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
        gradients = SharedGradients(model.parameters(), group, bucket_bytes=1)
        order = [2, 0, 1]  # backward reaches 1 first, then 0, then 2
        for _ in range(2):
            model.zero_grad()
            x = torch.ones(1, 4)
            for number in order:
                x = model[number](x)
            torch.autograd.backward(x.sum())
            gradients.finish()
        places = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
        return sorted(range(3), key=places.__getitem__)


def test_gradients_lie_in_the_order_in_which_backward_makes_them(ranks: RankPool) -> None:
    assert ranks.run(places_after_a_step, workers=2) == [[1, 0, 2]] * 2


def mistakes(rank: Rank) -> list[str]:
    """Return what two backward passes, and a sparse gradient, are answered with. Runs in the pool."""
    said = []
    with joined_shared(rank) as group:
        model = nn.Linear(4, 4)
        gradients = SharedGradients(model.parameters(), group, bucket_bytes=1)
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(JobError) as twice:
            model(torch.ones(1, 4)).sum().backward()
        said.append(str(twice.value))
        gradients.close()
        table = nn.Embedding(8, 4, sparse=True)
        gradients = SharedGradients(table.parameters(), group, bucket_bytes=1)
        with pytest.raises(JobError) as sparse:
            table(torch.tensor([1])).sum().backward()
        said.append(str(sparse.value))
        gradients.close()
    return said


def test_two_backward_passes_and_sparse_gradients_are_refused(ranks: RankPool) -> None:
    for said in ranks.run(mistakes, workers=2):
        assert "backward ran twice before finish()" in said[0]
        assert "sparse=False" in said[1]
