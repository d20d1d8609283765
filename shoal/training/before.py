"""What a run goes on from, looked at before its workers build anything, because they build by it.

1. In a later generation that is what its members hold in memory (fault/exchange.py), unless a checkpoint is newer; else
   the last checkpoint, if there is one.
2. With `sync.codec = "auto"` the codec of that state is kept: what it has not sent yet is a part of the state, and no
   other could send it.
3. What joins the workers is read or measured (links.py): before there is a model, beside whose memory that of large
   messages would count. Links that were measured in the generation before are taken as they are.
"""

import dataclasses
from typing import Any

from shoal.comm.messages import GroupWire, gather_values
from shoal.core.errors import ShoalError
from shoal.core.run_folder import RunFolder
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.fault.checkpoint.reader import Checkpoint
from shoal.fault.exchange import Offers, offer
from shoal.spec.plan import Plan
from shoal.training.links import Place, known_links, located
from shoal.training.snapshots import Keeping


def look_before(place: Place, plan: Plan, folder: RunFolder, keeping: Keeping | None) -> tuple[Place, Offers | None]:
    """Return `place` with its links and the codec that is known, and what the members hold, if that is gone on from.

    Called by every worker, in the group of all workers.
    """
    is_first = keeping is None or keeping.generation == 0
    offers = None if keeping is None or is_first else _newest(folder, keeping)
    codec = _codec(folder, offers) if plan.sync.codec == "auto" else ""
    place = dataclasses.replace(place, known=known_links(folder, is_first=is_first), codec=codec)
    return located(place, timeout_s=plan.timeout_s) if place.store is not None else place, offers


def _newest(folder: RunFolder, keeping: Keeping) -> Offers | None:
    """Return what the members hold together; None if that is nothing, or older than the last checkpoint."""
    offers = offer(keeping.held, GroupWire(), keeping.room)
    saved = gather_values(GroupWire(), [step_of(path) for path in committed(folder.checkpoints)][-1:])[0]
    return None if offers.newest is None or (saved and saved[0] > offers.step) else offers


def _codec(folder: RunFolder, offers: Offers | None) -> str:
    """Return the name of the state's codec, as worker 0 sees it; "" if it has none."""
    alike = offers.alike() if offers is not None else _last_saved(folder)
    used = (alike or {}).get("codec")
    name: str = gather_values(GroupWire(), used["codec"] if used else "")[0]
    return name


def _last_saved(folder: RunFolder) -> dict[str, Any] | None:
    """Return what all workers had alike in the last checkpoint that can be read."""
    for path in reversed(committed(folder.checkpoints)):
        try:
            return Checkpoint(path).alike()
        except (ShoalError, KeyError, TypeError, ValueError):  # what is wrong with it is said when it is to be loaded
            continue
    return None
