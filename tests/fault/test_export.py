"""Weights that leave: trained under plans that divide the model, read where shoal cannot be imported."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.cli.main import main
from shoal.comm.rank import ALONE
from shoal.core.errors import CheckpointError, ConfigError
from shoal.fault.checkpoint.manifest import committed, folder_of, remove
from shoal.fault.checkpoint.weights import export
from shoal.spec.plan import Batch, Checkpoints, Mesh, Plan
from tests.support.parallel import record
from tests.support.ranks import RankPool
from tests.support.training import bare_folder, build, train_part

STEPS = 3
SAVED = Checkpoints(every_steps=STEPS)
CASES = {
    # GPT-2's head is its embedding: a tied weight. Llama's are two, and it has buffers that are no part of its weights.
    "gpt2 zero=3": ("gpt2", {"dropout": 0.0}, Plan(mesh=Mesh(shard=2), zero=3, checkpoint=SAVED)),
    "gpt2 pipeline=2": (
        "gpt2", {"dropout": 0.0}, Plan(mesh=Mesh(pipeline=2), batch=Batch(micro_batch=4), checkpoint=SAVED),
    ),
    "llama tensor=2": ("llama", {}, Plan(mesh=Mesh(tensor=2), checkpoint=SAVED)),
}  # fmt: skip

OTHERS = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "shoal":
            raise ImportError("there is no shoal here")

sys.meta_path.insert(0, Blocker())
try:
    import shoal
except ImportError:
    pass
else:
    raise AssertionError("the blocker does not block")
import safetensors.torch, torch, transformers

def logits(model, x):
    with torch.no_grad():
        return model.eval()(x).logits.float().flatten().tolist()

answer = {}
for case, folder in json.loads(sys.argv[1]).items():
    x = torch.tensor([[1, 5, 3, 2, 7, 0, 4, 6]])
    found = answer[case] = {}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder + "/hf", output_loading_info=True)
    found["left over"] = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
    found["class"], found["hf"] = type(model).__name__, logits(model, x)
    half = transformers.AutoModelForCausalLM.from_pretrained(folder + "/bf16")
    found["dtype"], found["bf16"] = str(half.dtype), logits(half, x)

    plain = type(model)(model.config)
    left = safetensors.torch.load_model(plain, folder + "/safetensors/model.safetensors")
    found["safetensors"] = logits(plain, x)
    plain = type(model)(model.config)
    plain.load_state_dict(torch.load(folder + "/torch/model.pt", weights_only=True))
    found["torch"] = logits(plain, x)
assert "shoal" not in sys.modules
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def read_by_others(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each case trained, exported in each format, and what plain libraries compute with it."""
    folders = {}
    for case, (job, arguments, plan) in CASES.items():
        folder = folders[case] = tmp_path_factory.mktemp("export")
        settings: Any = {"steps": STEPS, "layers": 2, **arguments}
        run = record(ranks, f"benchmarks.parallel_cases:{job}", plan, folder=folder, **settings).path
        for to in ("hf", "safetensors", "torch"):
            assert export(run, folder / to, to=to) == STEPS
        export(run, folder / "bf16", to="hf", dtype="bf16", part_bytes=30_000)
        assert len(list((folder / "bf16").glob("model-*.safetensors"))) > 1
    command = [sys.executable, "-W", "ignore", "-c", OTHERS, json.dumps({case: str(f) for case, f in folders.items()})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("case", CASES)
def test_a_divided_model_that_was_exported_computes_in_plain_libraries_what_one_process_has_trained(
    case: str, read_by_others: dict[str, Any], tmp_path: Path
) -> None:
    job, arguments, _ = CASES[case]
    settings: Any = {"steps": STEPS, "layers": 2, **arguments}
    builder = f"benchmarks.parallel_cases:{job}"
    trace = train_part(ALONE, builder=builder, arguments=settings, plan=Plan(), folder=bare_folder(tmp_path, Plan()))
    model: Any = build(builder, **settings).model()
    with torch.no_grad():
        for parameter, numbers in zip(model.parameters(), trace.parameters, strict=True):
            parameter.copy_(numbers)
        expected = model.eval()(torch.tensor([[1, 5, 3, 2, 7, 0, 4, 6]])).logits.flatten()
    found = read_by_others[case]
    for to in ("hf", "safetensors", "torch"):
        # As far as sums in another order take three steps of an optimizer apart.
        torch.testing.assert_close(torch.tensor(found[to]), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.tensor(found["bf16"]), expected, rtol=0.1, atol=0.05)  # 8 bits
    assert found["class"] == type(model).__name__
    assert found["left over"] == []
    assert found["dtype"] == "torch.bfloat16"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = bare_folder(tmp_path / "runs", Plan(checkpoint=Checkpoints(every_steps=2)))
    train_part(ALONE, builder="tests.support.jobs:linear", arguments={"steps": 2}, plan=Plan(), folder=folder)
    (folder / "run.toml").touch()
    return folder


def test_what_cannot_be_exported_is_said_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for asked, sentence in (
        ({"to": "hf"}, "has no config, as those of transformers do"),
        ({"to": "gguf"}, "there is no format 'gguf'"),
        ({"dtype": "int4"}, "there is no dtype 'int4'"),
        ({"to": "torch", "tokenizer": tmp_path}, "not into 'torch'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            export(run, tmp_path / "weights", **asked)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "runs"}


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_a_write_that_fails_leaves_nothing_half_written(to: str, run: Path, tmp_path: Path) -> None:
    # The kernel refuses to let a file grow beyond this, as a full disk would.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        with pytest.raises(ConfigError, match="the weights cannot be written to"):
            export(run, tmp_path / "weights", to=to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_a_disk_without_room_is_said_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(ConfigError, match="the weights take 228 B, and there are 100 B left"):
        export(run, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_a_checkpoint_that_its_run_removes_meanwhile_is_named_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (last,) = committed(run / "checkpoints")

    def remove_and_tell(_: Path) -> SimpleNamespace:  # the last look before tensors are read
        remove(last)
        return SimpleNamespace(free=10**9)

    monkeypatch.setattr("shutil.disk_usage", remove_and_tell)
    with pytest.raises(CheckpointError, match=rf"{last}.* cannot be read: No such file.* removed meanwhile"):
        export(run, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_where_the_last_checkpoint_cannot_be_opened_the_one_before_is_exported(run: Path, tmp_path: Path) -> None:
    (first,) = committed(run / "checkpoints")
    last = shutil.copytree(first, folder_of(run / "checkpoints", 4))
    (last / "COMMIT").unlink()
    (last / "COMMIT").symlink_to("COMMIT")  # the file system refuses to read it, to root as well
    assert export(run, tmp_path / "weights") == 2
    with pytest.raises(CheckpointError, match=r"step-00000004 cannot be read: Too many levels"):
        export(run, tmp_path / "weights", step=4)


def test_a_second_export_takes_the_place_of_the_first(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights"
    export(run, target, part_bytes=60)
    (target / "README.md").touch()
    assert main(["export", str(run), str(target), "--to", "torch", "--dtype", "fp16"]) == 0
    assert {path.name for path in target.iterdir()} == {"README.md", "model.pt"}
    state = torch.load(target / "model.pt", weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}


def test_a_tokenizer_goes_beside_its_model(tmp_path: Path) -> None:
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = bare_folder(tmp_path, Plan(checkpoint=Checkpoints(every_steps=1)))
    arguments: dict[str, object] = {"steps": 1, "layers": 1}
    train_part(ALONE, builder="benchmarks.parallel_cases:gpt2", arguments=arguments, plan=Plan(), folder=folder)
    with pytest.raises(ConfigError, match="is no tokenizer"):
        export(folder, tmp_path / "hf", tokenizer=tmp_path)
    Tokenizer(WordLevel({"tide": 0, "shoal": 1, "?": 2}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    export(folder, tmp_path / "hf", tokenizer=tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("shoal")["input_ids"] == [1]
    assert json.loads((tmp_path / "hf/config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert (tmp_path / "hf/generation_config.json").is_file()
