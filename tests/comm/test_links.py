"""Real links between hosts: measured, cut, and what the survivors say. Network namespaces with shaped links."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.comm.algorithms import Wire
from shoal.comm.group import joined
from shoal.comm.pairs import Links, gather_hosts, measure_links
from shoal.comm.rank import Rank
from shoal.comm.store import connect, host_store
from shoal.core.toml import read_toml, write_toml
from shoal.spec.device import Link
from tests.comm.alive_worker import TIMEOUT_S
from tests.comm.test_alive import lines
from tests.support.hosts import Hosts, hosts
from tests.support.ranks import RankPool

NAMED = Link(source="the site's own page", bytes_per_s=12.5e9, latency_s=2e-6)
needs_hosts = pytest.mark.usefixtures("_needs_hosts")


def start_all(cluster: Hosts, count: int, **options: Any) -> list[Any]:
    """Start a worker of tests/comm/alive_worker.py on each host; worker 0 hosts the store if `worker_hosts`."""
    if options.get("worker_hosts"):
        host, port = cluster.address(0), 29_500  # its own namespace: nobody else has that port there
    else:
        host = cluster.machine
        cluster.store, port = host_store(host=host, timeout_s=60)  # type: ignore[attr-defined]
    command = [sys.executable, "-m", "tests.comm.alive_worker", host, str(port), str(count)]
    return [
        cluster.start(index, [*command, str(index), json.dumps(options)], stdout=-1, text=True)
        for index in range(count)
    ]


@needs_hosts
def test_survivors_name_the_worker_whose_link_is_cut_and_it_knows_itself() -> None:
    with hosts(count=3, rate="1gbit") as cluster:
        processes = start_all(cluster, 3, collective="halving-doubling")
        for process in processes:
            lines(process, 1)
        cluster.cut(1)
        first, cut, last = (lines(process, 1)[0] for process in processes)
    for end in (first, last):
        assert end["type"] == "PeerLost"
        assert end["text"].startswith("worker 1 (h2) has been silent for ")
    assert cut["text"].startswith("worker 1 (h2) cannot reach the others: neither the store at ")
    assert all(end["seconds"] < TIMEOUT_S for end in (first, cut, last))


@needs_hosts
def test_the_others_name_the_worker_that_hosts_the_store_when_its_link_is_cut() -> None:
    with hosts(count=3, rate="1gbit") as cluster:
        processes = start_all(cluster, 3, collective="ring", worker_hosts=True)
        for process in processes:
            lines(process, 1)
        cluster.cut(0)
        cut, second, third = (lines(process, 1)[0] for process in processes)
    for end in (second, third):
        assert end["type"] == "PeerLost"
        assert end["text"].startswith("worker 0 (h1), who hosts the store, cannot be reached"), end
    assert cut["text"].startswith("worker 0 (h1) cannot reach the others"), cut


@needs_hosts
def test_hosts_are_removed_when_a_test_fails() -> None:
    with contextlib.suppress(ZeroDivisionError), hosts(count=2, rate="100mbit") as cluster:
        process = cluster.start(1, ["sleep", "1000"])
        raise ZeroDivisionError
    assert process.returncode is not None
    assert list(Path("/run/netns").glob(f"{cluster.name}*")) == []
    assert list(Path("/sys/class/net").glob(f"{cluster.name}*")) == []
    assert list(Path("/etc/netns").glob(f"{cluster.name}*")) == []


def measured(rank: Rank, *, names: list[str], known: Links) -> tuple[list[str], Links]:
    """Return the hosts and the links that a worker learns. Runs in the pool."""
    with joined(rank, connect(rank, timeout_s=60), device=torch.device("cpu"), timeout_s=60):
        assert dist.group.WORLD is not None
        wire = Wire(dist.group.WORLD)
        found = gather_hosts(wire, timeout_s=60, host=names[rank.index])
        return found, measure_links(wire, found, seconds=0.3, known=known)


@pytest.mark.parametrize(
    ("names", "known", "inside", "between"),
    [
        (["a", "a", "b"], Links(), "measured inside a", "measured between a and b"),
        (["a", "b"], Links(), None, "measured between a and b"),
        (["a", "a"], Links(), "measured inside a", None),
        (["a"], Links(), None, None),
        (["a", "a", "b"], Links(between=NAMED), "measured inside a", None),
        (["a", "a", "b"], Links(inside=NAMED), None, "measured between a and b"),
    ],
)
def test_links_inside_and_between_hosts_are_told_apart_and_known_to_all_unless_they_were_before(
    ranks: RankPool, tmp_path: Path, names: list[str], known: Links, inside: str | None, between: str | None
) -> None:
    answers = ranks.run(measured, workers=len(names), names=names, known=known)
    (found, links), *others = answers
    assert found == names
    assert all(other == (found, links) for other in others)
    assert (links.inside and links.inside.source) == inside
    assert (links.between and links.between.source) == between
    for link in (links.inside, links.between):
        assert link is None or (link.bytes_per_s > 1e6 and 0 < link.latency_s < 1)
    write_toml(tmp_path / "links.toml", links)
    assert read_toml(Links, tmp_path / "links.toml") == links
