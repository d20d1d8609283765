"""The steps of a large log as columns of numbers, read by Arrow; for small logs, see reading.py.

A run of 64 workers and 100,000 steps has 6.4 million of them. Kept one by one they would fill gigabytes; as columns, a
worker's take 10 MB, and only until measured_large.py has made its sums of them.
"""

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import json as arrow_json

from shoal.core.events import LATER_PARTS, STEP_PARTS
from shoal.report.logs.log import LEAST, MOST, Step

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NAMES = ("loss", "samples", "weight", "batch_weight", "step_s", *STEP_PARTS)
"""The columns of `Columns.values`, as rows."""
_OPTIONAL = LATER_PARTS | {"batch_weight"}
_SCHEMA = pa.schema([("step", pa.int64()), ("time", pa.float64()), *((name, pa.float64()) for name in _NAMES)])
_PARSE = arrow_json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore")
_READ = arrow_json.ReadOptions(block_size=4 << 20)


class Columns:
    """The steps of one worker, in order; a step that was written twice counts as it was last."""

    def __init__(self, numbers: Ints, values: Floats) -> None:
        self.numbers, self._values = numbers, values

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, name: str) -> Floats:
        """Return the column called `name`; of loss, what was not finite is NaN."""
        column: Floats = self._values[_NAMES.index(name)]
        return column

    @property
    def first_step(self) -> int | None:
        """The lowest step."""
        return int(self.numbers[0]) if len(self.numbers) else None

    @property
    def last_step(self) -> int | None:
        """The highest step."""
        return int(self.numbers[-1]) if len(self.numbers) else None


class ColumnsReader:
    """Collects the step events of one worker."""

    def __init__(self) -> None:
        self._numbers: list[Ints] = []
        self._values: list[Floats] = []

    def take(self, lines: Sequence[bytes]) -> tuple[float, ...] | None:
        """Take in step events; return when the first and the last were, or None where not all of them make sense."""
        try:
            table = arrow_json.read_json(io.BytesIO(b"\n".join(lines)), read_options=_READ, parse_options=_PARSE)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None
        if len(table) != len(lines) or table["step"].null_count:
            return None
        values = np.stack([_column(table, name) for name in _NAMES])
        if not (np.abs(values[1:]) <= MOST).all():  # all but the loss must be there; what is not finite is no less
            return None
        values[1:][np.abs(values[1:]) < LEAST] = 0.0
        values[0, ~np.isfinite(values[0])] = np.nan
        self._numbers.append(table["step"].to_numpy())
        self._values.append(values)
        times = _column(table, "time")
        times = times[np.abs(times) <= MOST]
        return (float(times[0]), float(times[-1])) if len(times) else ()

    def take_steps(self, steps: dict[int, Step]) -> None:
        """Take in steps that were read line by line."""
        rows = [
            (np.nan if s.loss is None else s.loss, s.samples, s.weight, s.batch_weight, s.total_s, *s.parts_s)
            for s in steps.values()
        ]
        self._numbers.append(np.fromiter(steps, np.int64, len(steps)))
        self._values.append(np.array(rows, np.float64).reshape(len(rows), len(_NAMES)).T)

    def finish(self) -> Columns:
        """Return what was taken in."""
        if not self._numbers:
            return Columns(np.empty(0, np.int64), np.empty((len(_NAMES), 0)))
        numbers, values = np.concatenate(self._numbers), np.concatenate(self._values, axis=1)
        if (np.diff(numbers) > 0).all():
            return Columns(numbers, values)
        # Of several with one number, np.unique names the first: from behind, that is the last.
        ordered, last = np.unique(numbers[::-1], return_index=True)
        return Columns(ordered, values[:, ::-1][:, last])


def _column(table: pa.Table, name: str) -> Floats:
    column = table[name]
    if name in _OPTIONAL and column.null_count == len(column):
        return np.zeros(len(column))
    values: Floats = column.to_numpy()  # what is null becomes NaN
    return values
