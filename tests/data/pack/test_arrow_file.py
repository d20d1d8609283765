"""Where a part's buffers lie, beside what Arrow says."""

import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shoal.data.pack.arrow_file import Buffers, find_buffers
from shoal.data.pack.mapped import only_batch
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import DTYPES, Column, Stored, stored_columns
from shoal.data.pack.writer import pack
from tests.data.pack.sources import sample
from tests.data.packs import images_pack, tokens_pack

NUM_ROWS = 50


def held(path: Path, part: int = 0) -> tuple[mmap.mmap, list[Stored], int]:
    opened = Pack(path)
    column = next(name for name, column in opened.columns.items() if column.compression == "none")
    every = [each for each in stored_columns(opened.manifest.columns) if each.compression == "none"]
    return opened.map(part, column), every, opened.manifest.parts[part].num_rows


def assert_same(ours: dict[str, Buffers] | None, theirs: dict[str, Buffers]) -> None:
    assert ours is not None
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        assert found.values.dtype == theirs[name].values.dtype
        assert np.array_equal(found.values, theirs[name].values)
        assert not found.values.flags.writeable
        ends, their_ends = found.offsets, theirs[name].offsets
        assert (ends is None) == (their_ends is None)
        assert ends is None or their_ends is None or np.array_equal(ends, their_ends)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "rows.pack"
    pack((sample(row) for row in range(NUM_ROWS)), path, compression="none", report=Quiet())
    return path


def test_every_kind_of_column_is_found_where_arrow_finds_it(rows: Path, tmp_path: Path) -> None:
    packs = [rows, tokens_pack(tmp_path / "t.pack", 30), images_pack(tmp_path / "i.pack", 5)]
    for path in packs:
        for part in range(len(Pack(path).manifest.parts)):
            mapped, stored, num_rows = held(path, part)
            assert_same(find_buffers(mapped, stored, num_rows), only_batch(mapped, stored, num_rows, "it"))


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_every_dtype_is_found(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 2, (7, 3)).astype(dtype)
    pack(({"one": row[0], "all": row} for row in values), tmp_path / "p", compression="none", report=Quiet())
    mapped, stored, num_rows = held(tmp_path / "p")
    found = find_buffers(mapped, stored, num_rows)
    assert found is not None
    assert np.array_equal(found["all"].values, values)
    assert np.array_equal(found["one"].values, values[:, 0])


def test_columns_beside_compressed_ones_are_found(tmp_path: Path) -> None:
    choice = {"x": "zstd", "text": "lz4"}
    pack((sample(row) for row in range(NUM_ROWS)), tmp_path / "p", compression=choice, report=Quiet())
    mapped, stored, num_rows = held(tmp_path / "p")
    assert_same(find_buffers(mapped, stored, num_rows), only_batch(mapped, stored, num_rows, "it"))


def test_other_columns_than_the_manifest_says_are_left_to_arrow(rows: Path) -> None:
    mapped, stored, num_rows = held(rows)
    assert find_buffers(mapped, stored, num_rows) is not None
    assert find_buffers(mapped, stored, num_rows + 1) is None
    assert find_buffers(mapped, stored[:-1], num_rows) is None
    assert find_buffers(mapped, [*stored, stored[0]], num_rows) is None
    for number, each in enumerate(stored):
        changes: list[dict[str, Any]] = [{"name": "other"}, {"dtype": np.dtype("uint32")}]
        if each.layout == "fixed_list":
            changes.append({"shape": (*each.shape, 2)})
        if each.layout.startswith("large_b"):
            changes = [{"name": "other"}, {"layout": "large_string"}, {"layout": "large_list"}]
        if each.layout == "large_string":
            changes = [{"layout": "large_binary"}]
        for change in changes:
            other = Stored(**{**vars(each), **change})
            assert find_buffers(mapped, [*stored[:number], other, *stored[number + 1 :]], num_rows) is None, change


def written(path: Path, arrays: list[Any], schema: Any, *, batches: int = 1, **options: Any) -> mmap.mmap:
    with pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for _ in range(batches):
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def test_what_a_packs_writer_does_not_write_is_left_to_arrow(tmp_path: Path) -> None:
    stored = stored_columns([Column("x", "scalar", "int32")])
    plain, missing = pa.array([1, 2, 3], pa.int32()), pa.array([1, None, 3], pa.int32())
    schema = pa.schema([stored[0].arrow_field])
    nullable = pa.schema([pa.field("x", pa.int32())])
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    path = tmp_path / "file"
    assert find_buffers(written(path, [plain], schema), stored, 3) is not None
    assert find_buffers(written(path, [plain], nullable), stored, 3) is None
    assert find_buffers(written(path, [missing], nullable), stored, 3) is None
    assert find_buffers(written(path, [plain], schema, batches=2), stored, 3) is None
    assert find_buffers(written(path, [plain], schema, compression="zstd"), stored, 3) is None
    assert find_buffers(written(path, [words], pa.schema([pa.field("x", words.type)])), stored, 3) is None


def test_whatever_byte_is_wrong_nothing_outside_the_file_is_read(rows: Path, tmp_path: Path) -> None:
    mapped, stored, num_rows = held(rows)
    whole, random = mapped[:], np.random.default_rng(0)
    path = tmp_path / "file"
    for turn in range(400):
        wrong = bytearray(whole[: int(random.integers(1, len(whole)))] if turn % 8 == 0 else whole)
        for at in random.integers(0, min(1500, len(wrong)), 2):
            wrong[-int(at) - 1] = int(random.integers(256))  # the footer; and then the header of the record batch
            wrong[int(at)] ^= int(random.integers(256)) if turn % 2 else 0
        path.write_bytes(wrong)
        with path.open("rb") as file:
            damaged = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = find_buffers(damaged, stored, num_rows)
        for buffers in (found or {}).values():
            buffers.values.sum()
            assert buffers.offsets is None or buffers.offsets[-1] <= len(buffers.values)


def test_loading_takes_no_arrow_with_it(rows: Path) -> None:
    script = (
        "import sys; from shoal.data.loader import Loader;"
        f"print(len(list(Loader({str(rows)!r}, batch_size=8))), 'pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str(-(-NUM_ROWS // 8)), "False"]
