"""What joins the workers of this run: read where somebody has said it, else measured; all of it is kept in the folder.

1. Between hosts it is measured for a second, and the way and the codec are chosen by it. On one host, where gradients
   meet in memory or by the engine, a tenth of a second is enough.
2. What the cluster's file names need not be measured, while what it leaves out is. A link that was only guessed, for a
   prediction, is measured, too.
3. Processors measure by messages between two of them (comm/pairs.py); GPUs by all-reduces of all of them, as their
   engine does them: on several hosts that tells nothing of what joins those of one.
4. A generation takes over what the one before has measured: a recovery does not wait for it again.
"""

import dataclasses
import socket
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.distributed import PrefixStore, Store

from shoal.comm.algorithms import Wire
from shoal.comm.alive import Watch
from shoal.comm.group import all_workers, tell_all
from shoal.comm.link import link_from, time_all_reduces
from shoal.comm.pairs import Links, measure_links
from shoal.comm.rank import Rank
from shoal.comm.told import told
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.spec.cluster import Cluster
from shoal.spec.communication import Communication
from shoal.spec.device import Link
from shoal.spec.plan import Mesh

_BETWEEN_S, _INSIDE_S = 1.0, 0.1
_GPU_SIZES = (4 << 10, 25 << 20)
"""Bytes of the all-reduces that GPUs measure by: the latency, and a bucket."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker stands: with whom it meets, and by what."""

    rank: Rank
    store: Store | None
    device: torch.device
    watch: Watch | None = None
    """Tells whoever waits for a worker that it is lost."""
    known: Links = field(default_factory=Links)
    """Links that need not be measured; those of worker 0 count."""
    codec: str = ""
    """That of the state which the run goes on from, where the plan leaves it open (before.py)."""
    hosts: tuple[str, ...] = ()
    """The host of each worker: see `located`."""
    links: Links = field(default_factory=Links)
    """What joins them: see `located`."""

    @property
    def slowest(self) -> Link:
        """What joins the workers that are furthest apart."""
        link = self.links.between or self.links.inside
        assert link is not None, "located() has read or measured it"
        return link

    @property
    def per_host(self) -> int:
        """How many workers the host has that has the most."""
        return max(Counter(self.hosts).values(), default=1)

    def link_of(self, mesh: Mesh) -> Link:
        """Return what gradients travel over: what joins hosts, unless all who exchange them are on one."""
        is_inside = mesh.tensor * mesh.data <= self.per_host
        return (self.links.inside if is_inside else None) or self.slowest


def located(place: Place, *, timeout_s: float) -> Place:
    """Return `place` with the hosts of all workers and what joins them. Called by every worker, of several.

    If one is lost meanwhile, or does not come in `timeout_s`, raises PeerLost.
    """
    assert place.store is not None, "one worker alone is joined to nobody"
    hosts = hosts_of(place.rank, place.store, timeout_s=timeout_s)
    links: Links = tell_all(place.known)
    is_one = len(set(hosts)) == 1
    if is_one:
        links = Links(inside=links.inside)
    lacks_between = links.between is None and not is_one
    # GPUs are timed all together: on several hosts that tells what joins these.
    can_tell_inside = len(set(hosts)) < len(hosts) and (is_one or place.device.type == "cpu")
    if lacks_between or (links.inside is None and can_tell_inside):
        found = _measured(place, hosts, links, seconds=_BETWEEN_S if lacks_between else _INSIDE_S)
        links = Links(inside=links.inside or found.inside, between=links.between or found.between)
    return dataclasses.replace(place, hosts=tuple(hosts), links=links)


def hosts_of(rank: Rank, store: Store, *, timeout_s: float) -> list[str]:
    """Return the host of each worker; those that one launcher counts apart are told apart, whatever they are called.

    Called by every worker. If one is lost meanwhile, or does not come in `timeout_s`, raises PeerLost.
    """
    own = PrefixStore("hosts", store)
    own.set(str(rank.index), f"{socket.gethostname()}/{rank.index - rank.local_index}")
    return told(own, [str(worker) for worker in range(rank.workers)], timeout_s=timeout_s)


def known_links(folder: RunFolder, *, is_first: bool = True) -> Links:
    """Return the links that the cluster.toml of a run names, or that were measured unless this `is_first` to do so."""
    if not is_first and folder.communication_toml.exists():
        before = read_toml(Communication, folder.communication_toml)
        return Links(inside=before.inside, between=before.between)
    if not folder.cluster_toml.exists():
        return Links()
    cluster = read_toml(Cluster, folder.cluster_toml)
    return Links(inside=_named(cluster.inside), between=_named(cluster.between))


def _named(link: Link | None) -> Link | None:
    """Return `link`, if it is more than a guess."""
    return None if link is None or link.guessed else link


def _measured(place: Place, hosts: list[str], known: Links, *, seconds: float) -> Links:
    """Return what joins workers on these `hosts`, beside what is `known`, measured. Called by every worker."""
    if place.device.type == "cpu":
        wire = Wire(all_workers(), hosts=hosts, watch=place.watch)
        return measure_links(wire, hosts, seconds=seconds, known=known)
    times = time_all_reduces(place.device, seconds=seconds, sizes=_GPU_SIZES)
    source = f"measured by all-reduces of {len(hosts)} GPUs"
    link = link_from(times, workers=len(hosts), shared=False, source=source)
    return Links(inside=link) if len(set(hosts)) == 1 else Links(between=link)
