"""A real browser: Debian's Chromium, driven by Playwright.

    with opened(path, scheme="dark") as page:
        page.get_by_role("link", name="Loss").click()

Chromium is installed by apt where that can be done; Playwright's own browsers are never downloaded.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.needs import why_no

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_PACKAGES = ("chromium", "fonts-dejavu-core")
TIMEOUT_MS = 30_000.0
PHONE = (390, 844)
DESK = (1100, 900)


def why_not() -> str | None:
    """Return why this machine cannot have a browser, or None; it is installed where that can be done."""
    if find_spec("playwright") is None:
        return "the package playwright is not installed (it is in the extra dev)"
    return why_no(("chromium",), _PACKAGES)


@contextmanager
def started() -> Iterator["Browser"]:
    """Have a browser, ended at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without its sandbox: root may not have one, and the pages are our own.
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"], timeout=TIMEOUT_MS
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(where: Path | str, *, scheme: str = "light", size: tuple[int, int] = DESK) -> Iterator["Page"]:
    """Have the file or address `where` open in a browser of its own."""
    with started() as browser:
        page = browser.new_page(
            color_scheme="dark" if scheme == "dark" else "light", viewport={"width": size[0], "height": size[1]}
        )
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(where if isinstance(where, str) else where.resolve().as_uri())
        yield page
