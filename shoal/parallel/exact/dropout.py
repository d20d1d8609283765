"""Dropout that drops the same elements of the same sample, however the global batch is cut into workers.

1. A random number is a pure function of (seed, step, sample, layer, which call of the layer, which draw within that
   call, element within the sample): draws.py. Nothing depends on what else has been drawn, or where.
2. Functions that draw are met in a TorchFunctionMode, and computed with these numbers: random_functions.py. An element
   is kept when its number, read as a signed one, is below (1 - p) * 2**32 - 2**31.
3. Hooks say which layer runs: the innermost, or outside of all of them the one that ended last. A recomputed layer
   begins anew, and so draws the same; `checkpoint_contexts` gives it the step and samples of its own forward pass.
4. Samples are told apart along the batch dim: dim 0 if it has a row, or an equal number of rows, for each sample; dim 1
   in sequence-first tensors. A tensor without a batch dim is drawn alike on every worker, and so is a parameter.

Example: a batch holds samples 40, 41, 42, 43. One process draws for a tensor [4, 128, 768]; of two workers the second
draws for [2, 128, 768] with samples 42 and 43, and its element [0, 5, 6] is number 5 * 768 + 6 of sample 42, as the
element [2, 5, 6] is in the one process.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.module_tracker import ModuleTracker

from shoal.core.errors import JobError
from shoal.parallel.exact.draws import draw, key, key_of_draw, tensor_of_keys
from shoal.parallel.exact.handed_on import is_parameter
from shoal.parallel.exact.random_functions import DRAWING, OPENED


@dataclass
class _LayerCall:
    """One forward pass of a layer: the layer's key, the number of the call, and how often it drew."""

    key: Tensor
    number: int = 0
    draws: int = 0


@dataclass
class _Place:
    """Where in the training the model runs: the keys of the samples, and the layers that have begun."""

    keys: Tensor
    ended: _LayerCall
    running: list[_LayerCall] = field(default_factory=list)
    is_recomputed: bool = False

    def copy(self) -> "_Place":
        return replace(self, running=[replace(call) for call in self.running], ended=replace(self.ended))


class _Layer:
    """The hooks of one layer. Its key is a tensor: by a name or a number, each layer would be compiled by itself."""

    def __init__(self, dropout: "ExactDropout", key: Tensor) -> None:
        self._dropout = dropout
        self.key = key
        self.calls = 0

    def begin(self, *_: Any) -> None:
        """Count a call of the layer's forward, and let it be the layer that runs."""
        place, number = self._dropout.place, self.calls
        if self._dropout.is_in_backward() and not place.is_recomputed:  # a checkpoint of the model's: last call first
            number = self.calls = max(number - 1, 0)
        else:
            self.calls = number + 1
        place.running.append(_LayerCall(self.key, number))

    def end(self, *_: Any) -> None:
        """Go back to the layer around it, if there is one."""
        place = self._dropout.place
        if place.running:
            place.ended = place.running.pop()


class ExactDropout(TorchFunctionMode):
    """Entered around forward and backward: what draws random numbers there draws them by sample, layer and step.

    `was_used` says whether anything has been drawn so far. `inexact` names the random functions met that were left to
    torch, because what they draw cannot be told apart by sample.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, seed: int) -> None:
        super().__init__()
        self.was_used = False
        self.inexact: set[str] = set()
        self._seed = seed
        self._depth = 0
        self._tracker = ModuleTracker()  # torch's public way to ask whether a backward pass is running
        inner = (module for layer in layers.values() for module in layer.modules())
        self._is_sequence_first = any(getattr(module, "batch_first", True) is False for module in inner)
        names = {module: name for name, module in reversed(list(layers.items()))}
        self._device = torch.device("cpu")
        self._keys = tensor_of_keys([key(""), *map(key, names.values())])
        self.layers = [_Layer(self, own) for own in self._keys.T[1:]]
        pairs = list(zip(names, self.layers, strict=True))
        self._hooks = [module.register_forward_pre_hook(layer.begin) for module, layer in pairs]
        self._hooks += [module.register_forward_hook(layer.end) for module, layer in pairs]
        self.begin(step=0, samples=[])

    def begin(self, *, step: int, samples: Sequence[int]) -> None:
        """Say of which step, and of which samples of the dataset, the next forward pass is. Before each micro-batch."""
        keys = [key(self._seed, step, "all"), *(key(self._seed, step, int(sample)) for sample in samples)]
        keys_there = tensor_of_keys(keys).to(self._device, non_blocking=True)
        self.place = _Place(keys_there, ended=_LayerCall(self._keys[:, 0]))
        for layer in self.layers:
            layer.calls = 0

    def remove(self) -> None:
        """Take the hooks off the layers."""
        for hook in self._hooks:
            hook.remove()

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of forward and of recomputation: the `context_fn` of torch.utils.checkpoint.

        Recomputation then draws what its forward pass drew, even if other micro-batches have begun in between, and
        even if the mode is not entered around backward.
        """
        return nullcontext(), _Recomputation(self) if self.is_entered else nullcontext()

    @property
    def is_entered(self) -> bool:
        """Whether the mode is on."""
        return self._depth > 0

    def __enter__(self) -> "ExactDropout":
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what `func` returns; if it draws, with our numbers."""
        if func in OPENED:
            with self:
                return OPENED[func](*args, **(kwargs or {}))
        if func in DRAWING:
            return DRAWING[func](self, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def keep(self, shape: Sequence[int], like: Tensor, p: float) -> Tensor:
        """Return a mask of `shape`, False with probability `p`; for a DTensor, what this worker has of it."""
        threshold = min(round((1 - p) * 2**32) - 2**31, 2**31 - 1)
        return self._draw(shape, like, lambda bits: bits < threshold)

    def uniform(self, like: Tensor) -> Tensor:
        """Return float32 numbers in [0, 1) for the elements of `like` that this worker has."""
        return self._draw(like.shape, like, lambda bits: (bits ^ (bits >> 15)).bitwise_and_(2**24 - 1) * 2.0**-24)

    def normal(self, like: Tensor) -> Tensor:
        """Return standard normal float32 numbers for the elements of `like` that this worker has (Box and Muller)."""
        radius = (1 - self.uniform(like)).log_().mul_(-2).sqrt_()
        return radius * self.uniform(like).mul_(2 * math.pi).cos_()

    def _draw(self, shape: Sequence[int], like: Tensor, finish: Callable[[Tensor], Tensor]) -> Tensor:
        if like.device != self.place.keys.device:
            self._move(like.device)
        keys = self.place.keys
        samples = 0 if is_parameter(like) else keys.shape[1] - 1
        batch_dim = self._batch_dim(shape, samples)
        keys = keys[:, :1] if batch_dim is None else keys[:, 1:]
        first, second = self._next_draw()
        return draw(shape, like, (keys[0] * first, keys[1] * second), batch_dim=batch_dim or 0, finish=finish)

    def _move(self, device: torch.device) -> None:
        """Bring the keys to where the model turns out to run; from then on `begin` puts them there."""
        self._device = device
        self._keys = self._keys.to(device)
        for layer, own in zip(self.layers, self._keys.T[1:], strict=True):
            layer.key = own
        self.place.keys = self.place.keys.to(device)
        for call in (*self.place.running, self.place.ended):
            call.key = call.key.to(device)

    def _batch_dim(self, shape: Sequence[int], samples: int) -> int | None:
        if not shape or not samples:
            return None
        is_second = len(shape) > 1 and shape[1] == samples != shape[0]
        if shape[0] % samples:
            return 1 if is_second else None
        return 1 if is_second and len(shape) == 3 and self._is_sequence_first else 0

    def _next_draw(self) -> tuple[Tensor, Tensor]:
        """Return the key of the next draw in the layer that runs, or else in the one that ended last."""
        place = self.place
        if self.is_in_backward() and not place.running and not place.is_recomputed:
            raise JobError(
                "the model checkpoints a part of a layer that draws random numbers, and recomputation would draw "
                "others than the forward pass did. Checkpoint whole layers, or none and let the plan say recompute."
            )
        call = place.running[-1] if place.running else place.ended
        call.draws += 1
        self.was_used = True
        return key_of_draw(call.key, call.number, call.draws)

    def is_in_backward(self) -> bool:
        """Return whether a backward pass runs, and so whatever runs now is recomputed."""
        return not torch.compiler.is_compiling() and self._tracker.is_bw  # no hook runs where compiled code recomputes


class _Recomputation(AbstractContextManager[None]):
    """Puts the mode back to where a checkpointed forward pass began, each time it is entered."""

    def __init__(self, dropout: ExactDropout) -> None:
        self._dropout = dropout
        self._place = replace(dropout.place.copy(), is_recomputed=True)
        self._calls = [layer.calls for layer in dropout.layers]
        self._interrupted: list[tuple[_Place, list[int], AbstractContextManager[Any]]] = []

    def __enter__(self) -> None:
        dropout = self._dropout
        mode = nullcontext() if dropout.is_entered else dropout
        self._interrupted.append((dropout.place, [layer.calls for layer in dropout.layers], mode))
        self._go_to(self._place.copy(), self._calls)
        mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        place, calls, mode = self._interrupted.pop()
        mode.__exit__(*error)
        self._go_to(place, calls)

    def _go_to(self, place: _Place, calls: list[int]) -> None:
        self._dropout.place = place
        for layer, number in zip(self._dropout.layers, calls, strict=True):
            layer.calls = number
