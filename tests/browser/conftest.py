"""Pages in a real browser (tests/support/browser.py); where there can be none, these tests are skipped."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import DESK, TIMEOUT_MS, started, why_not
from tests.support.needs import need

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    need(why_not())
    with started() as browser:
        yield browser


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[Open]:
    """Opens files: `open_page(path, scheme="dark", size=PHONE)`. At the end, nothing may have gone wrong in any page,
    and none may have asked for anything but its own file."""
    said: list[str] = []
    contexts = []

    def note_dialog(dialog: "Dialog") -> None:
        said.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def note_request(url: str, own: str) -> None:
        if not _is_own(url, own):
            said.append(f"asked: {url}")

    def open_one(path: Path, *, scheme: str = "light", size: tuple[int, int] = DESK, **options: Any) -> "Page":
        own = path.resolve().as_uri()
        context = browser.new_context(
            color_scheme="dark" if scheme == "dark" else "light",
            viewport={"width": size[0], "height": size[1]},
            **options,
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", note_dialog)
        page.on("request", lambda request: note_request(request.url, own))
        page.goto(own)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert said == []


def _is_own(url: str, own: str) -> bool:
    return url.split("#", maxsplit=1)[0] == own or url.startswith(("data:", "blob:"))
