"""Damage is found, and said where: by checksums, and, where these were made to agree, by what the rows must be."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.core.errors import DataError
from shoal.data.pack.check import check_pack
from shoal.data.pack.checksum import file_checksum
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.writer import pack
from tests.data.pack.sources import MadeUp


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "made.pack"
    asked = {"x": "zstd", "words": "lz4"}
    pack(MadeUp(250), path, part_bytes=20e3, workers=1, compression=asked, storage_bytes_per_s=1e12, report=Quiet())
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copy.pack")
    return tmp_path / "copy.pack"


def found(path: Path) -> str:
    """Return the one problem of a pack."""
    (problem,) = check_pack(path)
    return str(problem)


def agree(path: Path, name: str) -> None:
    """Make the manifest agree with a file as it now is."""
    content = json.loads((path / "manifest.json").read_text())
    for part in content["parts"]:
        for file in part["files"]:
            if file["name"] == name:
                file.update(num_bytes=(path / name).stat().st_size, checksum=file_checksum(path / name))
    (path / "manifest.json").write_text(json.dumps(content))


def overwrite(path: Path, place: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


def place_of(path: Path, part: int, column: str) -> int:
    """Return where the offsets of a column begin in its file."""
    offsets = Pack(path).offsets(part, column)
    whole = (path / f"parts/0000{part}.arrow").read_bytes()
    return whole.index(offsets.tobytes())


def test_a_whole_pack_has_no_problems(made: Path) -> None:
    looked = []
    assert check_pack(made, on_part=lambda done, parts: looked.append((done, parts))) == []
    assert looked == [(1, 3), (2, 3), (3, 3)]


def test_one_flipped_bit_anywhere_is_found(copy: Path) -> None:
    for name in ("00001.arrow", "00001.zstd.arrow", "00001.lz4.arrow"):
        file = copy / "parts" / name
        whole = file.read_bytes()
        for place in np.random.default_rng(1).integers(0, len(whole), 5).tolist():
            overwrite(file, place, bytes([whole[place] ^ 1]))
            assert f"{name} is damaged: its checksum is" in found(copy)
            overwrite(file, place, whole[place : place + 1])
    assert check_pack(copy) == []


def test_a_missing_a_short_and_a_strange_file_are_named(copy: Path) -> None:
    (copy / "parts/00007.arrow").touch()
    assert "00007.arrow is not in the manifest" in found(copy)
    (copy / "parts/00007.arrow").unlink()
    (copy / "parts/00001.arrow").rename(copy / "away")
    assert "00001.arrow is missing" in found(copy)
    (copy / "parts/00001.arrow").write_bytes((copy / "away").read_bytes()[:-1])
    assert "but the manifest says" in found(copy)


def test_offsets_that_fall_are_named_with_their_row(copy: Path) -> None:
    place = place_of(copy, 1, "blob")
    overwrite(copy / "parts/00001.arrow", place + 8 * 20, np.int64(1).tobytes())
    agree(copy, "parts/00001.arrow")
    (problem,) = check_pack(copy)
    assert (problem.part, problem.row) == ("00001", 119)
    assert "part 00001, row 119: column 'blob' has offsets that fall" in problem.what


def test_offsets_beyond_the_values_are_refused_before_anything_is_read(copy: Path) -> None:
    place = place_of(copy, 1, "blob")
    overwrite(copy / "parts/00001.arrow", place + 8 * 100, np.int64(10**9).tobytes())
    agree(copy, "parts/00001.arrow")
    assert "has offsets from 0 to 1,000,000,000, beyond its" in found(copy)


def test_text_that_is_none_is_named(copy: Path) -> None:
    file = copy / "parts/00000.arrow"
    overwrite(file, file.read_bytes().index("né ".encode()), b"n\xff\xff")
    agree(copy, "parts/00000.arrow")
    assert "column 'text' has text that is not UTF-8" in found(copy)


def test_a_shape_that_does_not_fit_is_named_with_its_row(copy: Path) -> None:
    place = place_of(copy, 0, "boxes.shape")
    values = Pack(copy).values(0, "boxes.shape")
    whole = (copy / "parts/00000.arrow").read_bytes()
    start = whole.index(values.tobytes(), place)
    overwrite(copy / "parts/00000.arrow", start + 16 * 31, np.int64(7).tobytes())
    agree(copy, "parts/00000.arrow")
    assert "part 00000, row 31: column 'boxes' has a shape that its elements do not fill" in found(copy)


def words_pack(path: Path, compression: str) -> Path:
    rows = [{"text": f"wörd {row}", "is": np.array([row % 2 == 0, True])} for row in range(20)]
    asked = {"text": compression, "is": "none"}
    pack(rows, path, compression=asked, storage_bytes_per_s=1e12, report=Quiet())
    return path


def rewrite(path: Path, column: str, change: Callable[[bytearray, list[int]], object]) -> None:
    """Change the bytes of an uncompressed column of part 0, of which `change` is told where each row begins."""
    values, offsets = Pack(path).values(0, column).tobytes(), []
    with contextlib.suppress(DataError):
        offsets = Pack(path).offsets(0, column).tolist()
    file = path / "parts/00000.arrow"
    place, changed = file.read_bytes().index(values), bytearray(values)
    change(changed, offsets)
    overwrite(file, place, bytes(changed))
    agree(path, "parts/00000.arrow")


def test_the_row_is_named_whose_text_is_none(tmp_path: Path) -> None:
    path = words_pack(tmp_path / "a.pack", "none")

    def damage(values: bytearray, offsets: list[int]) -> None:
        values[offsets[13]] = 0xFF

    rewrite(path, "text", damage)
    assert found(path) == "part 00000, row 13: column 'text' has text that is not UTF-8."
    named = f"sample 13 of {path}, column 'text': its text is damaged: byte 0 of 8 is not UTF-8."
    for read in (lambda: Pack(path)[13], lambda: list(shoal.Loader(path, batch_size=4, seed=1))):
        with pytest.raises(DataError) as raised:
            read()
        assert str(raised.value) == named
    assert Pack(path)[12]["text"] == "wörd 12"


def test_a_character_that_two_rows_share_is_none(tmp_path: Path) -> None:
    path = words_pack(tmp_path / "a.pack", "none")
    values, offsets = Pack(path).values(0, "text"), Pack(path).offsets(0, "text")
    place = (path / "parts/00000.arrow").read_bytes().index(offsets.tobytes())
    middle = int(offsets[7]) + 2  # between the two bytes of its ö
    assert values[middle] & 0xC0 == 0x80
    overwrite(path / "parts/00000.arrow", place + 8 * 7, np.int64(middle).tobytes())
    agree(path, "parts/00000.arrow")
    assert found(path) == "part 00000, row 6: column 'text' has text that is not UTF-8."


def test_the_row_of_a_boolean_that_is_none_is_named(tmp_path: Path) -> None:
    path = words_pack(tmp_path / "a.pack", "zstd")
    rewrite(path, "is", lambda values, _: values.__setitem__(2 * 9 + 1, 7))
    assert found(path) == "part 00000, row 9: column 'is' has booleans that are neither 0 nor 1."


@pytest.mark.parametrize("shape", [(7, 3), (-1, 2), (2**32, 2**32)])
def test_a_sample_whose_shape_is_damaged_is_named(shape: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "a.pack"
    rows = [{"boxes": np.zeros((row % 4, 2), np.float32)} for row in range(40)]
    pack(rows, path, columns={"boxes": "ragged"}, compression="none", report=Quiet())
    values = Pack(path).values(0, "boxes.shape").copy()
    content = np.array(shape, np.int64).tobytes()
    place = (path / "parts/00000.arrow").read_bytes().index(values.tobytes())
    overwrite(path / "parts/00000.arrow", place + 16 * 32, content)  # which has no elements
    agree(path, "parts/00000.arrow")
    assert found(path) == "part 00000, row 32: column 'boxes' has a shape that its elements do not fill."
    named = r"sample 32 of .*a.pack, column 'boxes': its shape is damaged: .* of 0 elements"
    for read in (lambda: Pack(path)[32], lambda: list(shoal.Loader(path, batch_size=4, seed=1))):
        with pytest.raises(DataError, match=named):
            read()


def test_a_sample_whose_offsets_are_damaged_is_named(copy: Path) -> None:
    place = place_of(copy, 1, "blob")
    overwrite(copy / "parts/00001.arrow", place + 8 * 20, np.int64(10**12).tobytes())
    with pytest.raises(DataError, match=r"sample 119 of .*, column 'blob': its offsets are damaged"):
        Pack(copy)[119]


def test_a_manifest_that_lies_about_itself_is_the_one_problem(copy: Path) -> None:
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace('"num_rows": 250', '"num_rows": 251'))
    assert "num_rows is 251, but its parts have 250 rows" in found(copy)
