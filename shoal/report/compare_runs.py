"""Two runs beside each other: what was different about them, and what came of it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal.core.units import format_bytes, format_seconds
from shoal.report.compare import UNKNOWN, in_words
from shoal.report.logs.log import clean
from shoal.report.split import PARTS
from shoal.report.summary import Summary
from shoal.report.verdict import rate_in_words, ratio_of

_EQUAL = 0.03
"""Two runs of the same plan differ by as much."""
_NOT_COMPARED = ("predicted", "why")


@dataclass(frozen=True)
class Beside:
    """One quantity of both runs, and the second over the first."""

    name: str
    values: tuple[str, str]
    ratio: float | None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row of a table."""
        return self.name, *self.values, in_words(self.ratio, "{:.2f}".format)


def verdict_on(first: Summary, second: Summary) -> str:
    """Return in one sentence which of the two was faster, and where the difference lies."""
    gain = ratio_of(second.units_per_s, first.units_per_s)
    if gain is None or first.unit != second.unit:
        return f"{first.run} and {second.run}: their throughputs cannot be compared."
    if abs(gain - 1) <= _EQUAL:
        return f"{second.run} is as fast as {first.run}: {_rates(first, second)}."
    word = "faster" if gain > 1 else "slower"
    times = gain if gain > 1 else 1 / gain
    why = _rates(first, second) + _largest_change(first, second)
    return f"{second.run} is {times:.2f}x {word} than {first.run}: {why}."


def _rates(first: Summary, second: Summary) -> str:
    before, after = (rate_in_words(one.units_per_s or 0.0) for one in (first, second))
    return f"{after} instead of {before} {first.unit}/s"


def _largest_change(first: Summary, second: Summary) -> str:
    """Return the clause on the part of a step that changed most."""
    if not first.split or not second.split:
        return ""
    name = max(PARTS, key=lambda part: abs(second.split[part] - first.split[part]))
    before, after = first.split[name], second.split[name]
    return f"; {name} went from {format_seconds(before)} to {format_seconds(after)} of each step"


def beside(first: Summary, second: Summary) -> list[Beside]:
    """Return the numbers of both runs; rows known to neither go."""
    both = (first, second)
    rows = [
        _row("workers", (first.workers, second.workers), str),
        _row("steps", (first.steps, second.steps), lambda count: f"{count:,.0f}"),
        _row(f"{first.unit}/s", tuple(one.units_per_s for one in both), rate_in_words),
        _row("samples/s", tuple(one.samples_per_s for one in both), rate_in_words),
        _row("step, without data loading", tuple(one.step_s for one in both), format_seconds),
        _row("median step", tuple(one.step_times.median_s if one.step_times else None for one in both), format_seconds),
        *(_row(name, tuple(one.split.get(name) for one in both), format_seconds) for name in PARTS),
        _row("peak memory", tuple(_most(one.peak_bytes) for one in both), format_bytes),
        _row("wall time", tuple(one.wall_s for one in both), format_seconds),
        _row("last loss", tuple(_last_loss(one) for one in both), "{:.4g}".format),
    ]
    zero = format_seconds(0.0)
    return [row for row in rows if row.values not in ((UNKNOWN, UNKNOWN), (zero, zero))]


def differences(first: Summary, second: Summary) -> list[tuple[str, str, str]]:
    """Return what was set differently: the plans' fields, the jobs' numbers, the software, the machines."""
    found = [*_differing("plan", first.plan, second.plan), *_differing("job", first.job, second.job)]
    versions = (summary.record.versions if summary.record else {} for summary in (first, second))
    found.extend(_differing_values("version of ", *versions))
    before, after = _nodes(first), _nodes(second)
    return [*found, ("nodes", before, after)] if before != after else found


def told_apart(first: Summary, second: Summary) -> tuple[Summary, Summary]:
    """Return both, with their folders before their names where these are the same."""
    if first.run != second.run:
        return first, second
    named = [replace(one, run=clean(f"{one.page.parent.parent.name}/{one.run}")) for one in (first, second)]
    if named[0].run == named[1].run:
        named = [replace(one, run=clean(one.page.parent)) for one in (first, second)]
    return named[0], named[1]


def loss_over_time(summary: Summary) -> tuple[list[float], list[float | None]]:
    """Return the training seconds (the sum of the steps so far) at which each loss was reached, and the losses."""
    seconds, at_s, ends = 0.0, [], iter(summary.stretches)
    stretch = next(ends, None)
    for number in summary.step_numbers:
        while stretch is not None and number > stretch.last:
            stretch = next(ends, None)
        seconds += sum(stretch.parts_s) if stretch is not None else 0.0
        at_s.append(seconds)
    return at_s, list(summary.losses)


def _row(name: str, values: Any, words: Any) -> Beside:
    first, second = values
    return Beside(name, (in_words(first, words), in_words(second, words)), ratio_of(second, first))


def _most(peaks: tuple[int | None, ...]) -> int | None:
    return max((peak for peak in peaks if peak is not None), default=None)


def _last_loss(summary: Summary) -> float | None:
    return next((loss for loss in reversed(summary.losses) if loss is not None), None)


def _nodes(summary: Summary) -> str:
    nodes = summary.cluster.nodes if summary.cluster else ()
    return ", ".join(f"{node.count} x {node.device}" for node in nodes) or UNKNOWN


def _differing(prefix: str, first: Any, second: Any) -> Iterator[tuple[str, str, str]]:
    values = [_flat(asdict(one)) if one else {} for one in (first, second)]
    return _differing_values(f"{prefix} ", *values)


def _differing_values(prefix: str, first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in dict.fromkeys([*first, *second]):
        before, after = first.get(name, UNKNOWN), second.get(name, UNKNOWN)
        if before != after:
            yield f"{prefix}{name}", _word(before), _word(after)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"mesh.tensor": 2} of {"mesh": {"tensor": 2}}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in _NOT_COMPARED:
            continue
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _word(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(_word(item) for item in value) or "none"
    if value is None or value == "":
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
