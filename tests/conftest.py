import os
from collections.abc import Iterator
from typing import Any

# Two tests run at once, and what they start computes: threads that spin while they wait take the cores from each other,
# and tests take five times as long. OpenMP reads this when torch is loaded, which the imports below do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.hosts import why_not as hosts_why_not
from tests.support.needs import need
from tests.support.ranks import RankPool
from tests.support.slurm import SlurmCluster, slurm_cluster
from tests.support.slurm import why_not as slurm_why_not

DIFFERENCES = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-size",
        action="store_true",
        help="hold the examples at their full size against one process; what is to be mended",
    )


class TwoGroups(LoadScopeScheduling):  # type: ignore[misc]
    """Gives one process the tests that mostly wait or import, one after the other, and another all the rest.

    Two of the rest at once take longer than one after the other: processes that wait for each other lose their cores.
    """

    def _split_scope(self, nodeid: str) -> str:
        patient = ("tests/launch", "tests/tasks", "tests/cli", "tests/docs", "tests/fault")
        return "waiting" if nodeid.startswith(patient) else "busy"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let `--dist loadgroup` mean these two groups."""
    return TwoGroups(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def slurm_daemons() -> Iterator[SlurmCluster]:
    need(slurm_why_not())
    with slurm_cluster(nodes=4, cpus=2) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_daemons: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """A Slurm of 4 nodes, the same for all tests, which this process reaches; its jobs are ended after each test."""
    for name, value in slurm_daemons.env.items():
        monkeypatch.setenv(name, value)
    yield slurm_daemons
    slurm_daemons.clear()


@pytest.fixture(scope="session")
def _needs_hosts() -> None:
    need(hosts_why_not())


@pytest.fixture(scope="session")
def record_difference(request: pytest.FixtureRequest) -> dict[str, float]:
    """What is put in here under a name is printed, largest first, when all tests have run."""
    return request.config.stash.setdefault(DIFFERENCES, {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where tests run in several processes, hand over what this one has recorded."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["differences"] = session.config.stash.get(DIFFERENCES, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what one of these processes has recorded."""
    node.config.stash.setdefault(DIFFERENCES, {}).update(getattr(node, "workeroutput", {}).get("differences", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    differences = config.stash.get(DIFFERENCES, {})
    if differences:
        terminalreporter.section("largest relative difference of a loss from that of one process")
    for name, difference in sorted(differences.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{difference:.1e}  {name}")
