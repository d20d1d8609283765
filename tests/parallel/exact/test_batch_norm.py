"""Batch norm over several workers against one process on the whole batch.

Tolerance 1e-5: float32 sums over the batch in another order, of numbers near 1.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.errors import JobError
from shoal.parallel.exact.batch_norm import apply_batch_norm, counting
from tests.support.ranks import RankPool

TOLERANCE = 1e-5
STEPS = 3
CHANNELS = 5

Answer = dict[str, Tensor]


class NormAndRelu(nn.BatchNorm2d):
    """A batch norm with a forward of its own, as vision libraries have it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        ).relu()


NORMS: dict[str, Any] = {
    "1d of vectors": (lambda: nn.BatchNorm1d(CHANNELS), ()),
    "1d": (lambda: nn.BatchNorm1d(CHANNELS), (7,)),
    "2d": (lambda: nn.BatchNorm2d(CHANNELS), (4, 3)),
    "3d": (lambda: nn.BatchNorm3d(CHANNELS), (2, 3, 2)),
    "cumulative": (lambda: nn.BatchNorm2d(CHANNELS, momentum=None), (4, 3)),
    "without running averages": (lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False), (4, 3)),
    "without weights": (lambda: nn.BatchNorm2d(CHANNELS, affine=False), (4, 3)),
    "with a forward of its own": (lambda: NormAndRelu(CHANNELS), (4, 3)),
}


def build(norm: str) -> nn.Module:
    torch.manual_seed(0)
    layer = NORMS[norm][0]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return nn.Sequential(nn.Identity(), layer)


def batch(norm: str, step: int, *, samples: int) -> tuple[Tensor, Tensor]:
    """Return a batch whose channels are not around zero, and weights of its outputs."""
    generator = torch.Generator().manual_seed(step)
    shape = (samples, CHANNELS, *NORMS[norm][1])
    x = torch.randn(shape, generator=generator) + torch.arange(CHANNELS).view(CHANNELS, *[1] * (len(shape) - 2)) - 2
    return x, torch.randn(shape, generator=generator)


def run_part(model: nn.Module, norm: str, own: slice, *, samples: int, weight: float = 1.0) -> Answer:
    """Train on this part of each batch, and evaluate; return all that came of it."""
    answer: Answer = {}
    for step in range(STEPS):
        x, weights = batch(norm, step, samples=samples)
        x = x[own].detach().requires_grad_()
        output = model(x)
        (output * weights[own]).sum().mul(weight).backward()
        assert x.grad is not None
        answer |= {f"output {step}": output.detach(), f"input's gradient {step}": x.grad}
    answer |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    answer |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        answer["evaluated"] = model(batch(norm, 0, samples=samples)[0][own])
    return answer


def worker(rank: Rank, *, parts: list[int]) -> dict[str, tuple[list[str], Answer]]:
    """Be one of the workers that have `parts` of each batch; one with 0 runs the first sample without counting it."""
    start, size = sum(parts[: rank.index]), parts[rank.index]
    own = slice(start, start + size) if size else slice(0, 1)
    results = {}
    with joined(rank, connect(rank, timeout_s=60), device=torch.device("cpu"), timeout_s=60), counting(size > 0):
        for norm in NORMS:
            model = build(norm)
            names = apply_batch_norm(model, torch.distributed.group.WORLD if rank.workers > 1 else None)
            results[norm] = names, run_part(model, norm, own, samples=sum(parts), weight=float(size > 0))
    return results


def together(answers: list[Answer], parts: list[int]) -> Answer:
    """Return what the workers have, as one: samples one after the other, gradients of weights summed."""
    joint = dict(answers[0])
    counted = [answer for answer, size in zip(answers, parts, strict=True) if size]
    for name in joint:
        if name.startswith(("output", "input's", "evaluated")):
            joint[name] = torch.cat([answer[name] for answer in counted])
        elif name.startswith("gradient"):
            joint[name] = sum((answer[name] for answer in answers), torch.zeros(()))
    return joint


def assert_same(ours: Answer, expected: Answer, norm: str = "2d") -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        what = partial("{} of {}: {}".format, name, norm)
        torch.testing.assert_close(ours[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=what)


@pytest.mark.parametrize("parts", [[6], [3, 3], [5, 1], [2, 0, 4]], ids=str)
def test_workers_together_are_one_process(ranks: RankPool, parts: list[int]) -> None:
    results = ranks.run(worker, workers=len(parts), parts=parts)
    for norm in NORMS:
        assert all(names == (["1"] if len(parts) > 1 else []) for names, _ in (result[norm] for result in results))
        answers = [result[norm][1] for result in results]
        for name, _ in build(norm).named_buffers():
            assert all(torch.equal(answer[name], answers[0][name]) for answer in answers), f"{name} of {norm}"
        ours = together(answers, parts)
        expected = run_part(build(norm), norm, slice(0, sum(parts)), samples=sum(parts))
        if norm == "without running averages":  # in evaluation each worker has only its own samples, as in torch
            del ours["evaluated"], expected["evaluated"]
        assert_same(ours, expected, norm)


def in_group(rank: Rank, *, what: str) -> Any:
    """Run the function of this module called `what` with a batch norm over all workers."""
    with joined(rank, connect(rank, timeout_s=60), device=torch.device("cpu"), timeout_s=60):
        model = build("2d")
        apply_batch_norm(model, torch.distributed.group.WORLD)
        return globals()[what](rank, model)


def run_with_no_rows(rank: Rank, model: nn.Module) -> Answer:
    return run_part(model, "2d", slice(0, 6) if rank.index else slice(0, 0), samples=6)


def test_a_worker_may_also_have_a_batch_without_rows(ranks: RankPool) -> None:
    answers = ranks.run(in_group, workers=2, what="run_with_no_rows")
    assert_same(together(answers, [0, 6]), run_part(build("2d"), "2d", slice(0, 6), samples=6))


def run_far_from_zero(rank: Rank, model: nn.Module) -> Tensor:
    model(batch("2d", 0, samples=6)[0][3 * rank.index : 3 * rank.index + 3] + 1000)
    return model[1].running_var  # type: ignore[index, no-any-return]


def test_the_variance_of_numbers_far_from_zero_keeps_its_digits(ranks: RankPool) -> None:
    variance = ranks.run(in_group, workers=2, what="run_far_from_zero")[0]
    x = (batch("2d", 0, samples=6)[0] + 1000).double()
    expected = 0.9 + 0.1 * x.var((0, 2, 3))
    # Numbers near 1000 are 6e-5 apart in float32, and their mean may be off by as much; by sums of squares it is 0.06.
    torch.testing.assert_close(variance.double(), expected, rtol=1e-5, atol=0)


def run_in_bfloat16(rank: Rank, model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    size = 6 // rank.workers
    x = batch("2d", 0, samples=6)[0][size * rank.index : size * rank.index + size]
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x.bfloat16())
    output.float().square().sum().backward()
    return output.detach(), model[1].running_var, model[1].weight.grad  # type: ignore[index]


def test_under_autocast_the_statistics_are_float32(ranks: RankPool) -> None:
    first, second = ranks.run(in_group, workers=2, what="run_in_bfloat16")
    output, variance, gradient = run_in_bfloat16(Rank(0, 1, 0, 1, "", 0, store_is_hosted=False), build("2d"))
    assert first[0].dtype == output.dtype == torch.bfloat16
    torch.testing.assert_close(first[1], variance, rtol=TOLERANCE, atol=TOLERANCE)
    # The last of bfloat16's 8 bits may fall to either side; sums over the batch of such outputs, to 1%.
    torch.testing.assert_close(torch.cat([first[0], second[0]]), output, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(first[2] + second[2], gradient, rtol=0.01, atol=0.01)


def run_recomputed(rank: Rank, model: nn.Module) -> tuple[Tensor | None, ...]:
    x, weights = (part[3 * rank.index : 3 * rank.index + 3] for part in batch("2d", 0, samples=6))
    gradients = []
    for again in (False, True):
        own = x.clone().requires_grad_()
        output = checkpoint(model, own, use_reentrant=False) if again else model(own)
        (output * weights).sum().backward()
        gradients.append(own.grad)
    return tuple(gradients)


def test_recomputation_takes_the_same_statistics_again(ranks: RankPool) -> None:
    for plain, recomputed in ranks.run(in_group, workers=2, what="run_recomputed"):
        assert torch.equal(plain, recomputed)


def run_copy_and_evaluate_alone(rank: Rank, model: nn.Module) -> list[str]:
    twin = copy.deepcopy(model)
    assert isinstance(twin[1], nn.BatchNorm2d)  # type: ignore[index]
    assert model.state_dict().keys() == build("2d").state_dict().keys()
    if rank.index == 0:
        with torch.no_grad():
            twin.eval()(batch("2d", 0, samples=2)[0])
    return apply_batch_norm(build("2d").eval(), torch.distributed.group.WORLD)


def test_a_copy_evaluates_without_the_others_and_what_does_not_train_is_left_alone(ranks: RankPool) -> None:
    assert ranks.run(in_group, workers=2, what="run_copy_and_evaluate_alone") == [[], []]


def run_one_value(rank: Rank, model: nn.Module) -> str:
    with counting(rank.index == 0), pytest.raises(JobError) as raised:
        model(torch.ones(1, CHANNELS, 1, 1))
    return str(raised.value)


def test_one_value_in_the_whole_batch_is_refused_as_torch_refuses_it(ranks: RankPool) -> None:
    for text in ranks.run(in_group, workers=2, what="run_one_value"):
        assert "has 1 value per channel in the whole batch, and needs 2 or more" in text
