"""The comparison of two runs and the page about a sweep, in a real browser."""

import json
from pathlib import Path

import pytest

from shoal.report.page.compare_page import write_comparison
from shoal.report.page.sweep import write_sweep_page
from shoal.report.summary import summarize
from tests.browser.conftest import Open
from tests.browser.looking import draw_all, lowest_contrast, nameless, overflow_px
from tests.support.browser import DESK, PHONE
from tests.support.runs import make_rich_run, make_run

SIZES = pytest.mark.parametrize("size", [DESK, PHONE])
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    first, second = summarize(make_run(folder, workers=2)), summarize(make_rich_run(folder, workers=4))
    return write_comparison(first, second, folder / "two.html")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    trials = [
        {"number": i, "state": "pruned" if i % 5 == 4 else "complete", "value": 1 / (i + 1)}
        | {"parameters": {"lr": 10.0**-i, "act": "relu" if i % 2 else "gelu"}}
        for i in range(12)
    ]
    counts = {"wanted": 12, "complete": 10, "pruned": 2, "failed": 0, "direction": "minimize", "file": "train.py"}
    said = counts | {"best": trials[11] | {"number": 11}, "trials": trials}
    (folder / "sweep.json").write_text(json.dumps(said))
    return write_sweep_page(folder)


@SIZES
@SCHEMES
def test_a_comparison_can_be_read_everywhere(
    comparison: Path, open_page: Open, scheme: str, size: tuple[int, int]
) -> None:
    page = open_page(comparison, scheme=scheme, size=size)
    assert len(draw_all(page)) == 1
    assert lowest_contrast(page)["contrast"] >= 4.5
    assert overflow_px(page) == 0
    assert nameless(page) == []
    assert "rich-1 is 2.00x faster than gpt-1" in page.locator(".verdict").inner_text()


def test_the_loss_is_shown_over_steps_or_over_time(comparison: Path, open_page: Open) -> None:
    page = open_page(comparison)
    draw_all(page)
    page.get_by_label("Loss over").select_option("training time")
    page.locator("#loss-time").scroll_into_view_if_needed()
    page.locator("#loss-time svg.main-svg").first.wait_for()
    assert not page.locator("#loss").is_visible()
    assert page.evaluate("document.getElementById('loss-time').data.map((line) => line.name)") == ["gpt-1", "rich-1"]


def test_the_differing_settings_stand_in_a_table(comparison: Path, open_page: Open) -> None:
    page = open_page(comparison)
    table = page.get_by_role("region", name="What was set differently, table")
    assert "plan mesh.replicate" in table.inner_text()


@SIZES
@SCHEMES
def test_a_sweep_can_be_read_everywhere(sweep: Path, open_page: Open, scheme: str, size: tuple[int, int]) -> None:
    page = open_page(sweep, scheme=scheme, size=size)
    assert len(draw_all(page)) == 3
    assert lowest_contrast(page)["contrast"] >= 4.5
    assert overflow_px(page) == 0
    assert nameless(page) == []
    assert "in trial 11 is the best" in page.locator(".verdict").inner_text()


def test_a_sweeps_points_can_be_looked_at(sweep: Path, open_page: Open) -> None:
    page = open_page(sweep)
    draw_all(page)
    page.locator("#parameter-0").scroll_into_view_if_needed()
    box = page.locator("#parameter-0 .points path").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#parameter-0 .hoverlayer text").first.wait_for()
    assert "trial 0" in (page.locator("#parameter-0 .hoverlayer").text_content() or "")
