"""The page of `shoal watch --web` in a real browser."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from shoal.report.live.web import WatchServer
from tests.report.live_runs import Growing
from tests.support.browser import PHONE, opened, why_not
from tests.support.needs import need
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAME = "gpt <img src=x onerror=document.title='pwned'> & 'more'"


@pytest.fixture(autouse=True)
def _needs_a_browser() -> None:
    need(why_not())


@contextmanager
def serving(growing: Growing) -> Iterator[WatchServer]:
    with WatchServer(growing.folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(timeout=20)


def begun(runs: Path, **options: Any) -> Growing:
    growing = Growing(runs, name=NAME, **options)
    growing.start()
    growing.steps(1, 20)
    growing.write(0, "data", 20, step=20, peak_bytes=40_000_000)
    return growing


def progress(page: "Page") -> str | None:
    return page.get_by_role("progressbar", name="steps done").get_attribute("aria-valuenow")


def test_the_page_shows_the_run_and_updates_itself(tmp_path: Path) -> None:
    growing = begun(tmp_path)
    with serving(growing) as server, opened(server.address) as page:
        page.get_by_text("step 20 of 100").wait_for()
        assert page.locator("h1").inner_text().replace("\n", "").startswith(NAME), "as text, never as HTML"
        assert progress(page) == "20"
        legend = page.locator("#legend").inner_text()
        assert " ".join(legend.split()) == "compute 70% data 10% communication 10% waiting 10%"
        assert "40 MB of 50 MB predicted" in page.locator("#numbers").inner_text()
        assert page.get_by_role("listitem").filter(has_text="1: step 20").count() == 1
        assert page.get_by_role("img", name="loss over steps. 0.2000 at step 20.").locator("svg.main-svg").count() >= 1
        growing.steps(21, 50)
        growing.write(0, "hang", 200, sentence="worker 1 is in data.py:8 (8.0 s).", blamed=[1], still_s=8.0)
        page.get_by_text("step 50 of 100").wait_for()
        page.get_by_role("alert").filter(has_text="Waiting: worker 1 is in data.py:8").wait_for()
        assert page.locator("li.blamed").inner_text().startswith("1: holds the others up at step 50")
        growing.folder.write_result("done")
        page.get_by_role("status").filter(has_text="done").wait_for()
        assert page.title().startswith("gpt <img")


def test_nothing_goes_wrong_in_the_browser_and_nothing_is_asked_of_others(tmp_path: Path) -> None:
    complaints: list[str] = []
    addresses: list[str] = []
    with serving(begun(tmp_path)) as server, opened(server.address) as page:
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: addresses.append(request.url))
        page.reload()
        page.get_by_text("step 20 of 100").wait_for()
        wait_until(lambda: _waited(page) and sum("/state?" in address for address in addresses) >= 2)
        assert complaints == []
        assert {f"{parts.scheme}://{parts.netloc}" for parts in map(urlsplit, addresses)} == {
            f"http://127.0.0.1:{server.server_port}"
        }


def _waited(page: "Page") -> bool:
    page.wait_for_timeout(50)  # lets the browser's messages come in
    return True


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_paper_by_day_and_by_night(tmp_path: Path, scheme: str) -> None:
    with serving(begun(tmp_path)) as server, opened(server.address, scheme=scheme) as page:
        page.get_by_text("step 20 of 100").wait_for()
        pairs = [("body", "body"), ("#numbers dd", "section"), ("#numbers dt", "section"), ("#counts", "section")]
        for text, paper in pairs:
            assert _contrast(_colour(page, text, "color"), _colour(page, paper, "backgroundColor")) > 4.5


def _colour(page: "Page", selector: str, name: str) -> list[int]:
    value: str = page.eval_on_selector(selector, f"element => getComputedStyle(element).{name}")
    return [int(part) for part in value.removeprefix("rgb(").removesuffix(")").split(",")]


def _contrast(first: list[int], second: list[int]) -> float:
    """Return the ratio of luminances, as the accessibility guidelines (WCAG 2) define it."""

    def luminance(colour: list[int]) -> float:
        linear = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("workers", [2, 64])
def test_on_a_phone_nothing_is_cut_off_and_those_in_trouble_come_first(tmp_path: Path, workers: int) -> None:
    growing = begun(tmp_path, workers=workers)
    growing.steps(21, 60, range(workers - 1))
    with serving(growing) as server, opened(server.address, size=PHONE) as page:
        page.get_by_text("step 60 of 100").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        assert page.locator("#workers li").count() == workers
        late = page.locator("#workers li.late").inner_text()
        assert late.startswith(f"{workers - 1}: late: step 20, 40 behind")
        if workers > 12:
            assert page.locator("#workers li").first.inner_text() == late


def test_a_watch_that_has_ended_is_said_on_the_page(tmp_path: Path) -> None:
    with serving(begun(tmp_path)) as server, opened(server.address) as page:
        page.get_by_text("step 20 of 100").wait_for()
        server.shutdown()
        server.server_close()
        page.get_by_role("alert").filter(has_text="No answer: the watch has ended").wait_for()
        assert page.get_by_text("step 20 of 100").is_visible(), "what was known stays"
