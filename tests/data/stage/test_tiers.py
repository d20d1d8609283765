"""Where a pack goes: the choice by arithmetic, and this machine's real storage."""

import os
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.core.host import available_memory
from shoal.data.stage.copies import Desk, folder_in, folder_of
from shoal.data.stage.tiers import (
    Tier,
    choose,
    find_tiers,
    given_tier,
    is_memory,
    places,
    room,
    source_rate,
)

MEMORY = Tier("memory", Path("/m"), 8e9, 180)
DISK = Tier("local", Path("/d"), 3e9, 900)
SIZES = [10] * 15


@pytest.mark.parametrize(
    ("sizes", "wanted", "source", "tier", "parts", "words"),
    [
        (SIZES, None, 0.8e9, MEMORY, range(15), "the fastest with room for the whole pack"),
        ([20] * 15, None, 0.8e9, DISK, range(15), "/m (8 GB/s, room for 180 B) has no room"),
        ([100] * 20, [3, 1, 3], 0.8e9, DISK, [3, 1], "room for the 2 parts that this node reads"),
        ([90] * 20, [3, 1], 0.8e9, MEMORY, [3, 1], "room for the 2 parts that this node reads"),
        ([300] * 9, [5, 4, 3, 2], 0.8e9, DISK, [5, 4, 3], "3 of 4 parts"),
        ([1000] * 9, None, 0.8e9, None, [], "not one part fits"),
        (SIZES, None, 7e9, None, [], "read in place at 7 GB/s: no storage of this node is clearly faster"),
        (SIZES, None, 6e9, MEMORY, range(15), "the fastest"),
        (SIZES, [14, 0], 0.0, MEMORY, [14, *range(14)], "the fastest"),
    ],
)
def test_the_fastest_with_room_is_taken_and_the_reason_said(
    sizes: list[int], wanted: list[int] | None, source: float, tier: Tier | None, parts: list[int], words: str
) -> None:
    choice = choose([MEMORY, DISK], sizes, wanted=wanted, source_bytes_per_s=source)
    assert choice.tier == tier
    assert choice.parts == tuple(parts)
    assert words in choice.reason


def test_without_any_storage_a_pack_stays_where_it_is() -> None:
    assert choose([], SIZES).tier is None


def test_this_machines_storage_is_measured_fastest_first() -> None:
    tiers = find_tiers(seconds=0.01)
    assert [tier.path for tier in tiers] == sorted((tier.path for tier in tiers), key=lambda p: -speeds(tiers)[p])
    assert {tier.path for tier in tiers} == set(places())
    assert all(tier.room_bytes >= 0 for tier in tiers)


def speeds(tiers: list[Tier]) -> dict[Path, float]:
    return {tier.path: tier.read_bytes_per_s for tier in tiers}


def test_room_keeps_a_reserve_and_a_file_system_in_memory_has_no_more_than_memory(tmp_path: Path) -> None:
    free = room(tmp_path, reserve_bytes=0)
    assert 0 < room(tmp_path, reserve_bytes=10**9) <= free - 9 * 10**8
    assert room(tmp_path, reserve_bytes=10**18) == 0
    if is_memory(Path("/dev/shm")):
        assert room(Path("/dev/shm"), reserve_bytes=0) <= available_memory() * 1.1  # it may change in between
    assert not is_memory(Path("/proc"))


def test_the_rate_of_the_source_is_that_of_reading_a_part(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(bytes(100_000))
    assert source_rate(tmp_path / "part") > 0


@pytest.mark.parametrize("how", ["a link", "another user's"])
def test_no_copy_goes_into_a_folder_that_somebody_else_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    desk, folder = Desk(tmp_path / "desk"), folder_in(tmp_path)
    if how == "a link":
        (tmp_path / "theirs").mkdir()
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.mkdir()
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        folder = folder.rename(folder_in(tmp_path))
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        given_tier(tmp_path)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        desk.join(folder_of(tmp_path, "a.pack"), timeout_s=1)
    assert list(folder.iterdir()) == []


def test_the_folder_of_copies_is_closed_to_others_even_if_it_was_open(tmp_path: Path) -> None:
    folder_in(tmp_path).mkdir(mode=0o777)
    desk = Desk(tmp_path / "desk")
    desk.join(folder_of(tmp_path, "a.pack"), timeout_s=1)
    assert folder_in(tmp_path).stat().st_mode & 0o777 == 0o700
