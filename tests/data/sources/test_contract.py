"""What every source keeps to, whatever its format."""

import contextlib
import json
import multiprocessing
import pickle
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.infer import infer_columns
from shoal.data.pack.reader import open_pack
from shoal.data.pack.writer import pack
from shoal.data.sources.find import open_source
from shoal.data.sources.rows import rows_of
from shoal.data.sources.source import Slice, Source
from tests.data.sources.formats import FORMATS
from tests.data.sources.made import NUM_ROWS, Made

ON_DISK = [name for name in FORMATS if name not in ("dataset", "iterable", "huggingface_object")]
BY_URL = [name for name in ON_DISK if name not in ("lmdb", "huggingface")]
LIBRARIES = {"hdf5": "h5py", "zarr3": "zarr", "lmdb": "lmdb", "huggingface": "datasets", "squashfs": "PySquashfsImage"}
WITH_IMAGES = ("folder", "webdataset", "lmdb", "huggingface", "huggingface_object", "squashfs", "beton")
"""Their images only begin as such: the writer, which looks further, would refuse them."""
TIMEOUT_S = 120


@pytest.fixture(params=FORMATS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    return FORMATS[request.param](tmp_path)


@pytest.fixture
def source(made: Made) -> Source:
    return open_source(made.src, **made.options)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def read_slices(source: Source, about_bytes: int) -> list[tuple[str, Mapping[str, Any]]]:
    """Return all samples; an error among them fails the test."""
    found = [sample for part in source.slices(about_bytes) for sample in source.read(part)]
    for _, values in found:
        if isinstance(values, DataError):
            raise values
    return found  # type: ignore[return-value]


def raise_first(source: Source, slices: list[Slice]) -> None:
    """Raise the first error among the samples."""
    for part in slices:
        for _, values in source.read(part):
            if isinstance(values, DataError):
                raise values


def read_backwards(pickled: bytes) -> list[tuple[str, Mapping[str, Any]]]:
    """Return all samples, the slices read from the last to the first: called in another process."""
    source, slices = pickle.loads(pickled)
    read = [list(source.read(part)) for part in reversed(slices)]
    return [sample for samples in reversed(read) for sample in samples]


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert list(found) == list(expected) or sorted(found) == sorted(expected)
    for name, value in expected.items():
        if isinstance(value, (str, bytes)):
            assert type(found[name]) is type(value)
            assert found[name] == value
        else:
            np.testing.assert_array_equal(found[name], value, strict=isinstance(value, np.ndarray))
            assert np.asarray(found[name]).dtype == np.asarray(value).dtype


def test_the_samples_are_those_that_were_written_whatever_the_size_of_slices(made: Made, source: Source) -> None:
    whole = read_slices(source, 1 << 40)
    assert len(whole) == NUM_ROWS
    for (_, values), expected in zip(whole, made.samples, strict=True):
        assert_same(values, expected)
    for about_bytes in (1, 40, 100, 1000, 3000):
        cut = read_slices(source, about_bytes)
        assert [label for label, _ in cut] == [label for label, _ in whole]
        for (_, values), (_, expected) in zip(cut, whole, strict=True):
            assert_same(values, expected)


def test_small_slices_are_many_where_the_format_can_be_cut(source: Source) -> None:
    kind = source.describe()["kind"]
    slices = source.slices(1)
    assert len(slices) > (1 if kind not in ("iterable", "npz", "arrow") and "gz" not in str(source.describe()) else 0)
    assert sum(part.num_bytes for part in slices) > 0 or kind == "iterable"


def test_slices_are_read_in_any_order_in_another_process(
    made: Made, source: Source, elsewhere: ProcessPoolExecutor
) -> None:
    message = pickle.dumps((source, source.slices(100)))
    found = elsewhere.submit(read_backwards, message).result(TIMEOUT_S)
    for (_, values), expected in zip(found, made.samples, strict=True):
        assert_same(values, expected)


def test_labels_name_rows_each_with_its_own(source: Source) -> None:
    labels = [label for label, _ in read_slices(source, 100)]
    assert len(set(labels)) == NUM_ROWS
    assert not any("/" in label[:1] for label in labels)


def test_batches_hold_the_same_rows_under_the_same_labels(source: Source) -> None:
    if not hasattr(source, "read_batches"):
        pytest.skip("this format has no batches")
    assert source.columns is not None
    for about_bytes in (100, 1 << 40):
        rows = [
            row
            for part in source.slices(about_bytes)
            for batch in source.read_batches(part)
            for row in rows_of(batch, source.columns)
        ]
        for (label, values), (expected_label, expected) in zip(rows, read_slices(source, about_bytes), strict=True):
            assert label == expected_label
            assert not isinstance(values, DataError)
            assert_same(values, expected)


def test_the_declared_columns_are_those_inferred_from_the_samples(made: Made, source: Source) -> None:
    inferred = {column.name: column for column in infer_columns(made.samples)}
    declared = source.columns or infer_columns([values for _, values in read_slices(source, 1 << 40)])
    assert {column.name for column in declared} == set(inferred)
    for column in declared:
        expected = inferred[column.name]
        kind = "ragged" if column.kind == "tokens" else column.kind
        assert (kind, column.dtype, column.shape) == (expected.kind, expected.dtype, expected.shape), column
        assert column.ndim == expected.ndim


def test_the_description_is_json_without_absolute_paths(source: Source, tmp_path: Path) -> None:
    text = json.dumps(source.describe())
    assert json.loads(text) == source.describe()
    assert str(tmp_path) not in text
    assert '"/' not in text
    assert {"kind", "name"} <= set(source.describe())


@pytest.mark.parametrize("name", ON_DISK)
def test_a_source_that_changes_while_it_is_read_is_noticed(name: str, tmp_path: Path) -> None:
    made = FORMATS[name](tmp_path)
    source = open_source(made.src, **made.options)
    part = source.slices(1)[0]
    before = source.fingerprint(part)
    assert before
    assert source.fingerprint(part) == before
    assert pickle.loads(pickle.dumps(source)).fingerprint(part) == before
    written = made.files[0].read_bytes()
    made.files[0].write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    assert source.fingerprint(part) != before


@pytest.mark.parametrize("name", [name for name in ON_DISK if not name.startswith(("text", "plain", "json"))])
def test_a_file_that_is_cut_off_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    made = FORMATS[name](tmp_path)
    file = made.files[0]
    written = file.read_bytes()
    shown = "db" if name == "lmdb" else file.stem
    lengths = {"folder": [0], "tokens": [len(written) // 2 | 1]}.get(name, [len(written) // 2, len(written) // 2 + 3])
    for length in lengths:
        file.write_bytes(written[:length])
        with pytest.raises((DataError, ConfigError)) as caught:
            read_slices(open_source(made.src, **made.options), 100)
        said = str(caught.value)
        assert shown in said or name in ("zarr2", "zarr3", "huggingface"), said
        assert str(tmp_path) not in said
        assert said.endswith(".")
        assert "\n" not in said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pyarrow's, of CSV that is not UTF-8
@pytest.mark.parametrize("name", [name for name in ON_DISK if name not in ("hdf5", "lmdb", "zarr2", "zarr3")])
def test_damage_anywhere_is_read_or_an_error_of_shoals_own(name: str, tmp_path: Path) -> None:
    made = FORMATS[name](tmp_path)
    file, draw = made.files[0], np.random.default_rng(3)
    written = file.read_bytes()
    for _ in range(15):
        damaged = bytearray(written)
        for place in draw.integers(0, [min(len(written), 400), len(written)], (2, 2)).ravel().tolist():
            damaged[place] = int(draw.integers(0, 256))
        file.write_bytes(damaged)
        with contextlib.suppress(DataError, ConfigError):
            read_slices(open_source(made.src, **made.options), 100)


@pytest.mark.parametrize("name", ON_DISK)
def test_what_is_gone_after_opening_is_an_error_not_an_end(name: str, tmp_path: Path) -> None:
    made = FORMATS[name](tmp_path)
    source = open_source(made.src, **made.options)
    slices = source.slices(1 << 40)
    other = pickle.loads(pickle.dumps(source))
    for file in made.files:
        file.unlink()
    if name.startswith("zarr"):
        return  # a chunk that is not there is the fill value; the fingerprint tells
    with pytest.raises(DataError):
        raise_first(other, slices)


@pytest.mark.parametrize("name", BY_URL)
def test_a_url_gives_the_same_samples_as_the_path(name: str, tmp_path: Path) -> None:
    import fsspec

    made = FORMATS[name](tmp_path)
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/bucket/{path.relative_to(tmp_path)}", path.read_bytes())
    url = "memory://bucket" + str(made.src).removeprefix(str(tmp_path))
    source = open_source(url, **made.options)
    found = read_slices(pickle.loads(pickle.dumps(source)), 100)
    for (_, values), expected in zip(found, made.samples, strict=True):
        assert_same(values, expected)
    part = source.slices(1)[0]
    assert source.fingerprint(part) == source.fingerprint(part) != ""
    assert "memory" not in json.dumps(source.describe())


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_missing_is_named_with_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FORMATS[name](tmp_path)
    monkeypatch.setitem(__import__("sys").modules, LIBRARIES[name], None)
    with pytest.raises(ConfigError, match=rf"needs {LIBRARIES[name]}.*pip install 'shoal\["):
        open_source(made.src, **made.options)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in WITH_IMAGES])
def test_a_pack_made_of_it_holds_the_same_samples(name: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    made = FORMATS[name](tmp_path / "src")
    pack(made.src, tmp_path / "out.pack", part_bytes=1000, workers=1, compression="none", **made.options)
    packed = open_pack(tmp_path / "out.pack")
    assert len(packed) == NUM_ROWS
    for row, expected in enumerate(made.samples):
        assert_same(packed[row], expected)
    packed.close()


def test_a_folder_moved_elsewhere_is_the_same_source(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    made = FORMATS["webdataset"](tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first, second = (open_source(str(made.src).replace("/a/", f"/{where}/")) for where in "ab")
    assert [label for label, _ in read_slices(first, 100)] == [label for label, _ in read_slices(second, 100)]
