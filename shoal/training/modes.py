"""The ways for gradients to meet other than all-reduce, by the names that plans give them."""

from collections.abc import Callable

import torch

from shoal.comm.group import all_reduce_sum
from shoal.compress.bucket import Bucket
from shoal.sync.local import Local
from shoal.sync.mode import Mode, Place, Trained
from shoal.training.meeting import Meeting


def open_mode(trained: Trained, place: Place, meeting: Meeting) -> Mode:
    """Return the mode that the plan names, open. Called by every worker, with equal parameters on all of them."""
    return MODES[place.sync.mode](trained, place, meeting)


def _local(trained: Trained, place: Place, meeting: Meeting) -> Mode:
    return Local(trained, place, add_up=adding(meeting, place), send=sending(meeting, place, trained))


def _deadline(trained: Trained, place: Place, meeting: Meeting) -> Mode:  # noqa: ARG001
    from shoal.sync.deadline.mode import Deadline

    return Deadline(trained, place)


def _server(trained: Trained, place: Place, meeting: Meeting) -> Mode:  # noqa: ARG001
    from shoal.sync.server.mode import Servers

    return Servers(trained, place)


MODES: dict[str, Callable[[Trained, Place, Meeting], Mode]] = {
    "local": _local,
    "deadline": _deadline,
    "server": _server,
}


def adding(meeting: Meeting, place: Place) -> Callable[[torch.Tensor], None]:
    """Return what sums a tensor over all workers, in place, by the way that the meeting has: all have the same bits."""
    if place.rank.workers == 1:
        return lambda _: None
    if meeting.shared is not None:
        return meeting.shared.all_reduce
    if meeting.exchange is not None:
        return meeting.exchange
    return lambda tensor: _engine_sum(tensor, place)


def sending(meeting: Meeting, place: Place, trained: Trained) -> Callable[[torch.Tensor], None]:
    """Return the same for what goes through the plan's codec, if it has one: all parameters' numbers, in one row.

    One worker alone has nobody to send to; it takes over what was pending when it had.
    """
    feedback, workers = meeting.feedback, meeting.workers
    if feedback is None:
        return adding(meeting, place)
    # The names that an engine would give them, by which what is pending is saved (saved_codec.py).
    names = tuple(f"model.{name}" for name in trained.parameters)
    if workers is None:
        sizes = [parameter.numel() for parameter in trained.parameters.values()]
        return lambda row: feedback.take_over(dict(zip(names, torch.split(row, sizes), strict=True)).get)
    bucket = Bucket(names, tuple(tuple(parameter.shape) for parameter in trained.parameters.values()))
    return lambda row: feedback.sum(bucket, row, workers)


def _engine_sum(tensor: torch.Tensor, place: Place) -> None:
    work = all_reduce_sum(tensor)
    if place.watch is None or tensor.is_cuda:
        work.wait()
    else:
        place.watch.wait(work)
