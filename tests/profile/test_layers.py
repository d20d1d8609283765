"""Layers in the order in which they run, runs of equal ones traced once, recompute: held against full traces."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.planner.memory.peak import peak
from shoal.profile import layers as layers_module
from shoal.profile.layers import find_layers
from shoal.profile.pairs import find_pairs
from shoal.profile.trace import trace
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.spec.profile import Profile

WIDTH, LENGTH, VOCABULARY = 64, 256, 50


class Block(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.join = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.work, x, use_reentrant=False) if self.recompute else self.work(x)

    def work(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.norm(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.join(mixed)
        return x + self.feed(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, blocks: int, *, by_index: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(blocks))
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.depth = blocks if by_index else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index in range(self.depth or len(self.blocks)):
            x = self.blocks[index](x)
        return self.out(x)  # type: ignore[no-any-return]


def make_job(model: Any) -> Job:
    return Job(
        model=model,
        loss=lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch.flatten()),
        inputs=lambda batch: batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=[torch.arange(LENGTH) % VOCABULARY for _ in range(4)],
        batch_size=4,
        steps=1,
    )


def traced(blocks: int, *, gpu: bool = True, precision: str = "fp32", **options: Any) -> Profile:
    return trace(make_job(lambda: Model(blocks, **options)), micro_batch=4, precision=precision, gpu=gpu)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_that_repeat_are_traced_once_and_come_out_as_if_all_had_been(
    gpu: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = traced(9, gpu=gpu, precision=precision)
    monkeypatch.setattr(layers_module, "KEPT", 100)
    whole = traced(9, gpu=gpu, precision=precision)
    assert short == whole
    last = [("blocks.8", 1, True)] if precision == "bf16" else []  # its output is cast, and not kept
    assert [(layer.name, layer.repeats, layer.block) for layer in short.layers] == [
        ("embed", 1, False),
        ("blocks.0", 9 - len(last), True),
        *last,
        ("out", 1, False),
        ("loss", 1, False),
    ]


def test_only_a_few_of_many_layers_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    work = Block.work

    def counted(self: Block, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return work(self, x)

    monkeypatch.setattr(Block, "work", counted)
    profile = traced(80)
    assert len(calls) == 2 * layers_module.KEPT  # at two sizes of the micro-batch
    assert profile.num_layers == 83
    assert profile.parameters == sum(p.numel() for p in Model(80).parameters())


def test_a_model_that_counts_its_layers_is_traced_whole() -> None:
    assert traced(9, by_index=True) == traced(9)


class Growing(nn.Module):
    """The layers are built alike, and each works on twice as much as the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(torch.cat([x, x]))
        return self.out(x[: len(x) // 64])  # type: ignore[no-any-return]


def test_layers_that_are_built_alike_and_do_not_cost_the_same_are_all_traced() -> None:
    profile = trace(make_job(Growing), micro_batch=4, precision="fp32")
    linears = [layer for layer in profile.layers if layer.kind == "Linear" and layer.block]
    # Each block's doubling of its input runs before it, and so belongs to the layer before.
    assert [layer.forward.flops // linears[0].forward.flops for layer in linears] == [1, 2, 4, 8, 16, 32]


def test_the_parts_of_a_layer_add_up_to_the_model() -> None:
    profile = traced(3)
    model = Model(3)
    assert profile.parameter_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert profile.gradient_bytes == profile.parameter_bytes
    assert profile.optimizer_bytes == pytest.approx(2 * profile.parameter_bytes, rel=1e-3)
    block = profile.layers[1]
    weights = 12 * WIDTH * WIDTH
    products = 2 * 4 * LENGTH * weights
    scores = 2 * 4 * LENGTH * LENGTH * WIDTH
    assert block.forward.flops == products + 2 * scores
    assert block.backward.flops == 2 * products + 5 * scores
    assert sum(product.flops * product.count for product in block.forward.products) == products
    assert block.output_bytes == 4 * 4 * LENGTH * WIDTH
    assert (block.pairs, block.heads) == (2, 4)
    assert block.split_parameters == weights + 9 * WIDTH


def test_what_grows_with_the_micro_batch_is_told_from_what_does_not() -> None:
    small, large = (trace(make_job(lambda: Model(2)), micro_batch=n, precision="bf16", gpu=True) for n in (4, 8))
    for a, b in zip(small.layers, large.layers, strict=True):
        scaled = a.saved_fixed_bytes + 2 * (a.saved_bytes - a.saved_fixed_bytes)
        assert scaled == b.saved_bytes
    block = small.layers[1]
    # The weights of its products in bfloat16; a bias is cast and not kept.
    assert block.saved_fixed_bytes == pytest.approx(2 * 12 * WIDTH * WIDTH, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recompute_is_predicted_as_a_model_that_recomputes_is_traced(precision: str) -> None:
    plain, again = (traced(12, precision=precision, recompute=recompute) for recompute in (False, True))
    plan = Plan(precision=precision)
    kept = peak(plain, plan, samples=4).peak_bytes
    predicted = peak(plain, dataclasses.replace(plan, recompute="full"), samples=4).peak_bytes
    real = peak(again, plan, samples=4).peak_bytes
    # A forward that keeps nothing is predicted with the peak of one that does: 4% too much where autocast's cache
    # makes the forward the worst moment.
    assert predicted == pytest.approx(real, rel=0.05)
    assert predicted < 0.9 * kept
    selective = peak(plain, dataclasses.replace(plan, recompute="selective"), samples=4).peak_bytes
    assert predicted < selective < kept


def test_a_batch_norm_that_does_not_train_takes_no_statistics() -> None:
    def model(frozen: bool) -> nn.Module:
        norm = nn.BatchNorm1d(LENGTH).train(not frozen)
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), norm, nn.Linear(WIDTH, VOCABULARY))

    for frozen, names in ((False, ("1",)), (True, ())):
        profile = trace(make_job(lambda frozen=frozen: model(frozen)), micro_batch=4, precision="fp32")
        assert profile.batch_norms == names


def test_layers_are_found_in_containers_and_runs_are_not_opened() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU()),
        nn.ModuleDict({"stage": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))}),
        nn.Linear(4, 2),
    )
    found, runs = find_layers(model)
    assert list(found) == ["0.0", "0.1", "1.stage.0", "1.stage.1", "1.stage.2", "2"]
    assert [(run.name, run.start, run.stop) for run in runs] == [("1.stage", 0, 2)]


def test_a_pair_begins_with_the_columns_and_ends_with_the_rows() -> None:
    block = Block()
    pairs = find_pairs(block)
    assert {(id(pair.start), id(pair.joins)) for pair in pairs} == {
        (id(block.query_key_value), id(block.join)),
        (id(block.feed), id(block.feed[3])),
    }
    encoder = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH)
    assert len(find_pairs(encoder)) == 2
    assert find_pairs(nn.Linear(4, 4)) == []
