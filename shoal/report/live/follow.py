"""Follows a run by its folder alone: each look reads what the workers have written since the last.

Nothing is asked of a worker, and nothing is written: a run on another machine that shares the disk is followed like one
on this machine, and one that has ended like one that goes on.
"""

import math
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.launch.slurm.sbatch import CANCELLED
from shoal.report.live.log import LiveLog, LiveStep, sample_steps
from shoal.report.live.state import Curve, LiveState, WorkerState
from shoal.report.live.workers import describe, furthest
from shoal.report.logs.log import clean, number
from shoal.report.split import PARTS, split_step
from shoal.spec.plan import Plan
from shoal.spec.record import JobRecord

_RATE_S = 10.0
_LEFT_S = 60.0
"""Over which time the rate and the time left are told: the second must not jump at each evaluation."""
_SILENT_S = 10.0
_SILENT_STEPS = 10.0
"""For how many steps, and seconds, nothing must have come to say so."""
_MOST_POINTS = 1000
_AGAIN = "It goes on when Slurm starts its job again."


class Follower:
    """One run, followed. `steps` and `unit` are read from the folder where they are not given."""

    def __init__(self, folder: RunFolder, *, steps: int | None = None, unit: str | None = None) -> None:
        self._folder = folder
        self._steps, self._unit = steps, unit
        self._plan: Plan | None = None
        self._logs: dict[int, LiveLog] = {}
        self._losses, self._rates = Curve(_MOST_POINTS), Curve(_MOST_POINTS)
        self._recent: deque[LiveStep] = deque(maxlen=4096)
        self._lost: dict[int, float] = {}
        """The workers that were lost, and when that was written."""
        self._ended: set[int] = set()
        """Those of them that were ended, as somebody has asked for fewer."""
        self._hang: dict[str, Any] = {}
        self._heard_s = time.monotonic()
        self.news: list[dict[str, Any]] = []
        """The events of the last look that are about no step, in the order of their time."""

    def look(self) -> LiveState:
        """Read what is new, and return how the run stands."""
        self._read_plan()
        result = self._folder.read_result()  # before the logs: what they say last is then in the state of its end
        self._read_logs()
        logs = [self._logs[rank] for rank in sorted(self._logs)]
        self._forget_lost(
            [log.rank for log in logs if log.last and log.last.time_s > self._lost.get(log.rank, math.inf)]
        )
        front = furthest([log for log in logs if log.rank not in self._lost])
        self._follow(front)
        return self._state(logs, front, result)

    def _goes_on(self, result: dict[str, Any]) -> bool:
        """Return whether a job that was stopped is started again: nobody has cancelled it."""
        return result.get("goes_on") is True and not (self._folder.slurm / CANCELLED).exists()

    def _read_plan(self) -> None:
        """Read plan and job once they are there: while a run is being prepared they are not yet."""
        try:
            if self._plan is None:
                self._plan = read_toml(Plan, self._folder.plan_toml)
            if self._steps is None or self._unit is None:
                record = read_toml(JobRecord, self._folder.job_toml)
                self._steps, self._unit = record.steps, clean(record.unit)
        except ShoalError:
            return

    def _read_logs(self) -> None:
        is_first = not self._logs
        for rank in self._ranks():
            if rank not in self._logs:
                self._logs[rank] = LiveLog(self._folder.events_of(rank), rank)
        self.news = []
        for rank, log in self._logs.items():
            before = log.last_time_s
            self.news += [event | {"worker": rank} for event in log.poll()]
            if log.last_time_s != before:
                self._heard_s = time.monotonic()
        self.news.sort(key=lambda event: number(event.get("time")) or 0.0)
        for event in self.news:
            self._take(event)
        if is_first:
            self._read_history()

    def _ranks(self) -> Iterable[int]:
        """Return the plan's workers, and whoever has a log: a run may have got more workers since."""
        names = (re.fullmatch(r"rank-(\d{1,6})\.jsonl", path.name) for path in self._folder.events.glob("rank-*.jsonl"))
        found = {int(name[1]) for name in names if name}
        return sorted(found | set(range(self._plan.workers if self._plan else 0)))

    def _read_history(self) -> None:
        """Fill the curves with what was before the first look; how long ago that was, only clocks can tell."""
        front = furthest(list(self._logs.values()))
        if front is None:
            return
        steps = sample_steps(self._folder.events_of(front.rank), _MOST_POINTS)
        window_s = max(1.0, (steps[-1].time_s - steps[0].time_s) / 100) if steps else 0.0
        earlier = steps[0] if steps else None
        for step in steps:
            self._losses.add(step.number, step.step.loss)
            if earlier is not None and step.time_s - earlier.time_s >= window_s:
                self._rates.add(step.number, _rate([earlier, step]))
                earlier = step
        ago_s = time.time() - max(log.last_time_s or 0.0 for log in self._logs.values())
        self._heard_s -= max(0.0, ago_s)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "loss":
            self._ended = (self._ended - _ranks_in(event.get("dead"))) | _ranks_in(event.get("ended"))
            self._lost |= dict.fromkeys(_ranks_in(event.get("dead")), number(event.get("time")) or 0.0)
        elif kind == "joined":
            self._forget_lost(_ranks_in(event.get("joined")))
        elif kind == "start":
            self._forget_lost({event["worker"]})
            self._hang = {}  # of an attempt before, or mended by this worker
        elif kind == "hang":
            self._hang = event

    def _forget_lost(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._lost.pop(rank, None)

    def _follow(self, front: LiveLog | None) -> None:
        """Take the new steps of the worker that is furthest."""
        if front is None:
            return
        last = self._recent[-1] if self._recent else None
        if last is not None and front.last is not None and front.last.number < last.number:
            self._recent.clear()  # gone back
            last = None
        for step in front.steps:
            if last is None or step.number > last.number:
                self._recent.append(step)
                self._losses.add(step.number, step.step.loss)
        rate = _rate(self._window(_RATE_S))
        if rate is not None and self._recent:
            self._rates.add(self._recent[-1].number, rate)
        if self._hang and self._recent and self._recent[-1].time_s > (number(self._hang.get("time")) or 0.0):
            self._hang = {}  # something goes on

    def _window(self, seconds: float) -> list[LiveStep]:
        """Return the steps of the last so many seconds of the run, and at least two, if there are."""
        if not self._recent:
            return []
        since_s = self._recent[-1].time_s - seconds
        steps = [step for step in self._recent if step.time_s >= since_s]
        return steps if len(steps) > 1 else list(self._recent)[-2:]

    def _state(self, logs: list[LiveLog], front: LiveLog | None, result: dict[str, Any]) -> LiveState:
        status, message, goes_on = clean(result.get("status")), clean(result.get("message", "")), self._goes_on(result)
        last = front.last if front else None
        splits = _latest_split(logs, front)
        is_over = status != "unfinished"
        step_s = _step_s(self._window(_LEFT_S))
        left = max(0, self._steps - last.number) if last and self._steps else None
        blamed = _ranks_in(self._hang.get("blamed")) if not is_over else set()
        return LiveState(
            run=clean(self._folder.name),
            status=status,
            message=f"{message} {_AGAIN}" if goes_on else message,
            goes_on=goes_on,
            step=last.number if last else 0,
            steps=self._steps,
            loss=last.step.loss if last else None,
            is_lost_loss=last is not None and last.step.loss is None,
            unit=self._unit or "samples",
            units_per_s=_rate(self._window(_RATE_S)),
            step_s=step_s,
            left_s=None if left is None or step_s is None or is_over else left * step_s,
            silent_s=None if is_over else self._silent_s(step_s),
            split=_mean_split(splits.values()),
            workers=tuple(
                self._worker(log, front, splits.get(log.rank, {}), blamed=blamed, is_over=is_over) for log in logs
            ),
            hang=clean(self._hang.get("sentence", "")) if not is_over else "",
            losses=self._losses.points,
            rates=self._rates.points,
        )

    def _worker(
        self, log: LiveLog, front: LiveLog | None, split: dict[str, float], *, blamed: set[int], is_over: bool
    ) -> WorkerState:
        state, words = describe(log, front, lost=self._lost, ended=self._ended, blamed=blamed, is_over=is_over)
        predicted = self._plan.predicted.peak_bytes if self._plan and self._plan.predicted else ()
        return WorkerState(
            rank=log.rank,
            state=state,
            words=words,
            step=log.last.number if log.last else None,
            share=None if log.rank in self._lost else _share(log.last),
            host=log.host,
            peak_bytes=log.peak_bytes,
            predicted_bytes=predicted[log.rank] if log.rank < len(predicted) else None,
            split=_mean_split([split]),
        )

    def _silent_s(self, step_s: float | None) -> float | None:
        silent_s = time.monotonic() - self._heard_s
        return silent_s if silent_s > max(_SILENT_S, _SILENT_STEPS * (step_s or 0.0)) else None


def _share(last: LiveStep | None) -> float | None:
    return last.step.weight / last.step.batch_weight if last is not None and last.step.batch_weight else None


def _rate(steps: Sequence[LiveStep]) -> float | None:
    """Return what was trained on in a second; steps may be missing between those that are there."""
    step_s = _step_s(steps)
    return sum(one.step.batch_weight for one in steps) / len(steps) / step_s if step_s else None


def _step_s(steps: Sequence[LiveStep]) -> float | None:
    """Return the seconds from one step to the next."""
    if len(steps) < 2 or steps[-1].time_s <= steps[0].time_s:
        return None
    return (steps[-1].time_s - steps[0].time_s) / (steps[-1].number - steps[0].number)


def _latest_split(logs: Sequence[LiveLog], front: LiveLog | None) -> dict[int, dict[str, float]]:
    """Return the seconds by part of each worker over the latest steps of the one that is furthest.

    Of these only the ones that as many others have done as any: the last may not be written by all yet.
    """
    by_rank = {log.rank: {step.number: step.step for step in log.steps} for log in logs}
    numbers = [step.number for step in front.steps] if front else []
    together = [{rank: steps[n] for rank, steps in by_rank.items() if n in steps} for n in numbers]
    most = max(map(len, together), default=0)
    total: dict[int, dict[str, float]] = {}
    for of_step in together:
        if len(of_step) == most:
            for rank, split in zip(of_step, split_step(list(of_step.values())), strict=True):
                sums = total.setdefault(rank, dict.fromkeys(PARTS, 0.0))
                for part, seconds in split.items():
                    sums[part] += seconds
    return total


def _mean_split(splits: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the fractions of the sum of `splits`; empty where nothing took any time."""
    rows = list(splits)
    sums = {part: sum(row.get(part, 0.0) for row in rows) for part in PARTS}
    whole = sum(sums.values())
    return {part: seconds / whole for part, seconds in sums.items()} if whole > 0 else {}


def _ranks_in(value: object) -> set[int]:
    return {rank for rank in value if isinstance(rank, int)} if isinstance(value, list) else set()
