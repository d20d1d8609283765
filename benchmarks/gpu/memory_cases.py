"""The cases of the memory benchmark: models of the field, precisions, recompute, and sharding over a fake world."""

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.planner.catalog import read_device
from shoal.planner.memory.peak import Peak, needed_bytes, peak
from shoal.profile.config import job_from_config
from shoal.profile.trace import trace
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan

GPT2: dict[str, Any] = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
VIT: dict[str, Any] = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_labels": 1000}
RESNET: dict[str, Any] = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "num_labels": 1000}

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-medium": {**GPT2, "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-xl": {**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "llama-1b": {**LLAMA, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                 "num_attention_heads": 32, "num_key_value_heads": 4},
    "llama-3b": {**LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                 "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256},
    "llama-7b": {**LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                 "num_attention_heads": 32},
    "vit-b": {**VIT},
    "vit-l": {**VIT, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
              "intermediate_size": 4096},
    "resnet-50": {**RESNET},
    "resnet-101": {**RESNET, "depths": [3, 4, 23, 3]},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model, one way to train it."""

    model: str
    micro_batch: int
    precision: str = "fp32"
    """fp32; autocast: float32 parameters, products in bfloat16; bf16: all of it in bfloat16."""
    recompute: str = "none"
    shard: int = 1
    zero: int = 0
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        """What the tables call it."""
        words = [self.model, f"x{self.micro_batch}", self.precision, self.optimizer]
        words += ["recompute"] if self.recompute != "none" else []
        words += [f"zero-{self.zero} over {self.shard}"] if self.shard > 1 else []
        return " ".join(words)


CASES = (
    Case("gpt2", 8),
    Case("gpt2", 16, "autocast"),
    Case("gpt2", 16, "bf16"),
    Case("gpt2", 32, "autocast", "full"),
    Case("gpt2", 96, "autocast"),
    Case("gpt2-medium", 8, "autocast", optimizer="fused"),
    Case("gpt2-medium", 8, "fp32", "full"),
    Case("gpt2-xl", 4, "autocast"),
    Case("gpt2-xl", 4, "bf16", "full"),
    Case("llama-1b", 4, "autocast"),
    Case("llama-1b", 4, "bf16"),
    Case("llama-1b", 8, "autocast", "full"),
    Case("llama-1b", 4, "fp32", optimizer="sgd"),
    Case("llama-3b", 2, "bf16"),
    Case("llama-3b", 2, "autocast", "full"),
    Case("llama-7b", 2, "bf16"),
    Case("llama-7b", 4, "bf16", "full"),
    Case("llama-7b", 7, "bf16"),
    Case("llama-7b", 1, "bf16", "full", optimizer="adafactor"),
    Case("vit-b", 64),
    Case("vit-b", 128, "autocast"),
    Case("vit-l", 64, "autocast", "full"),
    Case("vit-l", 64, "bf16"),
    Case("resnet-50", 128, optimizer="momentum"),
    Case("resnet-50", 256, "autocast", optimizer="momentum"),
    Case("resnet-101", 128, "autocast", optimizer="momentum"),
    Case("resnet-50", 128, "bf16", optimizer="momentum"),
    Case("gpt2", 16, "autocast", shard=8, zero=3),
    Case("gpt2-xl", 4, "fp32", "full", shard=8, zero=3),
    Case("llama-1b", 4, "bf16", shard=8, zero=2),
    Case("llama-7b", 2, "bf16", "full", shard=8, zero=3),
    Case("llama-7b", 1, "bf16", shard=64, zero=3),
    Case("llama-7b", 2, "fp32", "full", shard=8, zero=3),
    Case("llama-7b", 2, "fp32", "full", shard=64, zero=3),
    Case("llama-7b", 2, "autocast", "full", shard=64, zero=3),
    Case("vit-l", 64, "autocast", shard=64, zero=3),
)

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-4),
}


def make_job(case: Case) -> Job:
    """Return the job of `case`."""
    fields = {**MODELS[case.model], "dtype": "bfloat16" if case.precision == "bf16" else "float32"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(fields))
        job = job_from_config(path, batch_size=case.micro_batch * case.shard)
    if case.precision == "bf16":  # pictures, where there are some, in the model's precision
        job = dataclasses.replace(job, inputs=lambda batch: {k: _halved(value) for k, value in batch.items()})
    return dataclasses.replace(job, optimizer=OPTIMIZERS[case.optimizer])


def predict(case: Case, device: str = "h200") -> tuple[Peak, int]:
    """Return the predicted peak of `case`, and what a device must have for it."""
    precision = "bf16" if case.precision == "autocast" else "fp32"
    plan = Plan(
        mesh=Mesh(shard=case.shard),
        batch=Batch(micro_batch=case.micro_batch),
        precision=precision,
        zero=case.zero,
        recompute=case.recompute,
    )
    profile = trace(make_job(case), micro_batch=case.micro_batch, precision=precision, gpu=True)
    found = read_device(device)
    worst = peak(profile, plan, samples=case.micro_batch, device=found)
    return worst, needed_bytes(worst, found)


def _halved(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16() if value.is_floating_point() else value
