import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.report.compare_runs import beside, differences, loss_over_time, told_apart, verdict_on
from shoal.report.page.compare_page import comparison_page, render_comparison
from shoal.report.summary import summarize
from shoal.spec.plan import Batch, Mesh, Plan
from tests.support.runs import make_run, step_fields


def without_data(step: int, rank: int) -> dict[str, Any]:
    """Return a step that waits 20 ms less for its data."""
    fields = step_fields(step, rank)
    return fields | {"data_s": 0.0, "step_s": fields["step_s"] - fields["data_s"]}


def pair(folder: Path) -> tuple[RunFolder, RunFolder]:
    first, second = make_run(folder, name="slow"), make_run(folder, name="fast", step_of=without_data)
    write_toml(second.plan_toml, Plan(mesh=Mesh(replicate=2), batch=Batch(micro_batch=2)))
    return first, second


def test_the_verdict_names_the_faster_run_and_what_made_it_so(tmp_path: Path) -> None:
    first, second = (summarize(run) for run in pair(tmp_path))
    assert verdict_on(first, second) == (
        "fast is 1.25x faster than slow: 1,000 instead of 800 tokens/s; data went from 20 ms to 0 us of each step."
    )
    assert verdict_on(second, first).startswith("slow is 1.25x slower than fast: 800 instead of 1,000 tokens/s")
    assert verdict_on(first, first) == "slow is as fast as slow: 800 instead of 800 tokens/s."


def test_the_numbers_stand_beside_each_other(tmp_path: Path) -> None:
    first, second = (summarize(run) for run in pair(tmp_path))
    rows = {row.name: row.cells[1:] for row in beside(first, second)}
    assert rows["tokens/s"] == ("800", "1,000", "1.25")
    assert rows["data"] == ("20 ms", "0 us", "0.00")
    assert rows["last loss"] == ("0.3333", "0.3333", "1.00")
    assert "bubble" not in rows  # neither has any


def test_what_was_set_differently_is_named_by_its_field(tmp_path: Path) -> None:
    first, second = (summarize(run) for run in pair(tmp_path))
    assert differences(first, second) == [("plan batch.micro_batch", "none", "2")]
    assert differences(first, first) == []


def test_loss_over_time_is_the_sum_of_the_steps(tmp_path: Path) -> None:
    seconds, losses = loss_over_time(summarize(make_run(tmp_path)))
    assert len(seconds) == len(losses) == 12
    assert round(seconds[-1], 6) == 3.0  # two steps of 1 s and ten of 0.1 s


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    assert [one.run for one in told_apart(summarize(first), summarize(second))] == ["a/gpt-1", "b/gpt-1"]


def test_a_run_without_a_step_can_be_compared(tmp_path: Path) -> None:
    first, empty = summarize(make_run(tmp_path)), summarize(make_run(tmp_path, name="empty", steps=0))
    assert "cannot be compared" in verdict_on(first, empty)
    assert b"What is missing" in comparison_page(first, empty)
    assert comparison_page(empty, empty)


def test_the_terminal_shows_the_same(tmp_path: Path) -> None:
    first, second = (summarize(run) for run in pair(tmp_path))
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(render_comparison(first, second, tmp_path / "page.html"))
    assert "fast is 1.25x faster than slow" in capture.get()
    assert "plan batch.micro_batch" in capture.get()


def test_the_verb_writes_the_page_into_the_second_runs_folder(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    asked = [sys.executable, "-m", "shoal", "report", str(first.path), str(second.path), "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=100)
    said = json.loads(done.stdout)
    assert said["page"] == str(second.path / "compared-with-slow.html")
    assert "fast is 1.25x faster than slow" in Path(said["page"]).read_text()
    assert said["differences"] == [["plan batch.micro_batch", "none", "2"]]
    assert not second.report_html.exists()
