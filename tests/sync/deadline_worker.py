"""A worker that trains a small regression under the mode "deadline", and one process that does the same from its notes.

Samples are numbered through: part (step, worker) has `SIZES[worker]` of them, whoever the others are. Each worker notes
what it brought to which step; `replayed` computes from these notes, with the parameters of every step at hand, what
all of them should have come to. All is in float64, so that only what is wrong differs.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.alive import watching
from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.comm.torch_private import abandon_groups
from shoal.core.errors import PeerLost
from shoal.core.events import EventLog
from shoal.spec.sync import Sync
from shoal.sync.deadline.mode import Deadline
from shoal.sync.mode import Met, Mine, Place, Trained
from tests.support.waiting import wait_until

SIZES = (3, 5, 4, 2)
TIMEOUT_S = 60.0


@dataclass
class Notes:
    """What a worker did."""

    brought: list[tuple[int, Met]] = field(default_factory=list)
    """For which step its gradient was meant, and what came of it."""
    state: list[Tensor] = field(default_factory=list)
    """Parameters, buffers and optimizer state at the end."""
    lr: float = 0.0
    at_boundaries: dict[int, list[Tensor]] = field(default_factory=dict)
    at_s: list[float] = field(default_factory=list)
    """When each of these steps was done."""


class Net(nn.Module):
    """With a buffer that says how often, and by whom, it was called."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Parameter(torch.randn(width, 5, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(width, generator=generator, dtype=torch.float64) / width)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first.T) @ self.second


def part(step: int, worker: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a worker in a step, and what they should give."""
    x = torch.randn(SIZES[worker], 5, generator=torch.Generator().manual_seed(100 * step + worker)).double()
    return x, x.sum(1).sin()


def loss_of(model: nn.Module, step: int, worker: int) -> Tensor:
    x, y = part(step, worker)
    loss: Tensor = ((model(x) - y) ** 2).mean()
    return loss


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    kept = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers(), *kept)]


def train(
    rank: Rank,
    *,
    sync: dict[str, Any],
    steps: int,
    boundaries: Sequence[int],
    folder: Path,
    width: int = 6,
    lags: dict[int, int] | None = None,
    sleeps: dict[int, float] | None = None,
    stops: tuple[int, int, int] | None = None,
    kills: tuple[int, int] | None = None,
    silent_s: float = 30.0,
    pause_s: float = 0.0,
) -> Notes:
    """Train as one of the workers. Runs in the pool.

    `lags`: so many steps the others do while a worker computes one gradient. `sleeps`: seconds for it. `stops`:
    (worker, step, until): it stops itself in that step, and worker 0 continues it after another. `kills`: (worker,
    step). `pause_s`: so long a late worker waits before it takes what another sends.
    """
    store = connect(rank, timeout_s=TIMEOUT_S)
    log = EventLog(folder / f"{rank.index}.jsonl")
    story = Story(rank, store, boundaries, lags or {}, sleeps or {}, stops, kills)
    with (
        joined(rank, store, device=torch.device("cpu"), timeout_s=TIMEOUT_S),
        _leaving_when_lost(),
        watching(store, rank, timeout_s=TIMEOUT_S, silent_s=silent_s) as watch,
    ):
        model = Net(width)
        optimizer, schedule = optimizer_of(model)
        trained = Trained(dict(model.named_parameters()), dict(model.named_buffers()), optimizer, schedule, 1.0)
        place = Place(
            Sync(mode="deadline", **sync),
            rank,
            dist.PrefixStore("mode", store),
            torch.device("cpu"),
            log,
            lambda step: step in boundaries,
            timeout_s=TIMEOUT_S,
            watch=watch,
            changing=lambda: time.sleep(pause_s),
        )
        mode = Deadline(trained, place)
        try:
            return _train(model, trained, mode, story, steps)
        finally:
            mode.close()
            log.close()


@contextmanager
def _leaving_when_lost() -> Iterator[None]:
    """Abandon the groups when a peer is lost, as runs do: torch may wait for ever to free what it has under way."""
    try:
        yield
    except PeerLost:
        abandon_groups()
        raise


def _train(model: Net, trained: Trained, mode: Deadline, story: "Story", steps: int) -> Notes:
    notes, step, worker = Notes(), 1, story.rank.index
    while step <= steps:
        loss = loss_of(model, step, worker)
        loss.backward()  # type: ignore[no-untyped-call]
        model.calls += torch.tensor([1.0, worker])  # type: ignore[operator]
        story.before(step)
        met = mode.meet(Mine(step, SIZES[worker], loss.item(), SIZES[worker]))
        notes.brought.append((step, met))
        notes.at_s.append(time.monotonic())
        step = met.next_step
        story.after(step - 1)
        if step - 1 in story.boundaries:
            notes.at_boundaries[step - 1] = state_of(model, trained.optimizer)
    notes.state, notes.lr = state_of(model, trained.optimizer), trained.optimizer.param_groups[0]["lr"]
    return notes


@dataclass
class Story:
    """What happens to the workers, told by steps and not by the clock."""

    rank: Rank
    store: dist.Store
    boundaries: Sequence[int]
    lags: dict[int, int]
    sleeps: dict[int, float]
    stops: tuple[int, int, int] | None
    kills: tuple[int, int] | None

    def before(self, step: int) -> None:
        """Be slow, or stopped, or killed, with the gradient of `step` in hand."""
        me = self.rank.index
        time.sleep(self.sleeps.get(me, 0.0))
        if self.kills is not None and self.kills[0] == me and step >= self.kills[1]:  # it may leave steps out
            os.kill(os.getpid(), signal.SIGKILL)
        if self.stops is not None and self.stops[:2] == (me, step):
            self.store.set("stopped", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if me in self.lags:
            boundary = min(b for b in self.boundaries if b >= step)
            until = min(step + self.lags[me] - 1, boundary - 1)  # beyond which the others do not go without this one
            wait_until(lambda: step > until or int(self.store.add("done", 0)) >= until)

    def after(self, step: int) -> None:
        """Tell the others; continue the one that is stopped."""
        if self.rank.index != 0:
            return
        self.store.add("done", step - int(self.store.add("done", 0)))
        if self.stops is not None and step == self.stops[2]:
            pid = int(self.store.get("stopped"))
            wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            os.kill(pid, signal.SIGCONT)


def replayed(
    notes: Sequence[Notes], steps: int, *, late: str, width: int = 6
) -> tuple[list[Tensor], list[float], list[float]]:
    """Return the parameters, and each step's loss and weight, from who brought what to which step."""
    model = Net(width)
    optimizer, schedule = optimizer_of(model)
    history = {0: _parameters(model)}
    losses, weights = [], []
    for step in range(1, steps + 1):
        here = [(meant, w) for w, of in enumerate(notes) for meant, met in of.brought if met.next_step == step + 1]
        counted = [(meant, w) for meant, w in here if meant == step or late == "add"]
        total = sum(SIZES[w] for _, w in counted)
        gradients, loss = _mean([_gradients(history[meant - 1], meant, w) for meant, w in counted], counted, total)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        history[step] = _parameters(model)
        losses.append(loss)
        weights.append(float(total))
    return history[steps], losses, weights


def _parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _gradients(parameters: list[Tensor], step: int, worker: int) -> tuple[list[Tensor], float]:
    model = Net(len(parameters[1]))
    with torch.no_grad():
        for mine, given in zip(model.parameters(), parameters, strict=True):
            mine.copy_(given)
    loss = loss_of(model, step, worker)
    return list(torch.autograd.grad(loss, list(model.parameters()))), loss.item()


def _mean(
    found: list[tuple[list[Tensor], float]], counted: list[tuple[int, int]], total: int
) -> tuple[list[Tensor], float]:
    scales = [SIZES[worker] / total for _, worker in counted]
    gradients = [
        torch.stack([scale * gradient for scale, gradient in zip(scales, each, strict=True)]).sum(0)
        for each in zip(*[gradients for gradients, _ in found], strict=True)
    ]
    return gradients, sum(scale * loss for scale, (_, loss) in zip(scales, found, strict=True))


def caught_up(folder: Path, worker: int) -> list[dict[str, Any]]:
    """Return the events of a worker that caught up."""
    lines = (folder / f"{worker}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "caught_up"]
