"""Builders of every kind: deferred, they leave the numbers and the random states that a plain build leaves."""

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

from shoal.core.errors import JobError
from shoal.parallel.building.deferred import HELD_BYTES, build_deferred
from tests.parallel.building.plain_build import SEED, assert_same_as_plain, built_plainly
from tests.support.jobs import GPT

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "vocab_size": 500,
}
GPT2 = transformers.GPT2Config(n_layer=2, n_embd=192, n_head=4, vocab_size=500, bos_token_id=1, eos_token_id=1)


def vision_net() -> nn.Module:
    convolutions = nn.Conv2d(16, 128, 3), nn.ConvTranspose2d(128, 64, 3), nn.Conv2d(64, 64, 3, groups=2)
    net: Any = nn.Sequential(*convolutions, nn.BatchNorm2d(64))
    channels_last: nn.Module = net.to(memory_format=torch.channels_last)
    return channels_last


def in_bfloat16() -> nn.Module:
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Sequential(nn.Linear(200, 200), nn.Embedding(400, 200, padding_idx=2), nn.Linear(200, 9).half())
    finally:
        torch.set_default_dtype(default_dtype)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(300, 300, device="cpu", dtype=torch.float64),
    "transformer": lambda: nn.Transformer(128, 4, 2, 2, 256, batch_first=True),
    "vision net": vision_net,
    "lstm": lambda: nn.LSTM(128, 128, 2, bidirectional=True),
    "bfloat16 by default": in_bfloat16,
    "converted": lambda: nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300)).to(torch.bfloat16),
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv1d(160, 160, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(200, 200)),
    "examples/gpt.py": lambda: GPT(layers=2, width=192),
    "gpt2": lambda: transformers.GPT2LMHeadModel(GPT2),  # type: ignore[no-untyped-call]
    "llama": lambda: transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        transformers.LlamaConfig(**SIZES)
    ),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES)),
    "bert": lambda: transformers.BertForMaskedLM(  # type: ignore[no-untyped-call]
        transformers.BertConfig(**SIZES)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(num_layers=2, d_model=192, d_ff=384, vocab_size=500)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_numbers_of_a_plain_build(name: str) -> None:
    assert not assert_same_as_plain(MODELS[name]).is_whole


class Views(nn.Module):
    """Writes through slices, views, indices and .data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(200, 150)), nn.Parameter(torch.zeros(150, 200))
        self.c, self.d = nn.Parameter(torch.randn(200, 200)), nn.Parameter(torch.empty(300, 150))
        with torch.no_grad():
            self.a[:100].normal_()
            self.a[100:, ::2].uniform_(-1, 1)
            self.a[100:, 1::2].copy_(self.a[:100, 1::2] * 2)
            self.c.t()[5:9].bernoulli_(0.3)
            self.c[torch.tensor([1, 5]), torch.tensor([2, 3])] = torch.tensor([9.0, 8.0])
            self.c.index_put_((torch.arange(10),), torch.randn(10, 200), accumulate=True)
            self.c[self.c > 2] = 0.5
            self.c.diagonal().fill_(3)
        nn.init.orthogonal_(self.b)
        self.a.data.mul_(0.5)
        self.b.data = self.b.data.t().contiguous().t()
        nn.init.trunc_normal_(self.d, std=0.8)
        self.d.data = self.d.data[:200]
        turned = torch.rand(200, 200)
        turned.to("cpu").mul_(2)  # on the CPU already: the same tensor
        turned.unsqueeze_(0).squeeze_(0).t_()
        self.e = nn.Parameter(turned.masked_fill_(turned > 1, 0))


class Draws(nn.Module):
    """Draws in every way: from other tensors, from a generator of its own, by Python and by NumPy."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(5)
        torch.rand(7, generator=own)
        self.a = nn.Parameter(torch.bernoulli(torch.rand(200, 200)))
        self.b = nn.Parameter(torch.normal(self.a.detach(), self.a.detach() + 1))
        self.c = nn.Parameter(torch.empty(200, 200).normal_(generator=own) + torch.randn(200, 200, generator=own))
        self.d = nn.Parameter(torch.randperm(50_000).float())
        self.e = nn.Parameter(nn.functional.dropout(torch.rand(200, 200), 0.3))
        self.f = nn.Parameter(torch.from_numpy(np.random.randn(200, 200)).float() * random.random())
        self.g = nn.Parameter(torch.rand_like(self.e).half())
        self.h = nn.ParameterList([nn.Parameter(torch.rand(200, 200)) for _ in range(2)])


class Computed(nn.Module):
    """Buffers that are computed, weights that are tied, copied and looked at, tensors that are neither."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(1000).float(), 1 / (10000 ** (torch.arange(0, 64, 2) / 64)))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(300, 300)).bool().view(1, 1, 300, 300))
        self.register_buffer("positions", torch.arange(70_000).expand(2, -1))
        self.rates = torch.linspace(0, 1, 12).tolist()
        self.first, self.tied = nn.Linear(200, 200), nn.Linear(200, 200)
        self.tied.weight = self.first.weight
        self.first.weight.data.mul_(1 / self.first.weight.data.norm().item())
        if (self.first.weight > 0).any():
            self.first.bias.data.copy_(self.first.weight.data.mean(0))
        self.first.weight.data[0] = torch.tensor(self.first.weight.data[1].tolist())
        self.copied = copy.deepcopy(self.first)
        self.copied.weight.data.add_(torch.from_numpy(self.first.weight.detach().numpy() * 2))
        self.copied.weight.note = "kept"  # type: ignore[attr-defined]
        self.table = torch.randn(200, 200)
        self.both = (self.first.weight, [self.table])
        self.count = int(torch.randn(300, 300).relu().nonzero().sum())


@pytest.mark.parametrize("build", [Views, Draws])
def test_an_unusual_initialisation_has_the_numbers_of_a_plain_build(build: Callable[[], nn.Module]) -> None:
    assert not assert_same_as_plain(build).is_whole


def test_what_is_no_parameter_is_as_in_a_plain_build() -> None:
    plain = built_plainly(Computed)
    deferred = assert_same_as_plain(Computed)
    model = deferred.model
    assert not deferred.is_whole
    assert (model.rates, model.count) == (plain.rates, plain.count)
    assert torch.equal(model.table, plain.table)  # type: ignore[arg-type]
    assert model.both[0] is model.first.weight  # type: ignore[index,union-attr]
    assert model.both[1][0] is model.table  # type: ignore[index]
    assert model.copied.weight.note == "kept"  # type: ignore[union-attr]


def without_an_address() -> nn.Module:
    model = nn.Linear(200, 200)
    np.random.rand()
    random.random()
    if model.weight.data_ptr() == 0:
        raise AssertionError
    return model


def caught() -> nn.Module:
    model = nn.Linear(200, 200)
    try:
        model.weight.data_ptr()
    except Exception:
        nn.init.zeros_(model.weight)  # another way than plainly
    return model


def written_by_numpy() -> nn.Module:
    model = nn.Linear(200, 200)
    model.weight.detach().numpy()[0] = 1
    return model


def from_elsewhere() -> nn.Module:
    model = nn.Linear(200, 200)
    model.weight.data = torch.from_numpy(np.random.rand(200, 200))
    return model


def in_another_thread() -> nn.Module:
    model = nn.Linear(200, 200)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(nn.init.ones_, model.weight).exception()  # not looked at
    return model


def conjugated() -> nn.Module:
    return nn.ParameterList([torch.rand(200, 200, dtype=torch.cfloat).conj()])


@pytest.mark.parametrize(
    ("build", "why_whole"),
    [
        (without_an_address, "model() calls data_ptr on a tensor of (200, 200)"),
        (caught, "model() calls data_ptr on a tensor of (200, 200)"),
        (written_by_numpy, "ValueError: assignment destination is read-only"),
        (from_elsewhere, "model() sets the .data of a tensor to one of another size or from elsewhere"),
        (in_another_thread, "takes a tensor that model() made and whose numbers are not there"),
        (conjugated, "model() makes a tensor of (200, 200) by resizing or conjugation"),
    ],
)
def test_a_builder_that_cannot_be_followed_builds_the_whole_model_from_the_same_states(
    build: Callable[[], nn.Module], why_whole: str
) -> None:
    deferred = assert_same_as_plain(build)
    assert deferred.is_whole
    assert why_whole in deferred.why_whole


def test_a_generator_of_the_builders_own_starts_again_with_the_second_try() -> None:
    own = torch.Generator().manual_seed(5)

    def build() -> nn.Module:
        model = nn.ParameterList([torch.randn(200, 200, generator=own)])
        model[0].data_ptr()
        return model

    deferred = build_deferred(build, seed=SEED)
    assert deferred.is_whole
    assert torch.equal(deferred.real("0"), torch.randn(200, 200, generator=torch.Generator().manual_seed(5)))


def test_a_builder_that_raises_raises_its_own_error() -> None:
    def build() -> nn.Module:
        raise ZeroDivisionError(f"after {nn.Linear(200, 200)}")

    with pytest.raises(ZeroDivisionError, match="after Linear") as raised:
        build_deferred(build, seed=SEED)
    assert raised.value.__context__ is None


@pytest.mark.parametrize("build", [lambda: nn.LazyLinear(5), lambda: nn.Linear(200, 200, device="meta")])
def test_a_parameter_without_numbers_is_refused_by_its_name(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(JobError, match="'weight' has no numbers"):
        build_deferred(build, seed=SEED)


@pytest.mark.parametrize("is_assigned", [False, True])
def test_a_checkpoint_is_kept_and_a_large_one_is_said_aloud(tmp_path: Path, is_assigned: bool) -> None:
    torch.save(nn.Linear(300, 300).state_dict(), tmp_path / "small.pt")
    torch.save(nn.Linear(4100, HELD_BYTES // 4 // 4096).state_dict(), tmp_path / "large.pt")

    def build(file: str, out_features: int, in_features: int) -> nn.Module:
        model = nn.Linear(in_features, out_features)
        model.load_state_dict(torch.load(tmp_path / file), assign=is_assigned)
        return model

    assert not assert_same_as_plain(lambda: build("small.pt", 300, 300)).is_whole
    large = assert_same_as_plain(lambda: build("large.pt", HELD_BYTES // 4 // 4096, 4100))
    assert large.why_whole.startswith("67 MB of its numbers come from NumPy, a file or a list")
