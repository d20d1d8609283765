"""Slices of whole tensors: filled from any others that cover them."""

import itertools
import math
import random

import pytest
import torch

from shoal.core.errors import ConfigError
from shoal.fault.shards import Found, Shard, fill, found_in


def cut(name: str, whole: torch.Tensor, chance: random.Random) -> list[Shard]:
    """Cut `whole` into a random grid of slices."""
    slices: list[tuple[tuple[int, ...], torch.Tensor]] = [((), whole)]
    for dim, size in enumerate(whole.shape):
        ends = sorted({chance.randint(0, size) for _ in range(chance.randint(0, 3))} | {0, size})
        slices = [
            ((*offset, begin), part.narrow(dim, begin, end - begin))
            for offset, part in slices
            for begin, end in itertools.pairwise(ends)
        ]
    return [Shard(name, part.clone(), tuple(whole.shape), offset) for offset, part in slices]


@pytest.mark.parametrize("seed", range(30))
def test_slices_are_filled_from_any_that_cover_them(seed: int) -> None:
    chance = random.Random(seed)
    shape = [chance.randint(1, 9) for _ in range(chance.randint(0, 3))]
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    wanted = [Shard(s.name, torch.full_like(s.tensor, -1), s.shape, s.offset) for s in cut("w", whole, chance)]
    fill(wanted, found_in(cut("w", whole, chance)))
    for shard in wanted:
        expected = whole
        for dim, (begin, size) in enumerate(zip(shard.offset, shard.tensor.shape, strict=True)):
            expected = expected.narrow(dim, begin, size)
        assert torch.equal(shard.tensor, expected)


def test_what_is_saved_twice_is_read_once() -> None:
    whole = torch.arange(6.0).reshape(3, 2)
    room = torch.zeros(3, 2)
    saved = Shard("w", whole, (3, 2), (0, 0))
    fill([Shard("w", room, (3, 2), (0, 0))], found_in([saved, saved]))
    assert torch.equal(room, whole)


@pytest.mark.parametrize(
    ("saved", "sentence"),
    [
        ([], "has no w: it is of another model"),
        ([Shard("w", torch.ones(2, 2), (2, 2), (0, 0))], r"w of shape \[2, 2\], but the model's is \[3, 2\]"),
        ([Shard("w", torch.ones(2, 2), (3, 2), (0, 0))], "lacks 2 numbers of w"),
    ],
)
def test_what_does_not_cover_them_is_refused_and_changes_nothing(saved: list[Shard], sentence: str) -> None:
    first, second = torch.zeros(3, 2), torch.zeros(3, 2)
    found: dict[str, Found] = found_in([*saved, Shard("v", torch.ones(3, 2), (3, 2), (0, 0))])
    with pytest.raises(ConfigError, match=sentence):
        fill([Shard("v", second, (3, 2), (0, 0)), Shard("w", first, (3, 2), (0, 0))], found)
    assert not first.any()
    assert not second.any()
