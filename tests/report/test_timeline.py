import json
from pathlib import Path
from typing import Any

import pytest

from shoal.core.run_folder import RunFolder
from shoal.report.page.timeline_figure import timeline_caption, timeline_figure, timeline_rows
from shoal.report.page.write import write_page
from shoal.report.summary import summarize
from shoal.report.timeline import MOST_STEPS, read_timelines
from tests.support.runs import make_rich_run, make_run


def test_a_traced_step_is_laid_out_by_its_moments(rich_run: RunFolder) -> None:
    asked, outlier = read_timelines(rich_run, summarize(rich_run))
    assert (asked.title, asked.why) == ("step 6", "asked")
    assert outlier.why == "outlier: 3.1x the median"
    assert asked.rows == ["0 compute", "0 links", "1 compute", "1 links"]
    spans = [span for span in asked.spans if span.row == "0 compute"]
    assert [span.kind for span in spans] == ["data", "forward", "backward", "optimizer"]
    assert [span.start_s for span in spans] == pytest.approx([0, 0.02, 0.05, 0.09])
    assert [span.seconds for span in spans] == pytest.approx([0.02, 0.03, 0.03, 0.01])


def test_the_plot_has_a_bar_for_each_span_and_the_table_their_sums(rich_run: RunFolder) -> None:
    timeline = read_timelines(rich_run, summarize(rich_run))[0]
    figure = timeline_figure(timeline)
    assert [trace["name"] for trace in figure["data"]] == ["data", "forward", "backward", "optimizer", "communication"]
    assert sum(len(trace["x"]) for trace in figure["data"]) == 10
    kinds, rows = timeline_rows(timeline)
    assert kinds == ["data", "forward", "backward", "optimizer", "communication"]
    assert rows[0] == ["0 compute", "20 ms", "30 ms", "30 ms", "10 ms", "-"]


def test_without_a_trace_the_mean_step_is_laid_out_and_said(run: RunFolder) -> None:
    (timeline,) = read_timelines(run, summarize(run))
    kinds = [span.kind for span in timeline.spans if span.row == "1"]
    assert kinds == ["data", "backward", "waiting", "communication", "optimizer"]
    assert sum(span.seconds for span in timeline.spans if span.row == "1") == pytest.approx(0.1)
    assert "No step was traced" in timeline_caption(timeline)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"traceEvents": 7}',
        b'{"traceEvents": [7, null, {"ph": "X"}, {"ph": "X", "ts": "a", "dur": 1}, {"ph": "X", "ts": 1, "dur": -5}]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_damaged_trace_is_left_out(rich_run: RunFolder, content: bytes) -> None:
    rich_run.trace_of(0, 6).write_bytes(content)
    asked, _ = read_timelines(rich_run, summarize(rich_run))
    assert asked.rows == ["1 compute", "1 links"]
    assert write_page(rich_run).exists()


def test_many_traces_do_not_make_a_large_page(tmp_path: Path) -> None:
    run = make_rich_run(tmp_path)
    spans = [{"ph": "X", "tid": 0, "name": "forward", "cat": "compute", "ts": i, "dur": 1 + i} for i in range(5000)]
    for step in range(1, 40):
        run.trace_of(0, step).write_text(json.dumps({"traceEvents": spans}))
    timelines = read_timelines(run, summarize(run))
    assert len(timelines) == MOST_STEPS
    assert max(len(timeline.spans) for timeline in timelines) <= 310
    assert write_page(run).stat().st_size < 10_000_000


def test_a_hostile_trace_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.traces.mkdir()
    hostile = "</script><script>alert(1)</script>"
    span: dict[str, Any] = {"ph": "X", "tid": 0, "name": hostile, "cat": hostile, "ts": 1, "dur": 5}
    lane = {"ph": "M", "name": "thread_name", "tid": 0, "args": {"name": hostile}}
    run.trace_of(0, 3).write_text(json.dumps({"traceEvents": [span, lane, span | {"tid": 1}]}))
    assert write_page(run).read_bytes().count(b"<script>alert(1)") == 0
