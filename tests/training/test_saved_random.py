"""Random states that are noted cheaply: every draw goes on alike from what was noted."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shoal.training.saved_random import RandomStates, begin_anew, set_random

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy, one normal of two": lambda: float(np.random.randn()),
}


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_go_on_alike(draw: Callable[[], object], before: int) -> None:
    for _ in range(before):
        RandomStates(CPU)  # as after every step: what was noted before must not be taken for what is now
        draw()
    noted = RandomStates(CPU)
    expected = [draw() for _ in range(4)]
    set_random(noted.own())
    assert [draw() for _ in range(4)] == expected


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_that_begin_anew_depend_on_seed_step_and_part_alone(draw: Callable[[], object]) -> None:
    def drawn(*where: int) -> list[object]:
        draw()
        begin_anew(*where)
        return [draw() for _ in range(4)]

    expected = drawn(7, 3, 1)
    assert drawn(7, 3, 1) == expected
    assert all(drawn(*other) != expected for other in [(8, 3, 1), (7, 4, 1), (7, 3, 0)])


def test_another_generator_of_numpys_is_noted_too() -> None:
    numpy_random: Any = np.random  # the stubs lack both
    before = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(np.random.MT19937(5))
    try:
        RandomStates(CPU)
        np.random.seed(7)
        noted = RandomStates(CPU)
        expected = np.random.rand(3).tolist()
        set_random(noted.own())
        assert np.random.rand(3).tolist() == expected
    finally:
        numpy_random.set_bit_generator(before)
