"""A checkpoint's folder, and whether it is there.

    step-00001200/
      worker-N.safetensors   worker N's slices
      worker-N.json          what worker N has for itself
      common.json            what all have alike; worker 0's
      manifest.json          every file's size and checksum; every tensor's dtype, shape and slices
      COMMIT                 the checksum of manifest.json: written last, when all the others are on the disk

Without a COMMIT that matches its manifest, a checkpoint is not there. Checksums are CRC-32: they find damage, not
forgery.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import CheckpointError, ConfigError
from shoal.core.files import write_whole
from shoal.native.crc32 import crc32

_FORMAT = 1
_PIECE_BYTES = 4 << 20
_NAME = re.compile(r"step-(\d{8,})")
COMMIT, MANIFEST, COMMON = "COMMIT", "manifest.json", "common.json"


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies."""
    return checkpoints / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of the checkpoint in `path`."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ConfigError(f"{path} is not a checkpoint: its name is not of the form step-00001200.")
    return int(found[1])


def committed(checkpoints: Path) -> list[Path]:
    """Return the checkpoints that are there, the oldest first."""
    return [path for path in _folders(checkpoints) if is_committed(path)]


def is_committed(path: Path) -> bool:
    """Return whether the checkpoint in `path` is there; so is one that merely cannot be read now."""
    try:
        return _matching_manifest(path) is not None
    except OSError:  # a file server that is away, say: in a moment it may be whole
        return True


def _matching_manifest(path: Path) -> bytes | None:
    """Return the manifest of the checkpoint in `path`; None where it or its COMMIT is missing, or they differ."""
    try:
        manifest, commit = (path / MANIFEST).read_bytes(), (path / COMMIT).read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return manifest if commit == checksum(manifest) else None


def remove_unfinished(checkpoints: Path) -> list[int]:
    """Remove what was begun and never committed; return its steps. Called by worker 0, while nobody writes."""
    unfinished = [path for path in _folders(checkpoints) if not is_committed(path)]
    for path in unfinished:
        remove(path)
    return [step_of(path) for path in unfinished]


def remove(path: Path) -> None:
    """Remove a checkpoint; cut off in the middle, it is not there any more."""
    (path / COMMIT).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def prune(checkpoints: Path, *, keep: int, best: str, highest: bool) -> None:
    """Remove all checkpoints but the last `keep`, and the best by the metric `best`, if it names one.

    One that cannot be removed keeps none of the others: its OSError is raised at the end.
    """
    there = committed(checkpoints)
    kept = set(there[-keep:])
    if best:
        kept |= {path for path in [best_of(there, best, highest=highest)] if path is not None}
    failures = []
    for path in there:
        if path not in kept:
            try:
                remove(path)
            except OSError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def best_of(paths: Sequence[Path], metric: str, *, highest: bool) -> Path | None:
    """Return the checkpoint with the best value of `metric`, the latest of equals; None where none has one."""
    values = [(_metrics(path).get(metric), path) for path in paths]
    known = [(-value if highest else value, path) for value, path in values if isinstance(value, (int, float))]
    return min(reversed(known), key=lambda pair: pair[0])[1] if known else None


def _metrics(path: Path) -> Mapping[str, Any]:
    try:
        metrics = json.loads((path / COMMON).read_text()).get("metrics", {})
    except (OSError, ValueError):
        return {}
    return metrics if isinstance(metrics, dict) else {}


def write_manifest(path: Path, pieces: Sequence[Mapping[str, Any]], *, step: int) -> None:
    """Write the manifest and the commit of a checkpoint from what each of its workers has written."""
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for piece in pieces:
        files |= piece["files"]
        for name, entry in piece["tensors"].items():
            tensors.setdefault(name, {**entry, "slices": []})["slices"] += entry["slices"]
    manifest = {"format": _FORMAT, "step": step, "workers": len(pieces), "files": files, "tensors": tensors}
    content = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()
    write_whole(path / MANIFEST, content)
    sync_folder(path)  # before the commit: a name may reach the disk later than what it names
    write_whole(path / COMMIT, checksum(content) + "\n")
    sync_folder(path)
    sync_folder(path.parent)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint in `path`."""
    try:
        content = _matching_manifest(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    if content is None:
        raise CheckpointError(
            f"{path} holds no whole checkpoint: its COMMIT is missing, or does not match its manifest."
        )
    manifest: dict[str, Any] = json.loads(content)
    if manifest.get("format") != _FORMAT:
        raise ConfigError(
            f"{path} has format {manifest.get('format')}, and this shoal reads {_FORMAT}. Use the shoal that wrote it."
        )
    return manifest


def find_damage(path: Path, files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return in one sentence what is wrong with the first damaged one of `files`; nothing if all are as written."""
    for name, expected in files.items():
        try:
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{path / name} has {size:,} bytes, and {expected['bytes']:,} were written: it is truncated."
            if file_checksum(path / name) != expected["crc32"]:
                return f"{path / name} is damaged: its checksum is not that of what was written."
        except OSError as error:
            return f"{path / name} cannot be read: {error.strerror or error}."
    return ""


def checksum(data: bytes) -> str:
    """Return the CRC-32 of `data`, as 8 hexadecimal digits."""
    return f"{crc32(data):08x}"


def file_checksum(path: Path) -> str:
    """Return the CRC-32 of a file, as 8 hexadecimal digits."""
    value, buffer = 0, bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = crc32(memoryview(buffer)[:count], value)
    return f"{value:08x}"


def sync_folder(path: Path) -> None:
    """Bring the names in a folder onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _folders(checkpoints: Path) -> list[Path]:
    try:
        found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=step_of)
