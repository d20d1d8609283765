from collections.abc import Iterator

import pytest

from tests.support.ranks import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-size", action="store_true", help="hold the examples at their full size against one process"
    )


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def record_difference(request: pytest.FixtureRequest) -> Iterator[dict[str, float]]:
    """Collect named differences; they are printed, largest first, when all tests have run."""
    differences: dict[str, float] = {}
    yield differences
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    reporter.write_line("\n\nlargest relative difference of a loss from the single-process run:")
    for name, difference in sorted(differences.items(), key=lambda item: -item[1]):
        reporter.write_line(f"  {difference:.1e}  {name}")
