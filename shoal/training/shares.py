"""Live shares of a run: a worker that is slower than the others takes fewer samples of each global batch.

1. Each worker notes of every step what it computed, without waiting: data, forward and backward; and the optimizer.
2. About every 2 seconds, after at least 5 steps and at most 50, the workers tell each other the medians since the last
   time, and all decide the same (sync/shares.py).
3. Other shares hold from the next step on: the loader goes on there. The order of samples, and so what is trained,
   stays as it is: each part's loss is scaled by its weight in the global batch.
4. Shares are part of the training state: a run that is gone on with, or that has lost workers, keeps those of the
   workers that are there.

Nothing changes before 20 steps and 2 seconds are done. What changes is said, and is in worker 0's events ("shares").

Example: of 4 workers one shares its core with 3 other processes. After some 5 seconds: "From step 27 on the workers
take 10, 10, 10, 2 of 32 samples (10.1, 10.2, 10.1, 40.5 ms each): a step should take 68% less."
"""

import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.comm.mesh import position_of
from shoal.comm.messages import GroupWire, gather_values
from shoal.core.events import EventLog
from shoal.data.steps import Part
from shoal.spec.parts import parts
from shoal.spec.plan import Plan
from shoal.sync.shares import Balance, Change, Window
from shoal.training.clock import StepClock
from shoal.training.memory import PeakMemory, free_bytes

if TYPE_CHECKING:
    from shoal.training.run import Run

_EVERY_S, _LEAST_STEPS, _MOST_STEPS = 2.0, 5, 50
_FIRST_STEPS, _FIRST_S = 20, 2.0
"""Nothing changes before: short runs, and tests, are left as they were planned."""
_WARM_STEPS = 2
"""The first steps, which say nothing: memory is touched for the first time, kernels are chosen."""
_MEMORY = 0.5
"""How much of the memory that is free may be taken by larger parts."""


class LiveShares:
    """The shares of one worker of a run; where they cannot follow anything, they stay the plan's."""

    def __init__(
        self, run: "Run", *, log: EventLog, memory: PeakMemory, clock: StepClock, is_recorded: bool = False
    ) -> None:
        self._run, self._log, self._memory, self._clock = run, log, memory, clock
        self._batch_size = run.job.largest_batch
        self._is_live = can_follow(run.plan, meets=run.layout.meets, batch_size=self._batch_size) and not is_recorded
        self._balance = Balance(self._batch_size)
        self._began_s = time.monotonic()
        self._noted: list[tuple[int, float, float, float]] = []
        """Of each step since the last time: samples, seconds that grow with them, other seconds, and of all."""
        self._first_step = 0
        """The first that was done here; 0: none yet."""
        self._due = 0
        """After which step the workers tell each other the next time."""

    def note(self, part: Part, seconds: dict[str, float]) -> None:
        """Learn what a step took that is done."""
        if not self._is_live:
            return
        self._first_step = self._first_step or part.step
        is_warm = part.step >= self._first_step + _WARM_STEPS
        if is_warm and part.batch_samples == self._batch_size:
            grows_s = sum(seconds.get(name, 0.0) for name in ("data_s", "forward_s", "backward_s"))
            self._noted.append((len(part.samples), grows_s, seconds.get("optimizer_s", 0.0), sum(seconds.values())))

    def after_step(self) -> tuple[float, ...] | None:
        """Return the shares from the next step on, if they change. Called by every worker, between steps."""
        step = self._run.step_count
        if not self._is_live or step >= self._run.job.total_steps:
            return None
        self._first_step = self._first_step or step
        self._due = self._due or self._first_step + _WARM_STEPS + _LEAST_STEPS
        if step < self._due:
            return None
        with self._clock.waiting():
            said = gather_values(GroupWire(), self._said())
        self._noted.clear()
        window = together(said, self._run.plan)
        if window is None:
            self._due = step + _LEAST_STEPS
            return None
        self._due = step + max(_LEAST_STEPS, min(_MOST_STEPS, math.ceil(_EVERY_S / window.step_s)))
        is_warm = step >= _FIRST_STEPS and min(each["run_s"] for each in said) >= _FIRST_S
        change = self._balance.decide(window, may_change=is_warm)
        if change is None:
            return None
        self._tell(change, step + 1)
        return change.shares

    def _said(self) -> dict[str, Any]:
        """Return what this worker tells the others."""
        run_s = time.monotonic() - self._began_s
        samples = self._noted[-1][0] if self._noted else 0
        if samples == 0:  # a share of less than a sample says nothing of the worker's speed
            return {"run_s": run_s, "samples": 0}
        alike = [step for step in self._noted if step[0] == samples]  # on a GPU a step is noted one step later
        grows, fixed, total = ([step[at] for step in alike] for at in (1, 2, 3))
        return {
            "run_s": run_s,
            "samples": samples,
            "seconds": statistics.median(grows),
            "fixed_s": statistics.median(fixed),
            "step_s": statistics.median(total),
            "noise": noise_of(grows),
            "most": self._most(samples),
        }

    def _most(self, samples: int) -> int:
        """Return how many samples this worker can take at once, by its memory; a micro-batch never grows."""
        if self._run.plan.batch.micro_batch is not None:
            return self._batch_size
        sample_bytes = max(1, self._memory.read()) / samples  # too much rather than too little: the state is in it
        room_bytes = _MEMORY * free_bytes(self._run.device) / self._run.rank.local_workers
        return samples + int(room_bytes / sample_bytes)

    def _tell(self, change: Change, step: int) -> None:
        """Write the change down, and say it."""
        run = self._run
        if run.rank.index == 0:
            self._log.write(
                "shares",
                step=step,
                samples=list(change.samples),
                shares=[round(share, 6) for share in change.shares],
                seconds_per_sample=[round(seconds, 6) for seconds in change.sample_s],
                predicted_gain=round(change.gain, 4),
                is_back=change.is_back,
            )
        run.say(sentence(change, step, self._batch_size))

    def saved(self) -> dict[str, list[Any]] | None:
        """Return the shares as the training state has them; None where they are the plan's for good."""
        if not self._is_live:
            return None
        rank, plan = self._run.rank, self._run.plan
        return {"workers": [rank.number_of(index) for index in range(rank.workers)], "shares": list(plan.shares)}

    def restored(self, saved: dict[str, list[Any]] | None) -> tuple[float, ...] | None:
        """Return the shares to go on with by what was `saved`; None: those of the plan, as where it names some."""
        plan, rank = self._run.plan, self._run.rank
        if not saved or not self._is_live or plan.batch.shares:
            return None
        numbers = [rank.number_of(index) for index in range(rank.workers)]
        shares = list(saved["shares"])
        if plan.mesh.data == rank.workers and len(shares) == len(saved["workers"]):
            had = dict(zip(saved["workers"], shares, strict=True))
            shares = [had[number] for number in numbers if number in had]
        if len(shares) != plan.mesh.data:
            return None
        scaled = tuple(share / math.fsum(shares) for share in shares)
        return scaled if min(parts(self._batch_size, scaled)) > 0 else None


def can_follow(plan: Plan, *, meets: bool, batch_size: int) -> bool:
    """Return whether the shares of `plan` can change as it runs. `meets`: workers meet in every forward."""
    mesh = plan.mesh
    # Workers that meet in every forward have equally many micro-batches: those with fewer samples compute stand-ins.
    is_even = meets and plan.batch.micro_batch is not None
    wanted = plan.batch.live and plan.sync.mode == "all-reduce"
    return wanted and mesh.data > 1 and mesh.pipeline == 1 and not is_even and batch_size >= mesh.data


def together(said: Sequence[dict[str, Any]], plan: Plan) -> Window | None:
    """Return what the workers have said, by replica; the slowest worker of a replica counts. None: nothing to go by."""
    if not all(each["samples"] for each in said):
        return None
    replicas: list[list[dict[str, Any]]] = [[] for _ in range(plan.mesh.data)]
    for index, each in enumerate(said):
        replicas[position_of(plan.mesh, index).data].append(each)
    return Window(
        samples=tuple(of_one[0]["samples"] for of_one in replicas),
        seconds=tuple(max(each["seconds"] for each in of_one) for of_one in replicas),
        fixed_s=tuple(max(each["fixed_s"] for each in of_one) for of_one in replicas),
        step_s=max(each["step_s"] for each in said),
        noise=max(each["noise"] for each in said),
        most=tuple(min(each["most"] for each in of_one) for of_one in replicas),
    )


def noise_of(values: Sequence[float]) -> float:
    """Return how far the median of `values` may be off, relatively: its standard error, by the median deviation."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values)) / max(middle, 1e-12)


def sentence(change: Change, step: int, batch_size: int) -> str:
    """Return what the user is told."""
    parts = ", ".join(map(str, change.samples))
    each = ", ".join(f"{1e3 * seconds:.3g}" for seconds in change.sample_s)
    if change.is_back:
        return f"From step {step} on the workers take {parts} of {batch_size} samples again: the change was no gain."
    return (
        f"From step {step} on the workers take {parts} of {batch_size} samples ({each} ms each): a step should take "
        f"{change.gain:.0%} less."
    )
