"""Whatever numbers a run's logs hold, it gets its page, its summary in the terminal, and its JSON."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from rich.console import Console

from shoal.core.events import STEP_PARTS
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.report.logs.reading import LARGE_BYTES
from shoal.report.page.write import write_page
from shoal.report.summary import summarize
from shoal.report.table import render
from shoal.spec.plan import Batch, Mesh, Plan, Predicted
from shoal.spec.sync import Sync
from tests.support.runs import make_run, step_fields

WORKERS = 2
PLAUSIBLE = st.sampled_from([0.0, -1e-9, 1e-300, 1e-6, 0.1, 3.0, 1e9]) | st.floats(0, 10)
"""Seconds; a clock that was cut into parts gives a little less than nothing now and then."""
WILD = PLAUSIBLE | st.sampled_from([-1.0, -1e300, 1e300, 1e308])


def steps(seconds: SearchStrategy[float]) -> SearchStrategy[list[list[dict[str, Any]]]]:
    """Return what draws the steps of each worker."""
    step = st.fixed_dictionaries(
        {
            "loss": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "samples": st.integers(0, 8),
            "weight": seconds,
            "batch_weight": seconds,
            "step_s": seconds,
            **dict.fromkeys(STEP_PARTS, seconds),
        }
    )
    return st.lists(st.lists(step, min_size=1, max_size=3), min_size=WORKERS, max_size=WORKERS)


def others(seconds: SearchStrategy[float]) -> SearchStrategy[list[dict[str, Any]]]:
    """Return what draws events about loading and saving."""
    loading = st.fixed_dictionaries(
        {
            "kind": st.just("data"),
            "step": st.just(3),
            "steps": st.integers(0, 3),
            "samples": st.integers(0, 12),
            "bytes": st.integers(0, 10**9),
            **dict.fromkeys(("wait_s", "fill_s", "fill_cpu_s"), seconds),
            **dict.fromkeys(("threads", "depth"), st.integers(0, 4)),
        }
    )
    saved = st.fixed_dictionaries(
        {"kind": st.just("checkpoint"), "step": st.just(3), "bytes": st.integers(0, 9), "stall_s": seconds}
        | {"write_s": seconds}
    )
    return st.lists(loading | saved, max_size=2)


def _plan(mesh: Mesh, sync: Sync, **fields: Any) -> Plan:
    return Plan(mesh=mesh, sync=sync if mesh.pipeline == 1 else Sync(), **fields)


def plans(seconds: SearchStrategy[float]) -> SearchStrategy[Plan]:
    """Return what draws plans with predictions."""
    fields = dict.fromkeys(("step_s", "comm_s", "samples_per_s", "bubble_s", "fixed_s", "sample_s"), seconds)
    predicted = st.builds(Predicted, peak_bytes=st.sampled_from([(0, 0), (50_000_000,)]), **fields)
    return st.builds(
        _plan,
        mesh=st.sampled_from([Mesh(replicate=2), Mesh(pipeline=2)]),
        sync=st.sampled_from([Sync(), Sync(mode="local", local_steps=4)]),
        batch=st.builds(Batch, micro_batch=st.sampled_from([None, 1, 2, 4])),
        predicted=st.none() | predicted,
    )


def run_of(runs: Path, plan: Plan, steps: list[list[dict[str, Any]]], others: list[dict[str, Any]]) -> RunFolder:
    """Write a run whose logs hold these `steps`, of each worker, and the `others` after them."""

    def step_of(step: int, rank: int) -> dict[str, Any]:
        return step_fields(step, rank) | (steps[rank][step - 1] if step <= len(steps[rank]) else {})

    run = make_run(runs, workers=WORKERS, steps=max(map(len, steps)), step_of=step_of)
    write_toml(run.plan_toml, plan)
    with run.events_of(0).open("a") as file:
        file.writelines(json.dumps({"time": 1013.0, **event}) + "\n" for event in others)
    return run


def told(plan: Plan, steps: list[list[dict[str, Any]]], others: list[dict[str, Any]], *, is_large: bool) -> str:
    """Return what the terminal shows of a run, once its page is written and its JSON can be read."""
    console = Console(width=1000, force_terminal=False)
    large_bytes = 0 if is_large else LARGE_BYTES
    with (
        TemporaryDirectory() as runs,
        mock.patch("shoal.report.page.write.plotly_source", return_value=b""),  # the same 5 MB on each page
        mock.patch("shoal.report.logs.reading.LARGE_BYTES", large_bytes),
    ):
        run = run_of(Path(runs), plan, steps, others)
        summary = summarize(run)
        assert write_page(run, summary).is_file()
        assert json.loads(json.dumps(summary.as_json(), allow_nan=False))
        with console.capture() as shown:
            console.print(render(summary))
    return shown.get()


@settings(max_examples=60, deadline=None)
@given(plan=plans(PLAUSIBLE), steps=steps(PLAUSIBLE), others=others(PLAUSIBLE), is_large=st.booleans())
def test_no_plausible_values_stop_a_report_or_an_adviser(
    plan: Plan, steps: list[list[dict[str, Any]]], others: list[dict[str, Any]], is_large: bool
) -> None:
    assert "could not be worked out" not in told(plan, steps, others, is_large=is_large)


@settings(max_examples=60, deadline=None)
@given(plan=plans(WILD), steps=steps(WILD), others=others(WILD), is_large=st.booleans())
def test_no_values_at_all_stop_a_report(
    plan: Plan, steps: list[list[dict[str, Any]]], others: list[dict[str, Any]], is_large: bool
) -> None:
    assert told(plan, steps, others, is_large=is_large)
