"""One worker's part of a checkpoint: written from memory, or copied from one folder to another.

    worker-N.safetensors, worker-N.json, and of worker 0 common.json

Files are written piece by piece. Before each piece and each file `tick` is called: it raises if nobody wants the rest.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.core.errors import CheckpointError
from shoal.core.files import write_whole
from shoal.fault.checkpoint.direct import write_directly
from shoal.fault.checkpoint.manifest import checksum, sync_folder
from shoal.native.crc32 import crc32

_PIECE_BYTES = 4 << 20

Files = dict[str, dict[str, Any]]
"""The bytes and the checksum of each file, by its name."""


def tensor_file(worker: int) -> str:
    """Return the name of the file with the slices of `worker`."""
    return f"worker-{worker}.safetensors"


def write_part(path: Path, name: str, memory: Tensor, texts: Mapping[str, str], *, tick: Callable[[], None]) -> Files:
    """Write `memory` as the file `name`, and `texts` by their names, onto the disk; return what was written."""
    tick()
    path.mkdir(parents=True, exist_ok=True)
    files: Files = {name: {"bytes": memory.numel(), "crc32": write_directly(path / name, memory, tick)}}
    for text_name, text in texts.items():
        tick()
        write_whole(path / text_name, text)
        files[text_name] = {"bytes": len(text.encode()), "crc32": checksum(text.encode())}
    sync_folder(path)
    return files


def copy_part(source: Path, path: Path, files: Files, *, tick: Callable[[], None]) -> None:
    """Copy `files` from the folder `source` to `path`, onto the disk, if they are as they were written."""
    tick()
    path.mkdir(parents=True, exist_ok=True)
    for name, expected in files.items():
        tick()
        num_bytes, crc = _copy(source / name, path / name, tick)
        if (num_bytes, crc) != (expected["bytes"], expected["crc32"]):
            raise CheckpointError(f"{source / name} is not what was written there: it is truncated or damaged.")
    sync_folder(path)


def _copy(source: Path, path: Path, tick: Callable[[], None]) -> tuple[int, str]:
    """Copy a file onto the disk; return its bytes and its checksum."""
    num_bytes, crc = 0, 0
    with source.open("rb", buffering=0) as opened, path.open("wb", buffering=0) as target:
        while piece := opened.read(_PIECE_BYTES):
            tick()
            rest = memoryview(piece)
            while rest:
                rest = rest[target.write(rest) :]
            num_bytes, crc = num_bytes + len(piece), crc32(piece, crc)
        os.fsync(target.fileno())
    return num_bytes, f"{crc:08x}"
