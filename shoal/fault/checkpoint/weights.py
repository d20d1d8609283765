"""Weights that leave a run, in the formats that others read (formats.py), and weights that a model begins with."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.core.errors import CheckpointError, ConfigError, did_you_mean
from shoal.core.files import whole_folder
from shoal.core.run_folder import RunFolder
from shoal.core.units import format_bytes
from shoal.fault.checkpoint.file_format import Entry, read_entries, read_tensor
from shoal.fault.checkpoint.formats import FORMATS, INDEX, ONE, PART_BYTES, Weights, remove_others
from shoal.fault.checkpoint.manifest import committed
from shoal.fault.checkpoint.reader import Checkpoint, opened
from shoal.fault.shards import Found

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    run: str | Path,
    target: str | Path,
    *,
    step: int | None = None,
    to: str | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    part_bytes: int = PART_BYTES,
) -> int:
    """Write the weights of a checkpoint of the run in the folder `run` into the folder `target`; return its step.

    `to`: "hf", a folder for `from_pretrained`; "safetensors"; or "torch", a model.pt. Without it, "hf" where the model
    is one of transformers, else "safetensors". Without a `step`, it is the latest checkpoint without damage; without a
    `dtype` ("fp32", "bf16", "fp16"), numbers are as they were trained. `tokenizer`: the folder of the one to put beside
    the model. Files have up to `part_bytes`. `target` has all of it in the end,
    or nothing.
    """
    checkpoint, target = _find(RunFolder(Path(run)).checkpoints, step), Path(target)
    weights = _weights(checkpoint, dtype, Path(tokenizer) if tokenizer is not None else None, part_bytes)
    to = to or ("hf" if weights.config else "safetensors")
    if to not in FORMATS:
        raise ConfigError(f"there is no format {to!r}.{did_you_mean(to, list(FORMATS))}")
    if tokenizer is not None and to != "hf":
        raise ConfigError(f"a tokenizer goes beside a model of transformers, not into {to!r}. Write to 'hf'.")
    try:
        with whole_folder(Path(os.path.abspath(target))) as folder:  # noqa: PTH100  # resolve() would follow links
            _need_room(folder, weights, target)
            FORMATS[to](folder, weights)
            names = {path.name for path in folder.iterdir()}
        remove_others(target, names)
    except OSError as error:
        raise ConfigError(f"the weights cannot be written to {target}: {error.strerror or error}.") from None
    return checkpoint.step


def _weights(checkpoint: Checkpoint, dtype: str | None, tokenizer: Path | None, part_bytes: int) -> Weights:
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"there is no dtype {dtype!r}.{did_you_mean(dtype, list(DTYPES))}")
    alike = checkpoint.alike()
    derived = {f"buffer/{name}" for name in alike["derived_buffers"]}
    held = {
        full.partition("/")[2]: found
        for full, found in checkpoint.found.items()
        if full.startswith(("model/", "buffer/")) and full not in derived
    }
    return Weights(
        held,
        tied={name: first for name, first in alike.get("tied", {}).items() if first in held},
        dtype=DTYPES[dtype] if dtype else None,
        config=json.loads(alike["config"]) if alike["config"] else None,
        generation=json.loads(alike["generation_config"]) if alike.get("generation_config") else None,
        model_class=alike.get("class", ""),
        tokenizer=tokenizer,
        part_bytes=part_bytes,
    )


def _need_room(folder: Path, weights: Weights, target: Path) -> None:
    needed, free = weights.num_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"the weights take {format_bytes(needed)}, and there are {format_bytes(free)} left where {target} is to be."
        )


def _find(checkpoints: Path, step: int | None) -> Checkpoint:
    there = committed(checkpoints)
    if step is not None:
        there = [path for path in there if path.name == f"step-{step:08d}"]
    damages = []
    for path in reversed(there):
        checkpoint, damage = opened(path)
        if checkpoint is not None and not damage:
            return checkpoint
        damages.append(damage)
    if damages:
        raise CheckpointError(damages[0])
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise ConfigError(f"there is {which} in {checkpoints}. Train with checkpoints: --checkpoint-every STEPS")


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
    index = path / INDEX
    try:
        files = [path] if path.is_file() else [path / ONE]
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
