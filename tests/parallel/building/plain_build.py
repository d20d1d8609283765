"""A deferred model held against the plain build: always torch.equal, never a tolerance."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.parallel.building.deferred import Deferred, build_deferred

SEED = 3


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


def built_plainly(build: Callable[[], nn.Module]) -> nn.Module:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(SEED)
    return build()


def built_deferred(build: Callable[[], nn.Module]) -> Deferred:
    random.seed(5)
    np.random.seed(5)
    return build_deferred(build, seed=SEED)


def holders(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Return the names that stand for one tensor each, together."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return sorted(names.values())


def assert_same_as_plain(build: Callable[[], nn.Module]) -> Deferred:
    """Hold names, kinds, ties, numbers and random states against those of the plain build."""
    plain = built_plainly(build)
    states_after = states()
    deferred = built_deferred(build)
    assert states() == states_after
    expected, found = named_tensors(plain), named_tensors(deferred.model)
    assert holders(found) == holders(expected)
    assert list(deferred.model.state_dict()) == list(plain.state_dict())
    for name in [*reversed(expected), *expected]:  # in two orders, and twice
        want, meta, real = expected[name], found[name], deferred.real(name)
        assert (meta.device.type, real.device.type) == ("meta", "cpu")
        assert (type(meta), meta.requires_grad, meta.stride()) == (type(want), want.requires_grad, want.stride()), name
        assert meta.dtype == real.dtype == want.dtype, name
        assert torch.equal(real, want), name
    assert states() == states_after
    return deferred
