"""Dropout in a model: which layer draws, what is drawn again in backward, and what of a divided tensor is drawn here.

Masks are the same to the bit, and so are losses and gradients, unless said otherwise.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.errors import JobError
from shoal.parallel.exact.dropout import ExactDropout
from shoal.profile.layers import find_layers
from tests.support.ranks import RankPool

SAMPLES = [4, 9, 1, 7]
BATCHES = {0: [4, 9], 1: [1, 7]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.drop(self.linear(x)).tanh(), 0.2, self.training)


class Model(nn.Module):
    """Three blocks, of which the middle one runs twice; `run` says how each is called."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1, self.training)
        for index in (0, 1, 1, 2):
            x = self.run(self.blocks[index], x)
        return F.dropout(x, 0.1, self.training)


def of_layers(model: nn.Module) -> ExactDropout:
    return ExactDropout(find_layers(model)[0], seed=0)


def batch(number: int) -> Tensor:
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, dropout: ExactDropout, *, backward_later: bool = False) -> list[Tensor]:
    """Return outputs and gradients of two micro-batches; with `backward_later`, both forwards come first."""
    outputs = []
    for number, samples in BATCHES.items():
        with dropout:
            dropout.begin(step=3, samples=samples)
            outputs.append(model(batch(number)))
            if not backward_later:
                outputs[-1].square().sum().backward()
    if backward_later:
        for output in outputs:
            output.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(output.detach() for output in outputs), *gradients]


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        # The same numbers; gradients of the two micro-batches may be added in another order.
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def expected() -> list[Tensor]:
    model = Model()
    return train(model, of_layers(model))


def test_layers_calls_and_draws_differ_and_the_seed_decides() -> None:
    model, x = Model(lambda block, x: x + F.dropout(torch.ones(2, 5, 6), 0.5)), torch.zeros(2, 5, 6)
    seen = []
    for seed in (0, 1, 1):
        dropout = ExactDropout({}, seed=seed)
        dropout.begin(step=0, samples=[1, 2])
        with dropout:
            seen.append(model(x))
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])
    masks: list[Tensor] = []
    model = Model()
    for block in model.blocks:
        block.drop.register_forward_hook(lambda _, __, out: masks.append(out == 0))  # type: ignore[union-attr]
    dropout = of_layers(model)
    with dropout:
        dropout.begin(step=0, samples=[1, 2])
        model(batch(0))
    assert len(masks) == 4
    assert all(not torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))


def test_a_stage_with_some_of_the_layers_draws_what_the_whole_model_draws() -> None:
    model = Model()
    seen: list[Tensor] = []
    model.blocks[2].register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
    train(model, of_layers(model))
    received, whole = seen[2:]
    stage = ExactDropout({"blocks.2": model.blocks[2]}, seed=0)
    with stage:
        stage.begin(step=3, samples=BATCHES[1])
        assert torch.equal(model.blocks[2](received), whole)


def test_a_model_that_checkpoints_its_layers_itself_draws_the_same_again() -> None:
    model = Model(lambda block, x: checkpoint(block, x, use_reentrant=False))
    assert_same(train(model, of_layers(model)), expected())


@pytest.mark.parametrize("backward_later", [False, True])
@pytest.mark.parametrize("around", ["block", "forward", "part"])
def test_recomputation_in_our_contexts_draws_the_same_whatever_has_begun_since(
    around: str, backward_later: bool
) -> None:
    def again(function: Any, x: Tensor) -> Any:
        return checkpoint(function, x, use_reentrant=False, context_fn=dropout.checkpoint_contexts)

    model = Model(again if around == "block" else lambda block, x: block(x))
    for block in model.blocks if around != "block" else []:
        inner: Any = block if around == "forward" else block.drop
        inner.forward = lambda x, forward=inner.forward: again(forward, x)
    dropout = of_layers(model)
    assert_same(train(model, dropout, backward_later=backward_later), expected())


def test_a_checkpoint_within_a_layer_that_we_do_not_know_of_is_refused() -> None:
    model = Model()
    for block in model.blocks:
        block.drop.forward = lambda x: checkpoint(lambda x: F.dropout(x, 0.3), x, use_reentrant=False)  # type: ignore[union-attr]
    with pytest.raises(JobError, match="checkpoints a part of a layer"):
        train(model, of_layers(model))


def test_the_keys_follow_the_model_to_its_device() -> None:
    model = Model(lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=dropout.checkpoint_contexts))
    dropout = of_layers(model.to("meta"))
    with dropout, torch.device("meta"):  # stands for a GPU: what lies elsewhere cannot be computed with
        for samples in BATCHES.values():
            dropout.begin(step=0, samples=samples)
            model(torch.ones(2, 5, 6)).sum().backward()


def test_nothing_is_met_in_evaluation_or_where_nothing_is_dropped() -> None:
    model = Model()
    dropout = of_layers(model)
    with dropout:
        model.eval()(batch(0))
        x = torch.ones(2, 2, 3, 4)
        F.scaled_dot_product_attention(x, x, x)
        F.dropout(batch(0), 0.0)
        nn.LSTM(6, 6, num_layers=2, batch_first=True)(batch(0))
    assert not dropout.was_used
    dropout.remove()
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in model.blocks)


def test_what_cannot_be_told_apart_by_sample_is_named() -> None:
    dropout = ExactDropout({}, seed=0)
    with dropout:
        nn.LSTM(6, 6, num_layers=2, dropout=0.1, batch_first=True)(batch(0))
        torch.randperm(4)
        torch.rand(2, generator=torch.Generator())
    assert dropout.was_used
    assert dropout.inexact == {"lstm", "randperm"}


@pytest.fixture
def compiler() -> Iterator[dict[str, Any]]:
    """Options of torch.compile, which starts afresh; in one graph where this torch can follow a mode."""
    torch._dynamo.reset()
    yield {"backend": "aot_eager", "fullgraph": torch.__version__ >= "2.13"}
    torch._dynamo.reset()


# torch.compile looks at the gradient of whatever it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("how", ["whole", "by layer"])
def test_a_compiled_model_draws_the_same(how: str, compiler: dict[str, Any]) -> None:
    model = Model()
    dropout = of_layers(model)
    for block in model.blocks if how == "by layer" else []:
        block.compile(**compiler)
    ours: Any = model if how == "by layer" else torch.compile(model, **compiler)
    assert_same(train(ours, dropout), expected())


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_model_recomputes_what_it_drew(compiler: dict[str, Any]) -> None:
    model = Model(lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=dropout.checkpoint_contexts))
    dropout = of_layers(model)
    ours: Any = torch.compile(model, **compiler | {"fullgraph": False})
    assert_same(train(ours, dropout), expected())


def test_a_hugging_face_model_draws_the_same_in_parts() -> None:
    transformers = pytest.importorskip("transformers")
    for attention in ("eager", "sdpa"):
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation=attention).train()
        dropout, tokens = of_layers(model), torch.arange(32).view(4, 8) % 16
        logits = []
        for cut in ([slice(0, 4)], [slice(0, 1), slice(1, 4)]):
            with dropout:
                for part in cut:
                    dropout.begin(step=0, samples=SAMPLES[part])
                    logits.append(model(tokens[part]).logits)
        assert dropout.was_used
        # Products over a part of the batch may be summed in another order.
        torch.testing.assert_close(torch.cat(logits[1:]), logits[0], rtol=1e-5, atol=1e-6)


DIVIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "features": lambda x: F.dropout2d(x, 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True),
    "masked attention": lambda x: F.scaled_dot_product_attention(
        x, x, x, dropout_p=0.3, attn_mask=torch.ones(4, 1, 5, 5, dtype=torch.bool).tril()
    ),
}


def run_and_back(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Any, Any]:
    x = x.detach().requires_grad_()
    output = function(x)
    output.square().sum().backward()  # type: ignore[no-untyped-call]
    return output.detach(), x.grad


def differences(case: str, x: Tensor, mesh: DeviceMesh) -> list[str]:
    """Return what comes out otherwise for a divided tensor than for a whole one."""
    wrong = []
    with ExactDropout({}, seed=0) as dropout:
        dropout.begin(step=0, samples=SAMPLES)
        whole = run_and_back(DIVIDED[case], x)
        for placement in [*map(Shard, range(4)), Replicate(), Partial()]:
            divided = distribute_tensor(x, mesh, [placement])
            dropout.begin(step=0, samples=SAMPLES)
            results = run_and_back(DIVIDED[case], divided)
            if "attention" not in case and placement != Partial() and results[0].placements != (placement,):
                wrong.append(f"{case}: {placement} became {results[0].placements}")
            for name, ours, expected in zip(("output", "gradient"), results, whole, strict=True):
                if not torch.allclose(ours.full_tensor(), expected, rtol=1e-5, atol=1e-6):  # products of parts
                    wrong.append(f"{case}: {name} of {placement}")
    return wrong


def divide(rank: Rank) -> list[str]:
    """Be one of the workers over which a tensor is divided. Runs in the pool."""
    x = torch.randn(4, 6, 5, 8, generator=torch.Generator().manual_seed(0))
    with joined(rank, connect(rank, timeout_s=60), device=torch.device("cpu"), timeout_s=60):
        mesh = init_device_mesh("cpu", (rank.workers,))
        return [found for case in DIVIDED for found in differences(case, x, mesh)]


def test_a_divided_tensor_draws_what_the_whole_one_draws(ranks: RankPool) -> None:
    assert ranks.run(divide, workers=2) == [[], []]
