"""Every way to sum a tensor over the workers of this machine, measured beside Gloo, MPI and what the formulas say.

1. Workers start on this machine, measure the link between two of them, check every sum, and take turns (see
   collectives_worker.py); Open MPI is measured directly before and after (see collectives_mpi.py).
2. A figure is the median over turns of what the slowest worker took.
3. From the link come the seconds that planner/collectives predicts, and the algorithm that the planner would choose.

What is predicted assumes that the workers of one host share what carries their bytes, its memory and cores: s workers
that send at the same time have 2/s of the rate that two alone have, and 2/s of the speed at which a message is set off.
Two send at the same time where the link is measured; in naive 1 does, in tree at most half of all, in the others all.
Example: two workers alone exchange 1 GB/s, with 0.1 ms. A ring among 4 then has 0.5 GB/s and 0.2 ms: 64 MB take
6 * (0.2 ms + 16 MB / 0.5 GB/s) = 193 ms.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench import collectives_mpi
from shoal.bench.turns import PROGRESS
from shoal.core.errors import PeerLost, WorkerFailed
from shoal.launch.local import Watch, Worker, launch_local
from shoal.launch.starting import Spawning
from shoal.planner.collectives.allreduce import ALLREDUCE, two_level
from shoal.planner.collectives.choice import choose_way
from shoal.planner.collectives.crowd import STEPS
from shoal.spec.device import Link

GLOO = "Gloo"
_MPI_SHARE = 0.1
"""The part of the time for MPI before, and the same after."""
_PATIENCE_S = 300.0
"""How much longer than asked the workers may take, on a machine that does much else: large sums are made thrice."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The algorithm that the planner would choose at one size, and the fastest of those it chooses from."""

    chosen: str
    fastest: str
    over_fastest: float
    """What the chosen one took over what the fastest took."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an all-reduce took with one number of workers."""

    workers: int
    link: Link
    """Between two workers alone."""
    seconds: dict[int, dict[str, float]]
    """By size in bytes, and by name."""
    rounds: dict[int, int]
    """How often each had its turn at a size."""
    left_out: list[str]
    """What could not be measured, a sentence each."""

    @property
    def names(self) -> list[str]:
        """All that were measured."""
        return list(next(iter(self.seconds.values())))

    @property
    def predicted(self) -> dict[int, dict[str, float]]:
        """What the formulas say, for those that have one."""
        return {size: predict(size, self.workers, self.link) for size in self.seconds}

    def over_predicted(self) -> dict[str, float]:
        """Return measured over predicted of each that has a formula: the median over sizes."""
        rows = [(self.seconds[size], row) for size, row in self.predicted.items()]
        return {name: statistics.median(took[name] / said[name] for took, said in rows) for name in rows[0][1]}

    def times_gloo(self) -> dict[str, float]:
        """Return how many times as fast as Gloo each is: the median over sizes."""
        rows = list(self.seconds.values())
        return {name: statistics.median(row[GLOO] / row[name] for row in rows) for name in self.names if name != GLOO}

    def choices(self) -> dict[int, Choice]:
        """Return, for each size, what the planner would choose, over messages, as if it knew of no hosts."""
        link, found = _shared_link(self.link, self.workers), {}
        for size, took in self.seconds.items():
            way = choose_way(workers=self.workers, per_host=1, inside=None, between=link, bucket=size)
            best = fastest_of({name: took[name] for name in STEPS})
            found[size] = Choice(chosen=way.name, fastest=best, over_fastest=took[way.name] / took[best])
        return found

    def as_json(self) -> dict[str, Any]:
        """Return all figures."""
        choices, predicted = self.choices(), self.predicted
        return {
            "workers": self.workers,
            "latency_s": self.link.latency_s,
            "link_bytes_per_s": self.link.bytes_per_s,
            "sizes": [
                {
                    "bytes": size,
                    "rounds": self.rounds[size],
                    "seconds": took,
                    "predicted_s": predicted[size],
                    "fastest": fastest_of(took),
                    "planner": vars(choices[size]),
                }
                for size, took in self.seconds.items()
            ],
            "measured_over_predicted": self.over_predicted(),
            "times_as_fast_as_gloo": self.times_gloo(),
            "left_out": self.left_out,
        }


def fastest_of(took: Mapping[str, float]) -> str:
    """Return the name with the least seconds."""
    return min(took, key=lambda name: took[name])


def predict(num_bytes: int, workers: int, link: Link) -> dict[str, float]:
    """Return the seconds of each algorithm that has a formula, among workers of one host; see above."""
    at_once = {"naive": 1, "tree": workers // 2}
    found = {}
    for name, cost in ALLREDUCE.items():
        if name != "parameter-server":  # it needs workers of its own
            own = _shared_link(link, at_once.get(name, workers))
            found[name] = cost(num_bytes, workers, own.bytes_per_s, own.latency_s).seconds
    if workers >= 4 and workers % 2 == 0:
        own = _shared_link(link, workers)
        rate, latency_s = own.bytes_per_s, own.latency_s
        found["two-level"] = two_level(
            num_bytes,
            workers,
            rate,
            latency_s,
            per_node=workers // 2,
            inside_bytes_per_s=rate,
            inside_latency_s=latency_s,
        ).seconds
    return found


def _shared_link(link: Link, senders: int) -> Link:
    """Return what one of `senders` that send at the same time has of the link."""
    part = min(1.0, 2 / senders)
    return Link(source=link.source, bytes_per_s=part * link.bytes_per_s, latency_s=link.latency_s / part)


def bench_collectives(*, workers: int, sizes: Sequence[int], seconds: float, say: Callable[[str], None]) -> Measured:
    """Return what an all-reduce of each of `sizes` bytes takes by every way, measured in about `seconds`.

    Raises WorkerFailed if a sum is wrong. `say` is told from time to time what is being measured.
    """
    reason = collectives_mpi.why_not()
    mpi_s = 0.0 if reason else _MPI_SHARE * seconds
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder = Path(name)
        before, reason = _by_mpi(folder, workers, sizes, mpi_s, say=say, reason=reason)
        command = worker_command(folder, seconds=seconds - 2 * mpi_s, sizes=sizes)
        ours = _run(command, folder / "times.json", workers=workers, seconds=seconds, say=say)
        after, reason = _by_mpi(folder, workers, sizes, mpi_s, say=say, reason=reason)
    times: dict[int, dict[str, list[float]]] = {int(size): row for size, row in ours["seconds"].items()}
    if not reason:
        for size, row in times.items():
            row[collectives_mpi.NAME] = before[str(size)] + after[str(size)]
    return Measured(
        workers=workers,
        link=Link(**ours["link"]),
        seconds={size: {name: statistics.median(s) for name, s in row.items()} for size, row in times.items()},
        rounds={size: len(row[GLOO]) for size, row in times.items()},
        left_out=ours["left_out"] + ([reason] if reason else []),
    )


def worker_command(folder: Path, *, seconds: float, sizes: Sequence[int]) -> list[str]:
    """Return the command of a worker, to be started by this process; worker 0 writes times.json into `folder`."""
    options = [str(folder), str(os.getpid()), str(seconds), ",".join(map(str, sizes))]
    return [sys.executable, "-m", "shoal.bench.collectives_worker", *options]


def _by_mpi(
    folder: Path, workers: int, sizes: Sequence[int], seconds: float, *, say: Callable[[str], None], reason: str
) -> tuple[dict[str, list[float]], str]:
    """Return the seconds of MPI's turns by size, and why there are none; that is so at once if there is a `reason`."""
    if reason:
        return {}, reason
    say("MPI")
    command = collectives_mpi.start_command(folder, workers=workers, seconds=seconds, sizes=sizes)
    try:
        return _run(command, folder / "mpi.json", workers=1, seconds=seconds, say=say), ""
    except WorkerFailed as error:
        return {}, f"MPI is left out: {error}"


def _run(
    command: list[str], answer: Path, *, workers: int, seconds: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return what the workers of `command` wrote to `answer`."""
    lines: list[tuple[int, str]] = []
    most_s = 10 * seconds + _PATIENCE_S
    deadline_s = time.monotonic() + most_s

    def hear(rank: int, line: str) -> None:
        if line.startswith(PROGRESS):
            say(line.removeprefix(PROGRESS))
        else:
            lines.append((rank, line))

    def look() -> None:
        if time.monotonic() > deadline_s:
            raise WorkerFailed(f"the benchmark's workers have not ended in {most_s:.0f} s.")

    ended = launch_local(Spawning(command), workers=workers, timeout_s=60, watch=Watch(on_line=hear, on_tick=look))
    if any(worker.exit_code != 0 for worker in ended):
        raise _failure(ended, lines)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _failure(ended: Sequence[Worker], lines: Sequence[tuple[int, str]]) -> WorkerFailed:
    """Return the error that says what the worker that is the cause said last."""
    failed = [worker for worker in ended if worker.exit_code != 0 and not worker.is_ended_by_us]
    cause = next((worker for worker in failed if worker.exit_code != PeerLost.exit_code), (failed or ended)[0])
    words = [line for rank, line in lines if rank == cause.rank and line.strip()]
    last = words[-1].removeprefix("WorkerFailed: ") if words else f"it left with exit code {cause.exit_code}."
    details = "\n".join(f"[worker {rank}] {line}" for rank, line in lines)
    return WorkerFailed(f"worker {cause.rank} of the benchmark failed: {last}", details=details)
