"""A model without its memory: its shapes now, and any one tensor's numbers when somebody asks for them.

1. The builder runs under a recorder (record.py): large tensors are shapes, and what makes their numbers goes on a tape.
   Random numbers are drawn and dropped, so that each draw comes out as in a plain build.
2. Every parameter and buffer becomes a meta tensor. Kept are the numbers of the small ones, and of each large one the
   notes that it rests on (tape.py).
3. `real` replays them.

Example: 40 layers of 4 MB. Building, and then `real("layers.7.weight")`, each use about 4 MB at a time, not 160. The
weight is bit for bit that of `torch.manual_seed(seed); model = build()`, and the generator is where that leaves it.

A builder that cannot be followed is called once more, from the same random states, and builds the whole model.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.core.errors import JobError
from shoal.parallel.building.record import SMALL_BYTES, Recorder
from shoal.parallel.building.shapes import CannotDefer, builders_attributes, ref_of
from shoal.parallel.building.tape import CPU, Ref, leaves, needed, replay
from shoal.profile.torch_private import FakeTensor, tree_map_only

# Large tensors that torch did not compute (from NumPy, from a file) have no recipe. Up to this much is simply kept.
HELD_BYTES = 64 * 1024**2


class Deferred:
    """A built model: `model` has every parameter and buffer on the meta device, `real` gives their numbers one by one.

    `why_whole` is empty, or the reason why this worker has held the whole model and still keeps its numbers.
    """

    def __init__(self, model: nn.Module, *, why_whole: str = "") -> None:
        self._numbers = {name: _numbers_of(name, tensor) for name, tensor in _named_tensors(model)}
        held_bytes = _held_bytes(self._numbers)
        if held_bytes > HELD_BYTES and not why_whole:
            why_whole = f"{held_bytes / 1e6:,.0f} MB of its numbers come from NumPy, a file or a list, not from torch"
        self.why_whole = why_whole
        _empty(model)
        self.model = model

    @property
    def is_whole(self) -> bool:
        """Return whether this worker has held the whole model."""
        return bool(self.why_whole)

    def real(self, name: str) -> Tensor:
        """Return the numbers of the parameter or buffer `name`, by any of its names, in a CPU tensor of their own."""
        numbers = self._numbers[name]
        if isinstance(numbers, Tensor):
            return numbers.to(CPU, copy=True)
        tensor = replay(numbers)
        has_all = tensor.numel() * tensor.element_size() == numbers.cell.num_bytes
        return tensor if has_all else tensor.clone()


def build_deferred(build: Callable[[], nn.Module], *, seed: int) -> Deferred:
    """Return the model of `torch.manual_seed(seed); build()` without its memory.

    The random generators of torch, NumPy and Python are then where that leaves them. What `build` itself raises, it
    raises here.
    """
    put_back = _random_states()
    recorder = Recorder()
    torch.manual_seed(seed)
    try:
        with recorder.follow():
            model = build()
        return Deferred(model)
    except Exception as error:  # anything: what a builder does with a tensor that is not there is its own affair
        why_whole = _first_line(error)
    put_back()
    for generator, state in recorder.generators.items():
        generator.set_state(state)
    torch.manual_seed(seed)
    return Deferred(build(), why_whole=why_whole)


def _first_line(error: Exception) -> str:
    """Return what `error` says, without the pages that torch may add."""
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, CannotDefer) else f"{type(error).__name__}: {line}"


def _random_states() -> Callable[[], None]:
    """Return a function that puts NumPy's and Python's generators and torch's defaults back to what they are now."""
    python, array, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_default_dtype(dtype)

    return put_back


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _numbers_of(name: str, tensor: Tensor) -> Ref | Tensor:
    """Return what `real` needs for `tensor`."""
    if isinstance(tensor, FakeTensor):
        return ref_of(tensor)
    if is_lazy(tensor) or tensor.device.type == "meta":
        raise JobError(f"{name!r} has no numbers when model() returns. Give its layer all sizes; build it on the CPU.")
    return tensor.detach()


def _held_bytes(numbers: dict[str, Ref | Tensor]) -> int:
    """Return the bytes of the large tensors that are kept as they are, because no operation makes them."""
    refs = [ref for ref in numbers.values() if isinstance(ref, Ref)]
    kept = leaves(Tensor, [(note.args, note.kwargs) for note in needed(refs)])
    kept += [tensor for tensor in numbers.values() if isinstance(tensor, Tensor)]
    bytes_at = {t.data_ptr(): t.nbytes for t in kept if t.layout == torch.strided}  # tied ones once
    return sum(num_bytes for num_bytes in bytes_at.values() if num_bytes > SMALL_BYTES)


def _empty(model: nn.Module) -> None:
    """Put a meta tensor in the place of every parameter and buffer, and numbers into what is neither."""
    settled: dict[int, tuple[Tensor, Tensor]] = {}  # the old tensor, kept so that its id stays taken, and the new

    def settle(tensor: Tensor, new: Callable[[Tensor], Tensor]) -> Tensor:
        if id(tensor) not in settled:
            settled[id(tensor)] = tensor, new(tensor)
        return settled[id(tensor)][1]

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, settle(parameter, _meta))  # not _parameters: an RNN also keeps a list of its own
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            module._buffers[name] = settle(buffer, _meta)
    for module in model.modules():
        for name, value in vars(module).items():
            new = tree_map_only(Tensor, lambda tensor: settle(tensor, _filled), value)
            if any(old is not now for old, now in zip(leaves(Tensor, value), leaves(Tensor, new), strict=True)):
                vars(module)[name] = new


def _filled(tensor: Tensor) -> Tensor:
    return replay(ref_of(tensor)).clone() if isinstance(tensor, FakeTensor) else tensor


def _meta(tensor: Tensor) -> Tensor:
    """Return `tensor` on the meta device, with its layout and the attributes that the builder gave it."""
    if tensor.layout == torch.strided:
        meta: Any = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    else:
        meta = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
    else:
        meta.requires_grad_(tensor.requires_grad)
    vars(meta).update(builders_attributes(tensor))
    return meta  # type: ignore[no-any-return]
