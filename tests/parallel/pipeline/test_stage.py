"""The pieces of a model run one after the other in one process, held against the model itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import PlanError
from shoal.parallel.pipeline.rehearsal import find_blocks
from shoal.parallel.pipeline.split import Split, split_model
from shoal.parallel.pipeline.stage import Stage
from tests.parallel.pipeline.models import MODELS, call, images, numbers_of, on_meta, square, text, tokens

CPU = torch.device("cpu")


def cut(model: nn.Module, batch: Any, pieces: int) -> Split:
    blocks = find_blocks(model)
    cuts = [blocks[len(blocks) * k // pieces] for k in range(1, pieces)]
    return split_model(call, on_meta(model), batch, boundaries=cuts)


def pieces_of(model: nn.Module, split: Split) -> list[Stage]:
    """Return each piece in a model of its own, as on workers of their own."""
    stages = [Stage(on_meta(model), split, k, call=call, device=CPU) for k in range(len(split.parameters))]
    for stage in stages:
        stage.materialise(numbers_of(model))
    return stages


def forward(stages: list[Stage], batch: Any) -> tuple[Any, list[tuple[tuple[Tensor, ...], Any]]]:
    """Return the output of the last piece, and what each piece received and handed on."""
    passed: list[tuple[tuple[Tensor, ...], Any]] = []
    received: tuple[Tensor, ...] = ()
    for stage in stages:
        output = stage(*received, batch=batch)
        passed.append((received, output))
        if stage is not stages[-1]:
            received = tuple(tensor.detach().requires_grad_() for tensor in output)
    return output, passed


def gradients_of(stages: list[Stage], batch: Any, loss: Callable[[Any], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients, those of parameters in several pieces added up."""
    output, passed = forward(stages, batch)
    value = loss(output)
    torch.autograd.backward(value)
    for (received, _), (_, sent) in zip(passed[:0:-1], passed[-2::-1], strict=True):
        torch.autograd.backward(sent, [tensor.grad for tensor in received])
    summed: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                known = summed.get(stage.names[name], torch.zeros(()))
                summed[stage.names[name]] = known + parameter.grad
    return value, summed


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_pieces_have_the_loss_and_the_gradients_of_the_model(name: str, pieces: int) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name].build(), MODELS[name].batch(2)
    split = cut(model, batch, pieces)
    stages = pieces_of(model, split)
    loss, gradients = gradients_of(stages, batch, MODELS[name].loss)
    expected = MODELS[name].loss(call(model, batch))
    torch.autograd.backward(expected)
    # The same operations on the same numbers in the same order: only the sum over tied weights can round otherwise.
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert set(gradients) == {n for n, p in model.named_parameters() if p.grad is not None}
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[parameter_name], parameter.grad, rtol=1e-6, atol=1e-7)
    for stage in stages:
        assert set(stage.names.values()) == set(split.parameters[stage.piece])


def test_names_of_a_stage_are_those_of_the_model() -> None:
    model = MODELS["vit"].build()
    stages = pieces_of(model, cut(model, images(2), 2))
    assert [name for name, _ in stages[1].named_parameters()] == [f"own.{name}" for name in stages[1].names.values()]
    assert "own.cls" in dict(stages[0].named_parameters())
    assert "own.cls" not in dict(stages[1].named_parameters())


def test_layers_of_other_pieces_stay_without_memory() -> None:
    model = MODELS["gpt"].build()
    stages = pieces_of(model, cut(model, tokens(2), 2))
    last: Any = stages[1]._held[0]
    forward(stages, tokens(2))
    assert last.token.weight.is_meta
    assert last.blocks[0].feed_up.weight.is_meta
    assert not last.blocks[3].feed_up.weight.is_meta


def test_batch_norm_updates_its_statistics_once_a_forward_and_uses_them_in_evaluation() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["resnet"].build(), images(4)
    stages = pieces_of(model, cut(model, batch, 3))
    forward(stages, batch)
    model(batch)
    for stage in stages:
        for name, buffer in stage.own.named_buffers():
            torch.testing.assert_close(buffer, model.get_buffer(name), rtol=0, atol=0)
        stage.eval()
    model.eval()
    torch.testing.assert_close(forward(stages, batch)[0], model(batch), rtol=0, atol=0)


def test_batches_of_other_shapes_run_through_the_same_pieces() -> None:
    model = MODELS["gpt"].build()
    stages = pieces_of(model, cut(model, tokens(2), 2))
    for shape in ((3, 16), (1, 7), (2, 16)):
        batch = torch.randint(0, 64, shape)
        torch.testing.assert_close(forward(stages, batch)[0], model(batch), rtol=0, atol=0)


def test_under_autocast_the_pieces_return_what_the_model_does() -> None:
    def in_bfloat16(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    batch = torch.randn(2, 8)
    split = split_model(in_bfloat16, model, batch, boundaries=["1", "3"])
    stages = [Stage(model, split, piece, call=in_bfloat16, device=CPU) for piece in range(3)]
    assert [shape.dtype for crossing in stages[0].outline(batch).crossings for shape in crossing] == [
        torch.bfloat16
    ] * 2
    torch.testing.assert_close(forward(stages, batch)[0], in_bfloat16(model, batch), rtol=0, atol=0)


def test_two_pieces_of_one_model_live_in_one_process() -> None:
    model = MODELS["gpt"].build()
    split, meta = cut(model, tokens(2), 3), on_meta(model)
    stages = [Stage(meta, split, piece, call=call, device=CPU) for piece in range(3)]
    for stage in stages:
        stage.materialise(numbers_of(model))
    batch = tokens(2)
    _, gradients = gradients_of(stages, batch, square)
    torch.autograd.backward(square(model(batch)))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-7)


def test_a_tied_weight_in_two_pieces_of_one_process_is_refused() -> None:
    model = MODELS["gpt2"].build()
    split, meta = cut(model, text(2), 2), on_meta(model)
    Stage(meta, split, 0, call=call, device=CPU)
    with pytest.raises(
        PlanError, match=r"'transformer.wte.weight' is needed by the pieces 0 and 1, both on one worker"
    ):
        Stage(meta, split, 1, call=call, device=CPU)


def test_the_model_has_its_own_layers_again_after_a_forward() -> None:
    model = MODELS["gpt"].build()
    stages = pieces_of(model, cut(model, tokens(2), 2))
    held = stages[1]._held[0]
    before = dict(held.named_modules())
    forward(stages, tokens(2))
    assert dict(held.named_modules()) == before
    with pytest.raises(RuntimeError, match=r"Given normalized_shape"):
        stages[1](torch.zeros(1, 4, 31), batch=tokens(1))
    assert dict(held.named_modules()) == before


class Chooser(nn.Module):
    """Runs its layers in an order that depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.is_turned = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if not self.is_turned else reversed(list(self.layers)):
            x = layer(x)
        return x


def test_a_model_that_takes_another_course_than_when_traced_is_refused() -> None:
    model = Chooser()
    stage = Stage(model, cut(model, torch.ones(1, 4), 2), 0, call=call, device=CPU)
    stage(batch=torch.ones(1, 4))
    model.is_turned = True
    with pytest.raises(PlanError, match=r"called 'layers.2' where it called 'layers.0' when it was traced"):
        stage(batch=torch.ones(1, 4))
