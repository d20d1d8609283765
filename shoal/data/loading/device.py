"""From the host's memory to a GPU's, beside the computation: on a stream of its own."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from shoal.core.errors import ConfigError
from shoal.data.loading.chunk import Load, Loaded
from shoal.data.loading.slot import Slot


class Sender:
    """Copies batches to `device`. On a CPU it gives them as they are."""

    def __init__(self, device: torch.device | str | None) -> None:
        self._device = torch.device(device or "cpu")
        if self._device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"Loader(device={str(device)!r}): batches go to cpu or cuda. Leave it out, and move them."
            )
        if self.is_needed and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device) if self.is_needed else None  # type: ignore[no-untyped-call]

    @property
    def is_needed(self) -> bool:
        """Whether batches go anywhere else than where they are loaded."""
        return self._device.type == "cuda"

    def sending(self, load: Load) -> Load:
        """Return `load` whose batches are on the device, or on their way there; the slot is read until they are."""
        if not self.is_needed:
            return load

        def load_and_send(steps: range, slot: Slot) -> Loaded:
            torch.cuda.set_device(self._device)  # of this thread: pinned memory would wake up the first GPU otherwise
            return self.send(load(steps, slot), slot)

        return load_and_send

    def send(self, loaded: Loaded, slot: Slot) -> Loaded:
        """Return the batches on the device, or on their way there."""
        if self._stream is None:
            return loaded
        with torch.cuda.stream(self._stream):
            batches = [map_tensors(lambda x: x.to(self._device, non_blocking=True), batch) for batch in loaded.batches]
            slot.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            slot.sent.record(self._stream)
        return Loaded(loaded.chunk, batches, slot.sent)

    def send_each(self, chunks: Iterable[Loaded]) -> Iterator[Loaded]:
        """Yield chunks on the device, whose memory on the host is filled again when the next one is asked for."""
        for loaded in chunks:
            slot = Slot()
            yield self.send(loaded, slot)
            slot.wait()

    def receive(self, loaded: Loaded) -> Sequence[Any]:
        """Have the stream that computes wait until the batches are there, and return them."""
        if self._stream is None or loaded.sent is None:
            return loaded.batches
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(loaded.sent)
        # Their memory belongs to the stream that copies: it must not be given away there while this one reads it.
        return [map_tensors(lambda x: _used_by(x, stream), batch) for batch in loaded.batches]


def _used_by(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor


def map_tensors(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """Return `batch` with `function` applied to every tensor in its dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a namedtuple takes its fields one by one
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch
