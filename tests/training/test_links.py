"""Which links a run goes by: those that the cluster's file names, or what is measured."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from shoal.cli.probe_slurm import build
from shoal.comm.calls import CALLS
from shoal.comm.pairs import Links
from shoal.comm.rank import ALONE
from shoal.core.errors import PeerLost
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.launch.slurm.nodes import NodeKind
from shoal.spec.cluster import Cluster, Node
from shoal.spec.communication import Communication
from shoal.spec.device import Link
from shoal.spec.plan import Mesh
from shoal.training import links as links_module
from shoal.training.links import Place, hosts_of, known_links, located

TIMEOUT_S = 60.0
"""More than a test waits: it fails if it has to."""

BETWEEN = Link(source="the site's own page", bytes_per_s=12.5e9, latency_s=2e-6)
INSIDE = Link(source="shoal probe", bytes_per_s=1e9, latency_s=1e-4)
MEASURED = Links(
    inside=Link(source="measured inside", bytes_per_s=1e10, latency_s=1e-6),
    between=Link(source="measured", bytes_per_s=1e9, latency_s=1e-5),
)


def folder_with(path: Path, between: Link | None) -> RunFolder:
    folder = RunFolder(path)
    path.mkdir(exist_ok=True)
    write_toml(
        folder.cluster_toml,
        Cluster(nodes=(Node(host="n1", device="cpu", devices=0, cores=2, memory_bytes=1 << 30),), between=between),
    )
    return folder


def test_links_that_the_file_names_are_known(tmp_path: Path) -> None:
    assert known_links(folder_with(tmp_path, BETWEEN)) == Links(between=BETWEEN)
    assert known_links(RunFolder(tmp_path / "nothing there")) == Links()


def test_a_file_without_a_link_between_hosts_leaves_it_to_measuring(tmp_path: Path) -> None:
    assert known_links(folder_with(tmp_path, None)) == Links()


def test_a_link_that_was_guessed_is_measured(tmp_path: Path) -> None:
    kind = NodeKind("n1", 64, 1 << 38, "", 0, 4)
    guessed = build([kind])[0].between
    assert guessed is not None
    assert known_links(folder_with(tmp_path / "guessed", guessed)) == Links()
    named = build([kind], link="ethernet-10")[0].between
    assert known_links(folder_with(tmp_path / "named", named)) == Links(between=named)


def test_who_waits_for_the_others_hosts_hears_that_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CALLS, "lost", "worker 1 (n2) has been silent for 15.0 s.")
    with pytest.raises(PeerLost, match=r"worker 1 \(n2\)"):
        hosts_of(dataclasses.replace(ALONE, workers=2), HashStore(), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("hosts", "device", "known", "seconds", "found"),
    [
        ("aabb", "cpu", Links(inside=INSIDE, between=BETWEEN), None, Links(inside=INSIDE, between=BETWEEN)),
        ("aabb", "cpu", Links(between=BETWEEN), 0.1, Links(inside=MEASURED.inside, between=BETWEEN)),
        ("aabb", "cpu", Links(inside=INSIDE), 1.0, Links(inside=INSIDE, between=MEASURED.between)),
        ("aabb", "cpu", Links(), 1.0, MEASURED),
        ("ab", "cpu", Links(between=BETWEEN), None, Links(between=BETWEEN)),
        ("aaaa", "cpu", Links(inside=INSIDE), None, Links(inside=INSIDE)),
        ("aaaa", "cpu", Links(between=BETWEEN), 0.1, Links(inside=MEASURED.inside)),
        ("aabb", "cuda", Links(between=BETWEEN), None, Links(between=BETWEEN)),
        ("aabb", "cuda", Links(inside=INSIDE), 1.0, Links(inside=INSIDE, between=MEASURED.between)),
        ("aaaa", "cuda", Links(), 0.1, Links(inside=MEASURED.inside)),
    ],
)
def test_what_the_file_does_not_say_of_these_hosts_is_measured_and_the_rest_stays_as_it_says(
    monkeypatch: pytest.MonkeyPatch, hosts: str, device: str, known: Links, seconds: float | None, found: Links
) -> None:
    asked: list[float] = []

    def measure(_: Place, hosts: list[str], __: Links, *, seconds: float) -> Links:
        asked.append(seconds)
        return MEASURED if len(set(hosts)) > 1 else Links(inside=MEASURED.inside)

    monkeypatch.setattr(links_module, "_measured", measure)
    monkeypatch.setattr(links_module, "hosts_of", lambda *_, **__: list(hosts))
    monkeypatch.setattr(links_module, "tell_all", lambda value: value)
    place = located(Place(rank=ALONE, store=HashStore(), device=torch.device(device), known=known), timeout_s=TIMEOUT_S)
    assert asked == ([] if seconds is None else [seconds])
    assert place.links == found
    assert place.per_host == hosts.count("a")


def test_what_a_generation_has_measured_the_next_need_not(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, BETWEEN)
    assert known_links(folder, is_first=False) == Links(between=BETWEEN)
    write_toml(
        folder.communication_toml,
        Communication(way="ring", why="", bucket_bytes=1, inside=INSIDE, between=MEASURED.between),
    )
    assert known_links(folder, is_first=False) == Links(inside=INSIDE, between=MEASURED.between)
    assert known_links(folder) == Links(between=BETWEEN)


def test_gradients_travel_between_hosts_unless_all_who_exchange_them_are_on_one() -> None:
    links = Links(inside=INSIDE, between=BETWEEN)
    place = Place(rank=ALONE, store=None, device=torch.device("cpu"), hosts=("a", "a", "b", "b"), links=links)
    assert place.link_of(Mesh(replicate=4)) == BETWEEN
    assert place.link_of(Mesh(shard=2, pipeline=2)) == INSIDE
    assert place.link_of(Mesh(shard=2, tensor=2)) == BETWEEN
