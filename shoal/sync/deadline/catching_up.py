"""Bringing a late worker to where the others are: it gets what a current one has after the step, bit by bit the same.

1. The current worker sends a description of its optimizer's state: for each parameter the names, with a number, or a
   tensor's shape and type. Then all tensors: parameters, buffers, optimizer state. They leave from where they lie,
   while it already computes its next gradient, which changes none of them; buffers, which forward may change, and what
   is a GPU's leave from copies. Before its next update it waits until all have left.
2. The late one receives each in its place, and makes what its optimizer does not have yet.
3. The learning rate is a matter of the number of steps: the late one steps its schedule as often as it has missed.

Example: worker 3 comes with a gradient for step 7 when step 9 is open. After step 9 worker 0 sends it 3 tensors for
each parameter (the parameter, Adam's two means) and a count, and worker 3's schedule steps 3 times, for 7, 8 and 9.
"""

import json
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.comm.algorithms.wire import Wait, Wire
from shoal.core.errors import PlanError
from shoal.sync.mode import Trained

_TAG = 1 << 20
"""Above those of the pieces of a sum, which travel between the same workers meanwhile."""
_LENGTH_BYTES = 8


class Departures:
    """What is on its way to late workers."""

    def __init__(self, trained: Trained, wire: Wire) -> None:
        self._trained, self._wire = trained, wire
        self._leaving: list[tuple[Tensor, Wait]] = []

    def start(self, to: Iterable[int]) -> None:
        """Begin to send this worker's state to those workers. It must not change before `wait` has returned."""
        workers = list(to)
        if not workers:
            return
        names, kept = describe(self._trained)
        head = torch.frombuffer(bytearray(json.dumps(names).encode()), dtype=torch.uint8)
        buffers = [buffer.detach().clone() for buffer in self._trained.buffers.values()]
        rows = [_length_of(head), head, *map(_row_of, [*self._trained.parameters.values(), *buffers, *kept])]
        for worker in workers:
            for number, row in enumerate(rows):
                if row.numel():
                    self._leaving.append((row, self._wire.send(row, worker, tag=_TAG + number)))

    def wait(self) -> None:
        """Wait until all has left."""
        while self._leaving:
            self._leaving[0][1]()
            self._leaving.pop(0)


def receive_state(trained: Trained, wire: Wire, source: int) -> int:
    """Make this worker's state that of worker `source`, who sends it; return how many bytes came."""
    length = torch.empty(_LENGTH_BYTES, dtype=torch.uint8)
    wire.receive(length, source, tag=_TAG)()
    head = torch.empty(int(length.view(torch.int64)), dtype=torch.uint8)
    wire.receive(head, source, tag=_TAG + 1)()
    kept = lay_out(trained, json.loads(head.numpy().tobytes()))
    places = [*trained.parameters.values(), *trained.buffers.values(), *kept]
    arriving = []
    for number, place in enumerate(places, start=2):
        row = _row_of(place.detach(), is_read=False)
        if row.numel():
            arriving.append((place.detach(), row, wire.receive(row, source, tag=_TAG + number)))
    for place, row, wait in arriving:
        wait()
        if row.data_ptr() != place.data_ptr():
            place.copy_(row.view(place.dtype).view(place.shape))
    return sum(row.numel() for _, row, _ in arriving)


def step_schedule(schedule: Any, times: int) -> None:
    """Step the schedule of a worker whose optimizer has not stepped meanwhile."""
    if schedule is None:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step")
        for _ in range(times):
            schedule.step()


def buffers_row(trained: Trained) -> Tensor | None:
    """Return a row with all buffers, or None where there are none."""
    rows = [_row_of(buffer) for buffer in trained.buffers.values() if buffer.numel()]
    return torch.cat(rows) if rows else None


def put_buffers(trained: Trained, row: Tensor) -> None:
    """Make the buffers what is in a row of them."""
    buffers = [buffer for buffer in trained.buffers.values() if buffer.numel()]
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    for buffer, part in zip(buffers, torch.split(row, sizes), strict=True):
        buffer.detach().copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def describe(trained: Trained) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Return what the optimizer keeps for each parameter, as JSON carries it, and its tensors in that order."""
    described, tensors = [], []
    for parameter in trained.parameters.values():
        names: dict[str, Any] = {}
        for name, value in trained.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                names[name] = [list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]
                tensors.append(value)
            elif value is None or isinstance(value, (bool, int, float, str)):
                names[name] = value
            else:
                raise PlanError(
                    f"{type(trained.optimizer).__name__} keeps {name!r} as a {type(value).__name__}, which cannot be "
                    "sent to a worker that was late. Use sync.mode='all-reduce', or an optimizer that keeps tensors."
                )
        described.append(names)
    return described, tensors


def lay_out(trained: Trained, described: list[dict[str, Any]]) -> list[Tensor]:
    """Make the optimizer keep what is described, and return its tensors, to be filled, in that order."""
    tensors = []
    for parameter, names in zip(trained.parameters.values(), described, strict=True):
        state = trained.optimizer.state[parameter] if names else {}
        for name, value in names.items():
            if isinstance(value, list):
                state[name] = _place(state.get(name), parameter, *value)
                tensors.append(state[name])
            else:
                state[name] = value
    return tensors


def _place(there: Any, parameter: Tensor, shape: list[int], dtype: str, kind: str) -> Tensor:
    """Return the tensor that is `there`, if it is as described, or another one on a device of that `kind`."""
    wanted = getattr(torch, dtype)
    if isinstance(there, Tensor) and list(there.shape) == shape and there.dtype == wanted:
        return there
    device = parameter.device if parameter.device.type == kind else torch.device(kind)
    if shape == list(parameter.shape):
        return torch.empty_like(parameter, dtype=wanted, device=device, requires_grad=False)
    return torch.empty(shape, dtype=wanted, device=device)


def _row_of(tensor: Tensor, *, is_read: bool = True) -> Tensor:
    """Return the bytes of a tensor, in the processor's memory: itself if it lies there, without gaps; else a copy.

    Without `is_read`, the copy holds anything.
    """
    whole = tensor.detach()
    if whole.device.type != "cpu" or not whole.is_contiguous():
        whole = whole.cpu().contiguous() if is_read else torch.empty(whole.shape, dtype=whole.dtype)
    return whole.view(-1).view(torch.uint8)


def _length_of(head: Tensor) -> Tensor:
    return torch.tensor([head.numel()], dtype=torch.int64).view(torch.uint8)
