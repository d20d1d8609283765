"""A small event simulation of one step: of a pipeline's stages, and of communication beside computing.

The pipeline:
1. Each stage has an order of tasks (`schedules`) and does one at a time.
2. A forward waits for the piece before it, a backward for the piece after it and for its own forward; what comes from
   another stage takes `send_s` on its way, during which the sender goes on.
3. With the zero-bubble schedule the gradients of the weights are a task of their own, which nobody waits for.

Example: 2 stages, 2 micro-batches, forward 1 s, backward 2 s, 1f1b. Stage 1 starts at 1 s and works to the end:
F0 B0 F1 B1 until 7 s; stage 0 gets the last gradient then and ends at 9 s. 6 of these 9 s it worked: 3 s of bubble.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.planner.time.schedules import BACKWARD, FORWARD, WEIGHTS, stage_order


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one piece of the model takes over one micro-batch."""

    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    """That part of the backward which makes the gradients of the weights: the zero-bubble schedule may put it off."""


class Event(NamedTuple):
    """What a stage did, and when."""

    stage: int
    kind: str
    micro_batch: int
    start_s: float
    end_s: float
    chunk: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a pipeline."""

    events: tuple[Event, ...]
    """In the order of their start on each stage, stage by stage."""
    stages: int

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max(event.end_s for event in self.events)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """How long each stage worked."""
        busy = [0.0] * self.stages
        for event in self.events:
            busy[event.stage] += event.end_s - event.start_s
        return tuple(busy)

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """How long each stage waited."""
        makespan_s = self.makespan_s
        return tuple(makespan_s - busy_s for busy_s in self.busy_s)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most forwards of a piece that each stage held at once, still needed by their backward."""
        split = any(event.kind == WEIGHTS for event in self.events)
        last = WEIGHTS if split else BACKWARD
        held, most = [0] * self.stages, [0] * self.stages
        for event in self.events:
            held[event.stage] += (event.kind == FORWARD) - (event.kind == last)
            most[event.stage] = max(most[event.stage], held[event.stage])
        return tuple(most)


def simulate_pipeline(
    pieces: Sequence[Piece], *, stages: int, micro_batches: int, schedule: str, send_s: float = 0.0
) -> Timeline:
    """Return what the stages do in one step: `pieces` in the order in which they run, piece k on stage k % stages."""
    assert len(pieces) % stages == 0, "every stage has equally many pieces"
    run = _Run(pieces, stages=stages, micro_batches=micro_batches, schedule=schedule, send_s=send_s)
    return Timeline(events=run.events(), stages=stages)


class _Run:
    """Lets every stage go as far as it can, and again when another has sent it something, until all is done."""

    def __init__(
        self, pieces: Sequence[Piece], *, stages: int, micro_batches: int, schedule: str, send_s: float
    ) -> None:
        self.stages, self.schedule = stages, schedule
        self.send_s = send_s if stages > 1 else 0.0
        chunks = len(pieces) // stages
        self.orders = [
            stage_order(schedule, stage=stage, stages=stages, micro_batches=micro_batches, chunks=chunks)
            for stage in range(stages)
        ]
        split = schedule == "zero-bubble"
        self.seconds = {
            FORWARD: [piece.forward_s for piece in pieces],
            BACKWARD: [piece.backward_s - split * piece.weights_s for piece in pieces],
            WEIGHTS: [piece.weights_s for piece in pieces],
        }
        # When each piece is done with each micro-batch; in front of the first forward and behind the last backward
        # lies what is there from the start.
        self.forwards = [*_unknown(len(pieces), micro_batches), [-self.send_s] * micro_batches]  # [-1]: in front
        self.backwards = [*_unknown(len(pieces), micro_batches), [-self.send_s] * micro_batches]

    def events(self) -> tuple[Event, ...]:
        rows: list[list[Event]] = [[] for _ in range(self.stages)]
        waiting = list(range(self.stages))
        while waiting:
            stage = waiting.pop()
            before = len(rows[stage])
            self._advance(stage, rows[stage])
            if len(rows[stage]) > before:
                waiting += [(stage + 1) % self.stages, (stage - 1) % self.stages]
        complete = all(len(row) == len(order) for row, order in zip(rows, self.orders, strict=True))
        assert complete, f"{self.schedule} waits for itself"
        return tuple(event for row in rows for event in row)

    def _advance(self, stage: int, row: list[Event]) -> None:
        """Add to `row` all that `stage` can do before it must wait for another."""
        now_s = row[-1].end_s if row else 0.0
        order = self.orders[stage]
        for turn in range(len(row), len(order)):
            kind, number, chunk = order[turn]
            piece = chunk * self.stages + stage
            ready_s = self._ready_s(kind, piece, number)
            if ready_s == math.inf:
                return
            start_s = max(now_s, ready_s)
            now_s = start_s + self.seconds[kind][piece]
            if kind != WEIGHTS:
                (self.forwards if kind == FORWARD else self.backwards)[piece][number] = now_s
            row.append(Event(stage, kind, number, start_s, now_s, chunk))

    def _ready_s(self, kind: str, piece: int, number: int) -> float:
        """Return when what a task waits for has arrived, from its own stage or from another; infinity: not yet."""
        if kind == FORWARD:
            return self.forwards[piece - 1][number] + self.send_s
        own_s = (self.forwards if kind == BACKWARD else self.backwards)[piece][number]
        assert own_s < math.inf, f"{self.schedule}: a {kind} before what it is made of"
        return max(own_s, self.backwards[piece + 1][number] + self.send_s) if kind == BACKWARD else own_s


def _unknown(pieces: int, micro_batches: int) -> list[list[float]]:
    return [[math.inf] * micro_batches for _ in range(pieces)]


class Layered(NamedTuple):
    """One layer of a pass: what must have come before it is computed, and what is sent when it is done."""

    compute_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A pass whose communication runs beside its computing."""

    end_s: float
    exposed_s: float
    """How much longer it took than computing alone."""
    messages: tuple[tuple[float, float], ...]
    """When each message started and ended."""


def simulate_overlap(layers: Sequence[Layered]) -> Overlap:
    """Return how a pass over `layers`, in the order of computing, goes with one link that sends a message at a time.

    A layer's gather is asked for when the layer before it starts (one ahead, as FSDP does); its reduce when it is done.
    """
    computed_s = link_s = 0.0
    messages: list[tuple[float, float]] = []

    def send(ready_s: float, seconds: float) -> float:
        nonlocal link_s
        start_s = max(ready_s, link_s)
        link_s = start_s + seconds
        messages.append((start_s, link_s))
        return link_s

    here_s = send(0.0, layers[0].gather_s) if layers and layers[0].gather_s else 0.0
    for number, layer in enumerate(layers):
        start_s = max(computed_s, here_s)
        following_s = layers[number + 1].gather_s if number + 1 < len(layers) else 0.0
        here_s = send(start_s, following_s) if following_s else 0.0
        computed_s = start_s + layer.compute_s
        if layer.reduce_s:
            send(computed_s, layer.reduce_s)
    end_s = max(computed_s, link_s)
    compute_s = sum(layer.compute_s for layer in layers)
    return Overlap(end_s=end_s, exposed_s=end_s - compute_s, messages=tuple(messages))
