import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.launch.wishes import Wishes
from shoal.report.advice import advise
from shoal.report.summary import Summary, summarize
from shoal.report.table import render
from shoal.report.verdict import headline, remarks
from tests.support.runs import step_fields

MakeRun = Callable[..., RunFolder]
StepFields = Callable[[int, int], dict[str, Any]]


def shown(summary: Summary, width: int = 120) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render(summary))
    return capture.get()


def cut_lines(path: Path, keep: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:keep]))


def test_the_numbers_of_a_whole_run_are_those_worked_out_by_hand(run: RunFolder) -> None:
    summary = summarize(run)
    assert (summary.run, summary.status, summary.workers) == ("gpt-1", "done", 2)
    assert (summary.steps, summary.planned_steps) == (12, 12)
    assert summary.losses == tuple(4 / step for step in range(1, 13))
    # A steady step takes 0.1 s, 0.02 s of it for data, and trains 4 samples of weight 40 on each of 2 workers.
    assert summary.samples_per_s == pytest.approx(80)
    assert summary.units_per_s == pytest.approx(800)
    assert summary.step_s == pytest.approx(0.08)
    parts = {"data_s": 0.02, "forward_s": 0.03, "backward_s": 0.03, "comm_s": 0.01, "bubble_s": 0.0}
    assert summary.parts == pytest.approx(parts | {"optimizer_s": 0.01, "checkpoint_s": 0.0})  # the log has no saving
    assert summary.peak_bytes == (60_000_000, 60_000_001)
    assert summary.wall_s == pytest.approx(13)  # the first start at 1000, the last end at 1013
    assert summary.metrics == {"loss": 5 / 12, "accuracy": 0.6}
    assert [step for step, _ in summary.evals] == [6, 12]
    assert summary.missing == ()


def test_the_slowest_worker_is_the_busiest_one_not_the_one_that_waits(run: RunFolder) -> None:
    summary = summarize(run)
    assert summary.slowest is not None
    assert summary.slowest.rank == 0
    assert not any("waits" in sentence for sentence in remarks(summary))
    assert advise(summary)[0].sentence.startswith("Worker 1 waits 30% of each step for worker 0, which takes")


@pytest.mark.parametrize(("steps", "left_out"), [(1, 0), (2, 1), (10, 1), (11, 2)])
def test_warm_up_steps_are_left_out_of_the_means(tmp_path: Path, make_run: MakeRun, steps: int, left_out: int) -> None:
    summary = summarize(make_run(tmp_path, steps=steps))
    assert summary.warm_up_steps == left_out
    seconds = [1.0 if step <= 2 else 0.1 for step in range(1, steps + 1)][left_out:]
    assert summary.samples_per_s == pytest.approx(8 * len(seconds) / sum(seconds))


def test_the_json_holds_every_promised_key_and_is_plain(run: RunFolder) -> None:
    plain = summarize(run).as_json()
    promised = "run status message workers steps losses samples_per_s units_per_s unit wall_s step_s parts peak_bytes"
    assert set(f"{promised} predicted metrics missing".split()) <= set(plain)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    expected = {"step_s": 0.08, "comm_s": 0.01, "samples_per_s": 100.0, "peak_bytes": [50_000_000, 50_000_000]}
    assert plain["predicted"].items() >= expected.items()
    assert plain["split"] == pytest.approx(
        {
            "data": 0.02,
            "compute": 0.055,
            "communication": 0.01,
            "bubble": 0,
            "checkpoint": 0,
            "waiting": 0.015,
            "other": 0,
        }
    )


def test_a_plan_without_prediction_gives_null(tmp_path: Path, make_run: MakeRun) -> None:
    assert summarize(make_run(tmp_path, predicted=None)).as_json()["predicted"] is None


def test_a_loss_that_is_not_finite_stays_a_gap(tmp_path: Path, make_run: MakeRun, step_fields: StepFields) -> None:
    def with_a_gap(step: int, rank: int) -> dict[str, Any]:
        return step_fields(step, rank) | ({"loss": None} if step == 3 else {})

    losses = summarize(make_run(tmp_path, step_of=with_a_gap)).losses
    assert losses[2] is None
    assert losses[3] == 1.0


def test_a_step_written_twice_counts_once_as_it_was_last(run: RunFolder, step_fields: StepFields) -> None:
    log = EventLog(run.events_of(0))
    log.write("step", **step_fields(12, 0) | {"loss": 9.0})
    log.close()
    summary = summarize(run)
    assert (summary.steps, summary.losses[-1]) == (12, 9.0)


# Damage: each kind leaves a report, and a sentence.


def test_an_absent_log_is_said_and_the_losses_come_from_the_next_worker(run: RunFolder) -> None:
    run.events_of(0).unlink()
    summary = summarize(run)
    assert summary.missing == ("No log of worker 0: times and memory there are not counted.",)
    assert len(summary.losses) == 12
    assert summary.peak_bytes == (None, 60_000_001)
    assert summary.samples_per_s == pytest.approx(80), "what a global batch weighs, the others know"


def test_a_log_cut_short_is_said_and_the_rest_comes_from_the_others(run: RunFolder) -> None:
    cut_lines(run.events_of(0), 1 + 5)  # its start and five steps
    summary = summarize(run)
    assert summary.missing == (
        "The log of worker 0 was cut short: it ends at step 5, the run went on to step 12.",
        "The log of worker 0 has no end, so its peak memory is unknown.",
    )
    assert summary.losses == tuple(4 / step for step in range(1, 13))
    assert summary.samples_per_s == pytest.approx(80)


def test_a_half_written_last_line_is_said(run: RunFolder) -> None:
    path = run.events_of(1)
    path.write_bytes(path.read_bytes()[:-10])
    missing = summarize(run).missing
    assert "The log of worker 1 ends in a half-written line, left out." in missing
    assert "The log of worker 1 has no end, so its peak memory is unknown." in missing


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\x00\x00\x00",
        b"\xff\xfe not json",
        b"[1, 2]",
        b'{"kind": 7}',
        b'{"kind": "step"}',
        b'{"kind": "step", "step": "twelve", "step_s": 1}',
        b'{"kind": "eval", "step": 3, "metrics": [1]}',
    ],
)
def test_damaged_lines_are_counted_and_left_out(run: RunFolder, line: bytes) -> None:
    path = run.events_of(0)
    path.write_bytes(line + b"\n" + path.read_bytes())
    summary = summarize(run)
    assert summary.missing == ("The log of worker 0 has 1 damaged line, left out.",)
    assert summary.samples_per_s == pytest.approx(80)


def test_a_number_no_float_can_hold_damages_only_its_line(run: RunFolder, step_fields: StepFields) -> None:
    with run.events_of(0).open("a") as file:
        file.write(json.dumps({"kind": "step"} | step_fields(12, 0) | {"step_s": 10**400}) + "\n")
        file.write('{"kind": "step", "step": 12, "step_s": NaN}\n')
    assert summarize(run).missing == ("The log of worker 0 has 2 damaged lines, left out.",)


def test_steps_lost_in_the_middle_are_counted(run: RunFolder) -> None:
    path = run.events_of(1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4] + lines[6:]))
    assert summarize(run).missing == ("The log of worker 1 lacks 2 of the steps up to 12.",)


def test_kinds_of_a_later_version_are_passed_over(run: RunFolder) -> None:
    with run.events_of(0).open("a") as file:
        file.write('{"kind": "weather", "time": 1005.0, "sky": "blue"}\n')
    assert summarize(run).missing == ()


def test_an_unfinished_run_is_said(tmp_path: Path, make_run: MakeRun) -> None:
    summary = summarize(make_run(tmp_path, status=None))
    assert summary.status == "unfinished"
    assert summary.missing == ("The run has not said how it ended: it still goes on, or it was cut off.",)
    assert headline(summary).startswith("Unfinished after 12 of 12 steps on 2 workers at 800 tokens/s")


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", '{"status": 3}'])
def test_a_damaged_result_does_not_stop_the_report(run: RunFolder, content: str) -> None:
    run.result_json.write_text(content)
    assert headline(summarize(run))


@pytest.mark.parametrize("name", ["plan.toml", "job.toml", "run.toml", "cluster.toml"])
@pytest.mark.parametrize("content", [None, b"", b"= what", b"\xff\xfe", b"nonsense = 1"])
def test_each_file_may_be_absent_or_damaged(run: RunFolder, name: str, content: bytes | None) -> None:
    (run.path / name).unlink()
    if content is not None:
        (run.path / name).write_bytes(content)
    summary = summarize(run)
    # An empty plan.toml is a valid plan for one worker: what is said then is that the other worker is none of its own.
    is_default_plan = (name, content) == ("plan.toml", b"")
    assert any(("The plan has no worker 1" if is_default_plan else name) in sentence for sentence in summary.missing)
    assert shown(summary)


def test_without_a_plan_the_logs_say_how_many_workers_there_were(run: RunFolder) -> None:
    run.plan_toml.unlink()
    summary = summarize(run)
    assert summary.workers == 2
    assert "Without a plan, the number of workers is taken from the logs: 2." in summary.missing


def test_a_log_that_no_worker_of_the_plan_wrote_is_left_out(run: RunFolder) -> None:
    run.events_of(5).write_text("")
    assert summarize(run).missing == ("The plan has no worker 5: what is logged there is left out.",)


def test_the_logs_of_workers_that_were_added_count_and_those_that_were_ended_are_not_cut_short(run: RunFolder) -> None:
    Wishes(run, 2).note(3)
    for rank in (0, 2):
        with closing(EventLog(run.events_of(rank))) as log:
            log.write("joined", time=1003.0, joined=[2], workers=3, step=3)
            log.write("step", time=1004.5, **step_fields(4, rank))
            log.write("loss", time=1005.0, dead=[2], ended=[2], workers=2, step=4)
    summary = summarize(run)
    assert summary.workers == 3
    assert summary.faults[-1].sentence == "Worker 2 was ended; 2 go on."
    assert summary.missing == ("The log of worker 2 has no end, so its peak memory is unknown.",)
    assert shown(summary)


def test_a_log_that_is_a_folder_is_said(run: RunFolder) -> None:
    run.events_of(1).unlink()
    run.events_of(1).mkdir()
    assert summarize(run).missing == ("The log of worker 1 cannot be read: Is a directory.",)


def test_an_empty_folder_still_has_a_report(tmp_path: Path) -> None:
    summary = summarize(RunFolder(tmp_path))
    assert (summary.workers, summary.steps, summary.samples_per_s) == (0, 0, None)
    assert "before the first step" in headline(summary)
    assert shown(summary)


def test_steps_that_took_no_time_have_a_report(tmp_path: Path, make_run: MakeRun, step_fields: StepFields) -> None:
    def at_once(step: int, rank: int) -> dict[str, Any]:
        return {name: 0.0 if name.endswith("_s") else value for name, value in step_fields(step, rank).items()}

    assert shown(summarize(make_run(tmp_path, step_of=at_once)))


def test_a_number_that_no_worker_measures_is_damage(run: RunFolder, step_fields: StepFields) -> None:
    with run.events_of(0).open("a") as file:
        file.write(json.dumps({"kind": "step"} | step_fields(12, 0) | {"step_s": 1e300}) + "\n")
    assert summarize(run).missing == ("The log of worker 0 has 1 damaged line, left out.",)


# The terminal.


def test_the_terminal_shows_predicted_beside_measured_within_90_columns(run: RunFolder) -> None:
    run.report_html.write_text("")
    lines = shown(summarize(run), width=200).splitlines()
    assert max(len(line.rstrip()) for line in lines if "report.html" not in line) <= 90
    rows = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert rows["samples/s"] == ["samples/s", "100", "80", "0.80"]
    assert rows["peak memory, worker 1"][-5:] == ["50", "MB", "60", "MB", "1.20"]
    assert any(line.endswith(str(run.report_html)) for line in lines)


def test_the_headline_of_a_good_run_names_rate_and_wait(run: RunFolder) -> None:
    assert headline(summarize(run)) == (
        "Trained 12 steps on 2 workers at 800 tokens/s; 10% of each step was spent waiting for communication."
    )


def test_markup_and_escape_codes_in_a_message_are_shown_not_obeyed(tmp_path: Path, make_run: MakeRun) -> None:
    summary = summarize(make_run(tmp_path, status="failed", message="[bold]x[/nope] \x1b[31mred"))
    assert "[bold]x[/nope] ?[31mred" in shown(summary)


def test_a_report_imports_neither_torch_nor_numpy_nor_plotly(run: RunFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from shoal.core.run_folder import RunFolder\n"
        "from shoal.report.summary import summarize; from shoal.report.page.write import write_page\n"
        "from shoal.report.table import render\n"
        "run = RunFolder.open(Path(sys.argv[1])); render(summarize(run)); write_page(run)\n"
        "print(sorted({'torch', 'numpy', 'plotly'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
