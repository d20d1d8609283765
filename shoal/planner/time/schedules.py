"""In which order each stage of a pipeline takes its work: one function a schedule, as the engines run them.

A model is cut into pieces that run one after the other. With `chunks` pieces a stage, piece k lies on stage
k % stages, so a micro-batch passes every stage `chunks` times.

gpipe        all forwards, then all backwards
1f1b         a stage runs ahead by as many forwards as there are stages behind it, then one backward, one forward
             (Narayanan and others, 2019, https://arxiv.org/abs/1806.03377)
interleaved  the same over several pieces a stage (Narayanan and others, 2021, https://arxiv.org/abs/2104.04473)
zero-bubble  1f1b with the backward in two: what the stage before waits for goes first, the gradients of the weights
             come one micro-batch later for every stage in front (ZB-H1 of Qi and others, 2023,
             https://arxiv.org/abs/2401.10241)
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


class Task(NamedTuple):
    """One thing a stage does: the forward or the backward of one of its pieces over one micro-batch."""

    kind: str
    micro_batch: int
    chunk: int


@lru_cache(maxsize=512)
def stage_order(schedule: str, *, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Task, ...]:
    """Return what `stage` does, in its order."""
    return tuple(_ORDERS[schedule](stage, stages, micro_batches, chunks))


def runs_interleaved(micro_batches: int, stages: int) -> bool:
    """Return whether the interleaved schedule can take so many micro-batches: rounds of equal size, as torch asks."""
    return micro_batches % max(1, micro_batches // stages) == 0


def _gpipe(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Task]:
    del stage, stages, chunks
    yield from (Task(FORWARD, number, 0) for number in range(micro_batches))
    yield from (Task(BACKWARD, number, 0) for number in range(micro_batches))


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Task]:
    del chunks
    ahead = min(stages - stage - 1, micro_batches)
    forwards = (Task(FORWARD, number, 0) for number in range(micro_batches))
    backwards = (Task(BACKWARD, number, 0) for number in range(micro_batches))
    yield from _alternating(forwards, backwards, ahead=ahead)


def _interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Task]:
    in_round = micro_batches // max(1, micro_batches // stages)
    ahead = min(2 * (stages - stage - 1) + (chunks - 1) * in_round, micro_batches * chunks)
    forwards = (Task(FORWARD, *_place(turn, in_round, chunks)) for turn in range(micro_batches * chunks))
    backwards = (
        Task(BACKWARD, number, chunks - 1 - chunk)
        for number, chunk in (_place(turn, in_round, chunks) for turn in range(micro_batches * chunks))
    )
    yield from _alternating(forwards, backwards, ahead=ahead)


def _zero_bubble(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Task]:
    for task in _one_forward_one_backward(stage, stages, micro_batches, chunks):
        yield task
        if task.kind == BACKWARD and task.micro_batch >= stage:
            yield Task(WEIGHTS, task.micro_batch - stage, 0)
    yield from (Task(WEIGHTS, number, 0) for number in range(max(0, micro_batches - stage), micro_batches))


def _place(turn: int, in_round: int, chunks: int) -> tuple[int, int]:
    """Return (micro_batch, chunk) of a stage's turn: a round of micro-batches through each chunk, then the next."""
    rounds, within = divmod(turn, in_round * chunks)
    chunk, number = divmod(within, in_round)
    return rounds * in_round + number, chunk


def _alternating(forwards: Iterator[Task], backwards: Iterator[Task], *, ahead: int) -> Iterator[Task]:
    for _ in range(ahead):
        yield next(forwards)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


_ORDERS: dict[str, Callable[[int, int, int, int], Iterator[Task]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}
