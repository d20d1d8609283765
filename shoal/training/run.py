"""A run from the inside: what `shoal.start` gives to people with their own loop, and what shoal's own loop uses."""

import dataclasses
import math
import sys
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed import Store

from shoal.comm.alive import Watch
from shoal.comm.mesh import device_mesh, position_of
from shoal.comm.rank import Rank
from shoal.core.errors import ConfigError
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.data.steps import Part, StepLoader
from shoal.fault.same import check_same_model
from shoal.parallel.layout import Layout
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.sync.compressed import compress_shards
from shoal.training.clock import StepClock
from shoal.training.eager import eager
from shoal.training.engine import build_engine
from shoal.training.evaluate import evaluate
from shoal.training.links import Place, known_links
from shoal.training.loader import open_loader
from shoal.training.meeting import open_meeting, open_shards
from shoal.training.memory import PeakMemory, state_bytes
from shoal.training.metrics import Metrics
from shoal.training.pieces import Cutter
from shoal.training.recording import Recording
from shoal.training.saving import Saving
from shoal.training.snapshots import Keeping, RunSnapshots
from shoal.training.staging import Decision
from shoal.training.state import build_state
from shoal.training.step import Pending, Stepper, check_finite

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
        is_recorded: bool = False,
        keeping: Keeping | None = None,
    ) -> None:
        self.job, self.plan, self.folder, self.rank, self.device = job, plan, folder, rank, device
        self._log = log
        tensorboard = folder.tensorboard if rank.index == 0 else None
        self._metrics = Metrics(log, tensorboard=tensorboard, unit=job.unit)
        self._memory = PeakMemory(device, divided=not plan.mesh.keeps_whole)
        self._clock = StepClock(device)
        self.position = position_of(plan.mesh, rank.index)
        mesh = device_mesh(plan.mesh, device, timeout_s=plan.timeout_s) if rank.workers > 1 else None
        self._shards = open_shards(plan, self.position, rank=rank, store=store, device=device)
        self.state = self._state = build_state(
            job,
            plan,
            position=self.position,
            mesh=mesh,
            device=device,
            waiting=self._clock.waiting,
            shared=self._shards,
        )
        check_same_model(store, rank, self._state.layout, plan, watch)
        if self._state.layout.why_whole:
            self.say(f"Each worker held the whole model while building it: {self._state.layout.why_whole}.")
        self._cutter = Cutter(job, plan, device=device, meets=self._state.layout.meets)
        parameters = self._state.layout.parameters.values()
        self._meeting = open_meeting(
            plan,
            Place(rank=rank, store=store, device=device, watch=watch, known=known_links(folder)),
            shapes=[parameter.shape for parameter in parameters],
            seed=job.seed,
        )
        self.feedback = self._meeting.feedback
        shares = self._shards is not None or self._meeting.shared is not None
        self._sharers = rank.local_workers if shares else 1
        if self._meeting.feedback is not None and not plan.mesh.keeps_whole:
            for root in self._state.layout.roots:
                compress_shards(root, self._meeting.feedback, watch=watch)
        if rank.index == 0:
            write_toml(folder.communication_toml, self._meeting.communication)
        self.engine = build_engine(self._state, job, plan, device=device, clock=self._clock, meeting=self._meeting)
        self._recording = Recording(self._state.layout, self.position, folder.parameters) if is_recorded else None
        self._stepper = Stepper(
            self._state,
            job,
            plan,
            self.engine,
            position=self.position,
            index=rank.number,
            device=device,
            clock=self._clock,
            cutter=self._cutter,
            recording=self._recording,
        )
        self.step_count = 0
        """How many steps have been done."""
        self._part: Part | None = None
        self._loader: StepLoader | None = None
        self._pending: Pending | None = None
        self._loss = math.nan
        self.evaluated: tuple[int, dict[str, float]] = (0, {})  # after how many steps, and what came of it
        self._is_first = True
        self.saving = Saving(self, store, log, watch)
        self.snapshots = RunSnapshots(self, keeping, log, watch)
        self.is_taken_over = self.snapshots.take_over() is not None
        """Whether the state has come from the memory of workers."""
        self.saving.begin(is_restored=self.is_taken_over)
        self.snapshots.begin()

    @property
    def model(self) -> torch.nn.Module:
        """The model as the job built it, without any wrapper."""
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
        loader = self._loader = open_loader(
            self.job, self.plan, index=self.position.data, first_step=self.step_count + 1, device=self.device
        )
        self._clock.restart()
        for part in loader:
            self._clock.mark("data_s")
            self._part = part
            yield part.batch
            if self._part is None:  # it was trained on, and so the run is between two steps
                self.saving.after_step()

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
        self._state.layout.end_step()
        if self._is_first:
            self._say_inexact()
        self._is_first = False
        self.step_count += 1
        self.snapshots.after_step()
        if self._pending is not None:
            self.settle()
        self._pending = pending
        if self.device.type == "cpu":
            self.settle()

    def _say_inexact(self) -> None:
        """Tell the user what the workers do otherwise than one process would, if anything."""
        drawn = self._state.layout.dropout.inexact
        if drawn and self.plan.workers > 1:
            self.say(f"{', '.join(sorted(drawn))} draws its random numbers inside: they differ between workers.")

    def note_staging(self, decisions: Sequence[Decision]) -> None:
        """Say where the packs of the job are read, and why; each node's first worker writes it down."""
        for decision in decisions:
            self.say(str(decision))
            if self.rank.local_index == 0:
                self._log.write("staging", **dataclasses.asdict(decision))

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint now, between two steps; without `wait`, while training goes on. Called by every worker."""
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
            self._metrics.step(pending.part, result, pending.seconds())
            self._loss = result.loss
        return self._loss

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the job's metrics over `job.eval_data`. Called by every worker."""
        if self.job.eval_data is None:
            raise ConfigError("run.evaluate() needs Job.eval_data.")
        self.settle()
        with self._stepper.contexts():
            metrics = evaluate(
                self.model, self.job, self.plan, self.engine, position=self.position, cutter=self._cutter
            )
        self.evaluated = (self.step_count, metrics)
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
        self.settle()
        self.saving.finish()
        self.snapshots.finish()
        loading = self._loader.report() if self._loader is not None else None
        if loading is not None and loading.is_bottleneck and loading.waited_s > WORTH_SAYING_S:
            self.say(str(loading))
        if self._recording is not None:
            self._recording.write()
        held = state_bytes(self._state.layout, self._state.optimizer)
        self._metrics.end(self.step_count, self._memory.read(sharers=self._sharers), held)

    def close(self) -> None:
        """Close the files, and let go of the engine, which must not outlive the group (see `comm.group.joined`)."""
        self.saving.close()
        self.snapshots.close()
        self._metrics.close()
        self._meeting.close()
        if self._shards is not None:
            self._shards.close()
        del self._stepper, self.engine, self.state, self._state, self._recording, self.saving, self.snapshots
