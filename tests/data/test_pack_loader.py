"""Batches gathered from packs, beside the plain way to the same samples."""

import threading
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import ConfigError, DataError
from shoal.data.loader import Loader
from shoal.data.pack.reader import Pack
from shoal.data.stage.staged import in_place
from shoal.data.view import View
from shoal.spec.parts import cut
from tests.data.pack.sources import sample
from tests.data.packs import NUM_ROWS, expected, labels, rows_pack

UNEQUAL = (0.25, 0.25, 0.10, 0.4)
SHARES = [(1.0,), (0.5, 0.5), (1 / 3,) * 3, UNEQUAL, (0.2,) * 5, (0.125,) * 8]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = rows_pack(tmp_path_factory.mktemp("packs") / "rows.pack", NUM_ROWS)
    assert len(Pack(path).manifest.parts) > 3
    return path


@pytest.mark.parametrize("batch_size", [1, 8, 33, 500])
def test_batches_are_the_samples_of_the_order_one_batch_after_the_other(rows: Path, batch_size: int) -> None:
    loader = Loader(rows, batch_size=batch_size, columns=["label"])
    assert len(loader) == -(-NUM_ROWS // batch_size)
    assert labels(loader) == expected(batch_size)
    assert labels(loader) == expected(batch_size, epoch=1), "each iteration is the next epoch"


@pytest.mark.parametrize("block_rows", [None, 7])
@pytest.mark.parametrize("shares", SHARES, ids=len)
def test_each_global_batch_is_the_same_however_many_workers_take_it(
    rows: Path, shares: tuple[float, ...], block_rows: int | None
) -> None:
    options: dict[str, Any] = {"batch_size": 33, "epochs": 2, "columns": ["label"], "block_rows": block_rows, "seed": 3}
    alone = labels(Loader(rows, **options))
    for threads in (1, 3):
        workers = [labels(Loader(rows, shares=shares, index=i, threads=threads, **options)) for i in range(len(shares))]
        assert [[*chain(*parts)] for parts in zip(*workers, strict=True)] == alone
        bounds = cut(33, shares)
        assert [len(worker[0]) for worker in workers] == list(np.diff(bounds))


def test_a_pack_and_a_dataset_of_the_same_samples_give_the_same_batches(rows: Path) -> None:
    dataset = [{"label": row} for row in range(NUM_ROWS)]
    for block_rows in (None, 16):
        options: dict[str, Any] = {"batch_size": 20, "seed": 5, "block_rows": block_rows}
        assert labels(Loader(rows, columns=["label"], **options)) == labels(Loader(dataset, **options))


def test_a_block_shuffle_sees_each_sample_once_and_opens_few_blocks_at_a_time(rows: Path) -> None:
    seen = [*chain(*labels(Loader(rows, batch_size=10, block_rows=2, columns=["label"])))]
    assert sorted(seen) == list(range(NUM_ROWS))
    assert seen != list(range(NUM_ROWS))
    for first in range(0, NUM_ROWS - 32, 32):
        assert len({row // 2 for row in seen[first : first + 32]}) <= 17  # 16 blocks, and perhaps the short one


@pytest.mark.parametrize("compression", ["none", "lz4", {"x": "zstd", "text": "lz4", "words": "zstd", "label": "none"}])
def test_every_kind_of_column_is_what_was_packed(tmp_path: Path, compression: Any) -> None:
    path = rows_pack(tmp_path / "rows.pack", 60, compression=compression)
    for batch in Loader(path, batch_size=13):
        wanted = [sample(row) for row in batch["label"].tolist()]
        assert batch["x"].dtype == torch.float32
        assert np.array_equal(batch["x"].numpy(), np.stack([each["x"] for each in wanted]))
        assert batch["even"].dtype == torch.bool
        assert batch["even"].tolist() == [each["even"] for each in wanted]
        assert batch["text"] == [each["text"] for each in wanted]
        assert batch["blob"] == [each["blob"] for each in wanted]
        for name in ("words", "boxes"):
            for found, each in zip(batch[name], wanted, strict=True):
                assert np.array_equal(found.numpy(), each[name])
                assert found.numpy().dtype == each[name].dtype


def test_arrays_of_any_length_come_padded_or_packed_on_request(rows: Path) -> None:
    options: dict[str, Any] = {"batch_size": 9, "columns": ["label", "words"]}
    for padded, packed in zip(
        Loader(rows, ragged="padded", **options), Loader(rows, ragged="packed", **options), strict=True
    ):
        bounds = packed["words.offsets"].tolist()
        assert padded["label"].tolist() == packed["label"].tolist()
        for i, row in enumerate(padded["label"].tolist()):
            words = sample(row)["words"]
            assert padded["words.length"][i] == len(words)
            assert padded["words"][i].tolist() == [*words, *[0] * (padded["words"].shape[1] - len(words))]
            assert packed["words"][bounds[i] : bounds[i + 1]].tolist() == words.tolist()
    with pytest.raises(ConfigError, match=r"ragged='padded' is for one dimension; column 'boxes' has 2"):
        next(iter(Loader(rows, batch_size=9, ragged="padded")))


def test_a_view_is_a_map_style_dataset(rows: Path) -> None:
    view = View(rows, columns=["x", "label", "text", "words"])
    assert len(view) == NUM_ROWS
    assert view[-1]["label"] == NUM_ROWS - 1
    many = view.__getitems__([5, 0, 5])
    assert [int(each["label"]) for each in many] == [5, 0, 5]
    assert np.array_equal(many[0]["x"].numpy(), sample(5)["x"])
    assert many[0]["text"] == sample(5)["text"]
    assert many[0]["words"].tolist() == sample(5)["words"].tolist()
    with pytest.raises(IndexError):
        view[NUM_ROWS]
    with pytest.raises(DataError, match=r"has no column 'labels'"):
        View(rows, columns=["labels"])


def test_batches_that_are_kept_are_copied_on_request(rows: Path) -> None:
    kept = list(Loader(rows, batch_size=10, columns=["label"], copy=True))
    assert [batch["label"].tolist() for batch in kept] == expected(10)


def test_a_batch_stays_as_it_is_until_the_next_one_is_asked_for(rows: Path) -> None:
    wanted = expected(200) + expected(200, epoch=1)
    # One batch a chunk, many ahead: what is loaded meanwhile goes elsewhere.
    batches = iter(Loader(View(rows, columns=["label", "x"]), batch_size=200, epochs=2, prefetch=4, threads=2))
    for samples in wanted:
        batch = next(batches)
        assert batch["label"].tolist() == samples
        assert np.array_equal(batch["x"][-1].numpy(), sample(samples[-1])["x"])


def test_transforms_get_seeds_that_depend_on_the_sample_alone(rows: Path) -> None:
    def noted(batch: dict[str, Any], seeds: torch.Tensor) -> dict[str, Any]:
        return {"label": batch["label"].clone(), "seed": seeds}

    def seen(**options: Any) -> dict[int, int]:
        loader = Loader(rows, columns=["label"], transform=noted, seed=4, **options)
        return {
            label: seed for b in loader for label, seed in zip(b["label"].tolist(), b["seed"].tolist(), strict=True)
        }

    alone = seen(batch_size=20)
    assert len(set(alone.values())) == NUM_ROWS
    assert seen(batch_size=7, threads=3) == alone
    parts = [seen(batch_size=50, shares=(0.5, 0.5), index=index) for index in (0, 1)]
    assert parts[0] | parts[1] == alone


def test_a_missing_part_is_named_and_the_threads_end(tmp_path: Path) -> None:
    path = rows_pack(tmp_path / "rows.pack", 100)
    (path / "parts" / "00001.arrow").unlink()
    with pytest.raises(DataError, match=r"00001.arrow is missing"):
        list(Loader(path, batch_size=10, threads=2))
    assert [thread for thread in threading.enumerate() if thread.name == "shoal-loader"] == []


def test_parts_that_arrive_later_are_waited_for_and_change_nothing(rows: Path) -> None:
    arrived = threading.Event()
    asked: list[int] = []

    def locate(part: int, name: str) -> Path:
        asked.append(part)
        assert part < 2 or arrived.wait(timeout=60)
        return rows / name

    late = View(Pack(rows, locate=locate), columns=["label"])
    batches = iter(Loader(late, batch_size=10, shuffle=False, prefetch=0))
    first = next(batches)["label"].tolist()
    assert asked == [0]
    arrived.set()
    assert [first, *(batch["label"].tolist() for batch in batches)] == labels(
        Loader(rows, batch_size=10, shuffle=False, columns=["label"])
    )


def test_a_staged_pack_is_loaded_like_any_other(rows: Path) -> None:
    assert labels(Loader(in_place(rows), batch_size=10, columns=["label"])) == expected(10)


def test_a_transform_that_fails_is_named_with_its_step_and_line(rows: Path) -> None:
    def broken(batch: dict[str, Any]) -> None:
        raise ValueError(f"{len(batch['label'])} at once")

    with pytest.raises(DataError, match=r"transform\(batch\) failed at step 1: ValueError: 10 at once \(.*test_pack"):
        list(Loader(rows, batch_size=10, transform=broken))


def test_what_cannot_be_is_refused_in_one_sentence(rows: Path) -> None:
    for options, sentence in [
        ({"batch_size": 0}, r"Loader\(batch_size=0\) must be a whole number of at least 1"),
        ({"batch_size": 500, "drop_last": True}, r"203 samples make no batch of 500"),
        ({"batch_size": 5, "shares": (0.5, 0.6), "index": 0}, r"shares are fractions of 1"),
        ({"batch_size": 5, "prefetch": "some"}, r"prefetch='some'"),
        ({"batch_size": 5, "window": 9}, r"needs one column of tokens"),
        ({"batch_size": 5, "stride": 9}, r"stride and with_documents are for windows of tokens"),
        ({"batch_size": 5, "with_documents": True}, r"stride and with_documents are for windows of tokens"),
        ({"batch_size": 5, "block_rows": 0}, r"Loader\(block_rows=0\) must be a whole number of at least 1"),
        ({"batch_size": 5, "threads": -1}, r"Loader\(threads=-1\) must be a whole number of at least 1"),
        ({"batch_size": 5, "device": "meta"}, r"Loader\(device='meta'\): batches go to cpu or cuda"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            Loader(rows, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"window=...\) is for the path of a pack, not for list"):
        Loader([1, 2], batch_size=1, window=9)
    with pytest.raises(ConfigError, match=r"needs a pack or a dataset"):
        Loader(iter([1]), batch_size=1)


def test_drop_last_leaves_out_what_is_no_whole_batch(rows: Path) -> None:
    loader = Loader(rows, batch_size=50, columns=["label"], drop_last=True)
    assert labels(loader) == expected(50)[:4]
    assert labels(loader) == expected(50, epoch=1)[:4]


def test_nothing_as_long_as_the_dataset_is_ever_made() -> None:
    import tracemalloc

    class Huge:
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> int:
            return index

    for block_rows in (None, 4096):
        tracemalloc.start()
        batches = iter(Loader(Huge(), batch_size=64, block_rows=block_rows))
        assert len(set(next(batches).tolist())) == 64
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 4_000_000
