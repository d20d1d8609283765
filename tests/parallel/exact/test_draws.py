"""The numbers themselves: how often they keep, and that neighbours, samples, layers and steps have nothing in common.

Every figure is a z score: the distance from what chance gives, in standard deviations. The numbers are fixed by their
keys, so that a test either always passes or never; of n scores the largest is expected near sqrt(2 ln n), below 4.6 for
the 29,000 here at most, and 6 is far outside.
"""

import functools
import itertools
import math

import pytest
import torch
from torch import Tensor

from shoal.parallel.exact.draws import draw, key, key_of_draw, tensor_of_keys

SAMPLES, ELEMENTS = 16, 2**14
FAR_OUTSIDE = 6.0


@functools.cache
def bits(*, step: int = 0, layer: str = "h.0", number: int = 0, draws: int = 1) -> Tensor:
    """Return [samples, elements] of what `layer` draws in `step`."""
    keys = tensor_of_keys([key(0, step, sample) for sample in range(SAMPLES)])
    first, second = key_of_draw(tensor_of_keys([key(layer)])[:, 0], number, draws)
    return draw(
        (SAMPLES, ELEMENTS), torch.empty(0), (keys[0] * first, keys[1] * second), batch_dim=0, finish=torch.clone
    )


def kept(drawn: Tensor, p: float) -> Tensor:
    """Return a mask with its mean taken off and its deviation made 1."""
    mask = (drawn < round((1 - p) * 2**32) - 2**31).double()
    return (mask - (1 - p)) / math.sqrt(p * (1 - p))


def largest(scores: Tensor) -> float:
    return scores.abs().max().item()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_every_sample_keeps_as_many_as_it_should(p: float) -> None:
    for step in range(5):
        assert largest(kept(bits(step=step), p).mean(1) * math.sqrt(ELEMENTS)) < FAR_OUTSIDE


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("distance", [1, 2, 3, 7, 8, 64, 100, 128, 1024, 4096])
def test_elements_at_a_distance_are_independent(distance: int, p: float) -> None:
    for step in range(5):
        mask = kept(bits(step=step), p)
        together = (mask[:, distance:] * mask[:, :-distance]).mean(1)
        assert largest(together * math.sqrt(ELEMENTS - distance)) < FAR_OUTSIDE


def test_samples_steps_layers_calls_and_draws_are_independent() -> None:
    drawn = [
        *(bits(step=step) for step in range(4)),
        *(bits(layer=f"h.{layer}") for layer in range(1, 5)),
        *(bits(number=number) for number in range(1, 4)),
        *(bits(draws=draws) for draws in range(2, 6)),
    ]
    masks = kept(torch.cat(drawn), 0.5)
    together = masks @ masks.T / math.sqrt(ELEMENTS)
    assert largest(together[~torch.eye(len(masks), dtype=torch.bool)]) < FAR_OUTSIDE


def test_every_bit_is_as_often_0_as_1() -> None:
    drawn = bits()
    for bit in range(8, 32):
        assert largest((((drawn >> bit) & 1).double().mean(1) - 0.5) * 2 * math.sqrt(ELEMENTS)) < FAR_OUTSIDE


def test_three_neighbours_show_every_pattern_as_often_as_any_other() -> None:
    first = (bits() >> 29) & 7
    numbers = first[:, :-2] * 64 + first[:, 1:-1] * 8 + first[:, 2:]
    patterns = torch.stack([torch.bincount(row, minlength=512) for row in numbers])
    expected = (ELEMENTS - 2) / 512
    chi_squares = ((patterns - expected) ** 2 / expected).sum(1)
    assert largest((chi_squares - 511) / math.sqrt(2 * 511)) < FAR_OUTSIDE


def test_no_two_keys_are_alike() -> None:
    keys = {key(*words) for words in itertools.product(range(3), range(30), range(300))}
    assert len(keys) == 3 * 30 * 300
    assert all(number % 2 == 1 and -(2**31) <= number < 2**31 for pair in keys for number in pair)


def test_keys_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert key(0, 1, 2) == (195411729, 1705268959)
    assert bits()[0, :3].tolist() == [-2130342537, 1345817354, 1341978919]


def test_a_sample_of_more_than_2_to_the_32_elements_can_be_drawn_for() -> None:
    like = torch.empty((2, 2**33), device="meta")
    keys = torch.empty(2, dtype=torch.int32, device="meta")
    assert draw(like.shape, like, (keys, keys), batch_dim=0, finish=torch.clone).shape == like.shape
