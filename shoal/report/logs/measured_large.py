"""The same as measured.py for logs of millions of steps: sums over columns, taken in one worker after the other.

What stays of a worker is 8 bytes a step (how long it was busy, and how long it waited), because who waited for whom is
known only when all have been read; all else is summed up as it comes.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.core.events import PASSES, STEP_PARTS
from shoal.report.logs.columns import Columns, Floats, Ints
from shoal.report.logs.measured import (
    MOST_PACES,
    MOST_STRETCHES,
    Means,
    Measured,
    StepTimes,
    Stretch,
    buckets,
    warm_up_count,
)
from shoal.report.split import PARTS

_MEANT = ("samples", "weight", "step_s", *STEP_PARTS)
_PARTS = ("data", "compute", "communication", "bubble", "checkpoint", "other")
"""Those that a worker's own log can tell; waiting is taken off communication later."""
_MOST_WARM_UP = 2


class _Kept(NamedTuple):
    """What stays of one worker."""

    numbers: Ints
    busy_s: npt.NDArray[np.float32]
    comm_s: npt.NDArray[np.float32]
    sums: Floats
    """Of the columns `_MEANT`."""
    own: Floats
    """Of `_PARTS`."""
    first: list[tuple[int, Floats, Floats]]
    """The number, `_MEANT` and `_PARTS` of the first steps, to be taken off again as warm-up."""
    median_passes_s: float
    """Without as many of its own first steps as a run has of warm-up."""


class LargeMeasure:
    """Takes in the steps of one worker after the other."""

    def __init__(self, *, is_apart: bool) -> None:
        self._is_apart = is_apart
        self._kept: list[_Kept] = []
        self._numbers: Ints = np.empty(0, np.int64)
        self._rows: Floats = np.zeros((6 + len(_PARTS), 0))
        """For each step: how many have it, the longest, its first loss, sums of loss x weight, of weight, the weight of
        the global batch; sums of _PARTS."""

    def add(self, columns: Columns) -> None:
        """Take in the next worker's steps."""
        parts = _parts_of(columns)
        numbers = self._numbers if np.array_equal(self._numbers, columns.numbers) else columns.numbers
        meant = np.stack([columns[name] for name in _MEANT])
        first = [
            (int(numbers[i]), meant[:, i].copy(), parts[:, i].copy()) for i in range(min(_MOST_WARM_UP, len(numbers)))
        ]
        busy_s = columns["step_s"] - columns["comm_s"] - columns["bubble_s"]
        kept = (busy_s.astype(np.float32), columns["comm_s"].astype(np.float32))
        passes_s = np.add(*(columns[name] for name in PASSES))[warm_up_count(len(numbers)) :]
        median_s = float(np.median(passes_s)) if len(passes_s) else 0.0
        self._kept.append(_Kept(numbers, *kept, meant.sum(axis=1), parts.sum(axis=1), first, median_s))
        self._grow(columns.numbers)
        self._add_rows(np.searchsorted(self._numbers, columns.numbers), columns, parts)

    def measured(self) -> Measured:
        """Return what all the steps come to."""
        count = len(self._numbers)
        if not count:
            return Measured(means=(None,) * len(self._kept), paces=((),) * len(self._kept))
        left_out = warm_up_count(count)
        longest, second = self._two_longest()
        waiting = [
            np.zeros(len(kept.comm_s)) if self._is_apart else self._waiting(kept, longest) for kept in self._kept
        ]
        waited = np.zeros(count)
        for kept, waiting_s in zip(self._kept, waiting, strict=True):
            waited[self._places(kept)] += waiting_s
        paces = buckets(count, MOST_PACES)
        return Measured(
            numbers=tuple(self._numbers.tolist()),
            losses=tuple(loss if math.isfinite(loss) else None for loss in self._losses().tolist()),
            warm_up_steps=left_out,
            steady_s=float(self._rows[1, left_out:].sum()),
            steady_weight=float(np.where(self._rows[5], self._rows[5], self._rows[4])[left_out:].sum()),
            means=tuple(
                self._means(kept, waiting_s, longest, second, left_out)
                for kept, waiting_s in zip(self._kept, waiting, strict=True)
            ),
            stretches=tuple(self._stretch(waited, bucket) for bucket in buckets(count, MOST_STRETCHES)),
            step_times=self._step_times(left_out),
            paces=tuple(self._pace(kept, paces) for kept in self._kept),
            pace_steps=tuple(int(self._numbers[bucket[0]]) for bucket in paces),
        )

    def _grow(self, numbers: Ints) -> None:
        """Make room for steps that no worker had before."""
        if np.array_equal(self._numbers, numbers):
            return
        union = np.union1d(self._numbers, numbers)
        if len(union) > len(self._numbers):
            rows = np.zeros((len(self._rows), len(union)))
            rows[2] = np.nan
            rows[:, np.searchsorted(union, self._numbers)] = self._rows
            self._numbers, self._rows = union, rows

    def _add_rows(self, at: Ints, columns: Columns, parts: Floats) -> None:
        rows, loss, weight = self._rows, columns["loss"], columns["weight"]
        is_first = rows[0, at] == 0
        rows[2, at[is_first]] = loss[is_first]
        rows[0, at] += 1
        rows[1, at] = np.maximum(rows[1, at], columns["step_s"])
        with np.errstate(over="ignore", invalid="ignore"):  # a loss near the largest float: `_losses` looks
            rows[3, at] += loss * weight
        rows[4, at] += weight
        rows[5, at] = np.where(is_first, columns["batch_weight"], np.maximum(rows[5, at], columns["batch_weight"]))
        rows[6:, at] += parts

    def _losses(self) -> Floats:
        """Return the first loss of each step; of workers that are apart, the mean by weight where all have one."""
        first: Floats = self._rows[2]
        if not self._is_apart:
            return first
        with np.errstate(divide="ignore", invalid="ignore"):
            mean: Floats = self._rows[3] / self._rows[4]
        found: Floats = np.where(np.isfinite(mean), mean, first)
        return found

    def _places(self, kept: _Kept) -> Ints:
        """Return where the worker's steps stand among all."""
        return np.searchsorted(self._numbers, kept.numbers)

    def _two_longest(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return how long the busiest worker of each step was busy, and the next; -inf where there is none."""
        longest = np.full(len(self._numbers), -np.inf, np.float32)
        second = longest.copy()
        for kept in self._kept:
            at = self._places(kept)
            second[at] = np.maximum(second[at], np.minimum(longest[at], kept.busy_s))
            longest[at] = np.maximum(longest[at], kept.busy_s)
        return longest, second

    def _waiting(self, kept: _Kept, longest: npt.NDArray[np.float32]) -> Floats:
        waiting: Floats = np.minimum(longest[self._places(kept)] - kept.busy_s, kept.comm_s).astype(np.float64)
        return waiting

    def _means(
        self,
        kept: _Kept,
        waiting_s: Floats,
        longest: npt.NDArray[np.float32],
        second: npt.NDArray[np.float32],
        left_out: int,
    ) -> Means | None:
        early = self._numbers[:left_out]
        steady = ~np.isin(kept.numbers, early)
        count = int(steady.sum())
        if not count:
            return None
        warm = [one for one in kept.first if one[0] in early]
        values = (kept.sums - sum(one[1] for one in warm)) / count
        own = (kept.own - sum(one[2] for one in warm)) / count
        named = dict(zip(_MEANT, values.tolist(), strict=True))
        split = dict(zip(_PARTS, own.tolist(), strict=True)) | {"waiting": float(waiting_s[steady].mean())}
        split["communication"] -= split["waiting"]
        at = self._places(kept)[steady]
        lead = kept.busy_s[steady] - second[at]
        is_lead = (kept.busy_s[steady] == longest[at]) & (lead > 0) & np.isfinite(lead)
        steps = len(self._numbers) - left_out
        return Means(
            steps=count,
            samples=named["samples"],
            weight=named["weight"],
            total_s=named["step_s"],
            parts={name: named[name] for name in STEP_PARTS},
            split={name: split[name] for name in PARTS},
            median_passes_s=kept.median_passes_s,
            led=float(is_lead.sum()) / steps,
            held_up_s=float(lead[is_lead].sum(dtype=np.float64)) / steps,
        )

    def _stretch(self, waited: Floats, bucket: range) -> Stretch:
        cut = slice(bucket[0], bucket[-1] + 1)
        count = self._rows[0, cut]
        means = dict(zip(_PARTS, (self._rows[6:, cut] / count).mean(axis=1).tolist(), strict=True))
        means["waiting"] = float((waited[cut] / count).mean())
        means["communication"] -= means["waiting"]
        numbers = int(self._numbers[bucket[0]]), int(self._numbers[bucket[-1]])
        return Stretch(*numbers, tuple(means[name] for name in PARTS), float(self._rows[1, cut].max()))

    def _step_times(self, left_out: int) -> StepTimes | None:
        longest = self._rows[1, left_out:]
        ordered, worst = np.sort(longest), int(longest.argmax())
        late = float(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))])
        return StepTimes(
            float(ordered[len(ordered) // 2]), late, float(longest[worst]), int(self._numbers[left_out + worst])
        )

    def _pace(self, kept: _Kept, paces: list[range]) -> tuple[float | None, ...]:
        edges = np.searchsorted(kept.numbers, [self._numbers[bucket[0]] for bucket in paces]).tolist()
        ends = [*edges[1:], len(kept.numbers)]
        cuts = [kept.busy_s[start:end] for start, end in zip(edges, ends, strict=True)]
        return tuple(float(cut.mean(dtype=np.float64)) if len(cut) else None for cut in cuts)


def _parts_of(columns: Columns) -> Floats:
    """Return `_PARTS` of each step, communication with the waiting for others in it."""
    own = {
        "data": columns["data_s"],
        "compute": columns["forward_s"] + columns["backward_s"] + columns["optimizer_s"],
        "communication": columns["comm_s"],
        "bubble": columns["bubble_s"],
        "checkpoint": columns["checkpoint_s"],
    }
    known = np.stack([own[name] for name in _PARTS[:-1]])
    other = np.maximum(0.0, columns["step_s"] - known.sum(axis=0))
    return np.vstack([known, other])
