"""Weights that go out and come in as safetensors, and plain values as JSON."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from shoal.comm.rank import ALONE
from shoal.core.errors import ConfigError
from shoal.fault.checkpoint.values import from_json, to_json
from shoal.fault.checkpoint.weights import export, read_weights
from shoal.spec.plan import Checkpoints, Plan
from tests.support.training import bare_folder, train_part


def train(folder: Path, steps: int, job: str = "linear") -> list[float]:
    """Train in `folder` and return the losses."""
    builder = f"tests.support.jobs:{job}"
    return train_part(ALONE, builder=builder, arguments={"steps": steps}, plan=Plan(), folder=folder).losses


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 2 and 4."""
    folder = bare_folder(tmp_path, Plan(checkpoint=Checkpoints(every_steps=2)))
    train(folder, 4)
    return folder


def test_weights_go_out_and_come_back(run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    target = tmp_path / "weights"
    assert export(run, target) == 4
    loaded = load_file(target / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in loaded.items()} == {
        "0.weight": [8, 5], "0.bias": [8], "2.weight": [1, 8], "2.bias": [1],
    }  # fmt: skip
    cut = tmp_path / "cut"
    export(run, cut, step=2, part_bytes=60)
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (40 + 8 + 8 + 1)
    assert len(set(index["weight_map"].values())) == 3
    assert all(name in load_file(cut / file) for name, file in index["weight_map"].items())
    found, _ = read_weights(cut)
    assert len(found) == 4
    begun = bare_folder(tmp_path, Plan(weights=str(target)))
    assert train(begun, 1)[0] < train(bare_folder(tmp_path, Plan()), 1)[0]


def test_buffers_go_out_and_come_back_with_the_weights(tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, Plan(checkpoint=Checkpoints(every_steps=2)))
    train(folder, 2, job="batch_norm")
    export(folder, tmp_path / "weights")
    found, _ = read_weights(tmp_path / "weights")
    assert found["model/1.num_batches_tracked"].slices[0].read() == 2
    begun = bare_folder(tmp_path, Plan(weights=str(tmp_path / "weights"), checkpoint=Checkpoints(every_steps=1)))
    train(begun, 1, job="batch_norm")
    export(begun, tmp_path / "later")
    later, _ = read_weights(tmp_path / "later")
    assert later["model/1.num_batches_tracked"].slices[0].read() == 3


def test_a_model_of_transformers_is_read_by_its_own_library(tmp_path: Path) -> None:
    import transformers

    folder = bare_folder(tmp_path, Plan(checkpoint=Checkpoints(every_steps=1)))
    arguments: dict[str, object] = {"steps": 1, "layers": 1}
    train_part(ALONE, builder="benchmarks.parallel_cases:gpt2", arguments=arguments, plan=Plan(), folder=folder)
    export(folder, tmp_path / "weights")
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "weights")
    found, _ = read_weights(tmp_path / "weights")
    assert torch.equal(model.transformer.wte.weight, found["model/transformer.wte.weight"].slices[0].read())
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize(
    ("step", "target", "sentence"),
    [(3, "weights", "no checkpoint of step 3"), (None, "run.toml/x", "cannot be written")],
)
def test_what_cannot_be_exported_is_said(
    step: int | None, target: str, sentence: str, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").touch()
    with pytest.raises(ConfigError, match=sentence):
        export(run, tmp_path / target, step=step)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0{..", b'\x20\0\0\0\0\0\0\0{"a":{"dtype":"F32"}}']
)
def test_a_file_that_is_no_safetensors_is_said(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is no safetensors file, or damaged"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        None, 3, -1.5, math.inf, "text", [1, [2]], (1, (2, "x")), {1: 2.0}, {"a": {"b": (1,)}}, Counter({30: 1, 80: 2}),
        b"\0bytes\xff", {"!": "mark"}, {3, 4},
    ],
    ids=str,
)  # fmt: skip
def test_plain_values_survive_json(value: object) -> None:
    found = from_json(json.loads(json.dumps(to_json(value, where="a test"), allow_nan=False)))
    assert found == value
    assert type(found) is type(value)
