"""Runs a model's builder with shapes in the place of large tensors, and puts what it does to them on a tape.

1. An operation on tensors that are there runs as ever; a result of more than SMALL_BYTES is dropped at once, a shape
   stands for it, and the operation is noted.
2. An operation on shapes is worked out as a shape. If it makes a storage or writes to one it is noted; if not it is a
   view, of which the shape tells all.
3. A random operation runs on a scratch tensor of the same layout, so that the generator moves as in a plain build.
4. An operation whose result depends on numbers, or that writes them into a tensor that is there, gets them by replay.

Example: `w = torch.empty(1000, 1000); w[0].normal_(); scale = w[0].norm().item()`.
`empty` is dropped and noted; `w[0]` is a view; `normal_` draws 1,000 numbers, is noted and dropped; the norm is noted;
`item` replays `empty`, `normal_` and the norm: 4 MB, for a moment.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.parallel.building.shapes import (
    SET_DATA,
    CannotDefer,
    Shapes,
    builders_attributes,
    cell_of,
    make_cell,
    ref_of,
    written,
)
from shoal.parallel.building.tape import CPU, Note, Ref, count_dropped, leaves, replay
from shoal.profile.torch_private import FakeTensor, TorchDispatchMode, tree_map_only

# 16,384 floats: what code reads back while it builds (rates of a schedule, lengths, masks) is smaller.
SMALL_BYTES = 64 * 1024

# These write every element of their first tensor and read none.
_DRAW = {"normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_"}
_OVERWRITE = _DRAW | {"copy_", "fill_", "zero_"}
# These draw, and read only the layout of their first tensor.
_BLIND = _DRAW | {"rand_like", "randn_like", "randint_like"}
# The result is a Python number, or has a shape that depends on numbers.
_LOOKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_REFUSED = (Tensor.__reduce_ex__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.share_memory_)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a build. `generators` holds those it drew from, with the state they were found in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generators: dict[torch.Generator, Tensor] = {}
        self.shapes = Shapes()
        self._numbers = itertools.count()
        self._is_paused = False

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Record what is done inside. Raises CannotDefer at the end also where the builder caught it."""
        with _Reads(self), self:
            yield
        if self.shapes.refused:
            raise CannotDefer(self.shapes.refused)

    def numbers(self, shape: FakeTensor) -> Tensor:
        """Return the numbers that a plain build would have in `shape` now."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            return replay(ref_of(shape))
        finally:
            self._is_paused = was_paused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            return CPU
        with self.shapes.remember_refusal():
            if self._must_compute(func, args, kwargs):
                return self._compute(func, args, kwargs)
            try:
                return self._imagine(func, args, kwargs)
            except Exception as error:
                if torch.Tag.inplace_view in func.tags:
                    raise CannotDefer(f"{func}: {error}") from error
                return self._compute(func, args, kwargs)  # a kernel without a rule for its shape, or its true error

    def _must_compute(self, func: Any, args: Any, kwargs: Any) -> bool:
        return (
            not leaves(FakeTensor, (args, kwargs))
            or _is_random(func)
            or any(tag in func.tags for tag in _LOOKS)
            or any(not isinstance(tensor, FakeTensor) for tensor in written(func, args, kwargs))
        )

    def _imagine(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result as shapes, noted unless it is a view."""
        with self.shapes.recorded():
            shaped_args, shaped_kwargs = tree_map_only(Tensor, _as_shape, (args, kwargs))
            result = func(*shaped_args, **shaped_kwargs)
        if any(tensor.device != CPU or tensor.layout != torch.strided for tensor in leaves(Tensor, result)):
            raise CannotDefer(f"{func} gives a tensor that is not an ordinary one on the CPU")
        if torch.Tag.inplace_view not in func.tags:
            self._note(func, args, kwargs, result)
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of running `func` on numbers, with shapes, noted, for large tensors."""
        state = self._random_state(args, kwargs) if _is_random(func) else None
        shapes: list[FakeTensor] = leaves(FakeTensor, (args, kwargs))
        is_blind = func.overloadpacket.__name__ in _BLIND and len(shapes) == 1 and shapes[0] is args[0]
        found = {id(shape): _scratch(shape) if is_blind else self.numbers(shape) for shape in shapes}
        real_args, real_kwargs = tree_map_only(FakeTensor, lambda shape: found[id(shape)], (args, kwargs))
        computed = func(*real_args, **real_kwargs)
        given = {id(_storage(tensor)) for tensor in leaves(Tensor, (real_args, real_kwargs))}
        copied = {id(_storage(tensor)) for tensor in found.values()}
        shape_of = {id(found[id(shape)]): shape for shape in shapes}

        def kept(tensor: Tensor) -> Tensor:
            if id(tensor) in shape_of:
                return shape_of[id(tensor)]
            if id(_storage(tensor)) in copied:
                raise CannotDefer(f"{func} gives a view of a tensor whose numbers are not there")
            is_new = tensor.layout == torch.strided and id(_storage(tensor)) not in given and not tensor.is_meta
            return self.shapes.like(tensor) if is_new and tensor.untyped_storage().nbytes() > SMALL_BYTES else tensor

        result = tree_map_only(Tensor, kept, computed)
        count_dropped(sum(tensor.untyped_storage().nbytes() for tensor in leaves(FakeTensor, result)))
        self._note(func, args, kwargs, result, state)
        return result

    def _random_state(self, args: Any, kwargs: Any) -> Tensor:
        generator = next(iter(leaves(torch.Generator, (args, kwargs))), torch.default_generator)
        state = generator.get_state()
        self.generators.setdefault(generator, state)
        return state

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, state: Tensor | None = None) -> None:
        """Put the operation on the tape if it made a storage or wrote to one."""
        results = leaves(Tensor, result)
        made = [isinstance(tensor, FakeTensor) and cell_of(tensor) is None for tensor in results]
        targets = written(func, args, kwargs)
        if not any(made) and not any(isinstance(tensor, FakeTensor) for tensor in targets):
            return
        if not all(isinstance(tensor, FakeTensor) for tensor in targets):
            raise CannotDefer(f"{func} writes to large and to small tensors at once")
        taken_args, taken_kwargs = tree_map_only(Tensor, _frozen, (args, kwargs))
        note = Note(next(self._numbers), func, taken_args, taken_kwargs, state, torch.get_default_dtype())
        refs = leaves(Ref, (taken_args, taken_kwargs))
        note.needs = [ref.writer for ref in (refs[1:] if _overwrites(func, args) else refs)]
        for tensor, is_new in zip(results, made, strict=True):
            if is_new and cell_of(tensor) is None:
                make_cell(tensor, note)
        note.makes = [ref_of(tensor) if is_new else None for tensor, is_new in zip(results, made, strict=True)]
        for tensor in targets:
            ref_of(tensor).cell.writer = note


class _Reads(TorchFunctionMode):
    """Sees the few ways to a tensor's numbers that are not operations."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self._recorder.shapes.remember_refusal():
            if args and isinstance(args[0], FakeTensor):
                if func in _READS:
                    return _read_only(func(self._recorder.numbers(args[0]), *args[1:], **kwargs))
                if func in _REFUSED:
                    raise CannotDefer(f"model() calls {func.__name__} on a tensor of {tuple(args[0].shape)}")
                if func is Tensor.__deepcopy__:
                    return _deep_copy(*args)
            if func == SET_DATA and isinstance(args[0], FakeTensor) != isinstance(args[1], FakeTensor):
                raise CannotDefer("model() sets the .data of a tensor to one of another size or from elsewhere")
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


def _as_shape(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _scratch(shape: Tensor) -> Tensor:
    return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=CPU)


def _frozen(tensor: Tensor) -> Ref | Tensor:
    """Return what a note keeps of a tensor: a small one may be written to later, so a copy of its numbers."""
    return ref_of(tensor) if isinstance(tensor, FakeTensor) else tensor.detach().clone()


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _overwrites(func: Any, args: Any) -> bool:
    """Return whether `func` writes every byte of the storage of its first argument, and reads none."""
    if func.overloadpacket.__name__ not in _OVERWRITE or not isinstance(args[0], FakeTensor):
        return False
    return args[0].numel() * args[0].element_size() == args[0].untyped_storage().nbytes()


def _read_only(numbers: Any) -> Any:
    """Return `numbers`; an array that refuses writes, which the tape would not see."""
    if hasattr(numbers, "setflags"):
        numbers.setflags(write=False)
    return numbers


def _deep_copy(shape: FakeTensor, memo: dict[int, Any]) -> Any:
    """Return what copy.deepcopy gives: one copy for one tensor, a parameter for a parameter."""
    if id(shape) not in memo:
        copied: Tensor = shape.detach().clone()
        if isinstance(shape, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=shape.requires_grad)
        else:
            copied.requires_grad_(shape.requires_grad)
            vars(copied).update(builders_attributes(shape))
        memo[id(shape)] = copied
    return memo[id(shape)]
