"""Packs that claim far more samples than the disk could hold: their parts are sparse files."""

import dataclasses
import os
import tempfile
from pathlib import Path

import numpy as np

from shoal.data.pack.manifest import Part, read_manifest, write_manifest
from shoal.data.pack.progress import Quiet
from shoal.data.pack.writer import pack

_EDGE_BYTES = 64 << 10
"""How much of a part's beginning and end is not zero, at most: Arrow's header and footer."""


def huge_rows(path: Path, *, num_rows: int, part_rows: int, width: int = 1) -> Path:
    """Write a valid pack of `num_rows` rows of `width` bytes, all zero, in parts of `part_rows`."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        rows = np.lib.format.open_memmap(Path(folder, "x.npy"), mode="w+", dtype=np.uint8, shape=(part_rows, width))
        del rows
        one = Path(folder, "one.pack")
        pack(Path(folder, "x.npy"), one, part_bytes=2 * part_rows * width, compression="none", report=Quiet())
        return _repeated(one, path, num_parts=-(-num_rows // part_rows))


def huge_tokens(path: Path, *, num_parts: int, part_tokens: int) -> Path:
    """Write a valid pack of tokens, all zero: a document of `part_tokens` in each part."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        document = {"tokens": np.zeros(part_tokens, dtype=np.uint16)}
        one = Path(folder, "one.pack")
        pack(
            [document],
            one,
            columns={"tokens": "tokens"},
            part_bytes=4 * part_tokens,
            compression="none",
            report=Quiet(),
        )
        return _repeated(one, path, num_parts=num_parts)


def _repeated(one: Path, path: Path, *, num_parts: int) -> Path:
    """Write a pack whose parts are all as the only part of `one`; what is zero there takes no room."""
    manifest = read_manifest(one)
    (part,) = manifest.parts
    (file,) = part.files
    content = np.memmap(one / file.name, mode="r")
    head, middle, tail = np.split(content, [_EDGE_BYTES, max(_EDGE_BYTES, len(content) - _EDGE_BYTES)])
    assert not middle.any()
    (path / "parts").mkdir(parents=True)
    parts = [_renamed(part, number) for number in range(num_parts)]
    for each in parts:
        handle = os.open(path / each.files[0].name, os.O_WRONLY | os.O_CREAT, 0o644)
        os.truncate(handle, len(content))
        os.pwrite(handle, head, 0)
        os.pwrite(handle, tail, len(content) - len(tail))
        os.close(handle)
    write_manifest(path, dataclasses.replace(manifest, parts=tuple(parts)))
    return path


def _renamed(part: Part, number: int) -> Part:
    (file,) = part.files
    name = f"{number:05d}"
    return dataclasses.replace(part, name=name, files=(dataclasses.replace(file, name=f"parts/{name}.arrow"),))
