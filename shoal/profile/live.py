"""Live bytes: how much tensor memory is alive, what made it, and whether it is a gradient.

1. Every operation's outputs are looked at; a storage not seen before is counted, whoever shares it later.
2. A weak reference to the storage takes it off the count when its last owner is gone, at the very operation it dies.
3. A storage can be named a gradient: from then on it is counted apart.

Example: x (4 kB) -> y = x + 1 (4 kB) -> z = y * 2 (4 kB), then y dies: 8 kB live, and 12 kB were.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


class LiveBytes:
    """Counts the bytes of all storages it is shown, for as long as each one lives."""

    def __init__(self, rounded: Callable[[int], int] = int) -> None:
        self.live_bytes = 0
        self.gradient_bytes = 0
        self._rounded = rounded
        # By id, not by value: a storage has no hash of its content. The weak reference keeps an id from being reused.
        self._seen: dict[int, tuple[weakref.ref[Any], int, Any]] = {}
        self._gradients: set[int] = set()

    def watch(self, values: Any, tag: Any = None) -> int:
        """Count the storages in `values` that are new, remember `tag` with them, and return their bytes."""
        new_bytes = sum(self._add(tensor.untyped_storage(), tag) for tensor in strided_tensors(values))
        self.live_bytes += new_bytes
        return new_bytes

    def name_gradient(self, gradient: torch.Tensor) -> None:
        """Count the storage of `gradient`, alive already, as a gradient from now on."""
        for tensor in strided_tensors(gradient):
            key = id(tensor.untyped_storage())
            if key in self._seen and key not in self._gradients:
                self._gradients.add(key)
                self.gradient_bytes += self._seen[key][1]

    def tagged(self) -> Iterator[tuple[Any, int]]:
        """Yield tag and bytes of every storage that is alive and no gradient."""
        for key, (_, num_bytes, tag) in self._seen.items():
            if key not in self._gradients:
                yield tag, num_bytes

    def _add(self, storage: torch.UntypedStorage, tag: Any) -> int:
        key = id(storage)
        if key in self._seen:
            return 0
        num_bytes = self._rounded(storage.nbytes())
        self._seen[key] = weakref.ref(storage, lambda _: self._remove(key)), num_bytes, tag
        return num_bytes

    def _remove(self, key: int) -> None:
        _, freed_bytes, _ = self._seen.pop(key)
        self.live_bytes -= freed_bytes
        if key in self._gradients:
            self._gradients.remove(key)
            self.gradient_bytes -= freed_bytes


def strided_tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor with a storage in `values`, a tensor or lists and dicts of them."""
    if isinstance(values, torch.Tensor):
        if values.layout == torch.strided:  # a sparse tensor has no storage of its own
            yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from strided_tensors(value)
    elif isinstance(values, dict):
        yield from strided_tensors(list(values.values()))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind `tensors`, each storage once: tied weights do not count twice."""
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in strided_tensors([*tensors])
    }
    return sum(sizes.values())
