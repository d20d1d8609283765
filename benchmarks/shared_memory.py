"""Shared memory beside Gloo and Open MPI on one host, and what gradients cost a training step.

    python benchmarks/shared_memory.py                  all-reduce of 1 to 64 MB, 2 and 4 workers
    python benchmarks/shared_memory.py --training       a step of examples/gpt.py on 2 workers, beside DDP over Gloo
    python benchmarks/shared_memory.py --waking         what it costs to wake a worker: semaphores beside sockets

All sides take turns in the same processes; each figure is the median of the rounds. Open MPI runs in an mpirun of its
own right after, where mpirun and mpi4py are installed. GB/s are the bytes of one tensor by the seconds of a call.
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


def compare_collectives(rounds: int) -> None:
    """Print GB/s of each way at each size."""
    from tests.support.ranks import RankPool

    pool = RankPool()
    print("| workers | MB | Gloo GB/s | shared buffer | times Gloo | own memory | times Gloo | Open MPI |")
    print("|---|---|---|---|---|---|---|---|")
    try:
        for workers in (2, 4):
            ours = pool.run(collectives_worker, workers=workers, rounds=rounds)[0]
            theirs = by_mpi(workers, rounds)
            for size_mb, seconds in ours.items():
                rate = {name: size_mb * MB / s / 1e9 for name, s in seconds.items()}
                mpi = f"{size_mb * MB / theirs[size_mb] / 1e9:.2f}" if theirs else "-"
                cells = [f"{rate['gloo']:.2f}"]
                for name in ("shared buffer", "own memory"):
                    cells += [f"{rate[name]:.2f}", f"{rate[name] / rate['gloo']:.1f}"]
                print(f"| {workers} | {size_mb} | {' | '.join(cells)} | {mpi} |", flush=True)
    finally:
        pool.close()


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


def compare_training(rounds: int, steps: int, bucket_mb: float) -> None:
    """Print what each way to sum gradients costs a step above none."""
    from tests.support.ranks import RankPool

    pool = RankPool()
    try:
        answers = pool.run(training_worker, workers=2, rounds=rounds, steps=steps, bucket_mb=bucket_mb)
    finally:
        pool.close()
    ms = {side: statistics.median(s for answer in answers for s in answer[side]) * 1e3 for side in answers[0]}
    above = above_none_ms(answers)
    print(f"a step without a sum {ms['none']:.1f} ms; DDP over Gloo {ms['ddp']:.1f} (+{above['ddp']:.1f}); ", end="")
    print(f"shared memory {ms['shared']:.1f} (+{above['shared']:.1f}), of which finish() {ms['exposed']:.1f}; ", end="")
    print(f"shared memory costs {above['shared'] / above['ddp']:.2f} of what DDP costs")
    slower = {side: [max(pair) for pair in zip(*(a[side] for a in answers), strict=True)] for side in ("none", *above)}
    of_pair = above_none_ms([slower])
    print(
        f"the slower worker of each round: DDP +{of_pair['ddp']:.1f} ms, shared memory +{of_pair['shared']:.1f}: "
        f"{of_pair['shared'] / of_pair['ddp']:.2f}"
    )


def waking_worker(rank: Any, *, rounds: int) -> dict[str, float]:
    """Return the seconds of telling each other "here" by semaphores, spinning or not, and by a socket."""
    from shoal.comm.shm.group import join
    from shoal.comm.store import connect

    with join(connect(rank, timeout_s=60), index=rank.index, count=2, timeout_s=60) as group:
        bells, (link,) = group._turns._slots.ready, group._meeting._links.values()
        link.settimeout(60)

        def sleeping() -> None:
            spin_s, bells._spin_s = bells._spin_s, 0.0
            group.barrier()
            bells._spin_s = spin_s

        def by_socket() -> None:
            link.send(b"x")
            link.recv(1)

        sides = {"semaphore, spinning shortly": group.barrier, "semaphore, sleeping": sleeping, "socket": by_socket}
        return alternate(sides, rounds=rounds, calls=200, wait=group.barrier)


def compare_waking(rounds: int) -> None:
    """Print the microseconds of a barrier of two by each way."""
    from tests.support.ranks import RankPool

    pool = RankPool()
    try:
        for name, seconds in pool.run(waking_worker, workers=2, rounds=rounds)[0].items():
            print(f"{name}: {seconds * 1e6:.1f} us")
    finally:
        pool.close()


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--waking", action="store_true")
    parser.add_argument("--rounds", type=int, help="by default 21, and 60 of --training")
    parser.add_argument("--steps", type=int, default=1, help="of a side in a round of --training")
    parser.add_argument("--bucket-mb", type=float, default=4.0)
    parser.add_argument("--mpi-worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (60 if arguments.training else 21)
    if arguments.mpi_worker:
        mpi_worker(arguments.rounds)
    elif arguments.training:
        compare_training(arguments.rounds, arguments.steps, arguments.bucket_mb)
    elif arguments.waking:
        compare_waking(arguments.rounds)
    else:
        compare_collectives(arguments.rounds)


if __name__ == "__main__":
    main()
