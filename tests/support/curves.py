"""Curves to compare with what loggers show."""

from collections.abc import Iterable
from typing import Any

import pytest


def about(points: Iterable[tuple[int, float]]) -> list[Any]:
    """Return the points (step, value), each value to compare with as far as float32 has it."""
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in points]
