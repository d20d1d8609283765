"""A run from the inside: what `shoal.start` gives to people with their own loop, and what shoal's own loop uses."""

import dataclasses
import math
import sys
from collections.abc import Generator, Iterable
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch.distributed import Store

from shoal.comm.alive import Watch
from shoal.comm.rank import Rank
from shoal.core.errors import ConfigError
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.data.loading.pace import Report
from shoal.data.loading.patience import never
from shoal.data.steps import Part, StepLoader
from shoal.parallel.layout import Layout
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.spec.record import Recorded
from shoal.training.before import look_before
from shoal.training.clock import StepClock
from shoal.training.eager import eager
from shoal.training.evaluate import evaluate
from shoal.training.links import Place
from shoal.training.loader import open_loader
from shoal.training.loggers.registry import config_of, loggers_of
from shoal.training.loggers.tensorboard import TensorBoard
from shoal.training.loose import Loose
from shoal.training.measuring import Measuring
from shoal.training.memory import PeakMemory, state_bytes
from shoal.training.metrics import Metrics
from shoal.training.recording import Recording
from shoal.training.result import Stepped, check_finite
from shoal.training.saving import Saving
from shoal.training.shares import LiveShares
from shoal.training.snapshots import Keeping, RunSnapshots
from shoal.training.wired import wire

WORTH_SAYING_S = 1.0
"""How long a worker must have waited for data before anybody is told: the first batches of a short run say nothing."""


class Run:
    """One worker's side of a run."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        folder: RunFolder,
        *,
        rank: Rank,
        store: Store | None,
        device: torch.device,
        log: EventLog,
        watch: Watch | None = None,
        recorded: Recorded = "no",
        keeping: Keeping | None = None,
    ) -> None:
        self.job, self.plan, self.folder, self.rank, self.device = job, plan, folder, rank, device
        is_logged = rank.index == 0 and "tensorboard" in loggers_of(folder)
        tensorboard = TensorBoard(folder) if is_logged else None
        generation = keeping.generation if keeping is not None else 0
        self._metrics = Metrics(log, tensorboard=tensorboard, unit=job.unit, generation=generation)
        self.memory = PeakMemory(device, divided=not plan.mesh.keeps_whole)
        self._clock = StepClock(device)
        self._check = watch.check if watch is not None else never
        place, offers = look_before(Place(rank=rank, store=store, device=device, watch=watch), plan, folder, keeping)
        self._wired = wire(job, plan, folder, place, clock=self._clock)
        self.position, self.engine, self._cutter = self._wired.position, self._wired.engine, self._wired.cutter
        self.state = self._state = self._wired.state
        self.feedback = self._wired.meeting.feedback
        self.sharers = rank.local_workers if self._wired.shares_memory else 1
        """How many workers share memory that is resident in each of them."""
        for note in self._wired.notes(plan):
            self.say(note)
        is_recorded = recorded != "no"
        self._recording = Recording(self.layout, self.position, folder.parameters) if is_recorded else None
        self.loose: Loose | None = None
        """Set where workers may be apart between two boundaries (sync.mode)."""
        if plan.sync.mode != "all-reduce":
            self.loose = Loose(self, store, clock=self._clock, cutter=self._cutter, log=log, watch=watch)
        self._stepper = self.loose or self._wired.stepper(job, plan, rank=rank, recording=self._recording)
        self.step_count = 0
        """How many steps have been done."""
        self._part: Part | None = None
        self.stream_place: dict[str, int] | None = None
        """Of a stream: the epoch of the batch at hand, and how many steps were done before it."""
        self._loader: StepLoader | None = None
        self._measuring = Measuring(
            folder,
            index=rank.index,
            log=log,
            clock=self._clock,
            memory=self.memory,
            loading=self._loading,
            sharers=self.sharers,
        )
        self._pending: Stepped | None = None
        self._loss = math.nan
        self.evaluated: tuple[int, dict[str, float]] = (0, {})  # after how many steps, and what came of it
        self._is_first = True
        self._loads_anew = False  # whether the loader is to go on from the next step by other shares
        self.live = LiveShares(self, log=log, memory=self.memory, clock=self._clock, is_recorded=is_recorded)
        self.kept: dict[str, torch.Tensor] = {}
        """What the mode of the run that is gone on with has kept."""
        self.saving = Saving(self, store, log, watch)
        self.snapshots = RunSnapshots(self, keeping, log, watch)
        self.is_taken_over = self.snapshots.take_over(offers) is not None
        """Whether the state has come from the memory of workers."""
        self.saving.begin(is_restored=self.is_taken_over)
        if self._recording is not None and recorded == "nudged":
            self._recording.nudge()
        if self.loose is not None:
            self.loose.open(self._wired.meeting, self.kept, is_kept=keeping is not None)
        self.snapshots.begin()
        self._metrics.begin(self.step_count, config_of(folder) if is_logged else {})

    @property
    def model(self) -> torch.nn.Module:
        """The model as the job built it, without any wrapper."""
        if self.loose is not None:
            self.loose.finish_fetching()
        return self._state.layout.model

    @property
    def layout(self) -> Layout:
        """What this worker holds of it."""
        return self._state.layout

    @property
    def samples(self) -> tuple[int, ...]:
        """The numbers, in the dataset, of the samples in the batch at hand."""
        return self._part.samples if self._part else ()

    def batches(self) -> Generator[Any, None, None]:
        """Yield this worker's part of each global batch, to the end of the job; each must be given to `step`.

        The part of a last, partial batch can be empty: `samples` is then, and the batch is a stand-in that counts
        nothing. It must still be given to `step`, for the other workers wait for this one.
        """
        self._measuring.read_from(self.job.data)
        self._clock.restart()
        if self.loose is not None and self.loose.tickets is not None:
            with closing(self.loose.parts()) as parts:
                yield from self._batches_of(parts)
            return
        loader = self._loader = open_loader(
            self.job,
            self.plan,
            index=self.position.data,
            first_step=self.step_count + 1,
            device=self.device,
            place=self.stream_place,
            check=self._check,
        )
        while True:
            self._loads_anew = False
            with closing(iter(loader)) as parts:
                yield from self._batches_of(parts)
            if not self._loads_anew:
                return
            loader.go_on(self.step_count + 1, self.plan.shares)

    def _batches_of(self, parts: Iterable[Part]) -> Generator[Any, None, None]:
        """Yield the batches of `parts`, to their end or until shares have changed."""
        for part in parts:
            self._clock.mark("data_s")
            self._part = part
            self.stream_place = getattr(self._loader, "place", None)
            self._measuring.begin(part)
            yield part.batch
            self._clock.mark("other_s")
            if self._part is None:  # it was trained on, and so the run is between two steps
                self.saving.after_step()
                self._clock.mark("checkpoint_s")
            if self._loads_anew:
                return

    def step(self, batch: Any) -> float:
        """Train on `batch` and return the loss of the global batch. Called by every worker."""
        self.advance(batch)
        return self.settle()

    def advance(self, batch: Any) -> None:
        """Train on `batch` without waiting for what comes of it: on a GPU, that is known one step later."""
        part, self._part = self._part, None
        if part is None:
            raise ConfigError("run.step(batch) takes each batch of run.batches() once, in their order.")
        with self._stepper.contexts(), eager() if self._is_first and self.plan.compile else nullcontext():
            pending = self._stepper.step(part, batch)
        self._measuring.end()
        self._state.layout.end_step()
        if self._is_first:
            self._say_inexact()
        self._is_first = False
        self.step_count = self._state.step
        # A worker that was late goes on with a later step; with tickets, with whichever it is given.
        self._loads_anew = self.step_count > part.step and getattr(self.loose, "tickets", None) is None
        self.snapshots.after_step()
        self._clock.mark("checkpoint_s")
        if self._pending is not None:
            self.settle()
        self._pending = pending
        if self.device.type == "cpu" or self.loose is not None:
            self.settle()
        self.share(self.live.after_step())

    def share(self, shares: tuple[float, ...] | None) -> None:
        """Cut the global batches from the next step on by other `shares`, if any. Called by every worker."""
        if shares is not None:
            self.plan = dataclasses.replace(self.plan, batch=dataclasses.replace(self.plan.batch, shares=shares))
            self._cutter.shares = shares
            self._loads_anew = True

    def _say_inexact(self) -> None:
        """Tell the user what the workers do otherwise than one process would, if anything."""
        drawn = self._state.layout.dropout.inexact
        if drawn and self.plan.workers > 1:
            self.say(f"{', '.join(sorted(drawn))} draws its random numbers inside: they differ between workers.")

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint now, between two steps; without `wait`, while training goes on. Called by every worker."""
        if self.loose is not None:
            self.loose.need_settled("run.save()")
        self.saving.save(wait=wait)
        self._clock.restart()

    def say(self, line: str) -> None:
        """Tell the user; worker 0 speaks for all."""
        if self.rank.index == 0:
            print(line, file=sys.stderr)

    def settle(self) -> float:
        """Wait for the step under way, write down what it was, and return the loss of the last step."""
        pending, self._pending = self._pending, None
        if pending is not None:
            result = pending.result
            check_finite(pending, result.loss, worker=self.rank.number, applied=True)
            seconds = pending.seconds()
            self._metrics.step(pending.part, result, seconds)
            self.live.note(pending.part, seconds)
            self._measuring.note(pending.part.step, pending.seconds, seconds)
            self._loss = result.loss
        return self._loss

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the job's metrics over `job.eval_data`. Called by every worker."""
        if self.job.eval_data is None:
            raise ConfigError("run.evaluate() needs Job.eval_data.")
        if self.loose is not None:
            self.loose.need_settled("run.evaluate()")
        self.settle()
        with self._stepper.contexts():
            at, cutter, check = self.position, self._cutter, self._check
            metrics = evaluate(self.model, self.job, self.plan, self.engine, position=at, cutter=cutter, check=check)
        self.evaluated = (self.step_count, metrics)
        if self.rank.index == 0:
            self._metrics.evaluation(self.step_count, metrics)
        self._clock.restart()
        return metrics

    def log(self, **values: float) -> None:
        """Write numbers of your own to the run's events and its loggers; worker 0's count."""
        if self.rank.index == 0:
            self._metrics.log(self.step_count, values)

    def finish(self) -> None:
        """Write that this worker did what it had to."""
        self.settle()
        self.saving.finish()
        self.snapshots.finish()
        self._measuring.write()
        loading = self._loading()
        if loading is not None and loading.is_bottleneck and loading.waited_s > WORTH_SAYING_S:
            self.say(str(loading))
        if self._recording is not None:
            self._recording.write()
        held = state_bytes(self._state.layout, self._state.optimizer)
        self._metrics.end(self.step_count, self.memory.read(sharers=self.sharers), held)

    def _loading(self) -> Report | None:
        return self._loader.report() if self._loader is not None else None

    def close(self) -> None:
        """Close the files, and let go of the engine, which must not outlive the group (see `comm.group.joined`)."""
        self.saving.close()
        self.snapshots.close()
        self._measuring.close()
        self._metrics.close()
        if self.loose is not None:
            self.loose.close()
        self._wired.close()
        del self._stepper, self.engine, self.state, self._state, self._recording, self.saving, self.snapshots
        del self.live, self.loose, self._wired
