import itertools
from pathlib import Path
from typing import Any

import pytest

from shoal.report.live import log as live_log
from shoal.report.live.log import LiveLog, sample_steps
from shoal.report.live.state import Curve
from tests.report.live_runs import Growing


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    return Growing(tmp_path)


def test_of_a_long_log_only_the_end_is_read_and_the_host_from_its_beginning(
    growing: Growing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_log, "_MOST_BYTES", 8192)
    growing.start()
    growing.steps(1, 500, range(1))
    parsed: list[bytes] = []
    parse = live_log._parsed

    def noted(line: bytes) -> dict[str, Any]:
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr(live_log, "_parsed", noted)
    log = LiveLog(growing.folder.events_of(0), 0)
    log.poll()
    assert log.last is not None
    assert (log.last.number, log.host) == (500, "node-0")
    assert len(parsed) <= live_log._MOST_STEPS + 20
    assert log.poll() == []


def test_a_sample_of_a_long_log_lies_evenly_over_it(growing: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_log, "_MOST_BYTES", 8192)
    growing.start()
    growing.steps(1, 1000, range(1))
    numbers = [step.number for step in sample_steps(growing.folder.events_of(0), 50)]
    assert 45 <= len(numbers) <= 50
    assert numbers[0] <= 25
    assert numbers[-1] >= 970
    assert max(b - a for a, b in itertools.pairwise(numbers)) <= 25


def test_a_curve_keeps_its_ends_and_few_points() -> None:
    curve = Curve(most=100)
    for step in range(1, 100_001):
        curve.add(step, float(step))
    numbers = [step for step, _ in curve.points]
    assert 50 <= len(numbers) <= 102
    assert (numbers[0], numbers[-1]) == (1, 100_000)
    curve.add(50_000, 7.0)  # gone back
    assert curve.points[-1] == (50_000, 7.0)
