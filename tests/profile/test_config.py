"""Hugging Face configs: traced without running, and held against what was measured on an H200."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.errors import ConfigError
from shoal.profile.config import job_from_config
from shoal.profile.trace import trace
from shoal.spec.call import call_model
from shoal.spec.profile import Profile

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "gpu"

TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 6, "n_head": 4, "vocab_size": 99},
    "llama": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "tie_word_embeddings": True,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "vocab_size": 99,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 6,
        "num_heads": 4, "vocab_size": 99, "decoder_start_token_id": 0,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 6, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    },
    "resnet": {
        "architectures": ["ResNetForImageClassification"], "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32],
        "depths": [2, 2, 6, 2], "layer_type": "basic",
    },
}  # fmt: skip


def write_config(folder: Path, kind: str, **changes: Any) -> Path:
    path = folder / f"{kind}.json"
    path.write_text(json.dumps({"model_type": kind, **TINY[kind], **changes}))
    return path


def traced(path: Path, **options: Any) -> Profile:
    job = job_from_config(path, sequence=16, batch_size=4)
    return trace(job, micro_batch=2, precision=options.pop("precision", "fp32"), gpu=options.pop("gpu", True))


@pytest.mark.parametrize("kind", sorted(TINY))
def test_a_config_is_traced_as_transformers_builds_it(kind: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, kind)
    job = job_from_config(path, sequence=16, batch_size=2)
    model = job.model()
    batch = torch.utils.data.default_collate([job.data[0], job.data[1]])
    loss = job.loss(call_model(model, job, batch), batch)
    loss.backward()
    profile = traced(path)
    real = list(model.parameters())
    assert profile.parameters == sum(p.numel() for p in real)  # tied weights once
    assert profile.gradient_bytes == sum(p.grad.numel() * 4 for p in real if p.grad is not None)
    assert max(layer.repeats for layer in profile.layers) > 2
    assert profile.flops > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sample_is_taken_for_one_sequence_and_no_mask_is_written_out(precision: str, tmp_path: Path) -> None:
    long, longer = (
        trace(job_from_config(write_config(tmp_path, "llama"), sequence=n, batch_size=2), micro_batch=1,
              precision=precision, gpu=True) for n in (256, 512)
    )  # fmt: skip
    # Twice the length, twice the memory: a mask, or scores, would be four times as large. This fails when transformers
    # moves find_packed_sequence_indices (shoal.profile.transformers_private), or fp32 falls back to written-out scores.
    layers = [max(p.layers, key=lambda layer: layer.repeats) for p in (long, longer)]
    saved = [layer.saved_bytes - layer.saved_fixed_bytes for layer in layers]
    if precision == "bf16":
        assert saved[1] == pytest.approx(2 * saved[0], rel=0.02)
    else:
        assert saved[1] > 2.5 * saved[0]  # fewer heads of keys in float32: torch has no fused kernel


def test_the_dtype_of_the_config_is_that_of_the_model(tmp_path: Path) -> None:
    full, half = (traced(write_config(tmp_path, "llama", dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert half.dtype == "bfloat16"
    assert 2 * half.parameter_bytes == pytest.approx(full.parameter_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not a config of Hugging Face"),
        ("[]", "has no 'model_type'"),
        ('{"model_type": "gpt3"}', "transformers cannot read"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers cannot read"),
    ],
)
def test_a_file_that_is_no_config_is_answered_with_one_sentence(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        job_from_config(path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        job_from_config(tmp_path / "none.json")


def test_heads_of_keys_and_values_are_known_where_attention_gets_them_repeated(tmp_path: Path) -> None:
    profile = traced(write_config(tmp_path, "llama"))
    blocks = [layer for layer in profile.layers if layer.block]
    assert {layer.key_value_heads for layer in blocks} == {2}
    assert profile.heads == 2
    assert traced(write_config(tmp_path, "gpt2")).layers[1].key_value_heads == 0


def test_batch_norms_are_found_by_name_and_layers_that_have_them_still_count_as_equal(tmp_path: Path) -> None:
    path = write_config(tmp_path, "resnet")
    names = traced(path).batch_norms
    model = job_from_config(path, sequence=16, batch_size=2).model()
    assert names
    assert all(isinstance(model.get_submodule(name), torch.nn.BatchNorm2d) for name in names)
    assert max(layer.repeats for layer in traced(path).layers) > 2
    assert traced(write_config(tmp_path, "vit")).batch_norms == ()


def benchmark_cases() -> list[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import memory_cases  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    chosen = ("gpt2 x8", "gpt2 x32", "llama-1b x4 bf16 adamw", "llama-7b x2 fp32", "resnet-50 x256", "vit-l x64 bf16")
    return [
        pytest.param(memory_cases, case, id=case.name) for case in memory_cases.CASES if case.name.startswith(chosen)
    ]


@pytest.mark.parametrize(("cases", "case"), benchmark_cases())
def test_the_peak_is_what_was_measured_on_an_h200(cases: Any, case: Any) -> None:
    measured = {row["case"]: row for row in json.loads((BENCHMARKS / "memory_h200.json").read_text())["rows"]}
    worst, needed = cases.predict(case)
    assert worst.peak_bytes == pytest.approx(measured[case.name]["peak_bytes"], rel=0.03)
    assert needed > measured[case.name]["peak_bytes"]
