"""A tiny dataset of every format, with the samples that are in it: the contract suite runs over all of them."""

from collections.abc import Callable
from pathlib import Path

from tests.data.sources.made import Made
from tests.data.sources.made_arrays import hdf5, npy, npy_by_columns, npy_fields, npz, raw, tokens, zarr2, zarr3
from tests.data.sources.made_files import beton, folder, lmdb, plain_files, squashfs, webdataset, webdataset_gz
from tests.data.sources.made_tables import arrow, arrow_stream, csv, huggingface, huggingface_object, parquet
from tests.data.sources.made_text import dataset, iterable, json_lines, text_files, text_lines, text_words

_EVERY = (
    *(folder, plain_files, webdataset, webdataset_gz, hdf5, zarr2, zarr3, lmdb),
    *(npy, npy_by_columns, npy_fields, npz, raw, tokens, beton, squashfs),
    *(csv, parquet, arrow, arrow_stream, huggingface, huggingface_object),
    *(text_files, text_lines, text_words, json_lines, dataset, iterable),
)
FORMATS: dict[str, Callable[[Path], Made]] = {make.__name__: make for make in _EVERY}
