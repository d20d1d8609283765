"""A run from the inside: what `shoal.start` gives to people with their own loop, and what shoal's own loop uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import Store

from shoal.comm.device import pick_device, set_threads
from shoal.comm.group import barrier, joined
from shoal.comm.rank import Rank
from shoal.core.errors import ConfigError
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.data.loader import Loader, Part
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.clock import StepClock
from shoal.training.evaluate import evaluate
from shoal.training.memory import PeakMemory
from shoal.training.metrics import Metrics
from shoal.training.state import build_state
from shoal.training.step import Stepper


class Run:
    """One worker's side of a run."""

    def __init__(
        self, job: Job, plan: Plan, folder: RunFolder, *, rank: Rank, device: torch.device, log: EventLog
    ) -> None:
        self.job, self.plan, self.folder, self.rank, self.device = job, plan, folder, rank, device
        tensorboard = folder.tensorboard if rank.index == 0 else None
        self._metrics = Metrics(log, tensorboard=tensorboard, unit=job.unit)
        self._memory = PeakMemory(device)
        self._clock = StepClock(device)
        self._state = build_state(job, device=device, rank=rank.index)
        self._stepper = Stepper(self._state, job, plan, rank=rank.index, device=device, clock=self._clock)
        self._part: Part | None = None

    @property
    def step_count(self) -> int:
        """How many steps have been done."""
        return self._state.step

    @property
    def model(self) -> torch.nn.Module:
        """The model as the job built it, without any wrapper."""
        return self._state.model

    @property
    def samples(self) -> tuple[int, ...]:
        """The numbers, in the dataset, of the samples in the batch at hand."""
        return self._part.samples if self._part else ()

    def batches(self) -> Iterator[Any]:
        """Yield this worker's part of each global batch, to the end of the job; each must be given to `step`.

        The part of a last, partial batch can be empty: it is None then, and `step(None)` must still be called, for the
        other workers wait for this one.
        """
        loader = Loader(
            self.job.data,
            batch_size=self.job.batch_size,
            shares=self.plan.shares,
            index=self.rank.index,
            first_step=self.step_count + 1,
            last_step=self.job.total_steps,
            seed=self.job.seed,
            shuffle=self.job.shuffle,
            collate=self.job.collate,
            timeout_s=self.plan.timeout_s,
        )
        self._clock.restart()
        for part in loader:
            self._clock.mark("data_s")
            self._part = part
            yield part.batch

    def step(self, batch: Any) -> float:
        """Train on `batch` and return the loss of the global batch. Called by every worker."""
        part, self._part = self._part, None
        if part is None:
            raise ConfigError("run.step(batch) takes each batch of run.batches() once, in their order.")
        result = self._stepper.step(part, batch)
        seconds = self._clock.read()
        self._metrics.step(part.step, part.epoch, len(part.samples), result, seconds)
        self._clock.restart()
        return result.loss

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the job's metrics over `job.eval_data`. Called by every worker."""
        if self.job.eval_data is None:
            raise ConfigError("run.evaluate() needs Job.eval_data.")
        metrics = evaluate(self.model, self.job, self.plan, rank=self.rank.index, device=self.device)
        if self.rank.index == 0:
            self._metrics.evaluation(self.step_count, metrics)
        self._clock.restart()
        return metrics

    def log(self, **values: float) -> None:
        """Write numbers of your own to the run's events and to TensorBoard; worker 0's count."""
        if self.rank.index == 0:
            self._metrics.log(self.step_count, values)

    def finish(self) -> None:
        """Write that this worker did what it had to."""
        self._metrics.end(self.step_count, self._memory.read())

    def close(self) -> None:
        """Close the files, and let go of the engine, which must not outlive the group (see `comm.group.joined`)."""
        self._metrics.close()
        del self._stepper


@contextmanager
def open_run(job: Job, folder: RunFolder, *, rank: Rank, store: Store | None, log: EventLog) -> Iterator[Run]:
    """Be worker `rank` of the run in `folder` for the length of a `with` block. Called by every worker."""
    plan = read_toml(Plan, folder.plan_toml)
    set_threads(rank)
    device = pick_device(rank)
    with joined(rank, store, device=device, timeout_s=plan.timeout_s):
        run = Run(job, plan, folder, rank=rank, device=device, log=log)
        try:
            yield run
            run.finish()
            if rank.workers > 1:
                barrier()  # whoever reads the run folder next finds every worker's end in it
        finally:
            run.close()
