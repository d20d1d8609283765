"""The first batch of a pack of 10^9 samples: nothing of its size is read, or held in memory."""

from pathlib import Path
from typing import Any

import pytest

from shoal.data.loader import Loader
from shoal.data.pack.check import check_pack
from shoal.data.stage.first_reads import first_reads
from shoal.data.stage.moved import first_samples
from shoal.data.view import View
from tests.data.huge import huge_rows, huge_tokens

NUM_SAMPLES, NUM_PARTS = 10**9, 1000
PACKED_ROWS = 10**8  # of 512 tokens
# An index of one byte a sample would be 1 GB, of one bit 125 MB. The manifest of 1,000 parts has 0.2 MB.
MOST_HELD_BYTES, MOST_READ_BYTES = 64 << 20, 4 << 20


def figure(file: str, name: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("huge")
    return {
        "rows": huge_rows(folder / "rows.pack", num_rows=NUM_SAMPLES, part_rows=NUM_SAMPLES // NUM_PARTS),
        "tokens": huge_tokens(folder / "tokens.pack", num_parts=NUM_PARTS, part_tokens=2 * NUM_SAMPLES // NUM_PARTS),
        "documents": huge_tokens(
            folder / "documents.pack", num_parts=NUM_PARTS, part_tokens=512 * PACKED_ROWS // NUM_PARTS
        ),
    }


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rows", {}),
        ("rows", {"block_rows": 1000}),
        ("rows", {"shuffle": False}),
        ("tokens", {"window": 3}),
        ("documents", {"window": 512, "pack_documents": True}),
    ],
    ids=str,
)
def test_the_first_batch_of_10_to_the_9_samples_takes_little_memory_and_few_reads(
    name: str, options: dict[str, Any], packs: dict[str, Path]
) -> None:
    held, read = figure("status", "RssAnon") * 1024, figure("io", "rchar")
    loader = Loader(packs[name], batch_size=256, seed=1, **options)
    batches = loader._batches(len(loader) // 2, len(loader))  # as after a resume: no position is far away
    first = next(iter(next(batches).values()))
    assert len(first) == 256
    assert len(loader) * 256 > 0.99 * (PACKED_ROWS if name == "documents" else NUM_SAMPLES)
    assert figure("status", "RssAnon") * 1024 - held < MOST_HELD_BYTES
    assert figure("io", "rchar") - read < MOST_READ_BYTES
    batches.close()  # type: ignore[attr-defined]


def test_a_sample_at_the_far_end_is_found_and_one_behind_it_is_refused(packs: dict[str, Path]) -> None:
    view = View(packs["rows"])
    assert [*view[NUM_SAMPLES - 1]] == [*view[0]]
    with pytest.raises(IndexError):
        view[NUM_SAMPLES]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_of_staging_is_found_by_a_look_at_few_positions(shuffle: bool, packs: dict[str, Path]) -> None:
    from shoal.data.order import Order

    view = View(packs["rows"])
    order = Order(NUM_SAMPLES, is_shuffled=shuffle)
    parts = first_reads(first_samples(view), order, batch_size=64, mine=(0, 64), num_reads=NUM_SAMPLES)
    assert sorted(parts) == list(range(NUM_PARTS))
    assert (parts == sorted(parts)) is not shuffle
    blocks = Order(NUM_SAMPLES, block_rows=NUM_SAMPLES // NUM_PARTS)
    found = first_reads(first_samples(view), blocks, batch_size=64, mine=(0, 16), num_reads=NUM_SAMPLES)
    exactly = first_reads(first_samples(view), blocks, batch_size=64, mine=(0, 16), num_reads=8 * 10**6, looks=10**7)
    assert {*found[:16]} == {*exactly[:16]}, "the parts of the first group of blocks come first"


def test_a_sparse_pack_is_a_valid_pack(tmp_path: Path) -> None:
    assert check_pack(huge_rows(tmp_path / "rows.pack", num_rows=300_000, part_rows=100_000)) == []
    assert check_pack(huge_tokens(tmp_path / "tokens.pack", num_parts=2, part_tokens=100_000)) == []
