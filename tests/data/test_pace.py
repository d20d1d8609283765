"""How far ahead is loaded, and what the loader says about it."""

from typing import Any

from shoal.data.loading.pace import Pace


def noted(pace: Pace, *, chunks: int, **seconds: Any) -> Pace:
    for _ in range(chunks):
        pace.note(batches=4, **seconds)
    return pace


def test_loading_begins_ahead_after_three_slow_chunks_in_a_row() -> None:
    pace = noted(Pace(threads=1), chunks=2, waited_s=0.1, used_s=1.0, load_s=0.1)
    assert pace.ahead == 0
    noted(pace, chunks=1, waited_s=0.01, used_s=1.0, load_s=0.01)
    noted(pace, chunks=2, waited_s=0.1, used_s=1.0, load_s=0.1)
    assert pace.ahead == 0
    noted(pace, chunks=1, waited_s=0.1, used_s=1.0, load_s=0.1)
    assert pace.ahead == 2


def test_single_slow_chunks_are_met_by_loading_further_ahead_up_to_a_limit() -> None:
    pace = noted(Pace(threads=2, is_ahead=True), chunks=10, waited_s=0.0, used_s=1.0, load_s=1.0)
    assert pace.ahead == 2
    noted(pace, chunks=1, waited_s=0.5, used_s=1.0, load_s=3.0)
    assert pace.ahead == 3
    noted(pace, chunks=100, waited_s=0.2, used_s=1.0, load_s=1.0)
    assert pace.ahead == 16


def test_no_depth_is_tried_where_loading_does_not_keep_up() -> None:
    pace = noted(Pace(threads=1, is_ahead=True), chunks=50, waited_s=1.0, used_s=1.0, load_s=2.0)
    assert pace.ahead == 2
    report = pace.report()
    assert report.is_bottleneck
    assert str(report) == (
        "Loading is the bottleneck: 50% of the time was spent waiting for data (250 ms of 500 ms a batch); "
        "to keep up, 2.0 threads would have to load, and there were 1."
    )


def test_a_fixed_depth_stays_as_it_is() -> None:
    assert noted(Pace(threads=1, prefetch=0), chunks=9, waited_s=1.0, used_s=0.0, load_s=1.0).ahead == 0
    assert noted(Pace(threads=1, prefetch=5), chunks=9, waited_s=1.0, used_s=1.0, load_s=0.5).ahead == 5


def test_the_report_says_when_loading_is_not_the_bottleneck() -> None:
    assert str(Pace(threads=1).report()) == "Nothing has been loaded yet."
    report = noted(Pace(threads=1), chunks=2, waited_s=0.004, used_s=1.0, load_s=0.01).report()
    assert not report.is_bottleneck
    assert str(report) == (
        "Loading is not the bottleneck: 0.4% of the time was spent waiting (1 ms of 251 ms a batch)."
    )
    busy = noted(Pace(threads=2, is_ahead=True), chunks=2, waited_s=1.0, used_s=0.001, load_s=2.0).report()
    assert str(busy).endswith("the worker does nothing else, and 2 thread(s) load as fast as they can.")


def test_a_worker_that_was_busy_with_something_else_for_a_while_is_not_taken_for_a_slow_one() -> None:
    pace = noted(Pace(threads=2, is_ahead=True), chunks=9, waited_s=0.9, used_s=0.1, load_s=2.0)
    noted(pace, chunks=1, waited_s=0.0, used_s=1000.0, load_s=2.0)
    noted(pace, chunks=90, waited_s=0.9, used_s=0.1, load_s=2.0)
    assert pace.ahead == 2


def test_chunks_that_are_used_in_no_time_are_not_loaded_further_ahead() -> None:
    pace = noted(Pace(threads=2, is_ahead=True), chunks=90, waited_s=1e-3, used_s=2e-4, load_s=1e-4)
    assert pace.ahead == 2
