"""What a block does with its projections, seen by running it once on fake tensors: which of them are packed.

1. A fake copy of the model runs: as the caller says, or as Hugging Face's own stand-in inputs say, or, if none of it
   runs, each block alone on [2, 16, width].
2. The output of each linear is followed through views, casts and clamps to the first function that takes it apart:
   chunk, split and slices of its last dim tell the sections; a view that puts 3 in front of the heads tells 3 of them.
3. What goes into an autograd function of the user's own is left alone: its backward would see one worker's part.
4. A projection on which nothing of this is seen is not packed: its output is divided as one range.

Example: split([64, 16, 16], dim=-1) of an output of 96 gives the sections (64, 16, 16).
"""

import contextlib
import copy
import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.parallel.tensor.shapes import SPLITS, VIEWS, asked_pieces, asked_shape
from shoal.parallel.tensor.torch_private import METADATA
from shoal.profile.sample import process_untouched
from shoal.profile.torch_private import FakeTensorMode
from shoal.profile.transformers_private import on_fake_tensors

Sample = Callable[[nn.Module], Any]
_KEEPS = frozenset({"contiguous", "clone", "to", "float", "bfloat16", "half", "clamp", "clip", "type_as", "dropout"})


class SectionWatch(TorchFunctionMode):
    """Follows outputs that are marked, until they are taken apart; `sections` has what was seen, by name."""

    def __init__(self, heads: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.sections: dict[str, tuple[int, ...]] = {}
        self._heads = heads
        self._marked: dict[int, tuple[str, int, int, Tensor]] = {}  # of name, dim, units a number; kept alive
        self._slices: dict[str, set[tuple[int, int]]] = {}
        self._whole: set[str] = set()

    def mark(self, name: str, output: Any) -> None:
        """Follow `output`, which the linear `name` has made."""
        if isinstance(output, Tensor):
            self._marked[id(output)] = (name, output.ndim - 1, 1, output)

    def keep_whole(self, tensors: Iterable[Any]) -> None:
        """Take no sections for what made `tensors`."""
        self._whole |= {self._marked[id(tensor)][0] for tensor in tensors if id(tensor) in self._marked}

    def found(self) -> dict[str, tuple[int, ...]]:
        """Return the sections that were seen, by the names of the linears; layers of one name have the same."""
        alike = {_without_numbers(name): sections for name, sections in self.sections.items()}
        whole = {_without_numbers(name) for name in self._whole}
        return {
            name: alike[key] for name in self._heads if (key := _without_numbers(name)) in alike and key not in whole
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in METADATA and args and id(args[0]) in self._marked:
            self._see(func, args, kwargs, result)
        return result

    def _see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensor = args[0]
        name, dim, unit, _ = self._marked[id(tensor)]
        if func in VIEWS:
            shape = asked_shape(func, tensor.shape, args[1:], kwargs)
            if shape is not None:
                self._see_view(tensor, shape, result)
        elif func in SPLITS:
            pieces = asked_pieces(func, tensor.shape, args[1:], kwargs, dim)
            if pieces:
                self._see_pieces(name, pieces, tensor.shape[dim], unit)
        elif getattr(func, "__name__", "") in _KEEPS and isinstance(result, Tensor):
            self._marked[id(result)] = (name, dim, unit, result)

    def _see_view(self, tensor: Tensor, new: Sequence[int], result: Tensor) -> None:
        """A view puts sections in front of the heads, (3, heads, size), or shows heads, of which some are keys."""
        name, dim, unit, _ = self._marked[id(tensor)]
        old = tensor.shape
        outer = math.prod(old[:dim])
        for index, size in enumerate(new):
            if math.prod(new[:index]) != outer or size == 1:
                continue
            rest = math.prod(old[dim:]) // size
            if index + 2 < len(new) and new[index + 1] in self._heads.get(name, ()) and size in (2, 3, 4):
                self.sections.setdefault(name, (rest * unit // math.prod(old[dim + 1 :]),) * size)
            else:
                self._marked[id(result)] = (name, index, unit * old[dim] // size, result)
            return

    def _see_pieces(self, name: str, pieces: list[tuple[int, int]], size: int, unit: int) -> None:
        """Pieces that together are the whole are its sections; slices come one after the other."""
        seen = self._slices.setdefault(name, set())
        seen.update((start * unit, stop * unit) for start, stop in pieces)
        ends = sorted(seen)
        covers = [0, *(stop for _, stop in ends)] == [*(start for start, _ in ends), size * unit]
        if covers and len(ends) > 1:
            self.sections.setdefault(name, tuple(stop - start for start, stop in ends))


def watch_sections(
    model: nn.Module, *, heads: Mapping[str, Sequence[int]], blocks: Mapping[str, int], sample: Sample | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the sections of those linears that are packed.

    `heads` are the names of the linears and the numbers of heads near each; `blocks` the names of blocks and the width
    of what they take.
    """
    watch = SectionWatch(heads)
    with process_untouched(), on_fake_tensors(), torch.no_grad():
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        twin = _fake_copy(model, fake)
        for name in heads:
            twin.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: watch.mark(name, out))
        with fake, watch, _seen_by(watch):
            if not _runs(sample or _stand_in, twin):
                for name, width in blocks.items():
                    _runs(functools.partial(_alone, name, width), twin)
    return watch.found()


@contextlib.contextmanager
def _seen_by(watch: SectionWatch) -> Iterator[None]:
    """Let `watch` see what goes into autograd functions, and keep quiet about what fake tensors cannot do."""
    original: Any = torch.autograd.Function.apply
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        watch.keep_whole(args)
        return original.__func__(cls, *args, **kwargs)

    disabled, log.disabled = log.disabled, True
    try:
        with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
            yield
    finally:
        log.disabled = disabled


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _fake_copy(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Return a copy of `model` whose tensors are fake ones on the CPU, wherever they are: masks fail on meta."""
    copies: dict[int, Any] = {}
    with fake:
        for tensor in [*model.parameters(), *model.buffers()]:
            like = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if is_parameter else like
        return copy.deepcopy(model, copies)


def _stand_in(model: nn.Module) -> Any:
    inputs: Any = getattr(model, "dummy_inputs", None)
    if inputs is None:
        raise TypeError("the model has no stand-in inputs")
    return model(**inputs)


def _alone(name: str, width: int, model: nn.Module) -> Any:
    return model.get_submodule(name)(torch.empty(2, 16, width))


def _runs(sample: Sample, model: nn.Module) -> bool:
    with contextlib.suppress(Exception):  # whatever it is: the next way of running it is tried, or none was needed
        sample(model)
        return True
    return False
