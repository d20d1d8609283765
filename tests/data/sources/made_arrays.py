"""Tiny datasets of arrays."""

from pathlib import Path
from typing import Literal

import numpy as np

from tests.data.sources.made import NUM_ROWS, ROWS, WORDS, Made, X, Y


def hdf5(where: Path) -> Made:
    import h5py

    ragged = [np.arange(row % 5, dtype=np.int32) for row in range(NUM_ROWS)]
    with h5py.File(where / "all.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(4, 2, 3), compression="gzip", fletcher32=True)
        file.create_dataset("inner/y", data=Y)
        file.create_dataset("words", data=WORDS, dtype=h5py.string_dtype())
        file.create_dataset("ragged", (NUM_ROWS,), h5py.vlen_dtype(np.int32))[:] = np.array(ragged, dtype=object)
        file.create_dataset("about", data=7)
    samples = [{"inner/y": Y[r], "ragged": ragged[r], "words": WORDS[r], "x": X[r]} for r in range(NUM_ROWS)]
    return Made(where / "all.h5", samples, files=(where / "all.h5",))


def zarr2(where: Path) -> Made:
    return _zarr(where, 2)


def zarr3(where: Path) -> Made:
    return _zarr(where, 3)


def _zarr(where: Path, version: Literal[2, 3]) -> Made:
    import zarr

    group = zarr.create_group(where / "all.zarr", zarr_format=version)
    group.create_array("x", shape=X.shape, chunks=(4, 2, 3), dtype="f4")[:] = X
    group.create_array("deep/y", shape=Y.shape, chunks=(5,), dtype="i8")[:] = Y + 1
    chunk = where / "all.zarr" / "x" / ("0.0.0" if version == 2 else "c/0/0/0")
    return Made(where / "all.zarr", [{"deep/y": Y[r] + 1, "x": X[r]} for r in range(NUM_ROWS)], files=(chunk,))


def npy(where: Path) -> Made:
    np.save(where / "0.npy", X[:10])
    np.save(where / "1.npy", X[10:].astype(">f4"))
    return Made(str(where / "*.npy"), [{"x": x} for x in X], files=(where / "0.npy",))


def npy_by_columns(where: Path) -> Made:
    np.save(where / "x.npy", np.asfortranarray(X))
    np.save(where / "y.npy", Y)
    return Made(where, ROWS, files=(where / "x.npy",))


def npy_fields(where: Path) -> Made:
    table = np.empty(NUM_ROWS, [("x", "f4", (2, 3)), ("y", "i8")])
    table["x"], table["y"] = X, Y
    np.save(where / "all.npy", table)
    return Made(where / "all.npy", ROWS, files=(where / "all.npy",))


def npz(where: Path) -> Made:
    np.savez_compressed(where / "all.npz", x=X, y=Y, words=np.array(WORDS))
    samples = [{**row, "words": word} for row, word in zip(ROWS, WORDS, strict=True)]
    return Made(where / "all.npz", samples, files=(where / "all.npz",))


def raw(where: Path) -> Made:
    (where / "all.bin").write_bytes(b"head" + X.tobytes())
    options = {"kind": "raw", "dtype": "float32", "shape": (2, 3), "skip_bytes": 4}
    return Made(where / "all.bin", [{"x": x} for x in X], options, files=(where / "all.bin",))


def tokens(where: Path) -> Made:
    documents = [np.array([*range(1, 2 + row), 0], np.uint16) for row in range(NUM_ROWS)]
    (where / "train.bin").write_bytes(bytes(8) + np.concatenate(documents).tobytes())
    options = {"kind": "tokens", "end_token": 0, "skip_bytes": 8}
    return Made(where / "train.bin", [{"tokens": one} for one in documents], options, files=(where / "train.bin",))
