"""HDF5 files: each dataset with rows is a column, named by its path; strings are text, variable lengths are ragged."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from shoal.data.pack.schema import Column
from shoal.data.sources.arrays import ArraySource, StoredArray
from shoal.data.sources.source import Values, library
from shoal.data.sources.tree import LocalTree


class Hdf5Source(ArraySource):
    """Rows of the datasets of one or more HDF5 files."""

    kind = "hdf5"

    @contextmanager
    def arrays(self, name: str) -> Iterator[dict[str, StoredArray]]:
        """Open a file and return its datasets, also those in groups; links to other files are not followed."""
        h5py = _h5py()
        if isinstance(self.tree, LocalTree):
            # locking=False: shared file systems refuse locks; the fingerprint notices a writer.
            opened = h5py.File(self.tree.path(name), "r", locking=False)
        else:
            opened = h5py.File(self.tree.open(name), "r")
        with opened as file:
            found: dict[str, StoredArray] = {}

            def visit(path: str, item: Any) -> None:
                if isinstance(item, h5py.Dataset) and item.shape:
                    found[path] = cast(StoredArray, item)

            file.visititems(visit)
            yield dict(sorted(found.items()))

    def column(self, name: str, array: StoredArray) -> Column:
        """Return what a dataset holds."""
        if _h5py().check_string_dtype(array.dtype):
            return Column(name, "text")
        ragged = _h5py().check_vlen_dtype(array.dtype)
        if ragged is not None and len(array.shape) == 1:
            return Column(name, "ragged", np.dtype(ragged).name, extra={"ndim": 1})
        return super().column(name, array)

    def values(self, array: StoredArray, rows: slice) -> Values:
        """Return some rows of a dataset."""
        if _h5py().check_string_dtype(array.dtype):
            return list(cast(Any, array).asstr()[rows])
        if array.dtype == object:
            return list(array[rows])
        return super().values(array, rows)


def _h5py() -> Any:
    return library("h5py", extra="hdf5", what="HDF5 files")
