"""What goes on beside forward: parameters come while layers that have theirs already run.

1. `begin` is given the links' fetches under way. `meet` returns; forward starts.
2. Before a module runs, its own parameters are waited for, and copied into place: only the slices that they lie in.
3. A parameter that is used outside its own module's forward (`F.linear(x, self.other.weight)`) is waited for before
   forward begins. Which those are is seen in the first forward, in which every operation is looked at, and for which
   all parameters are waited for.
4. `finish` waits for all the rest: before gradients are sent, and before anybody else looks at the parameters.

Example: 2 servers, layers 1 to 6, of which server 0 owns 1 to 3. As soon as server 0's slice is here layer 1 runs, and
server 1's comes meanwhile. A head that shares the weight of layer 1 by name (`head.weight = embed.weight`) is a module
of its own, and waits by itself.

A model that uses a parameter from outside in some forwards, but not in the first, must not be given to this.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.overrides import TorchFunctionMode

from shoal.sync.server.copies import Copies
from shoal.sync.server.slices import Slice

Wait = Callable[["Sequence[Future[None]]"], object]


class Fetching:
    """Beside the forward of `model`, whose parameters are those of `copies`. `wait` waits for links' fetches."""

    def __init__(self, model: nn.Module, copies: Copies, wait: Wait) -> None:
        self._copies, self._wait = copies, wait
        numbers = {id(parameter): number for number, parameter in enumerate(copies.parameters)}
        self._slices_of = [_slices_with(copies, number) for number in range(len(copies.parameters))]
        self._pending: dict[int, Future[None]] = {}
        self._left: set[int] = set()
        self._looking: _Looking | None = None
        self._early: set[int] | None = None
        own = {
            module: [numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers]
            for module in model.modules()
        }
        itself = weakref.ref(self)  # torch keeps hooks where Python's collector does not look

        def before_all(_: nn.Module, __: Any) -> None:
            if (fetching := itself()) is not None:
                fetching._begin_forward(own)

        def after_all(_: nn.Module, __: Any, ___: Any) -> None:
            if (fetching := itself()) is not None:
                fetching._end_forward()

        def before(module: nn.Module, _: Any) -> None:
            if (fetching := itself()) is not None:
                fetching.fetch(own[module])

        self._hooks = [
            model.register_forward_pre_hook(before_all, prepend=True),
            model.register_forward_hook(after_all, always_call=True),
            *(module.register_forward_pre_hook(before) for module, numbers in own.items() if numbers),
        ]

    def begin(self, fetches: "Sequence[Future[None]]") -> None:
        """Have parameters fetched as they are needed, by these, one for each slice."""
        self._pending, self._left = dict(enumerate(fetches)), set(range(len(self._copies.parameters)))

    def fetch(self, numbers: Iterable[int]) -> None:
        """Wait for parameters, and have them in place."""
        for number in numbers:
            if number in self._left:
                for each in self._slices_of[number]:
                    if each in self._pending:
                        self._wait([self._pending.pop(each)])
                self._copies.give_parameter(number)
                self._left.discard(number)

    def finish(self) -> None:
        """Wait for all parameters, and have them in place."""
        self._wait(list(self._pending.values()))
        self._pending = {}
        self.fetch(sorted(self._left))

    @property
    def early(self) -> list[int]:
        """The parameters that are waited for before forward begins, by their numbers."""
        return sorted(self._early or ())

    def close(self) -> None:
        """Leave the model alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin_forward(self, own: dict[nn.Module, list[int]]) -> None:
        if self._early is not None:
            self.fetch(sorted(self._early))
            return
        self.finish()
        if is_grad_enabled() and self._looking is None:
            self._looking = _Looking(own, self._copies)
            self._looking.begin()

    def _end_forward(self) -> None:
        if self._looking is not None:
            self._looking.end()
            self._early, self._looking = self._looking.outside, None


class _Looking(TorchFunctionMode):
    """Sees which parameters the operations of a forward use outside the modules that they belong to."""

    def __init__(self, own: dict[nn.Module, list[int]], copies: Copies) -> None:
        super().__init__()
        self._numbers = {id(parameter): number for number, parameter in enumerate(copies.parameters)}
        self._own, self._running, self._hooks = own, list[nn.Module](), list[Any]()
        self.outside: set[int] = set()

    def begin(self) -> None:
        """Look from now on."""
        for module in self._own:
            self._hooks.append(module.register_forward_pre_hook(lambda module, _: self._running.append(module)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        self._running.append(next(iter(self._own)))  # the whole model runs already
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Look no more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the parameters among the arguments, and go on."""
        for value in _tensors((*args, *(kwargs or {}).values())):
            number = self._numbers.get(id(value))
            if number is not None and not any(number in self._own[module] for module in self._running):
                self.outside.add(number)
        return func(*args, **(kwargs or {}))

    def _leave(self) -> None:
        if self._running:
            self._running.pop()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operation, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _slices_with(copies: Copies, number: int) -> list[int]:
    """Return the slices that a parameter has a part in."""

    def has(of: Slice) -> bool:
        return any(piece.parameter == number for piece in of.pieces)

    return [of.number for of in copies.slices if has(of)]
