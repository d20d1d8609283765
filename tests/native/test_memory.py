"""The C loops beside what torch says."""

import pytest
import torch

from shoal.native import memory
from shoal.native.library import library


def test_the_library_was_compiled_with_shoal() -> None:
    assert library() is not None, "run: python build_native.py"


@pytest.mark.parametrize("numel", [0, 1, 15, 70_001, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shift", [0, 1])  # to and from places that no line of the cache begins at
def test_a_copy_is_a_copy(numel: int, dtype: torch.dtype, shift: int) -> None:
    source = torch.arange(numel + shift).to(dtype)[shift:]
    around = torch.full((numel + 2 * shift + 1,), 7, dtype=dtype)
    memory.copy(around[shift : numel + shift], source)
    assert torch.equal(around[shift : numel + shift], source)
    assert around[:shift].eq(7).all()
    assert around[numel + shift :].eq(7).all()


def test_a_copy_of_another_layout_or_dtype_is_left_to_torch() -> None:
    source = torch.randn(300, 200)
    to = torch.empty(200, 300).t()
    memory.copy(to, source)
    assert torch.equal(to, source)
    memory.copy(half := torch.empty(300, 200, dtype=torch.bfloat16), source)
    assert torch.equal(half, source.bfloat16())


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_added_in_their_order_into_each(count: int, dtype: torch.dtype) -> None:
    rows = [torch.randn(5000, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(count)]
    before = [row.clone() for row in rows]
    wanted = before[0]
    for row in before[1:]:
        wanted = wanted + row
    add = memory.rows_adder(rows)
    assert add is not None
    add(3, 4099)
    for row, own in zip(rows, before, strict=True):
        assert torch.equal(row[3:4099], wanted[3:4099])
        assert torch.equal(row[:3], own[:3])
        assert torch.equal(row[4099:], own[4099:])


def test_other_dtypes_and_an_installation_without_it_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.rows_adder([torch.zeros(4, dtype=torch.int32)] * 2) is None
    monkeypatch.setattr(memory, "library", lambda: None)
    assert memory.rows_adder([torch.zeros(4)] * 2) is None
    memory.copy(to := torch.empty(3), torch.ones(3))
    assert to.tolist() == [1, 1, 1]
