"""Every code block and command of README.md and docs/ runs, or says why it does not."""

from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of, pages
from tests.docs.given import Given
from tests.docs.page import Player

PAGES = [page for page in pages() if blocks_of(page)]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return Given(tmp_path_factory.mktemp("given"))


@pytest.fixture(scope="module")
def already() -> set[str]:
    """The commands that pages have run, of the files that all of them take as given."""
    return set()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_runs(
    page: str, given: Given, already: set[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    player = Player(folder, given, already=already, full_size=request.config.getoption("--full-size"))
    played = []
    for one in player.play(blocks_of(page)):
        print(f"{one.where} " + (f"not run: {one.not_run}" if one.not_run else f"({one.seconds:.1f} s) {one.wrong}"))
        played.append(one)
    wrong = [f"{one.where}: {one.wrong}" for one in played if one.wrong]
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)
