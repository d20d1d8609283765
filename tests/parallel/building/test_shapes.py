"""What a deferred build needs of torch's private parts, and what it does with memory.

When torch moves a private part, one of the first tests says which need is no longer met.
"""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.core.errors import JobError
from shoal.parallel.building.deferred import build_deferred
from shoal.parallel.building.shapes import SET_DATA, Shapes, written
from shoal.profile.torch_private import FakeTensor, TorchDispatchMode, tree_map_only
from tests.parallel.building.plain_build import SEED, named_tensors


def test_what_is_put_on_a_storage_is_seen_by_every_view_and_stays() -> None:
    shapes = Shapes()
    tensor = shapes.like(torch.empty(10, 20))
    vars(tensor.untyped_storage())["cell"] = "mark"
    with shapes.recorded():
        view = tensor.detach().t()[3]
    del tensor
    gc.collect()
    assert vars(view.untyped_storage())["cell"] == "mark"


def test_a_shape_has_no_address_and_no_weak_references() -> None:
    tensor = Shapes().like(torch.empty(11, 22))
    with pytest.raises(RuntimeError, match="data pointer"):
        tensor.untyped_storage().data_ptr()
    assert weakref.getweakrefcount(tensor) == 0


def test_a_shape_says_that_it_is_on_the_processor() -> None:
    tensor = Shapes().like(torch.empty(10, 20))
    assert (tensor.device.type, tensor.is_meta, tensor.is_cpu) == ("cpu", False, True)


def test_setting_data_is_seen_by_a_function_mode() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor, other = torch.zeros(2), torch.ones(2)
    with Watch():
        tensor.data = other
    assert seen == [SET_DATA]


def test_operations_say_what_they_write_to() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    aten = torch.ops.aten
    assert [t is a for t in written(aten.add_.Tensor, (a, b), {})] == [True]
    assert [t is a for t in written(aten.add.out, (b, b), {"out": a})] == [True]
    assert written(aten.add.Tensor, (a, b), {}) == []


def test_every_operation_that_takes_a_generator_is_marked_as_random() -> None:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    operations = [
        getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()
    ]
    takers = [op for op in operations if any("Generator" in str(argument.type) for argument in op._schema.arguments)]
    assert torch.ops.aten.normal_.default in takers
    assert [op for op in takers if torch.Tag.nondeterministic_seeded not in op.tags] == []


def test_nobody_but_the_recorder_works_with_shapes() -> None:
    kept: list[Tensor] = []

    def build() -> nn.Module:
        kept.append(torch.rand(200, 200))
        return nn.Linear(200, 200)

    assert not build_deferred(build, seed=SEED).is_whole
    with pytest.raises(JobError, match=r"aten.add.Tensor takes a tensor that model\(\) made"):
        kept[0] + 1


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors with numbers that are alive after each operation, and keeps the most."""

    peak_bytes = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, lambda tensor: self.alive.append(weakref.ref(tensor)), result)
        tensors = [t for ref in self.alive if (t := ref()) is not None and not isinstance(t, FakeTensor)]
        storages = {
            id(storage): storage.nbytes() for t in tensors if (storage := t.untyped_storage()) and not t.is_meta
        }
        self.peak_bytes = max(self.peak_bytes, sum(storages.values()))
        self.alive = [ref for ref in self.alive if ref() is not None]
        return result


def forty_layers() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(40)))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.02)  # type: ignore[arg-type]
    return model


def test_building_and_asking_hold_one_tensor_at_a_time() -> None:
    with LiveBytes() as counter:
        deferred = build_deferred(forty_layers, seed=SEED)
    # One scratch tensor of 4 MiB, and 40 biases of 4 KiB; a plain build holds 160 MiB.
    assert 4 * 2**20 <= counter.peak_bytes < 5 * 2**20
    with LiveBytes() as counter:
        deferred.real("7.weight")
        deferred.real("39.weight")
    assert 4 * 2**20 <= counter.peak_bytes < 5 * 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts memory as Linux does")
def test_memory_of_tensors_that_were_dropped_goes_back_to_the_system() -> None:
    build_deferred(lambda: nn.Linear(300, 300), seed=SEED)  # loads what the first call loads
    before_bytes = resident_bytes()
    deferred = build_deferred(forty_layers, seed=SEED)
    for name in named_tensors(deferred.model):
        deferred.real(name)
    # Up to DROPPED_BYTES (32 MiB) may wait to be given back, and as much again for what Python has taken.
    assert resident_bytes() - before_bytes < 64 * 2**20
