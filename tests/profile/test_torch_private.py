"""What tracing needs of torch's private parts. When torch moves them, these tests say which need is no longer met."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shoal.profile.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    cpu_kernels_replaced,
    tree_map_only,
    without_autocast,
)


def test_a_module_built_in_fake_mode_has_fake_parameters_with_their_sizes() -> None:
    with FakeTensorMode():
        model = nn.Linear(1000, 1000)
    assert isinstance(model.weight, FakeTensor)
    assert model.weight.untyped_storage().nbytes() == 4_000_000


def test_a_real_module_can_be_copied_to_fake_tensors() -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, FakeCopyMode(fake):
        assert isinstance(copy.deepcopy(nn.Linear(2, 2)).weight, FakeTensor)


def test_a_real_tensor_becomes_fake_with_its_shape() -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    batch = tree_map_only(torch.Tensor, fake.from_tensor, {"x": torch.ones(3, 4), "n": 5})
    assert isinstance(batch["x"], FakeTensor)
    assert batch["x"].shape == (3, 4)
    assert batch["n"] == 5


def test_asking_for_a_value_raises_and_names_the_operation() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException) as raised:
        torch.ones(3).sum().item()
    assert "_local_scalar_dense" in str(raised.value.func)
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        torch.ones(3).nonzero()


def test_a_dispatch_mode_sees_forward_and_backward_with_their_overloads() -> None:
    seen = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2, requires_grad=True)
    with Watch():  # type: ignore[no-untyped-call]
        (x @ x).sum().backward()  # type: ignore[no-untyped-call]
    assert seen.count("mm") == 3


def test_a_storage_keeps_its_identity_and_can_be_watched_until_it_dies() -> None:
    with FakeTensorMode():
        tensor = torch.ones(4)
        died = []
        watch = weakref.ref(tensor.untyped_storage(), lambda _: died.append(True))
        assert watch() is tensor.view(2, 2).untyped_storage()
        del tensor
    assert died == [True]


def test_a_cpu_kernel_can_be_replaced_for_a_while() -> None:
    with cpu_kernels_replaced({"dropout": lambda tensor, *_: tensor + 1}, key="AutogradCPU"):
        assert torch.nn.functional.dropout(torch.zeros(3)).tolist() == [1, 1, 1]
    assert torch.nn.functional.dropout(torch.zeros(3)).tolist() == [0, 0, 0]


def test_autocast_can_be_left_out_inside_its_own_kernels() -> None:
    with torch.autocast("cpu", torch.bfloat16), without_autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
