"""Linear layers that write their gradients where they are wanted: the bits of torch, and the memory asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.sync.direct import DirectLinear
from shoal.sync.torch_private import packs_saved_tensors


class Places:
    """A place for the gradient of each weight, given once until it is put back."""

    def __init__(self, model: nn.Module) -> None:
        self.views = {id(p): torch.full_like(p, 7.0) for p in model.parameters()}
        self.given: set[int] = set()
        self.mode = DirectLinear(model, {key: self._giver(key) for key in self.views})

    def _giver(self, key: int) -> Callable[[], Tensor | None]:
        def give() -> Tensor | None:
            if key in self.given:
                return None
            self.given.add(key)
            return self.views[key].view_as(self.views[key])

        return give


class Net(nn.Module):
    def __init__(self, *, again: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 12, bias=False)
        self._again, self._reentrant = again, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self._again:
            x = x.detach().requires_grad_()
            return checkpoint(self._block, x, use_reentrant=self._reentrant)  # type: ignore[no-any-return]
        return self._block(x)

    def _block(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def gradients(model: nn.Module, x: Tensor, mode: Any = None) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    if mode is None:
        model(x).square().sum().backward()
    else:
        with mode:
            loss = model(x).square().sum()
        torch.autograd.backward(loss)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("shape", [(5, 12), (3, 5, 12), (2, 3, 5, 12)])
def test_gradients_have_torchs_bits_and_lie_in_their_places(shape: tuple[int, ...]) -> None:
    model, x = Net(), torch.randn(shape)
    expected = [gradient.clone() for gradient in gradients(model, x)]
    places = Places(model)
    found = gradients(model, x, places.mode)
    assert all(map(torch.equal, found, expected))
    weights = [model.first.weight, model.second.weight]
    for weight in weights:
        assert weight.grad is not None
        assert weight.grad.data_ptr() == places.views[id(weight)].data_ptr()
    assert places.given == set(map(id, weights))


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_compute_their_forward_again_are_left_to_torch(reentrant: bool) -> None:
    model, x = Net(again=True, reentrant=reentrant), torch.randn(5, 12)
    expected = [gradient.clone() for gradient in gradients(model, x)]
    places = Places(model)
    assert all(map(torch.equal, gradients(model, x, places.mode), expected))
    assert not places.given


def test_torch_still_says_whether_hooks_pack_what_is_saved() -> None:
    assert not packs_saved_tensors()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert packs_saved_tensors()
    assert not packs_saved_tensors()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))  # type: ignore[no-any-return]


def test_a_weight_that_is_used_twice_gets_the_sum() -> None:
    model, x = Tied(), torch.randn(5, 12)
    expected = [gradient.clone() for gradient in gradients(model, x)]
    assert all(map(torch.equal, gradients(model, x, Places(model).mode), expected))


def test_gradients_can_themselves_be_differentiated() -> None:
    def penalty(model: nn.Module, x: Tensor, mode: Any) -> list[Tensor]:
        with mode:
            (of_x,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            torch.autograd.backward(of_x.square().sum())
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    x = torch.randn(5, 12, requires_grad=True)
    expected = penalty(Net(), x, torch.enable_grad())
    model = Net()
    found = penalty(model, x, Places(model).mode)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)  # float32, another order of sums


def test_other_weights_other_dtypes_and_evaluation_are_left_alone() -> None:
    model = Net()
    places = Places(model)
    x = torch.randn(5, 12)
    with places.mode, torch.no_grad():
        assert torch.equal(model(x), F.linear(torch.tanh(model.first(x)), model.second.weight))
    with places.mode, torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(x)
    assert low.dtype == torch.bfloat16
    low.sum().backward()
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    gradients(model, x, places.mode)
    assert places.given == {id(model.second.weight)}


def test_layers_that_are_not_plainly_torchs_are_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.doubled, self.own, self.normed = Doubled(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.own.forward = lambda x: -x * self.own.weight.sum()  # type: ignore[method-assign, assignment]
            nn.utils.parametrizations.weight_norm(self.normed)

        def forward(self, x: Tensor) -> Tensor:
            return self.normed(self.own(self.doubled(x)))  # type: ignore[no-any-return]

    model, x = Mixed(), torch.randn(5, 3)
    expected = [gradient.clone() for gradient in gradients(model, x)]
    places = Places(model)
    assert all(map(torch.equal, gradients(model, x, places.mode), expected))
    assert not places.given
    assert "forward" in vars(model.own)


def test_outside_the_block_a_layer_is_as_it_was() -> None:
    model = Net()
    before = {name: dict(vars(layer)) for name, layer in model.named_modules()}
    with pytest.raises(ValueError, match="amiss"), Places(model).mode:
        raise ValueError("amiss")
    assert {name: dict(vars(layer)) for name, layer in model.named_modules()} == before


@pytest.mark.parametrize("part", ["whole", "layer"])
def test_what_torch_compiles_keeps_the_backward_that_torch_makes_for_it(part: str) -> None:
    model, x = Net(), torch.randn(5, 12)
    expected = [gradient.clone() for gradient in gradients(model, x)]
    places = Places(model)
    if part == "whole":
        run: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        model.first.compile(backend="aot_eager", fullgraph=True)
        run = model
    with places.mode:
        loss = run(x).square().sum()
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True) if one is not None)
    assert places.given == (set() if part == "whole" else {id(model.second.weight)})
