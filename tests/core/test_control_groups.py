"""What control groups allow, as their files say it."""

from pathlib import Path

import pytest

from shoal.core.control_groups import core_quota, memory_left, memory_limit


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_are_found_in_both_versions(tmp_path: Path, version: int) -> None:
    own = tmp_path / "own"
    if version == 2:
        own.write_text("0::/job/step\n")
        (tmp_path / "job/step").mkdir(parents=True)
        (tmp_path / "job/cpu.max").write_text("150000 100000\n")
        (tmp_path / "job/step/cpu.max").write_text("max 100000\n")
        (tmp_path / "job/memory.max").write_text("1000000000\n")
        (tmp_path / "job/memory.current").write_text("700000000\n")
        (tmp_path / "job/memory.stat").write_text("anon 500000000\ninactive_file 200000000\n")
        (tmp_path / "job/step/memory.max").write_text("max\n")
    else:
        own.write_text("3:cpu,cpuacct:/job\n2:memory:/job\n")
        (tmp_path / "cpu,cpuacct/job").mkdir(parents=True)
        (tmp_path / "memory/job").mkdir(parents=True)
        (tmp_path / "cpu,cpuacct/job/cpu.cfs_quota_us").write_text("150000\n")
        (tmp_path / "cpu,cpuacct/job/cpu.cfs_period_us").write_text("100000\n")
        (tmp_path / "memory/job/memory.limit_in_bytes").write_text("1000000000\n")
        (tmp_path / "memory/job/memory.usage_in_bytes").write_text("700000000\n")
        (tmp_path / "memory/job/memory.stat").write_text("inactive_file 1\ntotal_inactive_file 200000000\n")
        (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert core_quota(tmp_path, own) == 1.5
    assert memory_limit(tmp_path, own) == 10**9
    assert memory_left(tmp_path, own) == 500_000_000


def test_where_nothing_is_limited_any_number_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    for limit in (core_quota, memory_limit, memory_left):
        assert limit(tmp_path, tmp_path / "own") is None
        assert limit(tmp_path, tmp_path / "nothing") is None
