"""Make the screenshots of docs/report.md from real runs: python docs/screenshots.py [--runs FOLDER] (make screenshots).

1. `shoal train examples/gpt.py` with 2 workers starts, one of which is given seven of the eight samples of a batch.
   While it runs, the live view is taken as a terminal shows it, and as `shoal watch --web` serves it.
2. When it is done, its report is opened in Chromium: on a desk, and on a phone in the dark.
3. A second run follows the first advice of the report, and is compared with the first.

Takes about three minutes on two cores; other work on them is in the pictures, too. Needs Chromium (Debian's package)
and the extra dev.
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # run as a script: shoal/ and tests/ are there

from shoal.core.run_folder import RunFolder  # noqa: E402
from shoal.report.advice import advise, flags_of  # noqa: E402
from shoal.report.live.draw import Drawing  # noqa: E402
from shoal.report.live.watch import look_once  # noqa: E402
from shoal.report.live.web import WatchServer  # noqa: E402
from shoal.report.summary import summarize  # noqa: E402
from tests.browser.looking import draw_all  # noqa: E402
from tests.support.browser import DESK, PHONE, started, why_not  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = ROOT / "docs" / "images"
_STEPS, _LIVE_AT_STEP = 40, 24
_TIMEOUT_S = 900.0
_COLUMNS = 100


def main() -> int:
    """Run, look, and write the images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, help="where the runs are kept (default: nowhere)")
    asked = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"No screenshots: {reason}.", file=sys.stderr)
        return 1
    runs = asked.runs or Path(tempfile.mkdtemp(prefix="shoal-screenshots-"))
    try:
        with started() as browser:
            _live(browser, runs)
            _report(browser, runs / "gpt")
            _comparison(browser, runs)
    finally:
        if asked.runs is None:
            shutil.rmtree(runs, ignore_errors=True)
    return 0


def _train(runs: Path, name: str, *flags: str) -> "subprocess.Popen[bytes]":
    """Start a run of the example."""
    asked = [sys.executable, "-m", "shoal", "train", "examples/gpt.py", "--workers", "2", "--steps", f"{_STEPS}"]
    return subprocess.Popen([*asked, "--runs", str(runs), "--name", name, *flags], cwd=ROOT)


def _finish(process: "subprocess.Popen[bytes]") -> None:
    try:
        code = process.wait(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    if code != 0:
        raise SystemExit(f"shoal train has ended with code {code}: no screenshots of it.")


def _live(browser: "Browser", runs: Path) -> None:
    """Run the example, and take the live view on its way."""
    process = _train(runs, "gpt", "--trace", "20:22", "--shares", "0.875,0.125", "--no-live-shares")
    try:
        folder = _wait_for(runs / "gpt", process)
        with _page(browser, DESK) as page:
            page.set_content(_terminal(folder))
            page.locator("svg").screenshot(path=IMAGES / "live.png")
        with WatchServer(folder, port=0) as server:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
            with _page(browser, DESK) as page:
                page.goto(server.address)
                page.locator("svg.main-svg").first.wait_for()
                page.wait_for_timeout(2500)  # so that it has updated itself
                page.screenshot(path=IMAGES / "live-web.png")
            server.shutdown()
    finally:
        _finish(process)


def _wait_for(path: Path, process: "subprocess.Popen[bytes]") -> RunFolder:
    """Return the run's folder once it has done some steps."""
    until_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < until_s and process.poll() is None:
        if (path / "run.toml").is_file() and (look_once(RunFolder(path)).step or 0) >= _LIVE_AT_STEP:
            return RunFolder(path)
        time.sleep(0.5)
    raise SystemExit(f"the run did not come to step {_LIVE_AT_STEP}: no screenshots of it.")


def _terminal(folder: RunFolder) -> str:
    """Return the live view as a terminal shows it, as SVG in HTML."""
    from rich.console import Console

    console = Console(record=True, width=_COLUMNS, force_terminal=True, file=io.StringIO())
    console.print(Drawing(look_once(folder)))
    return f'<body style="margin:0">{console.export_svg(title=f"shoal watch {folder.name}")}</body>'


def _report(browser: "Browser", path: Path) -> None:
    page_file = RunFolder(path).report_html
    with _page(browser, DESK) as page:
        page.goto(page_file.resolve().as_uri())
        draw_all(page)
        _picture(page, "report.png", height=1500)
        page.locator("#timeline-section").screenshot(path=IMAGES / "report-timeline.png")
    with _page(browser, PHONE, scheme="dark") as page:
        page.goto(page_file.resolve().as_uri())
        draw_all(page)
        _picture(page, "report-phone.png", height=1500)


def _comparison(browser: "Browser", runs: Path) -> None:
    advices = advise(summarize(RunFolder.open(runs / "gpt")))
    if not advices or advices[0].change is None:
        raise SystemExit("the report of the run has no advice to follow: no screenshot of a comparison.")
    _finish(_train(runs, "gpt-as-advised", "--no-live-shares", *flags_of(advices[0].change).split()))
    paths = [runs / "gpt", runs / "gpt-as-advised"]
    subprocess.run([sys.executable, "-m", "shoal", "report", *map(str, paths)], check=True, timeout=100)
    with _page(browser, DESK) as page:
        page.goto((paths[1] / "compared-with-gpt.html").resolve().as_uri())
        draw_all(page)
        _picture(page, "comparison.png", height=1500)


@contextmanager
def _page(browser: "Browser", size: tuple[int, int], scheme: str = "light") -> "Iterator[Page]":
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]},
        device_scale_factor=1.5,
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page.set_default_timeout(60_000)
    try:
        yield page
    finally:
        page.close()


def _picture(page: "Page", name: str, *, height: int) -> None:
    """Take the top of the page."""
    page.evaluate("window.scrollTo(0, 0)")
    width = int(page.evaluate("document.documentElement.clientWidth"))
    full = int(page.evaluate("document.documentElement.scrollHeight"))
    clip = {"x": 0.0, "y": 0.0, "width": float(width), "height": float(min(height, full))}
    page.screenshot(path=IMAGES / name, clip=clip, full_page=True)


if __name__ == "__main__":
    sys.exit(main())
