"""Weights as others read them, without shoal.

    hf            config.json, generation_config.json, safetensors, the tokenizer: for `from_pretrained(folder)`
    safetensors   model.safetensors: for `safetensors.torch.load_file` and `load_model`
    torch         model.pt: for `torch.load(..., weights_only=True)` and `load_state_dict`

1. The names are those of the model's state_dict; buffers that are no part of that are left out.
2. A tied weight is in safetensors once, under the first of its names, as Hugging Face has it; the others stand in the
   header, where `load_model` looks. In model.pt it has all its names, and is there once all the same.
3. Safetensors of more than `part_bytes` are cut: model-00001-of-00003.safetensors ..., and an index that says which
   tensor is in which file. They are written part by part: no more than one part is in memory at once.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.files import write_whole
from shoal.fault.checkpoint.file_format import lay_out, view_of
from shoal.fault.checkpoint.reader import read_whole
from shoal.fault.shards import Found

PART_BYTES = 5 * 10**9
"""As Hugging Face cuts."""
INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"
TORCH = "model.pt"
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, and what goes beside them."""

    held: Mapping[str, Found]
    """By the names of the model's state_dict."""
    tied: Mapping[str, str]
    """Further names of tied weights, each with the one by which it is held."""
    dtype: torch.dtype | None
    """What numbers are written as; None: as they are."""
    config: dict[str, Any] | None
    """That of a model of transformers."""
    generation: dict[str, Any] | None
    model_class: str
    tokenizer: Path | None
    part_bytes: int

    def dtype_of(self, found: Found) -> torch.dtype:
        """Return what a tensor is written as."""
        return self.dtype if self.dtype is not None and found.dtype.is_floating_point else found.dtype

    def bytes_of(self, found: Found) -> int:
        """Return how large a tensor is then."""
        return self.dtype_of(found).itemsize * math.prod(found.shape)

    @property
    def num_bytes(self) -> int:
        """How large all of them are."""
        return sum(map(self.bytes_of, self.held.values()))

    def read(self, found: Found) -> Tensor:
        """Return a tensor, put together."""
        return read_whole(found).to(self.dtype_of(found))


def write_safetensors(folder: Path, weights: Weights) -> None:
    """Write model.safetensors, or its parts."""
    parts = _parts(weights)
    count = len(parts)
    files = [ONE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for file, part in zip(files, parts, strict=True):
        _write_part(folder / file, part, weights)
    if count > 1:
        where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        index = {"metadata": {"total_size": weights.num_bytes}, "weight_map": where}
        write_whole(folder / INDEX, json.dumps(index, indent=2))


def _parts(weights: Weights) -> list[dict[str, Found]]:
    """Return the weights in parts of the size that is wanted, in their order."""
    parts: list[dict[str, Found]] = [{}]
    size = 0
    for name, found in weights.held.items():
        num_bytes = weights.bytes_of(found)
        if parts[-1] and size + num_bytes > weights.part_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = found
        size += num_bytes
    return parts


def _write_part(path: Path, part: dict[str, Found], weights: Weights) -> None:
    tied = {name: first for name, first in weights.tied.items() if first in part}
    shapes = {name: (weights.dtype_of(found), found.shape) for name, found in part.items()}
    layout = lay_out(shapes, {"format": "pt", **tied})
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
    memory[: len(layout.header)].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
    for name, found in part.items():
        view_of(memory, layout.entries[name]).copy_(weights.read(found))
    write_whole(path, memory.numpy().data)  # type: ignore[arg-type]


def write_torch(folder: Path, weights: Weights) -> None:
    """Write model.pt: a state_dict of plain tensors, which `torch.load(..., weights_only=True)` takes."""
    state = {name: weights.read(found) for name, found in weights.held.items()}
    state |= {name: state[first] for name, first in weights.tied.items()}
    with (folder / TORCH).open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def write_hf(folder: Path, weights: Weights) -> None:
    """Write what `from_pretrained` reads."""
    if weights.config is None:
        raise ConfigError(
            "the model of this run has no config, as those of transformers do, so that from_pretrained could not build "
            "it. Export to 'safetensors' or 'torch'."
        )
    config = {**weights.config, "architectures": weights.config.get("architectures") or [weights.model_class]}
    floats = {weights.dtype_of(found) for found in weights.held.values() if found.dtype.is_floating_point}
    if len(floats) == 1:
        config["dtype"] = str(floats.pop()).removeprefix("torch.")
    write_safetensors(folder, weights)
    write_whole(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    if weights.generation is not None:
        write_whole(folder / "generation_config.json", json.dumps(weights.generation, indent=2) + "\n")
    if weights.tokenizer is not None:
        _copy_tokenizer(folder, weights.tokenizer)


def _copy_tokenizer(folder: Path, source: Path) -> None:
    """Put the files of a tokenizer beside the weights: those of a folder, or one tokenizer.json."""
    files = [source / name for name in _TOKENIZER] if source.is_dir() else [source]
    found = [path for path in files if path.is_file()]
    if not found or (not source.is_dir() and source.name != "tokenizer.json"):
        raise ConfigError(
            f"{source} is no tokenizer: name the folder that has one, as tokenizer.save_pretrained writes it, or its "
            "tokenizer.json."
        )
    for path in found:
        shutil.copyfile(path, folder / path.name)
    if not (folder / "tokenizer_config.json").is_file():
        write_whole(folder / "tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}\n')


FORMATS: dict[str, Callable[[Path, Weights], None]] = {
    "hf": write_hf,
    "safetensors": write_safetensors,
    "torch": write_torch,
}


def remove_others(target: Path, written: set[str]) -> None:
    """Remove the weights of an earlier export to `target` that the one that has `written` is not made of."""
    for path in [*target.glob("model*.safetensors"), target / INDEX, target / TORCH]:
        if path.name not in written:
            path.unlink(missing_ok=True)
