"""Logs of millions of steps are read in columns: what comes out is what reading them line by line brings."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.report.logs import reading
from shoal.report.summary import Summary, summarize
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import Sync
from tests.support.runs import make_rich_run, make_run

Damage = Callable[[RunFolder], object]


def step_of(step: int, rank: int) -> dict[str, Any]:
    """Return one step of a worker, each of another length; a loss now and then is not finite."""
    random = np.random.default_rng([step, rank])
    parts = dict.fromkeys(("data_s", "forward_s", "backward_s", "comm_s", "bubble_s", "optimizer_s"), 0.0)
    parts = {name: round(float(random.exponential(0.01)), 6) for name in parts}
    total = sum(parts.values()) + (0.001 if step % 2 else 0.0)
    loss = None if step == 7 else 4 / step + rank
    return {"step": step, "loss": loss, "samples": 4 + rank, "weight": 40.0, "step_s": total, **parts}


def both(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> tuple[Summary, Summary]:
    """Return the summary read line by line, and in columns."""
    small = summarize(run)
    monkeypatch.setattr(reading, "LARGE_BYTES", 0)
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 3000)  # several blocks, and lines across their edges
    return small, summarize(run)


def assert_same(small: Summary, large: Summary) -> None:
    for name in ("step_numbers", "losses", "warm_up_steps", "missing", "wall_s", "evals", "faults", "calls", "loading"):
        assert getattr(large, name) == getattr(small, name), name
    assert large.units_per_s == pytest.approx(small.units_per_s)
    assert large.samples_per_s == pytest.approx(small.samples_per_s)
    assert large.step_times == pytest.approx(small.step_times)
    assert large.pace_steps == small.pace_steps
    for mine, other in zip(large.stretches, small.stretches, strict=True):
        assert (mine.first, mine.last) == (other.first, other.last)
        assert mine.parts_s == pytest.approx(other.parts_s, abs=1e-7)
        assert mine.longest_s == pytest.approx(other.longest_s)
    for row, expected in zip(large.paces, small.paces, strict=True):
        assert row == pytest.approx(expected, abs=1e-7)  # kept in 32 bits
    for worker, expected_worker in zip(large.per_worker, small.per_worker, strict=True):
        assert worker.parts == pytest.approx(expected_worker.parts)
        assert worker.split == pytest.approx(expected_worker.split, abs=1e-7)
        assert worker.led == pytest.approx(expected_worker.led)
        assert worker.held_up_s == pytest.approx(expected_worker.held_up_s, abs=1e-7)
        assert worker.samples == expected_worker.samples
        # Of a log cut short, other steps count as warm-up.
        assert (worker.median_passes_s or 0.0) == pytest.approx(expected_worker.median_passes_s or 0.0, rel=0.2)


def test_columns_bring_what_lines_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, workers=3, steps=300, step_of=step_of)
    small, large = both(run, monkeypatch)
    assert small.steps == 300
    assert_same(small, large)


def test_so_they_do_for_all_other_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*both(make_rich_run(tmp_path), monkeypatch))


def test_so_they_do_for_workers_that_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, workers=3, steps=40, step_of=step_of)
    write_toml(run.plan_toml, Plan(mesh=Mesh(replicate=3), sync=Sync(mode="local", local_steps=4)))
    small, large = both(run, monkeypatch)
    assert small.losses[0] == pytest.approx(5)  # the mean of 4, 5 and 6
    assert small.split["waiting"] == 0
    assert large.losses == pytest.approx(small.losses)
    assert large.split == pytest.approx(small.split)


def test_throughput_is_that_of_the_steps_as_they_were_where_the_number_of_workers_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(step: int, rank: int) -> dict[str, Any]:
        alone = {"samples": 64, "weight": 640, "step_s": 1.0}
        together = {"samples": 16, "weight": 160, "step_s": 0.25 - 0.01 * rank}
        return step_of(step, rank) | {"batch_weight": 640} | (alone if step <= 100 else together)

    run = make_run(tmp_path, workers=4, steps=200, step_of=joined)
    for rank in (1, 2, 3):
        lines = run.events_of(rank).read_bytes().splitlines(keepends=True)
        run.events_of(rank).write_bytes(b"".join([lines[0], *lines[101:]]))
    small, large = both(run, monkeypatch)
    assert_same(small, large)
    assert small.samples_per_s == pytest.approx(64 * 198 / (98 * 1.0 + 100 * 0.25))
    assert small.units_per_s == pytest.approx(640 * 198 / (98 * 1.0 + 100 * 0.25))


def test_workers_of_one_tensor_that_train_on_the_same_samples_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(step: int, rank: int) -> dict[str, Any]:
        return step_of(step, rank) | {"samples": 4, "weight": 40, "batch_weight": 40, "step_s": 0.5}

    small, large = both(make_run(tmp_path, workers=2, steps=20, step_of=same), monkeypatch)
    assert_same(small, large)
    assert (small.samples_per_s, small.units_per_s) == pytest.approx((8, 80))


def test_where_logs_do_not_say_what_a_batch_weighs_it_is_what_the_workers_have_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, workers=2, steps=20, step_of=lambda *at: step_of(*at) | {"samples": 4, "step_s": 0.5})
    for rank in range(2):
        path = run.events_of(rank)
        path.write_text(path.read_text().replace('"batch_weight"', '"another"'))
    small, large = both(run, monkeypatch)
    assert_same(small, large)
    assert (small.samples_per_s, small.units_per_s) == pytest.approx((16, 160))


def _cut(run: RunFolder) -> None:
    path = run.events_of(1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _garbage(run: RunFolder) -> None:
    path = run.events_of(1)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[20:20] = [b"\x00\x00\n", b'{"kind": "step", "step": "x"}\n', b'{"kind": "step", "step": 1e400}\n', b"[1]\n"]
    lines[40:40] = [b'{"kind": "step", "time": 1\n', b'{"kind": "step"}\n', b"\n"]
    path.write_bytes(b"".join(lines))


def _twice(run: RunFolder) -> None:
    with run.events_of(0).open("a") as file:
        for step in (3, 30):
            file.write(json.dumps({"kind": "step", "time": 1000.0, **step_of(step, 2)}) + "\n")


def _without_middle(run: RunFolder) -> None:
    path = run.events_of(2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[30:]))


def _with_saving(run: RunFolder) -> None:
    """Half of the log has the part that older logs lack."""
    path = run.events_of(0)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    later = [line | ({"checkpoint_s": 0.001} if line.get("step", 0) > 20 else {}) for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in later))


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _garbage,
        _twice,
        _without_middle,
        _with_saving,
        lambda run: run.events_of(0).unlink(),
        lambda run: run.events_of(2).write_text(""),
        lambda run: run.events_of(1).write_bytes(b"\xff" * 5000),
        lambda run: [run.events_of(rank).write_text("") for rank in range(3)],
    ],
)
def test_so_they_do_for_damaged_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage) -> None:
    run = make_run(tmp_path, workers=3, steps=60, step_of=step_of)
    damage(run)
    small, large = both(run, monkeypatch)
    assert_same(small, large)


def test_a_log_that_is_a_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    run.events_of(1).unlink()
    run.events_of(1).mkdir()
    monkeypatch.setattr(reading, "LARGE_BYTES", 0)
    assert summarize(run).missing == ("The log of worker 1 cannot be read: Is a directory.",)


def test_what_the_benchmark_makes_is_a_whole_run_that_says_it_is_synthetic(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from benchmarks.report.large import make_run\n"
        "print(make_run(Path(sys.argv[1]), workers=3, steps=2000).path)"
    )
    root = Path(__file__).parents[2]
    asked = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=True, timeout=100)
    summary = summarize(RunFolder.open(Path(done.stdout.strip())))
    assert (summary.steps, summary.workers, summary.missing) == (2000, 3, ())
    assert "synthetic" in summary.message
