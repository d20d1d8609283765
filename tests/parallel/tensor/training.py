"""Training a model divided, and training it plainly, and how far the two are apart."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.parallel.tensor.divide import Division, apply_tensor, finish_gradients, tensor_context
from shoal.parallel.tensor.plan import find_tensor_plan
from tests.parallel.tensor.models import CASES

STEPS, RATE = 2, 0.1
TOLERANCE = 1e-5
"""float32 sums of up to 4096 numbers in another order: 1e-6 or so of the largest, and two steps of them."""

Loss = Callable[[nn.Module, int], Tensor]
Trained = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


@contextmanager
def mesh_of(rank: Rank, **axes: int) -> Iterator[DeviceMesh]:
    with joined(rank, connect(rank, timeout_s=60.0), device=torch.device("cpu"), timeout_s=60.0):
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def built(case: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case].build()


def divided(case: str, mesh: DeviceMesh, *, sequence: bool = False) -> tuple[nn.Module, Division]:
    model = built(case)
    plan = find_tensor_plan(model, tensor=mesh.size())
    return model, apply_tensor(model, mesh, plan, sequence=sequence)


def whole(division: Division, name: str, tensor: Tensor) -> Tensor:
    """Return the whole of a parameter or gradient, gathered from all workers."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    gathered: Tensor = tensor.full_tensor().detach()
    how = division.cuts.get(name)
    return gathered if how is None else division.whole_of(name, list(gathered.chunk(division.count, how.dim)))


def trained(model: nn.Module, loss: Loss, division: Division | None = None) -> Trained:
    """Return the losses of STEPS steps of SGD, the gradients of the first, and the parameters after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    read = partial(whole, division or Division(0, 1, {}))
    losses, gradients = [], {}
    with tensor_context():
        for step in range(STEPS):
            optimizer.zero_grad()
            value = loss(model, step)
            torch.autograd.backward(value)
            finish_gradients(model)
            losses.append(value.item())
            if step == 0:
                gradients = {name: read(name, p.grad) for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
        return losses, gradients, {name: read(name, p) for name, p in model.named_parameters()}


def largest_difference(ours: Trained, reference: Trained) -> tuple[float, str]:
    """Return the largest difference, relative to the largest number of a tensor, and where it is."""
    pairs = zip(ours[0], reference[0], strict=True)
    worst = max((abs(a - b) / abs(b), f"loss {step}") for step, (a, b) in enumerate(pairs))
    for kind, index in (("gradient", 1), ("parameter", 2)):
        mine: Any = ours[index]
        theirs: Any = reference[index]
        assert mine.keys() == theirs.keys()
        # What should be nothing, as a gradient of keys' biases, is noise of the size of its neighbours' last digits.
        least = max(tensor.abs().max().item() for tensor in theirs.values()) / 100
        for name, tensor in theirs.items():
            assert mine[name].shape == tensor.shape, name
            scale = max(tensor.abs().max().item(), least)
            worst = max(worst, ((mine[name] - tensor).abs().max().item() / scale, f"{kind} of {name}"))
    return worst
