"""What a worker of a run loads: its own part of each global batch, or whichever it is given."""

import dataclasses
from collections.abc import Callable, Generator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import torch

from shoal.core.errors import ConfigError, DataError
from shoal.data.loading.patience import Check, never
from shoal.data.loading.slot import Slot
from shoal.data.steps import Part, StepLoader
from shoal.data.stream_steps import StreamLoader
from shoal.spec.job import Job, is_stream
from shoal.spec.plan import Plan
from shoal.sync.mode import Tickets


def open_loader(
    job: Job,
    plan: Plan,
    *,
    index: int,
    first_step: int,
    device: torch.device,
    place: dict[str, int] | None = None,
    check: Check = never,
) -> StepLoader:
    """Return what loads part `index` of each global batch, from `first_step` to the end of the job.

    `place` is where a loader of the same stream was at the step before. `check` is called while a part is waited for.
    """
    check_loading(job, plan)
    if is_stream(job.data):
        return StreamLoader(
            job.data,
            batch_size=job.batch_size,
            shares=plan.shares,
            index=index,
            first_step=first_step,
            last_step=job.total_steps,
            place=place,
            drop_last=job.drop_last,
            collate=job.collate,
            timeout_s=plan.timeout_s,
            check=check,
            is_ahead=device.type == "cuda",
        )
    return StepLoader(
        job.data,
        batch_size=job.batch_size,
        shares=plan.shares,
        index=index,
        first_step=first_step,
        last_step=job.total_steps,
        seed=job.seed,
        shuffle=job.shuffle,
        block_rows=job.block_rows,
        sampler=job.sampler,
        drop_last=job.drop_last,
        collate=job.collate,
        device=device,
        threads=plan.loading.threads or None,
        workers=plan.loading.workers,
        timeout_s=plan.timeout_s,
        check=check,
        is_ahead=device.type == "cuda",
    )


def check_loading(job: Job, plan: Plan) -> None:
    """Raise where `job` cannot be loaded as the plan says."""
    if plan.loading.workers and is_stream(job.data):
        raise ConfigError(
            f"loading.workers={plan.loading.workers}: Job.data is a stream, of which one thread reads all. Give a "
            "dataset with len() and [index], or leave loading.workers (--loader-workers) out."
        )


class PartLoader:
    """Loads any part of any step, one ahead, on a thread of its own. Ended by `close`."""

    _SLOTS = 3
    """The part that is computed with, the one that is loaded meanwhile, and the one that a GPU may still copy."""

    def __init__(self, open_one: Callable[[int], StepLoader]) -> None:
        """`open_one` returns the loader of the part of a number."""
        self._open_one = open_one
        self._loaders: dict[int, StepLoader] = {}
        self._slots: list[Slot] = []
        self._count = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-parts")

    def start(self, step: int, index: int) -> Callable[[], Part]:
        """Begin to load part `index` of `step`, and return what waits for it."""
        if index not in self._loaders:
            self._loaders[index] = self._open_one(index)
        loader = self._loaders[index]
        if len(self._slots) < self._SLOTS:
            self._slots.append(loader.new_slot())
        slot = self._slots[self._count % self._SLOTS]
        self._count += 1
        loading = self._thread.submit(loader.load, step, slot)

        def is_loaded(wait_s: float) -> bool:
            return bool(futures.wait([loading], wait_s).done)

        def wait() -> Part:
            if not loader.patience.lasts(is_loaded):
                timeout_s = loader.patience.timeout_s
                raise DataError(f"part {index} of step {step} has not come for {timeout_s:g} s (timeout_s).")
            return loader.receive(loading.result())

        return wait

    def close(self) -> None:
        """End the thread, after what it is loading."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def ticketed(
    tickets: Tickets,
    loader: PartLoader,
    *,
    last_step: int,
    done: Callable[[], int],
    is_boundary: Callable[[int], bool],
    on_ahead: Callable[[int | None], None],
) -> Generator[Part, None, None]:
    """Yield the parts that `tickets` give to this worker, each loaded while the one before is computed with.

    `done` tells how many steps are done, and `on_ahead` is told of which step the next part is. Where this worker has
    no part before a boundary, it gets a stand-in for that step, with the index -1.
    """
    with closing(loader):
        taken = tickets.next_part()
        wait = loader.start(*taken) if taken is not None else None
        while taken is not None or done() < last_step:
            until = taken[0] if taken is not None else last_step + 1
            boundary = next((step for step in range(done() + 1, until) if is_boundary(step)), None)
            if boundary is not None:
                on_ahead(until if taken is not None else None)
                yield dataclasses.replace(loader.start(boundary, 0)(), samples=(), index=-1)
                continue
            assert wait is not None
            assert taken is not None
            part, taken = wait(), tickets.next_part()
            wait = loader.start(*taken) if taken is not None else None
            on_ahead(taken[0] if taken is not None else None)
            yield part
