"""Workers of parameter servers as threads of one process: each with a model, an optimizer and links of its own."""

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.rank import Rank
from shoal.comm.store import connect, host_store
from shoal.core.events import EventLog
from shoal.spec.sync import Sync
from shoal.sync.mode import Met, Mine, Place, Trained
from shoal.sync.server.mode import Servers

TIMEOUT_S = 30.0
BATCH = 12
_X = torch.randn(48, 5, generator=torch.Generator().manual_seed(7))
_BUILDING = threading.Lock()

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD without."""
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, with two groups."""
    groups: list[dict[str, Any]] = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}]
    return torch.optim.AdamW(groups, lr=0.01)


class Bench:
    """A model on a bench: what one worker trains, and what the reference does."""

    def __init__(self, build: Build = sgd, *, clip_norm: float | None = None, has_schedule: bool = False) -> None:
        with _BUILDING:  # the seed is the whole process's
            torch.manual_seed(3)
            self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = build(list(self.model.parameters()))
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5) if has_schedule else None
        self.clip_norm = clip_norm

    @property
    def trained(self) -> Trained:
        """What a mode is given."""
        parameters = dict(self.model.named_parameters())
        return Trained(parameters, dict(self.model.named_buffers()), self.optimizer, self.schedule, self.clip_norm)

    def forward(self, samples: Sequence[int]) -> Tensor:
        """Return the mean loss over samples."""
        x = _X[list(samples)]
        return F.mse_loss(self.model(x)[:, 0], x.sum(1).sin())

    def backward(self, samples: Sequence[int]) -> float:
        """Leave the mean gradient over samples in the parameters; return the loss."""
        loss = self.forward(samples)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def step(self, samples: Sequence[int]) -> float:
        """Do a step the obvious way."""
        self.optimizer.zero_grad()
        loss = self.backward(samples)
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        if self.schedule:
            self.schedule.step()
        return loss

    def row(self) -> Tensor:
        """Return all parameters, one after the other."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def kept(self) -> list[Tensor]:
        """Return what the optimizer keeps, in a fixed order."""
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        return [torch.as_tensor(state[name]) for state in states for name in sorted(state) if state[name] is not None]


def batch_of(step: int) -> list[int]:
    """Return the samples of a step, from 1."""
    return [((step - 1) * BATCH + number) % len(_X) for number in range(BATCH)]


def part_of(step: int, index: int, cuts: Sequence[int]) -> list[int]:
    """Return the samples of part `index` of a step, where parts have `cuts` samples."""
    begin = sum(cuts[:index])
    return batch_of(step)[begin : begin + cuts[index]]


class Worker:
    """One worker: its bench, and its side of the servers."""

    def __init__(self, rank: Rank, bench: Bench, sync: Sync, folder: Path, **options: Any) -> None:
        self.rank, self.bench = rank, bench
        boundaries = options.pop("boundaries", ())
        self._log = EventLog(folder / f"rank-{rank.index}.jsonl")
        place = Place(
            sync=sync,
            rank=rank,
            store=connect(rank, timeout_s=TIMEOUT_S),
            device=torch.device("cpu"),
            log=self._log,
            is_boundary=lambda step: step in boundaries,
            first_step=options.pop("first_step", 1),
            last_step=options.pop("last_step", 0),
            timeout_s=TIMEOUT_S,
        )
        self.servers = Servers(bench.trained, place, **options)
        self._is_closed = False

    def step(self, step: int, samples: Sequence[int], *, part: int = 0) -> Met:
        """Compute on samples, and meet the others."""
        return self.meet(step, self.bench.backward(samples), len(samples), part=part)

    def meet(self, step: int, loss: float, samples: int, *, part: int = 0) -> Met:
        """Meet the others with the gradient that is there."""
        return self.servers.meet(Mine(step, float(samples), loss, samples, part, float(BATCH)))

    def close(self) -> None:
        """End it."""
        if not self._is_closed:
            self.servers.close()
            self._log.close()

    def die(self) -> None:
        """Be gone without a goodbye, as a killed process is: connections break, and its servers with them."""
        self._is_closed = self.servers._is_closing = True
        self.servers.opened.close(in_order=False)
        self._log.close()


@contextmanager
def ranks_of(workers: int) -> Iterator[list[Rank]]:
    """Have a store, and return the ranks of so many workers."""
    store, port = host_store(host="127.0.0.1", timeout_s=TIMEOUT_S)
    yield [Rank(index, workers, index, workers, "127.0.0.1", port, store_is_hosted=True) for index in range(workers)]
    del store


def together(workers: int, do: Callable[[Worker], Any], sync: Sync, *, build: Build = sgd, **options: Any) -> list[Any]:
    """Return what `do` returns for each of so many workers, each in a thread; all are closed in the end."""
    of_bench = {name: options.pop(name) for name in ("clip_norm", "has_schedule") if name in options}

    def one(rank: Rank) -> Any:
        worker = Worker(rank, Bench(build, **of_bench), sync, Path(folder), **options)
        try:
            return do(worker)
        finally:
            worker.close()

    with (
        tempfile.TemporaryDirectory() as folder,
        ranks_of(workers) as ranks,
        ThreadPoolExecutor(workers) as pool,
    ):
        return [future.result(2 * TIMEOUT_S) for future in [pool.submit(one, rank) for rank in ranks]]
