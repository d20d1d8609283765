"""A part that is written while it is made has the bytes that Arrow writes when it is given the whole part at once."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shoal.data.pack.checksum import Checksum, file_checksum
from shoal.data.pack.encode import Block
from shoal.data.pack.part_buffers import PartBuffers
from shoal.data.pack.part_file import places, write_part
from shoal.data.pack.progress import Quiet
from shoal.data.pack.schema import Column, Flat, Stored, stored_columns
from shoal.data.pack.writer import pack
from tests.data.pack.sources import MadeUp, Rows, files_of, jpeg

COLUMNS = {
    "images": [Column("image", "image")],
    "cut images and labels": [Column("image", "image", extra={"index": True}), Column("label", "scalar", "int64")],
    "tokens": [Column("ids", "tokens", "uint16")],
    "arrays": [Column("x", "array", "float32", (3, 5))],
    "fixed": [Column("x", "array", "float64", (7,)), Column("y", "scalar", "bool"), Column("z", "scalar", "bfloat16")],
    "several that vary": [
        Column("text", "text"),
        Column("boxes", "ragged", "float32", extra={"ndim": 2}),
        Column("even", "scalar", "bool"),
    ],
    "one compressed": [Column("x", "array", "float32", (3,), "zstd"), Column("ids", "tokens", "int32")],
}


def block_of(stored: tuple[Stored, ...], num_rows: int, seed: int, *, longest: int = 40) -> Block:
    """Return rows of noise."""
    draw, held = np.random.default_rng(seed), dict[str, Any]()
    for each in stored:
        if each.is_fixed:
            held[each.name] = draw.integers(0, 2, (num_rows, *each.shape)).astype(each.dtype)
        else:
            offsets = np.cumsum([seed, *draw.integers(0, longest, num_rows)])  # it need not begin at 0
            held[each.name] = Flat(draw.integers(0, 100, int(offsets[-1])).astype(each.dtype), offsets)
    return Block(num_rows, held)


def written_at_once(buffers: PartBuffers, schema: pa.Schema) -> bytes:
    """Return the file that Arrow makes of what is in memory."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(buffers.record_batch("none").columns, schema=schema))
    return bytes(sink.getvalue())


def filled(buffers: PartBuffers, blocks: list[Block]) -> PartBuffers:
    for block in blocks:
        buffers.append(block, 0, block.num_rows, int(block.row_bytes().sum()))
    return buffers


@pytest.mark.parametrize("planned", [None, 1, 63, 300, 301, 5000])
@pytest.mark.parametrize("longest", [1, 40])
@pytest.mark.parametrize("what", COLUMNS)
def test_a_streamed_part_has_the_bytes_of_one_that_arrow_writes_at_once(
    what: str, longest: int, planned: int | None, tmp_path: Path
) -> None:
    stored = stored_columns(COLUMNS[what])
    (tmp_path / "parts").mkdir()
    blocks = [block_of(stored, rows, seed, longest=longest) for seed, rows in enumerate([100, 1, 64, 135])]
    whole, streamed = filled(PartBuffers(stored), blocks), PartBuffers(stored)
    with ThreadPoolExecutor(1) as writer:
        streamed.stream(tmp_path / "parts/a.arrow", places(stored, planned), planned, writer)
        made = write_part(tmp_path, "a", filled(streamed, blocks), {"zstd": 16})
        streamed.clear()
    path = tmp_path / made.file("none").name
    assert path.read_bytes() == written_at_once(whole, pa.ipc.open_file(path).schema)
    assert made == write_part(tmp_path, "a", whole, {"zstd": 16}), "sizes, checksums, counts"
    for file in made.files:
        assert file.checksum == file_checksum(tmp_path / file.name)


def test_arrays_in_any_order_of_bytes_and_strides_are_streamed_as_they_are_stored(tmp_path: Path) -> None:
    stored = stored_columns([Column("x", "array", "float32", (4,))])
    (tmp_path / "parts").mkdir()
    rows = np.arange(80, dtype=">f4").reshape(10, 8)[:, ::2]
    buffers = PartBuffers(stored)
    with ThreadPoolExecutor(1) as writer:
        buffers.stream(tmp_path / "parts/a.arrow", places(stored, 10), 10, writer)
        write_part(tmp_path, "a", filled(buffers, [Block(10, {"x": rows})]), {})
        buffers.clear()
    found = pa.ipc.open_file(tmp_path / "parts/a.arrow").read_all()["x"].to_pylist()
    assert found == rows.tolist()


def test_the_memory_of_streamed_columns_is_not_taken(tmp_path: Path) -> None:
    stored = stored_columns([Column("image", "image", extra={"index": True}), Column("label", "scalar", "int64")])
    buffers, block = PartBuffers(stored), block_of(stored, 50, 0)
    with ThreadPoolExecutor(1) as writer:
        buffers.stream(tmp_path / "a.arrow", places(stored, 50), 50, writer)
        assert set(buffers.streamed) == {"image", "label"}, "where the index begins depends on the images"
        buffers.reserve(block, 10**9)
        filled(buffers, [block])
        assert [buffers._values[name].count for name in ("image", "label")] == [0, 0]
        assert buffers._values["image"]._array.size == 0
        buffers.clear()


class Uncounted(MadeUp):
    """The same samples; how many a slice has, nobody knows."""

    def slices(self, about_bytes: int) -> list[Rows]:
        return [Rows(part.begin, part.end, part.num_bytes) for part in super().slices(about_bytes)]


@pytest.mark.parametrize("part_bytes", [15e3, 50e3, 1e6])
@pytest.mark.parametrize("wrong", [(), (140, 777)])
def test_a_pack_is_the_same_whether_its_rows_could_be_counted_before_or_not(
    part_bytes: float, wrong: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed: set[str] = set()
    stream = PartBuffers.stream

    def noted(buffers: PartBuffers, path: Path, places: dict[str, int], *more: Any) -> None:
        streamed.update(places)
        stream(buffers, path, places, *more)

    monkeypatch.setattr(PartBuffers, "stream", noted)
    options: dict[str, Any] = {"part_bytes": part_bytes, "compression": "none", "workers": 1, "on_error": "skip"}
    pack(Uncounted(wrong=wrong), tmp_path / "a.pack", report=Quiet(), **options)
    assert streamed == {"x"}, "the first begins where it begins, however many rows there are"
    pack(MadeUp(wrong=wrong), tmp_path / "b.pack", report=Quiet(), **options)
    assert streamed == {"x", "label", "even", "words"}
    assert files_of(tmp_path / "a.pack") == files_of(tmp_path / "b.pack")


def test_a_folder_of_images_whose_rows_are_known_has_the_parts_of_an_iterator(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    images = [jpeg(64 + 8 * row, seed=row) for row in range(20)]
    for row, image in enumerate(images):
        (tmp_path / f"images/{row:02d}.jpg").write_bytes(image)
    options: dict[str, Any] = {"columns": {"image": "image"}, "compression": "none", "report": Quiet()}
    pack(tmp_path / "images", tmp_path / "a.pack", **options)
    pack(({"image": image} for image in images), tmp_path / "b.pack", **options)
    assert files_of(tmp_path / "a.pack/parts") == files_of(tmp_path / "b.pack/parts")


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 4096, 1_000_003])
def test_joined_checksums_are_those_of_zlib_over_all_bytes(num_bytes: int) -> None:
    whole = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 1000, dtype=np.uint8).tobytes()
    for cut in (0, 1, 500, 1000):
        first, second = Checksum(), Checksum()
        first.update(whole[:cut])
        second.update(whole[cut:])
        first.join(second, len(whole) - cut)
        first.update(b"more")
        assert first.hex() == f"{zlib.crc32(whole + b'more'):08x}"
