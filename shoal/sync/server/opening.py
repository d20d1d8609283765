"""Starting servers: who hosts them, what each begins with, and the links of this worker to them.

1. Worker 0 names this set of servers, by a word that nobody can guess: only who knows it is served.
2. There is one host for each server, and two at least, for replicas, where there are two workers or processes for
   them. Worker w starts those that fall to it: as threads of its own, or as processes.
3. Worker k hands slice k, of which all have equal copies, to its first host, which hands it on to the replica's.
"""

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from shoal.comm.group import FORM_S
from shoal.comm.reach import address_towards
from shoal.comm.store import LOOPBACK
from shoal.comm.told import told
from shoal.sync.mode import Place
from shoal.sync.server.copies import Copies
from shoal.sync.server.host import Host
from shoal.sync.server.link import Link
from shoal.sync.server.places import Places, Serving, first_serving
from shoal.sync.server.process import HostProcess, store_of
from shoal.sync.server.slices import Slice


@dataclass
class Opened:
    """What runs for the servers on this worker."""

    store: Store
    places: Places
    hosts: list[Host | HostProcess]
    links: list[Link]

    def close(self, *, in_order: bool) -> None:
        """End it all: links first, then hosts, which wait for the other workers' goodbyes if this is in order."""
        for link in self.links:
            link.close(in_order=in_order)
        for host in self.hosts:
            host.close(linger_s=10.0 if in_order else 0.0)


def open_servers(
    copies: Copies, place: Place, *, in_vain: Callable[[], bool], has_replica: bool, starts_hosts: bool = True
) -> Opened:
    """Start what falls to this worker, and return it with links to all servers. Called by every worker.

    Without `starts_hosts` somebody else starts them, as processes, and has written their word into the store.
    """
    rank, sync = place.rank, place.sync
    token, store = _meet(place)
    can_replicate = has_replica and (sync.place == "processes" or rank.workers > 1)
    hosts = max(len(copies.slices), 2 if can_replicate else 1)
    places = Places(store, hosts=hosts, token=token, in_vain=in_vain, timeout_s=place.timeout_s)
    opened = Opened(store, places, [], [])
    try:
        for host in range(rank.index, hosts, rank.workers) if starts_hosts else ():
            opened.hosts.append(_host(host, places, place))
        for of in copies.slices:
            if of.number % rank.workers == rank.index:
                _hand_over(of, copies, places, place, has_replica=can_replicate)
            opened.links.append(_link(of, copies, places, place))
    except BaseException:
        opened.close(in_order=False)
        raise
    return opened


def _meet(place: Place) -> tuple[str, Store]:
    """Return the word that names these servers, and their part of the store."""
    if place.rank.index == 0:
        place.store.compare_set("servers", "", secrets.token_hex(16))
    (token,) = told(place.store, ["servers"], timeout_s=min(place.timeout_s, FORM_S))
    if place.rank.workers == 1 and not place.rank.store_port:
        return token, place.store
    return token, store_of(place.rank, token, timeout_s=place.timeout_s)


def _host(host: int, places: Places, place: Place) -> Host | HostProcess:
    rank = place.rank
    is_one_node = rank.local_workers == rank.workers
    told: dict[str, Any] = {
        "hosts": places.hosts,
        "address": LOOPBACK if is_one_node else address_towards(rank.store_host, rank.store_port),
        "token": places.token,
        "workers": rank.workers,
        "timeout_s": place.timeout_s,
    }
    if place.sync.place == "processes" and rank.store_port:  # one worker alone has no store that a process could reach
        return HostProcess({"host": host, "store_host": rank.store_host, "store_port": rank.store_port, **told})
    return Host(host, places.store, **told)


def _hand_over(of: Slice, copies: Copies, places: Places, place: Place, *, has_replica: bool) -> None:
    """Give a slice to its first primary, and tell everyone who that is."""
    serving = first_serving(of.number, places.hosts, has_replica=has_replica)
    shard = copies.shard(of, version=place.first_step - 1, workers=place.rank.workers, gathers=place.sync.asynchronous)
    header, tensors = shard.save()
    connection = places.dial(serving.primary)
    try:
        connection.request({"op": "serve", "slice": of.number, "shard": header, "serving": asdict(serving)}, *tensors)
    finally:
        connection.close()
    places.begin(of.number, serving)


def _link(of: Slice, copies: Copies, places: Places, place: Place) -> Link:
    def on_takeover(serving: Serving) -> None:
        place.log.write("takeover", slice=of.number, primary=serving.primary, replica=serving.replica)

    return Link(
        of,
        places,
        worker=place.rank.index,
        gradient=copies.gradients[of.begin : of.end],
        parameters=copies.row[of.begin : of.end],
        on_takeover=on_takeover,
    )
