"""Which modules are divided, and how: found, carried, asked for, refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import PlanError
from shoal.parallel.tensor.plan import Style, find_tensor_plan, read_tensor_plan
from tests.parallel.tensor.models import CASES, Feeds, hugging_face, small_gpt


def of_first_block(plan: dict[str, Style], prefix: str) -> dict[str, Style]:
    return {name.removeprefix(prefix): style for name, style in plan.items() if name.startswith(prefix)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_block_has_columns_rows_and_a_packed_projection(device: str) -> None:
    with torch.device(device):
        plan = find_tensor_plan(small_gpt(), tensor=2)
    assert of_first_block(plan, "blocks.0.") == {
        "query_key_value": Style("column", (32, 32, 32)),
        "attention_out": Style("row"),
        "feed_up": Style("column"),
        "feed_down": Style("row"),
    }
    assert of_first_block(plan, "blocks.1.") == of_first_block(plan, "blocks.0.")
    assert {name: style.kind for name, style in plan.items() if "." not in name} == {"token": "vocab", "out": "head"}


def test_a_plan_that_a_model_carries_is_used() -> None:
    with torch.device("meta"):
        plan = find_tensor_plan(CASES["llama"].build(), tensor=2)
    block = of_first_block(plan, "model.layers.1.")
    assert [name for name, style in block.items() if style == Style("row")] == ["self_attn.o_proj", "mlp.down_proj"]
    columns = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
    assert {name for name, style in block.items() if style == Style("column")} == columns


def test_what_a_carried_plan_says_and_we_cannot_do_stays_whole() -> None:
    with torch.device("meta"):
        plan = find_tensor_plan(CASES["mixtral"].build(), tensor=2)
    assert plan["model.layers.0.mlp"] == Style("opaque")
    assert plan["model.layers.0.self_attn.q_proj"] == Style("column")


@pytest.mark.parametrize("how", ["split", "slices", "heads"])
def test_unequal_sections_of_a_packed_projection_are_seen(how: str) -> None:
    plan = find_tensor_plan(CASES[f"grouped {how}"].build(), tensor=2)
    assert plan["blocks.1.packed"] == Style("column", (32, 16, 16))


def test_a_projection_that_is_packed_head_by_head_is_one_range() -> None:
    with torch.device("meta"):
        plan = find_tensor_plan(CASES["neox"].build(), tensor=2)
    assert plan["gpt_neox.layers.0.attention.query_key_value"] == Style("column")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        ctx.save_for_backward(left, right)
        return left * right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        left, right = ctx.saved_tensors
        return torch.cat([gradients[0] * right, gradients[0] * left], -1)


class Gated(nn.Module):
    def __init__(self, own_function: bool) -> None:
        super().__init__()
        self.up, self.down, self.own_function = nn.Linear(8, 32), nn.Linear(16, 8), own_function

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        apply: Any = Doubled.apply
        hidden = apply(up) if self.own_function else F.silu(up.chunk(2, -1)[0]) * up.chunk(2, -1)[1]
        return x + self.down(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("own_function", "sections"), [(False, (16, 16)), (True, ())])
def test_what_an_autograd_function_takes_apart_is_not_packed(own_function: bool, sections: tuple[int, ...]) -> None:
    model = nn.Sequential(Gated(own_function), Gated(own_function))
    assert find_tensor_plan(model, tensor=2)["0.up"] == Style("column", sections)


def test_a_sample_shows_blocks_that_cannot_be_run_alone() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            left, right = self.packed(x).chunk(2, -1)
            return self.out(left * right * scale)  # type: ignore[no-any-return]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Two() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, x.mean())
            return x

    plan = find_tensor_plan(Scaled(), tensor=2, sample=lambda model: model(torch.zeros(1, 2, 8)))
    assert plan["blocks.0.packed"] == Style("column", (8, 8))


def test_a_model_without_repeated_blocks_is_divided_in_pairs() -> None:
    plan = find_tensor_plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), tensor=2)
    assert plan == {"0": Style("column"), "2": Style("row")}


def test_the_vocabulary_is_divided_only_where_its_rows_divide_and_a_head_is_there() -> None:
    config = {"n_layer": 2, "n_head": 4, "n_embd": 16, "n_positions": 8, "bos_token_id": 1, "eos_token_id": 2}
    odd = hugging_face("GPT2LMHeadModel", "GPT2Config", vocab_size=51, **config)
    no_head = hugging_face("GPT2Model", "GPT2Config", vocab_size=64, **config)
    with torch.device("meta"):
        plans = [find_tensor_plan(build(), tensor=2) for build in (odd, no_head)]
    assert all(style.kind in ("column", "row") for plan in plans for style in plan.values())


@pytest.mark.parametrize(
    ("case", "tensor", "message"),
    [
        ("gpt", 3, r"tensor=3 does not divide heads=4 of blocks\.0\. Use tensor=1, 2 or 4\."),
        ("llama", 4, r"does not divide num_key_value_heads=2 of model\.layers\.0\.self_attn\. Use tensor=1 or 2\."),
        ("feeds", 3, r"tensor=3 does not divide out_features=128 of blocks\.0\.up\. Use tensor=1, 2, 4 or 8\."),
        ("bert", 8, r"num_attention_heads=4 of bert\.encoder\.layer\.0\.attention\.self\. Use tensor=1, 2 or 4\."),
    ],
)
def test_a_degree_that_does_not_divide_is_refused_with_those_that_do(case: str, tensor: int, message: str) -> None:
    with torch.device("meta"), pytest.raises(PlanError, match=message):
        find_tensor_plan(CASES[case].build(), tensor=tensor)


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


def test_a_model_with_nothing_to_divide_is_told_which_block_stands_in_the_way() -> None:
    with pytest.raises(PlanError, match=r"0 \(Single, test_plan\.py line \d+\) has a single linear layer\. Say"):
        find_tensor_plan(nn.Sequential(Single(), Single()), tensor=2)


def test_what_is_asked_for_goes_before_what_is_found() -> None:
    plan = find_tensor_plan(
        small_gpt(), tensor=2, asked={"blocks.*.query_key_value": "column:6", "blocks.1.feed_*": "opaque"}
    )
    assert plan["blocks.0.query_key_value"] == Style("column", (16,) * 6)
    assert plan["blocks.1.feed_up"] == Style("opaque")
    assert plan["blocks.0.feed_up"] == Style("column")


def test_a_plan_is_read_by_patterns() -> None:
    asked = {"blocks.*.up": "column", "blocks.*.down": "row", "blocks.2": "opaque", "blocks.0.up": "column:96,16,16"}
    plan = read_tensor_plan(asked, Feeds())
    assert plan["blocks.0.up"] == Style("column", (96, 16, 16))
    assert plan["blocks.1.up"] == Style("column")
    assert plan["blocks.1.down"] == Style("row")
    assert plan["blocks.2"] == Style("opaque")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"blocks.*.ap": "column"},
            r"no module of the model is named 'blocks\.\*\.ap'\. Did you mean 'blocks\.\*\.up'",
        ),
        ({"blocks.*.up": "colum"}, r"'colum' of blocks\.0\.up is no style\. Did you mean 'column'"),
        ({"blocks.*.norm": "row"}, r"'row' divides an nn\.Linear, and blocks\.0\.norm is a LayerNorm\."),
        ({"blocks.*.up": "vocab"}, r"'vocab' divides an nn\.Embedding, and blocks\.0\.up is a Linear\."),
        ({"blocks.*.up": "column:3"}, r"does not say how 128 features are packed\. Write \"column:3\""),
        ({"blocks.*.up": "column:x"}, r"does not say how 128 features are packed"),
        ({"blocks.*.up": "column:100,20"}, r"does not say how 128 features are packed"),
    ],
)
def test_a_plan_that_cannot_be_read_says_what_to_write(asked: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_tensor_plan(asked, Feeds())
