"""Copies and their sums: what the native call does is what NumPy does, and damage is seen."""

import pytest
import torch

from shoal.native import library, snapshot

_SIZES = [0, 1, 63, 64, 65, 1000, (256 << 10) - 1, (256 << 10) + 77, 3_000_001]


def test_the_native_copy_and_sum_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in _SIZES]
    places = [torch.zeros(size + 64, dtype=torch.uint8)[at : at + size] for at, size in enumerate(_SIZES)]
    native = snapshot.pieces_copier(places, pieces)(5)
    assert all(map(torch.equal, places, pieces))
    assert native == snapshot.pieces_sum(pieces, 5) == snapshot.plain_sum(pieces, 5)
    monkeypatch.setattr(snapshot, "library", lambda: None)
    for place in places:
        place.zero_()
    assert snapshot.pieces_copier(places, pieces)(5) == native
    assert all(map(torch.equal, places, pieces))
    assert library.library() is not None


@pytest.mark.parametrize("at", [0, 100, 64_000, 299_999])
def test_the_sum_sees_a_changed_bit_and_lines_that_changed_places(at: int) -> None:
    data = torch.randint(0, 256, (300_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before = snapshot.pieces_sum([data])
    data[at] ^= 1
    assert snapshot.pieces_sum([data]) != before
    data[at] ^= 1
    swapped = torch.cat([data[64:128], data[:64], data[128:]])
    assert snapshot.pieces_sum([swapped]) != before
    assert snapshot.pieces_sum([data]) == before


def test_pieces_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="of one size"):
        snapshot.pieces_copier([torch.zeros(3)], [torch.zeros(4)])
