import dataclasses
import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console

from shoal.report.live.draw import Drawing, draw, plain
from shoal.report.live.follow import Follower
from shoal.report.live.state import LiveState, WorkerState
from shoal.report.live.view import LiveView
from tests.report.live_runs import Growing


def looked(runs: Path, *, workers: int = 2, late: int | None = None, steps: int = 60) -> LiveState:
    growing = Growing(runs, workers=workers, steps=100, name=f"gpt-{workers}")
    growing.start()
    for rank in range(workers):
        growing.steps(1, steps - 30 if rank == late else steps, range(rank, rank + 1))
        growing.write(rank, "data", steps, peak_bytes=48_000_000 + rank)
    return dataclasses.replace(Follower(growing.folder).look(), silent_s=None)


def text(state: LiveState, *, width: int = 100, height: int = 40, is_ascii: bool = False) -> str:
    lines = draw(state, width=width, height=height, is_ascii=is_ascii)
    return "\n".join(line.plain for line in lines)


def test_the_view_shows_what_a_glance_asks_for(tmp_path: Path) -> None:
    assert text(looked(tmp_path)).splitlines() == [
        "gpt-2  ━━━━━━━━━━━━━━━━━━━─────────────  step 60 of 100  4 s left",
        "loss 0.0667  800 tokens/s  100 ms a step  memory 48 MB of 50 MB predicted (worker 1)",
        "loss so far █▄▂▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁",
        "a step  ·····█████████████████████████████████▒▒▒▒▒░░░░░",
        "        █ compute 70%  · data 10%  ▒ communication 10%  ░ waiting 10%",
        "worker 0 ● step 60  50% of a batch  48 MB of 50 MB",
        "worker 1 ● step 60  50% of a batch  48 MB of 50 MB  waits 20%",
    ]


@pytest.mark.parametrize("workers", [1, 5, 64])
def test_no_line_is_wider_and_no_view_higher_than_the_terminal(tmp_path: Path, workers: int) -> None:
    state = looked(tmp_path, workers=workers, late=workers - 1, steps=40)
    state = dataclasses.replace(state, hang="worker 1 is in data.py:88 " * 9, message="why\nit ended " * 30)
    for width, height in itertools.product((12, 20, 33, 50, 61, 80, 132, 220), (4, 12, 24, 60)):
        for is_ascii in (False, True):
            lines = draw(state, width=width, height=height, is_ascii=is_ascii)
            assert len(lines) <= height
            assert max(line.cell_len for line in lines) <= width


def test_a_terminal_that_knows_only_ascii_gets_nothing_else(tmp_path: Path) -> None:
    shown = text(looked(tmp_path, workers=64, late=7), is_ascii=True)
    assert shown.isascii()
    assert "# compute" in shown


def test_sixty_four_workers_are_a_grid_with_whoever_is_in_trouble_below(tmp_path: Path) -> None:
    lines = text(looked(tmp_path, workers=64, late=7), width=80, height=24).splitlines()
    assert len(lines) <= 24
    counts = next(i for i, line in enumerate(lines) if line.startswith("64 workers"))
    assert lines[counts] == "64 workers: ● 63 running, ▲ 1 late"
    assert lines[counts + 1].startswith(" 0 ● 1.6%  1 ● 1.6%")
    assert " 7 ▲ 1.6%" in lines[counts + 1]
    assert lines[-1] == "worker 7 ▲ late: step 30, 30 behind (node-1)"


def test_where_there_is_no_room_for_a_grid_the_counts_and_the_troubled_stay(tmp_path: Path) -> None:
    lines = text(looked(tmp_path, workers=64, late=7), width=80, height=9).splitlines()
    assert lines[-2:] == ["64 workers: ● 63 running, ▲ 1 late", "worker 7 ▲ late: step 30, 30 behind (node-1)"]


def test_workers_on_several_hosts_are_shown_with_theirs(tmp_path: Path) -> None:
    assert "node-1" in text(looked(tmp_path, workers=5))
    assert "node-0" not in text(looked(tmp_path, workers=2))


def test_memory_far_above_its_prediction_is_yellow(tmp_path: Path) -> None:
    state = looked(tmp_path)
    fuller = dataclasses.replace(state.workers[0], peak_bytes=70_000_000)
    for worker, style in ((state.workers[0], ""), (fuller, "yellow")):
        lines = draw(dataclasses.replace(state, workers=(worker,)), width=100, height=40)
        spans = [span.style for line in lines for span in line.spans if "MB of" in line.plain[span.start : span.end]]
        assert set(spans) == ({style} if style else set()), "in the head and in the worker's row"


def test_why_nothing_goes_on_is_said_whole(tmp_path: Path) -> None:
    hang = (
        "worker 1 is in dataset.py:88 (12.1 s), the others wait in the sum of gradients #464, bucket 0 of 2 (step 232)."
    )
    lines = text(dataclasses.replace(looked(tmp_path), hang=hang), width=70).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("waiting: "))
    assert " ".join(lines[first : first + 2]) == f"waiting: {hang}"


def test_before_any_memory_is_known_the_prediction_is_shown(tmp_path: Path) -> None:
    state = looked(tmp_path)
    unknown = tuple(dataclasses.replace(worker, peak_bytes=None) for worker in state.workers)
    assert "memory 50 MB predicted" in text(dataclasses.replace(state, workers=unknown))


def test_each_state_of_a_worker_has_its_sign() -> None:
    from shoal.report.live.draw_workers import _SIGNS
    from shoal.report.live.state import STATES

    assert set(_SIGNS) == set(STATES)


def test_a_plain_line_says_the_same_in_one_line(tmp_path: Path) -> None:
    assert plain(looked(tmp_path, late=1)) == (
        "step 60/100  loss 0.0667  800 tokens/s  4 s left  compute 80%  data 10%  communication 10%  "
        "worker 1: late: step 30, 30 behind"
    )


def test_an_ended_run_says_how_and_why(tmp_path: Path) -> None:
    state = dataclasses.replace(looked(tmp_path), status="failed", message="worker 1:\nno such file", left_s=None)
    shown = text(state)
    assert shown.startswith("gpt-2  failed  ━")
    assert "worker 1: no such file" in shown
    assert "left" not in shown
    assert plain(state).startswith("step 60/100  loss 0.0667")
    assert plain(state).endswith("  failed: worker 1: no such file")


def view_of(growing: Growing, *, is_terminal: bool, quiet: bool = False) -> tuple[LiveView, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=is_terminal, width=90, height=30, quiet=quiet, legacy_windows=False, color_system=None
    )
    return LiveView(growing.folder, steps=100, unit="tokens", console=console), out


def test_without_a_terminal_there_are_plain_lines_and_no_control_codes(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    growing.start()
    view, out = view_of(growing, is_terminal=False)
    with view:
        view.print("[worker 0] hello [bold]")
        growing.steps(1, 6)
        growing.write(0, "eval", 6, step=6, metrics={"loss": 0.5, "accuracy": None})
    lines = out.getvalue().splitlines()
    assert lines[0] == "[worker 0] hello [bold]"
    assert lines[1] == "step 6: eval loss 0.5000, eval accuracy not finite"
    assert lines[2].startswith("step 6/100  loss 0.6667  800 tokens/s  9 s left  compute 70%")
    assert len(lines) == 3
    assert "\x1b" not in out.getvalue()


def test_in_a_terminal_the_view_is_drawn_over_itself_below_what_is_printed(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    growing.start()
    view, out = view_of(growing, is_terminal=True)
    with view:
        view.poll()
        growing.steps(1, 6)
        view.print("a line of a worker")
    shown = out.getvalue()
    assert "a line of a worker" in shown
    assert "step 6 of 100" in shown.split("a line of a worker")[1]
    assert "\x1b[1A" in shown, "the cursor goes up to draw again"


def test_a_quiet_console_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing = Growing(tmp_path)
    monkeypatch.setattr(Follower, "look", lambda self: pytest.fail("it looked"))
    view, _ = view_of(growing, is_terminal=False, quiet=True)
    with view:
        view.poll()


@pytest.mark.parametrize(("look_s", "looks"), [(0.0, 400), (0.01, 50), (10.0, 20)])
def test_looking_takes_at_most_a_200th_of_a_core_and_waits_5_seconds_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_s: float, looks: int
) -> None:
    growing = Growing(tmp_path)
    now, spent, looked = [0.0], [0.0], [0]
    look = Follower.look

    def costly_look(self: Follower) -> LiveState:
        looked[0] += 1
        spent[0] += look_s
        return look(self)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.thread_time", lambda: spent[0])
    monkeypatch.setattr(Follower, "look", costly_look)
    view, _ = view_of(growing, is_terminal=False)
    for _ in range(2000):  # 100 seconds
        now[0] += 0.05
        view.poll()
    assert looked[0] == pytest.approx(looks, rel=0.2)


def test_the_drawing_fits_the_console_it_is_printed_on(tmp_path: Path) -> None:
    out = io.StringIO()
    Console(file=out, width=60, height=10, color_system=None).print(Drawing(looked(tmp_path, workers=64)))
    assert len(out.getvalue().splitlines()) <= 9


def test_a_worker_without_anything_known_can_be_drawn(tmp_path: Path) -> None:
    empty = WorkerState(
        rank=0,
        state="starting",
        words="starting",
        step=None,
        share=None,
        host="",
        peak_bytes=None,
        predicted_bytes=None,
        split={},
    )
    state = dataclasses.replace(looked(tmp_path), workers=(empty,), split={}, losses=(), step=0, steps=None)
    assert text(state).splitlines() == ["gpt-2  step 0  4 s left", "100 ms a step", "worker 0 … starting"]
