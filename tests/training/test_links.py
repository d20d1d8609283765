"""Which links a run goes by: those that the cluster's file names, or what is measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.comm.pairs import Links
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.cluster import Cluster, Node
from shoal.spec.device import Link
from shoal.training import links as links_module
from shoal.training.links import known_links, links_of

BETWEEN = Link(source="the site's own page", bytes_per_s=12.5e9, latency_s=2e-6)


def folder_with(path: Path, between: Link | None) -> RunFolder:
    folder = RunFolder(path)
    write_toml(
        folder.cluster_toml,
        Cluster(nodes=(Node(host="n1", device="cpu", devices=0, cores=2, memory_bytes=1 << 30),), between=between),
    )
    return folder


def test_links_that_the_file_names_are_known(tmp_path: Path) -> None:
    assert known_links(folder_with(tmp_path, BETWEEN)) == Links(between=BETWEEN)
    assert known_links(RunFolder(tmp_path / "nothing there")) is None


def test_a_file_without_a_link_between_hosts_leaves_it_to_measuring(tmp_path: Path) -> None:
    assert known_links(folder_with(tmp_path, None)) is None


@pytest.mark.parametrize(("hosts", "is_measured"), [(["a", "b"], False), (["a", "a"], True)])
def test_known_links_are_not_measured_and_say_nothing_about_one_host(
    monkeypatch: pytest.MonkeyPatch, hosts: list[str], is_measured: bool
) -> None:
    measured = Links(inside=BETWEEN)
    monkeypatch.setattr(links_module, "measure_links", lambda *_, **__: measured)
    wire = cast(Any, SimpleNamespace(hosts=hosts))
    found = links_of(wire, Links(between=BETWEEN))
    assert (found is measured) == is_measured
