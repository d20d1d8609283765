"""Weights in Hugging Face's layout: written from a checkpoint, and read as where a model begins.

1. Up to `part_bytes`: one model.safetensors. Beyond: model-00001-of-00003.safetensors ..., and an index that says which
   tensor is in which file.
2. The names are those of the model's state_dict. Buffers that are no part of that are left out; a tied weight is there
   once, under the first of its names, as Hugging Face has it.
3. Where the model has a config of its own, as those of transformers do, it is written beside: `from_pretrained` reads
   the folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import CheckpointError, ConfigError
from shoal.core.files import write_whole
from shoal.core.run_folder import RunFolder
from shoal.fault.checkpoint.file_format import Entry, lay_out, read_entries, read_tensor, view_of
from shoal.fault.checkpoint.manifest import committed
from shoal.fault.checkpoint.reader import Checkpoint, read_whole
from shoal.fault.shards import Found

PART_BYTES = 5 * 10**9
"""As Hugging Face cuts."""
_INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"


def export(run: str | Path, target: str | Path, *, step: int | None = None, part_bytes: int = PART_BYTES) -> int:
    """Write the weights of a checkpoint of the run in the folder `run` into the folder `target`; return its step.

    Without a `step`, it is the latest checkpoint without damage.
    """
    checkpoint, target = _find(RunFolder(Path(run)).checkpoints, step), Path(target)
    alike = checkpoint.alike()
    derived = {f"buffer/{name}" for name in alike["derived_buffers"]}
    held = {
        full.partition("/")[2]: found
        for full, found in checkpoint.found.items()
        if full.startswith(("model/", "buffer/")) and full not in derived
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        _write(target, held, part_bytes)
        if alike["config"]:
            write_whole(target / "config.json", alike["config"])
    except OSError as error:
        raise ConfigError(f"the weights cannot be written to {target}: {error.strerror or error}.") from None
    return checkpoint.step


def _find(checkpoints: Path, step: int | None) -> Checkpoint:
    there = committed(checkpoints)
    if step is not None:
        there = [path for path in there if path.name == f"step-{step:08d}"]
    damages = []
    for path in reversed(there):
        checkpoint = Checkpoint(path)
        damage = checkpoint.damage()
        if not damage:
            return checkpoint
        damages.append(damage)
    if damages:
        raise CheckpointError(damages[0])
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise ConfigError(f"there is {which} in {checkpoints}. Train with checkpoints: --checkpoint-every STEPS")


def _write(target: Path, held: dict[str, Found], part_bytes: int) -> None:
    parts: list[dict[str, Found]] = [{}]
    size = total = 0
    for name, found in held.items():
        num_bytes = found.dtype.itemsize * int(torch.Size(found.shape).numel())
        if parts[-1] and size + num_bytes > part_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = found
        size, total = size + num_bytes, total + num_bytes
    files = [_ONE] if len(parts) == 1 else [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in _from_1(parts)]
    for file, part in zip(files, parts, strict=True):
        _write_part(target / file, part)
    if len(parts) > 1:
        where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        write_whole(target / _INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))


def _from_1(parts: list[Any]) -> range:
    return range(1, len(parts) + 1)


def _write_part(path: Path, part: dict[str, Found]) -> None:
    layout = lay_out({name: (found.dtype, found.shape) for name, found in part.items()}, {"format": "pt"})
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
    memory[: len(layout.header)].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
    for name, found in part.items():
        view_of(memory, layout.entries[name]).copy_(read_whole(found))
    write_whole(path, memory.numpy().data)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Whole:
    """A tensor of a file of weights."""

    path: Path
    entry: Entry

    @property
    def offset(self) -> tuple[int, ...]:
        return (0,) * len(self.entry.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.entry.shape

    def read(self) -> Tensor:
        return read_tensor(self.path, self.entry)


def read_weights(where: str | Path) -> tuple[dict[str, Found], str]:
    """Return the tensors of a folder or file of safetensors, as "model/NAME", and what to call it in errors."""
    path = Path(where)
    index = path / _INDEX
    try:
        files = [path] if path.is_file() else [path / _ONE]
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
            if any(Path(name).name != name for name in names):
                raise ValueError("it names files elsewhere")
            files = [path / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} cannot be read: {error}.") from None
    found = {}
    for file in files:
        for name, entry in read_entries(file).items():
            found[f"model/{name}"] = Found(entry.dtype, entry.shape, [_Whole(file, entry)])
    return found, str(path)
