"""Executors of others, given to `shoal.map`, each for real: `python benchmarks/tasks/executors.py` (half a minute).

1. concurrent.futures, Dask (`client.get_executor()`), Ray (by the few lines below) and submitit, of which each is tried
   that this Python has; submitit on Slurm, where there is one, and else by its own local processes.
2. Each runs 20 tasks, of which one fails the first time and is tried again, then a map in which one raises.
3. "ok" is printed for each whose results are those of the plain loop. Exit 1 where one is not.
"""

import concurrent.futures
import contextlib
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from shoal.tasks.map import map as shoal_map

WORKERS = 2


@contextmanager
def futures(_: Path) -> Iterator[Any]:
    """Give concurrent.futures."""
    with concurrent.futures.ProcessPoolExecutor(WORKERS) as executor:
        yield executor


@contextmanager
def dask(_: Path) -> Iterator[Any]:
    """Give Dask's own executor."""
    from distributed import Client, LocalCluster

    options = {
        "n_workers": WORKERS,
        "threads_per_worker": 1,
        "dashboard_address": None,
        "silence_logs": logging.CRITICAL,
    }
    with LocalCluster(**options) as cluster, Client(cluster) as client:  # type: ignore[arg-type]
        yield client.get_executor()


class RayExecutor(concurrent.futures.Executor):
    """Ray's tasks as futures: Ray has no executor of its own."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """Return the future of a remote task."""
        import ray as it

        future: concurrent.futures.Future[Any] = it.remote(fn).remote(*args, **kwargs).future()
        return future


@contextmanager
def ray(_: Path) -> Iterator[Any]:
    """Give Ray."""
    import ray as it

    it.init(num_cpus=WORKERS, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield RayExecutor()
    finally:
        it.shutdown()


@contextmanager
def submitit(folder: Path) -> Iterator[Any]:
    """Give submitit's executor: of Slurm, where there is one."""
    import submitit as it

    with contextlib.ExitStack() as stack:
        kind = "slurm" if _slurm(stack) else "local"
        print(f"submitit: {kind}", flush=True)
        executor = it.AutoExecutor(folder=folder / "submitit", cluster=kind)
        executor.update_parameters(timeout_min=2, cpus_per_task=1)
        yield executor


def _slurm(stack: contextlib.ExitStack) -> bool:
    """Have a Slurm on this machine, if it can have one."""
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        return False
    from tests.support.slurm import slurm_cluster

    os.environ.update(stack.enter_context(slurm_cluster(nodes=2, cpus=2)).env)
    return True


EXECUTORS = {
    "concurrent.futures": ("concurrent", futures),
    "Dask": ("distributed", dask),
    "Ray": ("ray", ray),
    "submitit": ("submitit", submitit),
}


def fail_once(item: tuple[str, int]) -> int:
    """Return twice the number; the first time, number 3 fails."""
    folder, number = item
    mark = Path(folder) / "failed"
    if number == 3 and not mark.exists():
        mark.touch()
        raise OSError("not yet")
    return 2 * number


def refuse_five(number: int) -> int:
    """Return the number, unless it is 5."""
    if number == 5:
        raise ValueError("five")
    return number


def is_right(executor: Any, folder: Path) -> bool:
    """Return whether a map on `executor` gives what the plain loop does."""
    items = [(str(folder), number) for number in range(20)]
    found = shoal_map(fail_once, items, executor=executor, retries=1)
    kept = shoal_map(refuse_five, range(8), executor=executor, on_error="return")
    others = [value for number, value in enumerate(kept) if number != 5]
    is_told = isinstance(kept[5], Exception) and "five" in str(kept[5])
    return found == [2 * number for number in range(20)] and others == [0, 1, 2, 3, 4, 6, 7] and is_told


def main() -> int:
    """Try each, print, and return 1 where one is wrong."""
    for name in ("distributed.worker", "submitit"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they tell of the tasks that fail on purpose
    wrong = 0
    for name, (module, opened) in EXECUTORS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{name:20}not installed in this Python")
            continue
        begun_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as executor:
            is_good = is_right(executor, Path(folder))
        wrong += not is_good
        print(f"{name:20}{'ok' if is_good else 'WRONG'}   {time.perf_counter() - begun_s:.1f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
