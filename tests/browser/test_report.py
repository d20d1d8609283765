"""The report in a real browser: opened, clicked and looked at."""

from pathlib import Path
from typing import Any

import pytest

from shoal.core.run_folder import RunFolder
from shoal.report.page.write import write_page
from tests.browser.conftest import Open
from tests.browser.looking import draw_all, lowest_contrast, nameless, overflow_px
from tests.support.browser import DESK, PHONE
from tests.support.runs import make_rich_run, make_run
from tests.support.waiting import wait_until

HOSTILE = "x</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`${alert(3)}"


@pytest.fixture(scope="module")
def rich_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(make_rich_run(tmp_path_factory.mktemp("rich")))


@pytest.fixture(scope="module")
def wide_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(make_rich_run(tmp_path_factory.mktemp("wide"), workers=64, steps=120))


def fill_of(page: Any, trace: str) -> Any:
    """Return the colour of the first bar of the split's `trace`."""
    return page.evaluate(
        "(name) => document.getElementById('split').data.find((trace) => trace.name === name).marker.color", trace
    )


def test_every_plot_is_drawn_and_the_verdict_stands_first(rich_page: Path, open_page: Open) -> None:
    page = open_page(rich_page)
    assert len(draw_all(page)) == 7
    verdict = page.locator(".verdict")
    assert "Worker 1 waits 30% of each step for worker 0" in verdict.inner_text()
    tops = page.evaluate("[...document.querySelectorAll('.verdict, nav, section')].map((e) => e.offsetTop)")
    assert tops == sorted(tops)
    assert page.title().startswith("rich-1: Worker 1 waits")


def test_words_are_there_before_any_plot_is(rich_page: Path, open_page: Open) -> None:
    page = open_page(rich_page, java_script_enabled=False)
    assert page.get_by_role("heading", name="Where the time of a step goes").is_visible()
    assert page.get_by_text("The loss was 4 at step 1").is_visible()
    assert page.get_by_text("Step 9 took 100 ms").is_visible()  # all of a choice are shown
    assert not page.locator(".plot").first.is_visible()


def test_plots_below_the_screen_are_drawn_when_they_are_near(wide_page: Path, open_page: Open) -> None:
    page = open_page(wide_page)
    page.locator("#loss").scroll_into_view_if_needed()
    page.locator("#loss svg.main-svg").first.wait_for()
    assert page.locator("#loading.drawn").count() == 0
    page.locator("#loading").scroll_into_view_if_needed()
    page.locator("#loading svg.main-svg").first.wait_for()


def test_dark_and_light_follow_the_system_and_plots_follow_at_once(rich_page: Path, open_page: Open) -> None:
    page = open_page(rich_page, scheme="light")
    draw_all(page)
    before = (page.evaluate("getComputedStyle(document.body).backgroundColor"), fill_of(page, "compute"))
    page.emulate_media(color_scheme="dark")
    wait_until(lambda: fill_of(page, "compute") != before[1])
    after = (page.evaluate("getComputedStyle(document.body).backgroundColor"), fill_of(page, "compute"))
    assert before == ("rgb(246, 247, 249)", "#2f6db5")
    assert after == ("rgb(18, 23, 30)", "#4a8ad4")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE])
def test_all_text_can_be_read(rich_page: Path, open_page: Open, scheme: str, size: tuple[int, int]) -> None:
    page = open_page(rich_page, scheme=scheme, size=size)
    draw_all(page)
    worst = lowest_contrast(page)
    assert worst["contrast"] >= 4.5, worst


@pytest.mark.parametrize("name", ["rich_page", "wide_page"])
def test_a_phone_need_not_scroll_sideways(name: str, open_page: Open, request: pytest.FixtureRequest) -> None:
    page = open_page(request.getfixturevalue(name), size=PHONE, has_touch=True, is_mobile=True)
    draw_all(page)
    assert overflow_px(page) == 0
    sizes = page.evaluate(
        "[...document.querySelectorAll('p, li, td, th, dd')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 13


def test_on_a_phone_each_worker_is_a_list_and_a_finger_scrolls_the_page(rich_page: Path, open_page: Open) -> None:
    page = open_page(rich_page, size=PHONE, has_touch=True, is_mobile=True)
    cell = page.locator(".workers td[data-label=waiting]").first
    assert cell.evaluate("(e) => getComputedStyle(e).display") == "flex"
    assert page.get_by_role("cell", name="30 ms").first.is_visible()
    draw_all(page)
    assert page.evaluate("document.getElementById('loss')._fullLayout.dragmode") is False


def test_a_value_is_shown_where_the_mouse_is(rich_page: Path, open_page: Open) -> None:
    page = open_page(rich_page)
    box = page.locator("#loss .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#loss .hoverlayer text").first.wait_for()
    assert "training" in (page.locator("#loss .hoverlayer").text_content() or "")


def test_another_traced_step_can_be_chosen(rich_page: Path, open_page: Open) -> None:
    page = open_page(rich_page)
    assert page.get_by_text("Step 6 took 100 ms").is_visible()
    assert not page.get_by_text("Step 9 took 100 ms").is_visible()
    page.get_by_label("Show").select_option("step 9 (outlier: 3.1x the median)")
    assert page.get_by_text("Step 9 took 100 ms").is_visible()
    assert not page.get_by_text("Step 6 took 100 ms").is_visible()
    page.locator("#timeline-1").scroll_into_view_if_needed()
    page.locator("#timeline-1 svg.main-svg").first.wait_for()


def test_the_page_can_be_used_without_a_mouse(rich_page: Path, open_page: Open) -> None:
    page = open_page(rich_page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "What to change next"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.get_by_role("link", name="Stragglers").focus()
    page.keyboard.press("Enter")
    assert page.url.endswith("#stragglers-section")
    where = "document.getElementById('stragglers-section').getBoundingClientRect().top"
    wait_until(lambda: abs(float(page.evaluate(where))) < 100)
    page.locator("#timeline-section summary").first.focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("region", name="Timeline of step 6, table").is_visible()
    page.get_by_label("Show").focus()
    page.keyboard.press("ArrowDown")
    assert page.get_by_text("Step 9 took 100 ms").is_visible()


def test_a_screen_reader_meets_no_nameless_thing(wide_page: Path, open_page: Open) -> None:
    page = open_page(wide_page)
    draw_all(page)
    assert nameless(page) == []
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("navigation", name="Sections").count() == 1
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.locator("html").get_attribute("lang") == "en"
    regions = page.locator("section").evaluate_all("(all) => all.map((e) => e.getAttribute('aria-labelledby'))")
    assert len(regions) == len(set(regions)) == 15
    snapshot = page.locator("#time-section").aria_snapshot()
    assert "img" in snapshot
    assert "The parts of each step over steps" in snapshot


def test_the_table_of_many_workers_is_folded_up_and_opens(wide_page: Path, open_page: Open) -> None:
    page = open_page(wide_page)
    table = page.locator("table.workers")
    assert not table.is_visible()
    page.get_by_text("All 64 workers").click()
    assert table.is_visible()
    assert table.get_by_role("row").count() == 65


def test_printed_all_plots_are_there(rich_page: Path, open_page: Open) -> None:
    page = open_page(rich_page)
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#loading.drawn").count() == 1


def test_hostile_words_are_shown_and_nothing_of_them_runs(tmp_path: Path, open_page: Open) -> None:
    name = HOSTILE.replace("/", "|")
    run = make_run(tmp_path, name=name, status="failed", message=HOSTILE, unit=HOSTILE, command=HOSTILE, metric=HOSTILE)
    page = open_page(write_page(run))
    draw_all(page)
    assert page.locator(".message").first.inner_text() == HOSTILE
    assert page.locator("img").count() == 0


def _cut(run: RunFolder) -> str:
    path = run.events_of(1)
    path.write_bytes(path.read_bytes()[:2000])
    return "The log of worker 1 ends in a half-written line"


def _unlink(run: RunFolder) -> str:
    run.events_of(1).unlink()
    return "No log of worker 1"


def _no_plan(run: RunFolder) -> str:
    run.plan_toml.unlink()
    return "the number of workers is taken from the logs"


@pytest.mark.parametrize("damage", [_cut, _unlink, _no_plan])
def test_a_damaged_run_has_a_page_that_says_what_is_missing(tmp_path: Path, open_page: Open, damage: Any) -> None:
    run = make_rich_run(tmp_path)
    sentence = damage(run)
    page = open_page(write_page(run))
    section = page.get_by_role("region", name="What is missing")
    assert sentence in section.inner_text()
    assert len(draw_all(page)) >= 3
