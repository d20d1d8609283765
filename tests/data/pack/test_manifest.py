"""A manifest that lies is named, before anything is read that is not there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import DataError
from shoal.data.pack.manifest import read_manifest, write_manifest
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.writer import pack
from tests.data.pack.sources import MadeUp


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "made.pack"
    pack(
        MadeUp(250),
        path,
        part_bytes=20e3,
        workers=1,
        compression={"x": "zstd"},
        report=Quiet(),
        storage_bytes_per_s=1e12,
    )
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copy.pack")
    return tmp_path / "copy.pack"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    (path / "manifest.json").write_text(json.dumps(content))


def test_what_is_written_is_what_is_read(made: Path, tmp_path: Path) -> None:
    write_manifest(tmp_path, read_manifest(made))
    assert (tmp_path / "manifest.json").read_bytes() == (made / "manifest.json").read_bytes()


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "rows": (lambda m: m.update(num_rows=249), "num_rows is 249, but its parts have 250 rows"),
    "version": (lambda m: m.update(version=2), "version 2; this shoal reads version 1"),
    "format": (lambda m: m.update(format="zip"), "not the manifest of a pack"),
    "no parts": (lambda m: m.update(parts=[], num_rows=0), "no columns or no parts"),
    "a file outside": (lambda m: m["parts"][0]["files"][0].update(name="../x"), "lies outside the pack"),
    "a file of another part": (lambda m: m["parts"][0].update(name="00001"), "part 00001 has"),
    "counts of rows": (lambda m: m["parts"][0].update(packed_rows={"t": [1]}), "packed_rows has not 0 counts"),
    "a width": (lambda m: m.update(row_widths=[-1]), "a width in row_widths is -1, not a count"),
    "a negative count": (lambda m: m["parts"][0].update(num_rows=-1), "is -1, not a count"),
    "an unknown kind": (lambda m: m["columns"][0].update(kind="tensor"), "has the kind 'tensor'"),
    "an unknown dtype": (lambda m: m["columns"][0].update(dtype="float31"), "Did you mean 'float32'"),
    "a name that is none": (lambda m: m["columns"][0].update(name=5), "the column 5 has no name"),
    "an extra that is none": (lambda m: m["columns"][0].update(extra=[]), "its extra is"),
    "a shape of fractions": (lambda m: m["columns"][0].update(shape=[1.5]), "is 1.5, not a count"),
    "a shape too large": (
        lambda m: m["columns"][0].update(kind="array", shape=[2**20, 2**11]),
        "fewer than 2.31 elements",
    ),
    "a number of dimensions": (
        lambda m: m["columns"][0].update(kind="ragged", shape=[], extra={"ndim": "x"}),
        "is damaged",
    ),
    "text of numbers": (lambda m: m["columns"][0].update(kind="text", shape=[]), "of kind text has the dtype"),
    "more rows than there are numbers": (lambda m: m["parts"][0].update(num_rows=2**70), "not a count"),
    "a column twice": (lambda m: m["columns"].append(m["columns"][0]), "a column is there twice"),
    "no block rows": (lambda m: m.update(block_rows={}), "block_rows does not say"),
    "a missing key": (lambda m: m.pop("columns"), "is damaged"),
    "a list for an object": (lambda m: m.update(parts=[[]]), "is damaged"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_contradicts_itself_is_refused(lie: str, copy: Path) -> None:
    change, message = LIES[lie]
    edit(copy, change)
    with pytest.raises(DataError, match=message):
        Pack(copy)


def test_a_torn_manifest_is_refused(copy: Path) -> None:
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match="cannot be read"):
        Pack(copy)


def test_a_folder_that_is_no_pack_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no manifest.json. Make one with: shoal pack"):
        Pack(tmp_path)
    with pytest.raises(DataError, match=r"s3://bucket/a.pack is an address, .*: shoal.View\(stage\('s3://bucket/"):
        Pack(Path("s3://bucket/a.pack"))
    with pytest.raises(DataError, match="there is no pack"):
        Pack(tmp_path / "nowhere.pack")
    (tmp_path / "half.pack.unfinished").mkdir()
    with pytest.raises(DataError, match=r"is not finished. Run the same shoal pack again"):
        Pack(tmp_path / "half.pack")


def replace_part(path: Path, part: int, by: str) -> None:
    """Put another file in a part's place, of a size that the manifest agrees to."""
    file = path / f"parts/0000{part}.arrow"
    shutil.copy(path / "parts" / by, file)
    edit(path, lambda m: m["parts"][part]["files"][0].update(num_bytes=file.stat().st_size))


def test_a_part_that_is_missing_or_short_or_another_is_named_when_it_is_read(copy: Path) -> None:
    (copy / "parts/00000.arrow").unlink()
    with pytest.raises(DataError, match=r"00000.arrow is missing"):
        Pack(copy)[0]
    shutil.copy(copy / "parts/00002.arrow", copy / "parts/00000.arrow")
    with pytest.raises(DataError, match=r"00000.arrow has [\d,]+ bytes, but the manifest says"):
        Pack(copy)[0]
    replace_part(copy, 0, "00001.arrow")
    with pytest.raises(DataError, match=r"00000.arrow, column 'words' has [\d,]+ elements, but the manifest says"):
        Pack(copy)[0]
    replace_part(copy, 0, "00002.arrow")
    with pytest.raises(DataError, match=r"00000.arrow has 50 rows, but the manifest says 100"):
        Pack(copy)[0]
    replace_part(copy, 1, "00001.zstd.arrow")
    with pytest.raises(DataError, match=r"00001.arrow has the columns x .* but the manifest says label"):
        Pack(copy)[100]
