"""Where models can be cut, what the pieces need, and what is refused with which sentence."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import PlanError
from shoal.parallel.pipeline.rehearsal import find_blocks
from shoal.parallel.pipeline.split import Split, split_model
from tests.parallel.pipeline.models import MODELS, call, on_meta, t5, text, tokens


def split(model: nn.Module, batch: Any, *boundaries: str) -> Split:
    return split_model(call, on_meta(model), batch, boundaries=boundaries)


class Around(nn.Module):
    """A U-Net's way: what the first layer returns is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = skipped = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x + self.changed(skipped)

    def changed(self, skipped: Tensor) -> Tensor:
        return skipped


class RoundedAround(Around):
    """The same, past autograd: what goes around is rounded, and has no gradient."""

    def changed(self, skipped: Tensor) -> Tensor:
        return (skipped.detach() > 0).float()


class ShapeAround(Around):
    """Only the shape goes around: no number does."""

    def changed(self, skipped: Tensor) -> Tensor:
        return torch.ones_like(skipped)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


class Spare(nn.Module):
    """Has a layer that never runs, and a parameter in a layer that has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.spare = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x * self.table) * self.table
        return out


def test_blocks_are_what_a_list_or_sequential_holds() -> None:
    assert find_blocks(MODELS["gpt"].build()) == [f"blocks.{n}" for n in range(4)]
    assert find_blocks(MODELS["llama"].build()) == [f"model.layers.{n}" for n in range(4)]
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3))) == ["0", "2"]
    assert find_blocks(MODELS["resnet"].build()) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "2.2", "4"]


def test_a_piece_needs_its_layers_and_the_parameters_that_are_read_around_them() -> None:
    found = split(MODELS["gpt"].build(), tokens(2), "blocks.2")
    assert {"token.weight", "position.weight"} <= set(found.parameters[0])
    assert all(name.startswith(("blocks.2.", "blocks.3.", "norm.", "out.")) for name in found.parameters[1])
    assert (found.tied, found.unused) == ((), ())


def test_a_tied_weight_is_needed_by_both_ends_under_its_first_name() -> None:
    found = split(MODELS["gpt2"].build(), text(2), "transformer.h.1", "transformer.h.3")
    assert found.tied == ("transformer.wte.weight",)
    assert ["transformer.wte.weight" in names for names in found.parameters] == [True, False, True]


def test_what_fails_inside_a_library_is_blamed_on_the_line_of_the_library() -> None:
    model, boundaries = MODELS["gpt2"].build(), ["transformer.h.1"]
    with pytest.raises(PlanError, match=r"cannot be traced: \S*site-packages/transformers/\S+:\d+ raises"):
        split_model(operator.call, on_meta(model), torch.ones(2, 4), boundaries=boundaries)  # tokens are integers


def test_a_parameter_on_the_model_that_two_pieces_read_is_tied_and_unused_ones_are_named() -> None:
    found = split(Spare(), torch.ones(2, 4), "blocks.1")
    assert found.tied == ("table",)
    assert found.unused == ("spare.weight", "spare.bias")
    assert found.parameters == (
        ("table", "blocks.0.weight", "blocks.0.bias"),
        ("table", "blocks.1.weight", "blocks.1.bias"),
    )


def test_frozen_parameters_are_split_like_others() -> None:
    model = MODELS["gpt"].build()
    expected = split(model, tokens(2), "blocks.2")
    assert split(model.requires_grad_(False), tokens(2), "blocks.2") == expected


@pytest.mark.parametrize("model", [Around(), RoundedAround()], ids=lambda m: type(m).__name__)
def test_what_goes_around_the_boundary_is_refused_by_name_and_line(model: nn.Module) -> None:
    name = type(model).__name__
    with pytest.raises(PlanError, match=rf"cut at 'blocks.1': {name} \(.*test_split.py:\d+\) uses what 'stem' returns"):
        split(model, torch.ones(2, 4), "blocks.1")


def test_a_shape_may_go_around_the_boundary() -> None:
    assert len(split(ShapeAround(), torch.ones(2, 4), "blocks.1").parameters) == 2


def test_an_encoder_and_decoder_is_refused() -> None:
    model = t5("ForConditionalGeneration")
    with pytest.raises(PlanError, match=r"T5\w* \(.*\) uses what 'encoder.* returns again behind this block"):
        split(model, text(2), "decoder.block.0")


def test_a_block_that_runs_twice_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cut at 'blocks.1': it runs more than once"):
        split(Twice(), torch.ones(2, 4), "blocks.1")


def test_boundaries_out_of_order_are_refused() -> None:
    with pytest.raises(PlanError, match=r"out of the order blocks.2, blocks.1"):
        split(MODELS["gpt"].build(), tokens(2), "blocks.2", "blocks.1")


def test_an_unknown_boundary_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(PlanError, match=r"no block 'block.1' to cut at. Did you mean 'blocks.1'"):
        split(MODELS["gpt"].build(), tokens(2), "block.1")


def test_a_boundary_that_does_not_run_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cut at 'spare': it does not run.*These run, in order: blocks.0, blocks.1\."):
        split(Spare(), torch.ones(2, 4), "spare")


def test_a_boundary_with_nothing_before_it_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cut at '0': no parameter is used before it"):
        split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4), "0")


class Indices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Embedding(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[1](self.blocks[0](x).argmax(-1))
        return out


def test_a_crossing_without_gradient_is_refused() -> None:
    with pytest.raises(PlanError, match=r"a tensor of torch.int64 that layers before it make without gradient"):
        split(Indices(), torch.ones(2, 4), "blocks.1")


def test_splitting_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    model = MODELS["bert"].build()
    batch = MODELS["bert"].batch(2)
    before, state = dict(model.named_modules()), torch.get_rng_state()
    split_model(call, model, batch, boundaries=["bert.encoder.layer.1"])
    assert dict(model.named_modules()) == before
    assert all(not hasattr(p, "fake_mode") for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
