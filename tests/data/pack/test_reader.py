"""What was packed is what is read: every kind of column, mapped or compressed, by shoal and by other Arrow tools."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from shoal.core.errors import DataError
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack, open_pack
from shoal.data.pack.writer import pack
from tests.data.pack.sources import MadeUp, assert_same, sample

NAMES = list(sample(0))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.pack"
    pack(MadeUp(500), path, part_bytes=20e3, workers=1, compression="none", report=Quiet())
    return path


@pytest.fixture(scope="module")
def squeezed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("squeezed") / "squeezed.pack"
    asked = {
        "x": "lz4",
        "label": "zstd",
        "words": "zstd",
        "boxes": "lz4",
        "text": "zstd",
        "even": "none",
        "blob": "none",
    }
    pack(MadeUp(500), path, part_bytes=20e3, workers=1, compression=asked, report=Quiet())
    return path


@pytest.mark.parametrize("which", ["plain", "squeezed"])
def test_every_row_of_every_kind_comes_back(which: str, request: pytest.FixtureRequest) -> None:
    opened = Pack(request.getfixturevalue(which))
    assert len(opened) == 500
    assert len(opened.manifest.parts) > 3
    for row in range(500):
        assert_same(opened[row], sample(row))
    assert_same(opened[-1], sample(499))
    assert [found["label"] for found in opened.__getitems__([7, 3])] == [7, 3]
    with pytest.raises(IndexError):
        opened[500]


def test_columns_are_views_of_the_map_and_fixed_ones_are_aligned(plain: Path) -> None:
    opened = Pack(plain)
    begun = 0
    for part, what in enumerate(opened.manifest.parts):
        x, words, offsets = opened.values(part, "x"), opened.values(part, "words"), opened.offsets(part, "words")
        rows = range(begun, begun + what.num_rows)
        np.testing.assert_array_equal(x, np.stack([sample(row)["x"] for row in rows]))
        np.testing.assert_array_equal(words, np.concatenate([sample(row)["words"] for row in rows]))
        assert offsets[0] == 0
        assert offsets[-1] == what.num_values["words"] == len(words)
        for name in ("x", "label", "even"):
            values = opened.values(part, name)
            assert values.ctypes.data % 64 == 0
            assert not values.flags.owndata
            assert not values.flags.writeable
        begun += what.num_rows
    assert opened.values(0, "even").dtype == np.bool_


def test_rows_are_found_in_their_parts(plain: Path) -> None:
    opened = Pack(plain)
    parts, rows = opened.part_of(np.arange(500))
    labels = [opened.values(int(part), "label")[row] for part, row in zip(parts, rows, strict=True)]
    assert labels == list(range(500))


def test_any_arrow_tool_reads_the_parts(plain: Path, squeezed: Path) -> None:
    for path in (plain, squeezed):
        for compression in {column.compression for column in Pack(path).manifest.columns}:
            files = [part.file(compression).name for part in Pack(path).manifest.parts]
            table = pa.concat_tables([pa.ipc.open_file(str(path / file)).read_all() for file in files])
            assert table.num_rows == 500
            for name in set(table.column_names) & {"label", "text", "words"}:
                wanted = [sample(row)[name] for row in range(500)]
                found = table.column(name).to_pylist()
                assert found == [value.tolist() if isinstance(value, np.ndarray) else value for value in wanted]


def test_blocks_hold_the_same_rows(squeezed: Path) -> None:
    opened = Pack(squeezed)
    rows = opened.block_rows("words")
    values, offsets = opened.block(1, "words", 0)
    assert offsets is not None
    first = opened.manifest.first_rows[1]
    last = min(first + rows, opened.manifest.first_rows[2])
    np.testing.assert_array_equal(values, np.concatenate([sample(row)["words"] for row in range(first, last)]))
    labels, none = opened.block(0, "label", 0)
    assert none is None
    assert labels[:3].tolist() == [0, 1, 2]
    with pytest.raises(DataError, match="is compressed"):
        opened.values(0, "words")
    with pytest.raises(DataError, match="is not compressed"):
        opened.block(0, "blob", 0)
    with pytest.raises(DataError, match="not block 99"):
        opened.block(0, "words", 99)


def test_a_pack_is_sent_to_another_process_by_its_path(plain: Path) -> None:
    opened = open_pack(plain, columns=["text", "label"])
    assert opened[3] == {"text": sample(3)["text"], "label": 3}
    sent = pickle.dumps(opened)
    assert len(sent) < 1000
    assert pickle.loads(sent)[3] == opened[3]


def test_threads_read_at_once(plain: Path, squeezed: Path) -> None:
    for path in (plain, squeezed):
        opened = Pack(path)
        together = threading.Barrier(4)

        def read(first: int, opened: Pack = opened, together: threading.Barrier = together) -> list[dict[str, Any]]:
            together.wait(timeout=30)
            return [opened[row] for row in range(first, 200, 4)]

        with ThreadPoolExecutor(4) as threads:
            for first, rows in enumerate(threads.map(read, range(4))):
                for place, found in enumerate(rows):
                    assert_same(found, sample(first + 4 * place))


def test_a_part_is_asked_for_where_it_is_when_it_is_first_read(plain: Path, tmp_path: Path) -> None:
    asked = []

    def locate(part: int, name: str) -> Path:
        asked.append(part)
        return plain / name

    opened = Pack(plain, locate=locate)
    assert asked == []
    assert opened[0]["label"] == 0
    assert opened[1]["label"] == 1
    assert asked == [0]


def test_views_outlive_the_pack(plain: Path) -> None:
    opened = Pack(plain)
    labels = opened.values(0, "label")
    opened.close()
    del opened
    assert labels[:4].tolist() == [0, 1, 2, 3]


def test_bfloat16_is_kept_bit_by_bit(tmp_path: Path) -> None:
    tensors = torch.randn(10, 4, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    pack([{"w": row} for row in tensors], tmp_path / "b.pack", compression="none", report=Quiet())
    opened = Pack(tmp_path / "b.pack")
    assert opened.columns["w"].dtype == "bfloat16"
    stored = torch.from_numpy(opened.values(0, "w").copy()).view(torch.bfloat16)
    assert torch.equal(stored, tensors)


def test_an_unknown_column_is_named(plain: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'lable'. Did you mean 'label'"):
        open_pack(plain, columns=["lable"])
    with pytest.raises(DataError, match="no column 'wrds'"):
        Pack(plain).values(0, "wrds")
