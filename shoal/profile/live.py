"""Live bytes: how much tensor memory is alive, and the most that ever was.

1. Every operation's outputs are looked at; a storage not seen before is counted, whoever shares it later.
2. A weak reference to the storage takes it off the count when its last owner is gone, at the very operation it dies.
3. A storage can be named a gradient: from then on it is also counted apart, so that there are two peaks, one of
   everything and one of everything but the gradients.

Example: x (4 kB) -> y = x + 1 (4 kB) -> z = y * 2 (4 kB), then y dies: 8 kB live, a peak of 12 kB.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class LiveBytes:
    """Counts the bytes of all storages it is shown, for as long as each one lives."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.gradient_bytes = 0
        self.peak_bytes = 0
        self.peak_without_gradients_bytes = 0
        # By id, not by value: a storage has no hash of its content. The weak reference keeps an id from being reused.
        self._seen: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._gradients: set[int] = set()

    def watch(self, values: Any) -> int:
        """Count the storages in `values` that are new, and return their bytes."""
        new_bytes = sum(self._add(tensor.untyped_storage()) for tensor in strided_tensors(values))
        if new_bytes:
            self.live_bytes += new_bytes
            self._raise_peaks()
        return new_bytes

    def name_gradient(self, gradient: torch.Tensor) -> None:
        """Count the storage of `gradient`, alive already, as a gradient from now on."""
        for tensor in strided_tensors(gradient):
            key = id(tensor.untyped_storage())
            if key in self._seen and key not in self._gradients:
                self._gradients.add(key)
                self.gradient_bytes += self._seen[key][1]

    def restart_peaks(self) -> None:
        """Forget the peaks so far; what is alive now is the new least."""
        self.peak_bytes = self.peak_without_gradients_bytes = 0
        self._raise_peaks()

    def _raise_peaks(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        without = self.live_bytes - self.gradient_bytes
        self.peak_without_gradients_bytes = max(self.peak_without_gradients_bytes, without)

    def _add(self, storage: torch.UntypedStorage) -> int:
        key = id(storage)
        if key in self._seen:
            return 0
        self._seen[key] = weakref.ref(storage, lambda _: self._remove(key)), storage.nbytes()
        return storage.nbytes()

    def _remove(self, key: int) -> None:
        _, freed_bytes = self._seen.pop(key)
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
