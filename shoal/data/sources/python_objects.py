"""Python objects: a map-style dataset (len and []), read in ranges; or any iterable, read once from begin to end.

A sample is a mapping; a tuple gets the names of `columns`, or `x` and `y` for a pair; anything else is `x`. Tensors
become arrays, PIL images become arrays of their pixels.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column
from shoal.data.sources.source import Sample, Slice, cut_rows, one_line


class DatasetSource:
    """The samples of a map-style dataset. To be read by several processes it must be picklable."""

    columns: tuple[Column, ...] | None = None

    def __init__(self, dataset: Any, *, columns: tuple[str, ...] | list[str] | None = None) -> None:
        self._dataset, self._names = dataset, tuple(columns) if columns else None
        self._num_rows = len(dataset)
        self._row_bytes = _first_bytes(dataset)

    def describe(self) -> dict[str, Any]:
        """Return the dataset's class and length."""
        return {"kind": "dataset", "name": type(self._dataset).__name__, "num_rows": self._num_rows}

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return ranges of rows, by the size of the first."""
        return cut_rows(self._num_rows, self._row_bytes, about_bytes)

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the samples of a range."""
        for row in range(part.begin, part.end):
            label = f"row {row}"
            try:
                yield label, as_mapping(self._dataset[row], self._names)
            except DataError as error:
                yield label, error
            except Exception as error:  # the user's dataset
                yield label, DataError(f"{label}: the dataset raised {type(error).__name__}: {one_line(error)}.")

    def fingerprint(self, part: Slice) -> str:
        """Return the dataset's length: more cannot be told."""
        del part
        return f"{type(self._dataset).__name__}-{len(self._dataset)}"


class IterableSource:
    """The samples of an iterable, or of a function that returns one. One slice: nobody can begin in the middle."""

    columns: tuple[Column, ...] | None = None

    def __init__(self, samples: Any, *, columns: tuple[str, ...] | list[str] | None = None) -> None:
        self._samples, self._names, self._is_used = samples, tuple(columns) if columns else None, False

    def describe(self) -> dict[str, Any]:
        """Return the name of the iterable's class or function."""
        name = getattr(self._samples, "__name__", None) or type(self._samples).__name__
        return {"kind": "iterable", "name": str(name)}

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return one slice."""
        del about_bytes
        return [Slice((), 0, 0, 0)]

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield everything. An iterator can be read once only."""
        del part
        samples = self._samples() if callable(self._samples) else self._samples
        if self._is_used and iter(samples) is samples:
            raise DataError(
                f"The {self.describe()['name']} was read already and cannot begin again. Give a list or a function."
            )
        self._is_used = True
        for row, sample in enumerate(_numbered(samples)):
            try:
                yield f"row {row}", as_mapping(sample, self._names)
            except DataError as error:
                yield f"row {row}", error

    def fingerprint(self, part: Slice) -> str:
        """Return "": nothing can be told of it."""
        del part
        return ""


def python_source(
    samples: Any, *, columns: tuple[str, ...] | list[str] | None = None
) -> DatasetSource | IterableSource:
    """Return the source of a map-style dataset, or of an iterable or a function that returns one."""
    if hasattr(samples, "__getitem__") and hasattr(samples, "__len__") and not isinstance(samples, Mapping):
        return DatasetSource(samples, columns=columns)
    if isinstance(samples, Iterable) or inspect.isroutine(samples):
        return IterableSource(samples, columns=columns)
    raise ConfigError(
        f"A {type(samples).__name__} has no samples. Give a path, a dataset, an iterable, or a function returning one."
    )


def as_mapping(sample: Any, names: tuple[str, ...] | None) -> Mapping[str, Any]:
    """Return a sample's values by column, as NumPy arrays, numbers, text and bytes."""
    if isinstance(sample, Mapping):
        return {str(name): _as_numpy(value) for name, value in sample.items()}
    values = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    names = names or {1: ("x",), 2: ("x", "y")}.get(len(values)) or tuple(f"x{at}" for at in range(len(values)))
    if len(names) != len(values):
        raise DataError(f"a sample has {len(values)} values, and columns names {len(names)}: {', '.join(names)}.")
    return {name: _as_numpy(value) for name, value in zip(names, values, strict=True)}


def _as_numpy(value: Any) -> Any:
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
        return value if str(value.dtype) == "torch.bfloat16" else value.numpy()  # NumPy has no bfloat16
    if isinstance(value, (str, bytes, np.ndarray, np.generic)):
        return value
    if isinstance(value, (bool, int, float, list, tuple)) or hasattr(value, "__array_interface__"):  # PIL images too
        return np.asarray(value)[()]
    return value


def _numbered(samples: Any) -> Iterator[Any]:
    """Yield the samples; what the user's code raises says after which row."""
    row = -1
    try:
        for row, sample in enumerate(samples):  # noqa: B007
            yield sample
    except (DataError, GeneratorExit):
        raise
    except Exception as error:  # the user's iterable
        raise DataError(
            f"After {row + 1} samples the iterable raised {type(error).__name__}: {one_line(error)}."
        ) from error


def _first_bytes(dataset: Any) -> int:
    """Return the bytes of the first sample, as a guess at all; should it fail, `read` will say so."""
    try:
        sample = as_mapping(dataset[0], None)
    except Exception:  # the user's dataset
        return 1 << 10
    return sum(
        getattr(value, "nbytes", None) or (len(value) if isinstance(value, (str, bytes)) else 8)
        for value in sample.values()
    )
