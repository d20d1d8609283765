"""Which columns samples have is seen from some of them; a value that does not fit its column is named."""

from typing import Any

import numpy as np
import pytest

from shoal.core.errors import DataError
from shoal.data.pack.encode import encode_rows
from shoal.data.pack.image import check_whole
from shoal.data.pack.infer import choose_columns, infer_columns
from shoal.data.pack.schema import Column, Flat, stored_columns
from tests.data.pack.sources import jpeg, sample


def kinds(*samples: dict[str, Any]) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    return {column.name: (column.kind, column.dtype, column.shape) for column in infer_columns(samples)}


def test_every_kind_is_seen_from_samples() -> None:
    assert kinds(sample(1), sample(2), sample(3)) == {
        "x": ("array", "float32", (3, 5)),
        "label": ("scalar", "int64", ()),
        "even": ("scalar", "bool", ()),
        "words": ("ragged", "int16", ()),
        "boxes": ("ragged", "float64", ()),
        "text": ("text", "uint8", ()),
        "blob": ("bytes", "uint8", ()),
    }
    assert kinds({"image": b"\xff\xd8\xff\xe0 rest"})["image"][0] == "image"
    assert kinds({"score": 1}, {"score": 0.5})["score"] == ("scalar", "float64", ())


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{}], "a sample is a mapping"),
        ([{"x": None}], "has a missing value"),
        ([{"x": {"y": 1}}], "which a pack cannot hold"),
        ([{"x": 1j}], "which a pack cannot hold"),
        ([{"x": 1}, {"y": 1}], "samples have different columns: x, y"),
        ([{"x": np.zeros(3)}, {"x": np.zeros((3, 2))}], r"arrays of \[1, 2\] dimensions"),
    ],
)
def test_samples_that_make_no_columns_are_refused(samples: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        infer_columns(samples)


def test_kinds_can_be_asked_for() -> None:
    columns = infer_columns([{"ids": np.arange(3), "x": np.zeros((2, 2)), "blob": b""}])
    chosen = choose_columns(columns, {"blob": "image", "ids": "tokens", "x": "ragged"})
    assert [(column.name, column.kind, column.ndim) for column in chosen] == [
        ("blob", "image", 1),
        ("ids", "tokens", 1),
        ("x", "ragged", 2),
    ]
    assert [column.name for column in choose_columns(columns, ["x"])] == ["x"]
    with pytest.raises(DataError, match="cannot be stored as image"):
        choose_columns(columns, {"x": "image"})


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (Column("x", "array", "float32", (2,)), np.zeros(3, np.float32), r"has shape \(3,\), the pack's is \(2,\)"),
        (Column("x", "array", "float32", (2,)), np.zeros(2), "has dtype float64, the pack's is float32"),
        (Column("x", "scalar", "int8"), 200, "has dtype int64, the pack's is int8"),
        (Column("x", "scalar", "int64"), 1.5, "has dtype float64, the pack's is int64"),
        (Column("x", "scalar", "int64"), None, "has a missing value"),
        (Column("x", "ragged", "int64"), np.zeros((1, 1), int), "has 2 dimensions, the pack's has 1"),
        (Column("x", "text"), b"bytes", "has a bytes, not a str"),
        (Column("x", "bytes"), "text", "has a str, not bytes"),
        (Column("x", "image"), np.zeros((2, 2)), "not an encoded image"),
        (Column("y", "scalar", "int64"), 1, "there is no column 'y'; it has x"),
    ],
)
def test_a_value_that_does_not_fit_is_named(column: Column, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^a.tar:0007: .*{message}"):
        encode_rows([column], [("a.tar:0007", {"x": value})])


def test_numbers_without_a_size_of_their_own_are_stored_in_the_columns() -> None:
    columns = [Column("a", "scalar", "uint8"), Column("b", "scalar", "float32"), Column("c", "array", "int64", (2,))]
    held = encode_rows(columns, [("", {"a": 200, "b": 1, "c": np.array([1, 2], np.int8)})]).block.held
    found = [each.dtype.name for each in held.values() if not isinstance(each, Flat)]
    assert found == ["uint8", "float32", "int64"]


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(DataError, match=r"two columns are called 'x.shape'"):
        stored_columns([Column("x", "ragged", extra={"ndim": 2}), Column("x.shape", "bytes")])


def test_a_truncated_image_is_named() -> None:
    whole = jpeg()
    check_whole(whole)
    check_whole(whole + b"trailing bytes that some cameras leave")
    for size in (len(whole) - 2, len(whole) // 2, 100, 3):
        with pytest.raises(DataError, match="JPEG is truncated"):
            check_whole(whole[:size])
    with pytest.raises(DataError, match="JPEG is damaged: there is no marker at byte 2"):
        check_whole(b"\xff\xd8 no marker")
    with pytest.raises(DataError, match="the image is empty"):
        check_whole(b"")
    with pytest.raises(DataError, match="PNG is truncated"):
        check_whole(b"\x89PNG\r\n\x1a\n and no end")
    with pytest.raises(DataError, match="WebP is truncated"):
        check_whole(b"RIFF\x00\x01\x00\x00WEBP")
    column = Column("image", "image")
    with pytest.raises(DataError, match=r"^cat/7.jpg: column 'image': the JPEG is truncated"):
        encode_rows([column], [("cat/7.jpg", {"image": whole[: len(whole) // 2]})])
