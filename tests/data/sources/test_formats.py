"""What single formats do beyond the contract: hostile names, bad rows among good ones, types that need care."""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from shoal.core.errors import ConfigError, DataError
from shoal.data.sources.find import open_source
from shoal.data.sources.source import Sample, Source
from tests.data.sources.beton_file import write_beton
from tests.data.sources.made import NUM_ROWS, X, Y


def everything(source: Source) -> list[Sample]:
    return [sample for part in source.slices(1 << 40) for sample in source.read(part)]


def errors(source: Source) -> list[str]:
    return [str(values) for _, values in everything(source) if isinstance(values, DataError)]


def test_a_folder_that_links_to_itself_is_refused_and_links_elsewhere_are_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/1.txt").write_text("one")
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a/0.txt").write_text("zero")
    (tree / "b").symlink_to(tmp_path / "outside")
    assert [label for label, _ in everything(open_source(tree, kind="folder"))] == ["a/0.txt", "b/1.txt"]
    (tree / "a/dead.txt").symlink_to(tmp_path / "nowhere")
    assert errors(open_source(tree, kind="folder")) == ["a/dead.txt cannot be read: No such file or directory."]
    (tree / "a/loop").symlink_to(tree)
    with pytest.raises(ConfigError, match=r"a/loop is a link to a folder above itself"):
        open_source(tree, kind="folder")


def test_folders_that_link_to_each_other_are_refused(tmp_path: Path) -> None:
    for own, other in (("a", "b"), ("b", "a")):
        (tmp_path / own).mkdir()
        (tmp_path / own / "1.txt").write_text(own)
        (tmp_path / own / "other").symlink_to(tmp_path / other)
    with pytest.raises(ConfigError, match=r"(a|b)/other/other is a link to a folder above itself"):
        open_source(tmp_path, kind="folder")


def test_a_pickle_in_lmdb_is_refused_unless_somebody_decodes_it(tmp_path: Path) -> None:
    import lmdb

    with lmdb.open(str(tmp_path / "db")) as database, database.begin(write=True) as transaction:
        transaction.put(b"\xff\x00", pickle.dumps([1, 2]))
    assert errors(open_source(tmp_path / "db"))[0].startswith("db: ff00 is a pickle, which shoal does not open")
    [(label, values)] = everything(open_source(tmp_path / "db", decode=lambda key, value: {"n": len(value)}))
    assert (label, values) == ("db: ff00", {"n": len(pickle.dumps([1, 2]))})
    assert (
        "decode raised ZeroDivisionError" in errors(open_source(tmp_path / "db", decode=lambda key, value: 1 // 0))[0]
    )


def test_a_row_that_is_missing_in_a_table_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    numbers: list[int | None] = list(range(10))
    numbers[6] = None
    pa.parquet.write_table(pa.table({"y": numbers}), tmp_path / "t.parquet", row_group_size=4)
    source = open_source(tmp_path / "t.parquet")
    assert errors(source) == ["t.parquet: row 6: column 'y' is missing. Fill it in, or leave the column out."]
    assert [int(values["y"]) for _, values in everything(source) if not isinstance(values, DataError)] == [
        *range(6),
        *range(7, 10),
    ]
    with pytest.raises(DataError, match="row 6: column 'y' is missing"):
        list(source.read_batches(source.slices(1)[1]))  # type: ignore[attr-defined]


def test_text_of_an_arrow_file_that_is_none_is_named_with_its_row(tmp_path: Path) -> None:
    words = [b"a", b"b\xff", b"c"]
    offsets = np.cumsum([0, *map(len, words)]).astype(np.int32)
    column = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(words))])
    table = pa.table({"word": column, "number": [1, 2, 3]})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table)
    found = everything(open_source(tmp_path / "t.arrow"))
    assert [values for _, values in found if not isinstance(values, DataError)] == [
        {"word": "a", "number": 1},
        {"word": "c", "number": 3},
    ]
    assert str(found[1][1]).startswith("t.arrow: record batch 0, row 1: ")
    assert "UTF8" in str(found[1][1])


def test_lists_of_an_arrow_file_with_wild_offsets_are_refused_before_they_are_read(tmp_path: Path) -> None:
    offsets = np.array([0, 2, 1_000_000, 4], np.int32)
    child = pa.array(np.arange(4))
    column = pa.Array.from_buffers(pa.list_(pa.int64()), 3, [None, pa.py_buffer(offsets)], children=[child])
    batch = pa.record_batch({"x": column})
    with pa.ipc.new_file(tmp_path / "t.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    found = everything(open_source(tmp_path / "t.arrow"))
    assert [label for label, values in found if isinstance(values, DataError)] == [
        "t.arrow: record batch 0, row 1",
        "t.arrow: record batch 0, row 2",
    ]
    assert found[0][1]["x"].tolist() == [0, 1]  # type: ignore[index]


def test_lines_of_a_csv_with_too_many_values_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4,5\n6,7\n")
    source = open_source(tmp_path / "t.csv")
    assert errors(source) == ["t.csv: line 3 has 3 values, not 2."]
    assert len(everything(source)) == 3
    (tmp_path / "t.tsv").write_text("a\tb\n1\t2\n")
    assert everything(open_source(tmp_path / "t.tsv"))[0][1] == {"a": 1, "b": 2}


def test_a_value_of_a_csv_that_is_of_another_type_in_a_later_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("a\n1\n")
    (tmp_path / "1.csv").write_text("a\n1\nx\n")
    with pytest.raises(DataError, match=r"1.csv cannot be read: .*Row #3: .*invalid value 'x'"):
        everything(open_source(tmp_path))


def test_lists_with_a_shape_are_arrays_and_one_of_another_length_is_named(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"x": [[[1.0, 2.0]], [[3.0], [4.0]], [[5.0]]]}), tmp_path / "t.parquet")
    source = open_source(tmp_path / "t.parquet", shapes={"x": (2,)})
    assert errors(source) == ["t.parquet: row 2: column 'x' has 1 elements, and the shape [2] has 2."]
    pa.parquet.write_table(pa.table({"x": [[[1.0, 2.0]], [[3.0, 4.0]]]}), tmp_path / "t.parquet")
    [column] = open_source(tmp_path / "t.parquet").columns or ()
    assert (column.kind, column.dtype, column.ndim) == ("ragged", "float64", 2)


@pytest.mark.parametrize("values", [[["a"], ["b", "c"]], [None, None], [1 + 2j]])
def test_columns_that_no_tensor_has_are_named(values: list[Any], tmp_path: Path) -> None:
    if isinstance(values[0], complex):
        np.save(tmp_path / "x.npy", np.array(values))
    else:
        pa.parquet.write_table(pa.table({"x": values}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="Column 'x' is"):
        open_source(tmp_path)


def test_rows_of_a_damaged_chunk_are_errors_and_the_others_are_read(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "x.h5", "w") as file:
        place = file.create_dataset("x", data=X, chunks=(4, 2, 3), fletcher32=True).id.get_chunk_info(1).byte_offset
    data = bytearray((tmp_path / "x.h5").read_bytes())
    data[place] ^= 1
    (tmp_path / "x.h5").write_bytes(data)
    found = everything(open_source(tmp_path / "x.h5"))
    wrong = [label for label, values in found if isinstance(values, DataError)]
    assert wrong == [f"x.h5: row {row}" for row in range(4, 8)]
    assert len(found) == NUM_ROWS


def test_a_npy_file_of_python_objects_is_not_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match=r"x.npy holds Python objects, which are not unpickled"):
        open_source(tmp_path / "x.npy")


def test_arrays_of_different_lengths_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y[:-1])
    with pytest.raises(ConfigError, match=r"arrays of a.npz differ in length \(x 23, y 22\)"):
        open_source(tmp_path / "a.npz").slices(100)
    assert len(everything(open_source(tmp_path / "a.npz", columns=["y"]))) == 22


def test_a_raw_file_that_is_not_a_whole_number_of_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(25))
    with pytest.raises(DataError, match=r"a.bin has 25 bytes, and a row of float32 \[2\] has 8: row 3 is not whole"):
        open_source(tmp_path / "a.bin", kind="raw", dtype="float32", shape=(2,))
    with pytest.raises(ConfigError, match="missing 1 required keyword-only argument: 'dtype'"):
        open_source(tmp_path / "a.bin", kind="raw")


def test_token_files_without_an_end_token_are_cut_into_rows_of_one_length(tmp_path: Path) -> None:
    numbers = np.arange(1000, dtype=np.uint16)
    (tmp_path / "t.bin").write_bytes(numbers.tobytes())
    source = open_source(tmp_path / "t.bin", kind="tokens", row_tokens=64)
    for about_bytes in (1, 300, 1 << 40):
        rows = [values["tokens"] for part in source.slices(about_bytes) for _, values in source.read(part)]  # type: ignore[index]
        assert [len(row) for row in rows] == [64] * 15 + [40]
        np.testing.assert_array_equal(np.concatenate(rows), numbers)


def test_raw_images_of_a_beton_file_become_png_where_sizes_differ(tmp_path: Path) -> None:
    from PIL import Image

    images = [np.random.default_rng(row).integers(0, 255, (3 + row, 4, 3), dtype=np.uint8) for row in range(3)]
    write_beton(tmp_path / "a.beton", [{"image": image} for image in images])
    for (_, values), image in zip(everything(open_source(tmp_path / "a.beton")), images, strict=True):
        assert not isinstance(values, DataError)
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(values["image"]))), image)


@pytest.mark.parametrize(
    "spoiled", [b"\x01\x00", b"\x02\x00\xff\xff", b"\x02\x00\x01\x00\x00\x00\x00\x00" + b"\xff" * 16]
)
def test_a_beton_file_whose_header_lies_is_named(spoiled: bytes, tmp_path: Path) -> None:
    write_beton(tmp_path / "a.beton", [{"y": 1}])
    data = (tmp_path / "a.beton").read_bytes()
    (tmp_path / "a.beton").write_bytes(spoiled + data[len(spoiled) :])
    with pytest.raises(DataError, match=r"a.beton is"):
        open_source(tmp_path / "a.beton")


def test_class_folders_are_found_or_refused(tmp_path: Path) -> None:
    for name in ("b/1.png", "a/deep/2.png", "3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n")
    assert [column.name for column in open_source(tmp_path).columns or ()] == ["image"]
    with pytest.raises(ConfigError, match=r"classes=True, but 3.png lies in no class folder"):
        open_source(tmp_path, classes=True)
    (tmp_path / "3.png").unlink()
    source = open_source(tmp_path, names=True)
    assert [values["label"] for _, values in everything(source)] == [0, 1]  # type: ignore[index]
    assert (source.columns or ())[1].extra == {"classes": ["a", "b"]}
    (tmp_path / "b" / "1.png").write_bytes(b"")
    assert errors(source) == ["b/1.png is empty."]


def test_a_hugging_face_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    import datasets

    two = datasets.DatasetDict({name: datasets.Dataset.from_dict({"x": [1, 2]}) for name in ("train", "test")})
    with pytest.raises(ConfigError, match=r"has the splits train, test. Choose one with split='train'"):
        open_source(two)
    two.save_to_disk(tmp_path / "two")
    source = open_source(tmp_path / "two", split="test")
    assert [values for _, values in everything(source)] == [{"x": 1}, {"x": 2}]
    shuffled = datasets.Dataset.from_dict({"x": list(range(9))}).select([3, 1, 8])
    assert [int(values["x"]) for _, values in everything(open_source(shuffled))] == [3, 1, 8]  # type: ignore[index]


def test_samples_of_python_objects_are_named_and_turned_into_arrays() -> None:
    values = [(torch.ones(2), 3), (torch.zeros(2), 4)]
    (_, first), _ = everything(open_source(values, columns=["image", "label"]))
    assert not isinstance(first, DataError)
    assert isinstance(first["image"], np.ndarray)
    assert int(first["label"]) == 3
    half = everything(open_source([{"x": torch.ones(2, dtype=torch.bfloat16)}]))[0][1]
    assert half["x"].dtype == torch.bfloat16  # type: ignore[index]
    assert "a sample has 2 values, and columns names 1" in errors(open_source([*values[:1]] * 2, columns=["x"]))[0]


class Failing:
    """A dataset whose row 1 raises."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> int:
        return 6 // (row - 1)


def test_a_dataset_that_raises_names_the_row_and_an_iterable_says_after_how_many() -> None:
    assert errors(open_source(Failing())) == [
        "row 1: the dataset raised ZeroDivisionError: integer division or modulo by zero."
    ]

    def failing() -> Iterator[dict[str, int]]:
        yield {"x": 1}
        raise KeyError("gone")

    with pytest.raises(DataError, match="After 1 samples the iterable raised KeyError: 'gone'"):
        everything(open_source(failing))


def test_an_iterator_that_was_read_cannot_be_read_again_and_says_so() -> None:
    source = open_source(iter([{"x": 1}]))
    assert len(everything(source)) == 1
    with pytest.raises(DataError, match="was read already and cannot begin again"):
        everything(source)
    assert source.fingerprint(source.slices(1)[0]) == ""


def test_a_squashfs_image_may_hold_any_format(tmp_path: Path) -> None:
    from shoal.data.sources.squashfs import SquashTree
    from shoal.data.sources.tree import LocalTree
    from tests.data.sources.made_files import squashfs

    squashfs(tmp_path)
    tree = SquashTree(LocalTree(tmp_path), "all.sqfs")
    assert len(tree.sizes()) == 23
    with pytest.raises(DataError, match=r"nothing.jpg is not in all.sqfs"):
        tree.read("nothing.jpg")
    with pytest.raises(ConfigError, match="unpack it with unsquashfs"):
        tree.path("cat/00.jpg")
