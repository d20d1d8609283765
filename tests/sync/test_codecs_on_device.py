"""What benchmarks/gpu/codecs.py does on a GPU, small and on the processor: with tensors staged as a GPU's would be."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.codecs import EXACT, lost_of, nothing_lost, plans, rates, trained, true_gradients
from benchmarks.parallel_cases import gpt
from shoal.comm.collectives import Work
from shoal.compress import collectives
from shoal.compress.bucket import Bucket
from shoal.compress.codecs import CODECS
from shoal.compress.collectives import GroupCollectives
from shoal.compress.feedback import ErrorFeedback
from shoal.core.errors import PeerLost
from shoal.training.codec_rates import Alone
from tests.support.ranks import RankPool, WorkerError
from tests.support.training import largest_difference, reference

CPU = torch.device("cpu")
STEPS = 4


def test_nothing_is_lost_by_way_of_staged_copies(ranks: RankPool) -> None:
    answers = ranks.run(nothing_lost, workers=2, names=list(CODECS), steps=5)
    true = true_gradients(5, CPU)
    for name in CODECS:
        assert lost_of([answer[name] for answer in answers], true) <= EXACT, name


def test_a_codec_of_a_plan_trains_almost_as_one_process_without_does(ranks: RankPool) -> None:
    losses = trained(ranks, ["int8"], STEPS, CPU)
    assert set(losses) == set(plans(["int8"])) == {"int8", "int8, zero 3"}
    expected = reference(gpt(steps=STEPS, layers=2), STEPS).losses
    for name, found in losses.items():
        # 127 steps up to the largest of 256: of four updates of 3e-4 each, at most a hundredth is not there yet.
        assert largest_difference(found, expected) < 1e-3, name


def test_runs_on_another_device_than_they_are_said_to_be_on_are_no_measurement(ranks: RankPool) -> None:
    with pytest.raises(WorkerError, match="AssertionError"):
        trained(ranks, ["int8"], STEPS, torch.device("cuda"))


def test_a_difference_between_workers_is_a_loss() -> None:
    ours = {"w": (torch.ones(2).numpy(), torch.zeros(2).numpy())}
    theirs = {"w": (torch.tensor([1.0, 1.0 + 2**-23]).numpy(), torch.zeros(2).numpy())}
    true = {"w": torch.ones(2).numpy()}
    assert lost_of([ours, ours], true) == 0
    assert lost_of([ours, theirs], true) == float("inf")


@pytest.mark.parametrize("name", ["int8", "threshold", "powersgd"])
def test_a_codec_has_rates_unless_it_is_summed_while_encoded(name: str) -> None:
    found = rates(name, 2**20, CPU)
    assert found is None if name == "powersgd" else found is not None and min(found) > 0


@pytest.mark.parametrize("name", CODECS)
def test_what_was_loaded_lies_on_the_processor_and_is_nobody_elses(name: str) -> None:
    bucket = Bucket(("a", "b"), ((40, 50), (7,)))
    first, second = ErrorFeedback(CODECS[name]()), ErrorFeedback(CODECS[name]())
    first.sum(bucket, torch.randn(bucket.width, generator=torch.Generator().manual_seed(0)), Alone())
    state = first.state_dict()
    second.load_state_dict(state)
    for value in [*state["pending"].values(), *state["memory"].values()]:
        value.fill_(float("nan"))
    for given, loaded in zip(_tensors(first), _tensors(second), strict=True):
        assert loaded.device == CPU
        assert torch.equal(given, loaded)


def _tensors(feedback: ErrorFeedback) -> Sequence[Tensor]:
    state = feedback.state_dict()
    return [state[kind][name] for kind in ("pending", "memory") for name in sorted(state[kind])]


class _Group:
    """A group of two whose work never ends."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class _Watch:
    """Knows at once that worker 1 is lost."""

    def wait(self, work: Any) -> None:
        raise PeerLost(f"worker 1 is lost, and {work} is in vain")

    def blame(self, error: BaseException) -> PeerLost | None:
        raise AssertionError(error)


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "all_to_all"])
def test_whoever_waits_in_a_codecs_exchange_is_told_by_the_watch(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    never: Any = "work without end"

    def start(*_arguments: Any) -> Work:
        return never  # type: ignore[no-any-return]

    monkeypatch.setattr(collectives, "start_sum", start)
    monkeypatch.setattr(collectives, "start_exchange", start)
    monkeypatch.setattr(collectives, "start_gather", lambda part, _group: ([part, part], never))
    workers = GroupCollectives(_Group(), watch=_Watch())  # type: ignore[arg-type]
    given = [torch.ones(3), torch.ones(3)] if call == "all_to_all" else torch.ones(3)
    with pytest.raises(PeerLost, match="worker 1 is lost"):
        getattr(workers, call)(given)
