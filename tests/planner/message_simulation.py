"""Collectives, message by message: the reference that the closed forms of the planner are held against.

Every worker runs its own program, a generator, and knows only its index. It yields what it does at once: at most one
Send and one Receive. A message goes from when both sides are ready for it, and takes latency + bytes / rate of the link
between the two; the worker goes on when all that it yielded is done. So a port never carries two messages at a time.

The payload is real: a gradient is cut into `pieces`, and each worker holds, for each piece, the set of the workers
whose numbers are in its sum (as bits of an int). Adding a sum that shares a worker with one's own fails: nothing counts
twice.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

Pieces = range | list[int]


@dataclass(frozen=True)
class Send:
    """Send what one holds of `pieces` to the worker `target`."""

    target: int
    pieces: Pieces


@dataclass(frozen=True)
class Receive:
    """Receive from the worker `source`; add it to what one holds, or keep it instead."""

    source: int
    add: bool = False


Program = Generator[list[Send | Receive], None, None]


@dataclass(frozen=True)
class Link:
    bytes_per_s: float
    latency_s: float


@dataclass
class Worker:
    """Where a worker stands: its program, what it holds of each piece, and how late it is there."""

    program: Program
    held: list[int]
    now_s: float = 0.0
    steps: int = 0
    sent_bytes: float = 0.0
    inside_bytes: float = 0.0
    waiting: list[Send | Receive] = field(default_factory=list)
    payload: dict[int, int] = field(default_factory=dict)
    after: tuple[int, float] = (0, 0.0)  # steps and seconds when all that it yielded last will be done
    done: bool = False

    def advance(self) -> bool:
        """Go on to the next yield, if nothing is being waited for; return whether it went on."""
        if self.waiting or self.done:
            return False
        self.steps, self.now_s = max(self.steps, self.after[0]), max(self.now_s, self.after[1])
        self.waiting = list(next(self.program, []))
        self.done = not self.waiting
        assert sum(isinstance(act, Send) for act in self.waiting) <= 1, "one message out at a time"
        assert sum(isinstance(act, Receive) for act in self.waiting) <= 1, "one message in at a time"
        sends = [act for act in self.waiting if isinstance(act, Send)]
        self.payload = {piece: self.held[piece] for send in sends for piece in send.pieces}
        return not self.done

    def finish(self, act: Send | Receive, steps: int, at_s: float) -> None:
        self.waiting.remove(act)
        self.after = max(self.after[0], steps), max(self.after[1], at_s)


@dataclass(frozen=True)
class Outcome:
    """What it cost, and what each worker holds at the end."""

    steps: int
    bytes_per_worker: float
    seconds: float
    inside_bytes: float
    held: list[list[int]]


def simulate(
    programs: list[Program],
    held: list[list[int]],
    num_bytes: float,
    link: Callable[[int, int], Link],
    *,
    per_node: int = 1,
) -> Outcome:
    """Run the programs to their ends; `held` is what each worker starts with, `num_bytes` what all pieces weigh."""
    workers = [Worker(program, list(pieces)) for program, pieces in zip(programs, held, strict=True)]
    moving = True
    while moving:
        moving = sum(worker.advance() for worker in workers) > 0
        for index, worker in enumerate(workers):
            for act in [act for act in worker.waiting if isinstance(act, Send)]:
                moving |= _deliver(workers, index, act, num_bytes, link(index, act.target), per_node)
    assert all(worker.done for worker in workers), "some wait for each other for ever"
    return Outcome(
        steps=max(worker.steps for worker in workers),
        bytes_per_worker=max(worker.sent_bytes for worker in workers),
        seconds=max(worker.now_s for worker in workers),
        inside_bytes=max(worker.inside_bytes for worker in workers),
        held=[worker.held for worker in workers],
    )


def _deliver(workers: list[Worker], index: int, send: Send, num_bytes: float, link: Link, per_node: int) -> bool:
    """Carry the message `send` if its receiver is ready for it; return whether it was."""
    source, target = workers[index], workers[send.target]
    receive = next((act for act in target.waiting if isinstance(act, Receive)), None)
    if receive is None or receive.source != index:
        return False
    message_bytes = num_bytes * len(send.pieces) / len(source.held)
    at_s = max(source.now_s, target.now_s) + link.latency_s + message_bytes / link.bytes_per_s
    steps = max(source.steps, target.steps) + 1
    source.sent_bytes += message_bytes
    if per_node > 1 and index // per_node == send.target // per_node:
        source.inside_bytes += message_bytes
    for piece, content in source.payload.items():
        mine = target.held[piece] if receive.add else 0
        assert mine & content == 0, f"worker {send.target} adds numbers to piece {piece} that are in it already"
        target.held[piece] = mine | content
    source.finish(send, steps, at_s)
    target.finish(receive, steps, at_s)
    return True
