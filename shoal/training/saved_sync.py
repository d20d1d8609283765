"""What the way in which workers meet keeps (sync.mode), as slices, and back, at any number of workers: "sync/NAME".

It is the same on all workers, after a boundary: the outer momentum of local steps, say. Worker 0 saves it. A run that
is gone on with another mode drops it, and says so.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shoal.fault.shards import Found, Shard, whole_shard

if TYPE_CHECKING:
    from shoal.training.run import Run

_KIND = "sync/"


def sync_alike(run: "Run") -> dict[str, Any] | None:
    """Return which mode keeps what is saved, if workers may be apart."""
    return None if run.loose is None else {"mode": run.plan.sync.mode}


def sync_shards(run: "Run") -> Iterator[Shard]:
    """Yield what the mode keeps."""
    if run.loose is not None:
        for name, tensor in run.loose.saved():
            live = tensor.detach()
            is_mine = run.rank.index == 0
            yield Shard(f"{_KIND}{name}", live, tuple(live.shape), (0,) * live.dim(), is_mine=is_mine)


def sync_wanted(run: "Run", found: Mapping[str, Found], alike: dict[str, Any]) -> list[Shard]:
    """Return room for what the same mode had kept."""
    if run.loose is None or alike.get("sync") != sync_alike(run):
        return []
    return [
        whole_shard(name, torch.empty(each.shape, dtype=each.dtype))
        for name, each in found.items()
        if name.startswith(_KIND)
    ]


def restore_sync(
    run: "Run", wanted: list[Shard], found: Mapping[str, Found], alike: dict[str, Any], *, say: Callable[[str], None]
) -> None:
    """Keep what was filled in, for the mode that is opened next."""
    run.kept = {shard.name.removeprefix(_KIND): shard.tensor for shard in wanted}
    was = alike.get("sync")
    if was is not None and not wanted and any(name.startswith(_KIND) for name in found):
        say(f"What sync.mode={was['mode']!r} has kept is dropped: this run has sync.mode={run.plan.sync.mode!r}.")
