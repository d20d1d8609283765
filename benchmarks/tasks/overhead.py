"""What a task costs beside its work: 10,000 no-ops by warm local workers: `python benchmarks/tasks/overhead.py`.

1. Peers: concurrent.futures with its default chunksize (1), with one of 100, and with the best there is for tasks that
   do nothing: a worker's whole share; joblib with its automatic batches, Dask (distributed, processes) and Ray; those
   that this Python has. None is needed: any Python that has them will do, with PYTHONPATH at the repository, since
   these parts of shoal need nothing else.
2. Each starts its workers and runs 1,000 tasks before anything is counted. Then all run the 10,000 in turns, in an
   order that is turned round every time; a figure is the median over rounds.
3. The bar: shoal's cost is the least. Exit 1 where it is not.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import importlib.util
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from shoal.tasks.executor import Executor

Run = Callable[[Sequence[int]], list[int]]


def noop(item: int) -> int:
    """Return the item."""
    return item


@contextmanager
def shoal(workers: int) -> Iterator[Run]:
    """Give shoal's executor."""
    with Executor(workers) as executor:
        yield lambda items: list(executor.map(noop, items))


@contextmanager
def futures(workers: int, *, chunk: int | None = 1) -> Iterator[Run]:
    """Give concurrent.futures, with a chunksize; None: as many as each worker gets in all."""
    with concurrent.futures.ProcessPoolExecutor(workers) as executor:
        yield lambda items: list(executor.map(noop, items, chunksize=chunk or -(-len(items) // workers)))


@contextmanager
def joblib(workers: int) -> Iterator[Run]:
    """Give joblib's processes."""
    from joblib import Parallel, delayed

    with Parallel(n_jobs=workers) as parallel:
        yield lambda items: parallel(delayed(noop)(item) for item in items)


@contextmanager
def dask(workers: int) -> Iterator[Run]:
    """Give Dask's local cluster of processes."""
    from distributed import Client, LocalCluster

    options = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.ERROR}
    with LocalCluster(**options) as cluster, Client(cluster) as client:  # type: ignore[arg-type]
        yield lambda items: client.gather(client.map(noop, items, pure=False))


@contextmanager
def ray(workers: int) -> Iterator[Run]:
    """Give Ray's tasks."""
    import ray as it

    it.init(num_cpus=workers, include_dashboard=False, logging_level=logging.ERROR)
    task = it.remote(noop)
    try:
        yield lambda items: it.get([task.remote(item) for item in items])
    finally:
        it.shutdown()


PEERS: dict[str, tuple[str, Callable[[int], AbstractContextManager[Run]]]] = {
    "shoal": ("shoal", shoal),
    "concurrent.futures": ("concurrent", futures),
    "concurrent.futures, 100s": ("concurrent", functools.partial(futures, chunk=100)),
    "concurrent.futures, shares": ("concurrent", functools.partial(futures, chunk=None)),
    "joblib": ("joblib", joblib),
    "Dask": ("distributed", dask),
    "Ray": ("ray", ray),
}


def main() -> int:
    """Measure, print, and return 1 where shoal is not the least."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    there = {name: opened for name, (module, opened) in PEERS.items() if importlib.util.find_spec(module) is not None}
    items = list(range(arguments.tasks))
    taken: dict[str, list[float]] = {name: [] for name in there}
    starts: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        runs = {}
        for name, opened in there.items():
            begun_s = time.perf_counter()
            runs[name] = stack.enter_context(opened(arguments.workers))
            assert runs[name](items[:1000]) == items[:1000]
            starts[name] = time.perf_counter() - begun_s
        for number in range(arguments.rounds):
            for name in list(there) if number % 2 else reversed(there):
                begun_s = time.perf_counter()
                found = runs[name](items)
                taken[name].append(time.perf_counter() - begun_s)
                assert found == items
    return tell(taken, starts, arguments)


def tell(taken: dict[str, list[float]], starts: dict[str, float], arguments: argparse.Namespace) -> int:
    """Print the table."""
    us = {name: statistics.median(each) / arguments.tasks * 1e6 for name, each in taken.items()}
    print(f"{arguments.tasks:,} no-ops, {arguments.workers} workers, median of {arguments.rounds} rounds")
    print(f"{'':28}{'us a task':>12}{'lowest':>10}{'times shoal':>14}{'start and 1,000, s':>21}")
    for name, value in us.items():
        lowest = min(taken[name]) / arguments.tasks * 1e6
        print(f"{name:28}{value:>12.2f}{lowest:>10.2f}{value / us['shoal']:>14.1f}{starts[name]:>21.2f}")
    for name in PEERS:
        if name not in us:
            print(f"{name:28}  not installed in this Python")
    is_least = us["shoal"] == min(us.values())
    print(f"shoal's cost is {'the least' if is_least else 'NOT the least'}.")
    return 0 if is_least else 1


if __name__ == "__main__":
    sys.exit(main())
