"""Shared memory beside Gloo and Open MPI on one host, and what gradients cost a training step.

    python benchmarks/shared_memory.py                  all-reduce of 1 to 64 MB, 2 and 4 workers
    python benchmarks/shared_memory.py --training       a step of examples/gpt.py on 2 workers, beside DDP over Gloo

All sides take turns in the same processes; each figure is the median of the rounds. Open MPI runs in an mpirun of its
own right after, where mpirun and mpi4py are installed. GB/s are the bytes of one tensor by the seconds of a call.

The bars stand beside the figures, and it ends with 1 where one was missed: at every size 5 times Gloo with 2 workers
and 3 times with 4; Open MPI's rate from 16 MB on, and half of it below; a quarter of what DDP over Gloo adds to a step.
"""

import argparse
import ctypes
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

MB = 1_000_000
SIZES_MB = (1, 4, 16, 64)
TIMES_GLOO = {2: 5.0, 4: 3.0}
"""By the number of workers."""
LARGE_MB, OF_MPI_SMALL, OF_MPI_LARGE = 16, 0.5, 1.0
OF_DDP = 0.25


def alternate(
    sides: dict[str, Callable[[], None]], *, rounds: int, calls: int, wait: Callable[[], None]
) -> dict[str, float]:
    """Return the median seconds of one call of each side."""
    times = all_times(sides, rounds=rounds, calls=calls, wait=wait)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def all_times(
    sides: dict[str, Callable[[], None]], *, rounds: int, calls: int, wait: Callable[[], None], before: int = 0
) -> dict[str, list[float]]:
    """Return the seconds of one call of each side in each round, after one to warm up.

    In each round the first `before` calls of a side are not timed: they run on cores and caches that another side left.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides) if number % 2 else reversed(list(sides)):
            for _ in range(before):
                sides[name]()
            wait()
            begin_s = time.perf_counter()
            for _ in range(calls):
                sides[name]()
            times[name].append((time.perf_counter() - begin_s) / calls)
    return {name: seconds[1:] for name, seconds in times.items()}


def collectives_worker(rank: Any, *, rounds: int) -> dict[int, dict[str, float]]:
    """Return the seconds of an all-reduce of each size by each way. Runs in the pool."""
    import torch
    import torch.distributed as dist

    from shoal.comm.group import joined
    from shoal.comm.shm.group import join
    from shoal.comm.store import connect

    found = {}
    store = connect(rank, timeout_s=60)
    with (
        joined(rank, store, device=torch.device("cpu"), timeout_s=60),
        join(store, index=rank.index, count=rank.workers, timeout_s=60) as group,
    ):
        for size_mb in SIZES_MB:
            numel = size_mb * MB // 4
            tensor, own = torch.zeros(numel), torch.zeros(numel)
            buffer = group.buffer(numel, torch.float32)
            sides: dict[str, Callable[[], None]] = {
                "gloo": lambda tensor=tensor: dist.all_reduce(tensor),
                "shared buffer": buffer.all_reduce,
                "own memory": lambda own=own: group.all_reduce(own),
            }
            found[size_mb] = alternate(sides, rounds=rounds, calls=max(1, 16 // size_mb), wait=group.barrier)
    return found


def mpi_worker(rounds: int) -> None:
    """Print the seconds of an all-reduce of each size. Runs under mpirun, where there need be no torch."""
    import numpy
    from mpi4py import MPI

    world, found = MPI.COMM_WORLD, {}
    for size_mb in SIZES_MB:
        own, total = numpy.zeros(size_mb * MB // 4, "f4"), numpy.zeros(size_mb * MB // 4, "f4")
        side: dict[str, Callable[[], None]] = {"mpi": lambda own=own, total=total: world.Allreduce(own, total)}
        found[size_mb] = alternate(side, rounds=rounds, calls=max(1, 16 // size_mb), wait=world.Barrier)["mpi"]
    if world.rank == 0:
        print(json.dumps(found))


def by_mpi(workers: int, rounds: int) -> dict[int, float]:
    """Return Open MPI's seconds of an all-reduce of each size; nothing where it is not installed."""
    if not shutil.which("mpirun") or not importlib.util.find_spec("mpi4py"):
        return {}
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(workers)]
    command += [sys.executable, __file__, "--mpi-worker", "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return {int(size): seconds for size, seconds in json.loads(done.stdout).items()}


def compare_collectives(rounds: int) -> list[str]:
    """Print GB/s of each way at each size; return which bars were missed."""
    from tests.support.ranks import RankPool

    pool = RankPool()
    missed: list[str] = []
    print("| workers | MB | Gloo GB/s | shared buffer | times Gloo (bar) | own memory | times Gloo | Open MPI (bar) |")
    print("|---|---|---|---|---|---|---|---|")
    try:
        for workers in (2, 4):
            ours = pool.run(collectives_worker, workers=workers, rounds=rounds)[0]
            theirs = by_mpi(workers, rounds)
            for size_mb, seconds in ours.items():
                rate = {name: size_mb * MB / s / 1e9 for name, s in seconds.items()}
                if theirs:
                    rate["mpi"] = size_mb * MB / theirs[size_mb] / 1e9
                mpi = f"{rate['mpi']:.2f} ({of_mpi(size_mb):g} of it)" if theirs else "-"
                cells = [f"{rate['gloo']:.2f}"]
                for name, bar in (("shared buffer", f" ({TIMES_GLOO[workers]:g})"), ("own memory", "")):
                    cells += [f"{rate[name]:.2f}", f"{rate[name] / rate['gloo']:.1f}{bar}"]
                print(f"| {workers} | {size_mb} | {' | '.join(cells)} | {mpi} |", flush=True)
                missed += missed_rates(workers, size_mb, rate)
    finally:
        pool.close()
    return missed


def of_mpi(size_mb: int) -> float:
    """Return which part of Open MPI's rate is the bar."""
    return OF_MPI_LARGE if size_mb >= LARGE_MB else OF_MPI_SMALL


def missed_rates(workers: int, size_mb: int, rate: Mapping[str, float]) -> list[str]:
    """Return a sentence for each bar that these GB/s miss; those of Open MPI are there if it is installed."""
    where = f"{size_mb} MB with {workers} workers"
    times = rate["shared buffer"] / rate["gloo"]
    missed = [f"{where}: {times:.1f} times Gloo, not {TIMES_GLOO[workers]:g}"] if times < TIMES_GLOO[workers] else []
    if "mpi" in rate and rate["shared buffer"] < of_mpi(size_mb) * rate["mpi"]:
        missed.append(f"{where}: {rate['shared buffer'] / rate['mpi']:.2f} of Open MPI's, not {of_mpi(size_mb):g}")
    return missed


def keep_freed_memory() -> None:
    """Tell glibc to give no memory back, for all sides alike: page faults add up to 10 ms to a step, of any of them."""
    trim_threshold, mmap_threshold = -1, -3
    ctypes.CDLL(None).mallopt(trim_threshold, 2**31 - 1)
    ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 30)


def training_worker(rank: Any, *, rounds: int, steps: int, bucket_mb: float) -> dict[str, list[float]]:
    """Return the seconds of a step of each side in each round, and what `finish` took of it. Runs in the pool."""
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from examples.gpt import CONTEXT, GPT, VOCABULARY
    from shoal.comm.group import joined
    from shoal.comm.shm.group import join
    from shoal.comm.store import connect
    from shoal.sync.shared import SharedGradients

    torch.set_num_threads(1)
    keep_freed_memory()
    exposed: list[float] = []
    store = connect(rank, timeout_s=60)
    with (
        joined(rank, store, device=torch.device("cpu"), timeout_s=60),
        join(store, index=rank.index, count=rank.workers, timeout_s=60) as group,
    ):

        def side(wrap: Callable[[Any], tuple[Any, Callable[[], None]]]) -> Callable[[], None]:
            torch.manual_seed(0)
            model = GPT()
            replica, finish = wrap(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
            tokens = torch.randint(0, VOCABULARY, (2, CONTEXT + 1))

            def step() -> None:
                logits = replica(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / rank.workers
                loss.backward()
                finish()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

            return step

        def by_shared_memory(model: Any) -> tuple[Any, Callable[[], None]]:
            gradients = SharedGradients(
                model.parameters(), group, bucket_bytes=int(bucket_mb * MB), report_exposed_s=exposed.append
            )
            return model, gradients.finish

        sides = {
            "none": side(lambda model: (model, lambda: None)),
            "ddp": side(lambda model: (DistributedDataParallel(model), lambda: None)),
            "shared": side(by_shared_memory),
        }
        times = all_times(sides, rounds=rounds, calls=steps, wait=group.barrier, before=1)
        sides.clear()
    return {**times, "exposed": exposed[steps:]}


def above_none_ms(times: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return what each way to sum adds to a step, by the seconds of each side in each round.

    Above the step without a sum of the same round: what slows the machine for a while slows all sides of a round.
    """
    return {
        side: 1e3 * statistics.median(s - none for t in times for s, none in zip(t[side], t["none"], strict=True))
        for side in ("ddp", "shared")
    }


def compare_training(rounds: int, steps: int, bucket_mb: float, pairs: int) -> list[str]:
    """Print what each way to sum gradients costs a step above none; return the bar, if it was missed.

    Several pairs of workers, one after the other: where a process has its memory moves a side by some milliseconds for
    as long as it lives, so that many rounds of one pair tell less than a few of each.
    """
    answers, slower = [], []
    for _ in range(pairs):
        pair = in_new_workers(training_worker, rounds=rounds, steps=steps, bucket_mb=bucket_mb)
        answers += pair
        sides = ("none", "ddp", "shared")
        slower.append(
            {side: [max(both) for both in zip(*(each[side] for each in pair), strict=True)] for side in sides}
        )
        print(f"pair {len(slower)} of {pairs}: " + in_words(above_none_ms(slower[-1:])), flush=True)
    ms = {side: statistics.median(s for answer in answers for s in answer[side]) * 1e3 for side in answers[0]}
    print(f"a step without a sum {ms['none']:.1f} ms, with DDP over Gloo {ms['ddp']:.1f}, in shared memory ", end="")
    print(f"{ms['shared']:.1f}, of which finish() {ms['exposed']:.1f}")
    print("each worker by itself: " + in_words(above_none_ms(answers)))
    together = above_none_ms(slower)
    print(f"a step of both, the slower worker's: {in_words(together)} (bar: {OF_DDP})")
    return missed_share(together)


def missed_share(above: Mapping[str, float]) -> list[str]:
    """Return the bar, if what shared memory adds to a step misses it."""
    share = above["shared"] / above["ddp"]
    return [f"a step: {share:.3f} of what DDP over Gloo adds, not {OF_DDP}"] if share > OF_DDP else []


def in_new_workers(function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Return what two workers of their own answer."""
    from tests.support.ranks import RankPool

    pool = RankPool()
    try:
        return pool.run(function, workers=2, **arguments)
    finally:
        pool.close()


def in_words(above: Mapping[str, float]) -> str:
    """Return both costs, and one as a share of the other."""
    share = above["shared"] / above["ddp"]
    return f"DDP +{above['ddp']:.1f} ms, shared memory +{above['shared']:.1f}: {share:.2f} of DDP's"


def main() -> int:
    """Print what is asked for; return 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--rounds", type=int, help="by default 21, and 16 of each pair of --training")
    parser.add_argument("--steps", type=int, default=1, help="of a side in a round of --training")
    parser.add_argument("--pairs", type=int, default=5, help="of workers in --training, one after the other")
    parser.add_argument("--bucket-mb", type=float, default=4.0)
    parser.add_argument("--mpi-worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (16 if arguments.training else 21)
    missed: list[str] = []
    if arguments.mpi_worker:
        mpi_worker(arguments.rounds)
    elif arguments.training:
        missed = compare_training(arguments.rounds, arguments.steps, arguments.bucket_mb, arguments.pairs)
    else:
        missed = compare_collectives(arguments.rounds)
    for each in missed:
        print(f"missed: {each}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
