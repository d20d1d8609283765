"""Staging a pack: choose a place, share it with the other workers of the node, fetch or wait, and leave no trace.

    with stage("corpus.pack") as staged:
        staged.path_of(0)      # returns when part 0 is here; the others are still coming

1. At the node's desk (copies.py), one process at a time: remove what nobody owns; use the copy that another worker of
   this node has made, or choose a tier (tiers.py) and make one. It has the manifest at once, so it is a pack at once.
2. In a thread of each worker: whoever has the copy's leader lock fetches the parts (fetch.py), from the nodes before
   this one if there is a store (peers.py), and serves them to those after it (serve.py). The others look now and then
   whether the lock is free: a leader that died is replaced by one of them, which goes on with the parts still missing.
3. Readers ask for a part by `path_of`, which waits for the file to get its name: it has it only when it is right.
4. `close`, or the end of the process, however it ends, gives the space back when no other process uses the copy: one
   that is killed cannot, so whoever makes a copy also starts a small process that can (keeper.py).

Why not torch's groups: a group fails for all when one node dies, is one thread's at a time, and staging goes on in the
background of training. Here each node asks for what it lacks, so a lost node is a matter of asking another one.
"""

import contextlib
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import write_whole
from shoal.data.pack.manifest import NAME, Manifest, read_manifest
from shoal.data.stage.agent import Staging
from shoal.data.stage.copies import Copy, Desk, folder_of, is_owned, pack_id, read_plan, write_plan
from shoal.data.stage.keeper import Sweeper
from shoal.data.stage.origin import FolderOrigin, Origin, open_origin, read_small
from shoal.data.stage.staged import WAIT_S, Staged, in_place
from shoal.data.stage.tiers import LOCAL_KINDS, Choice, Tier, choose, find_tiers, given_tier, places, source_rate

KINDS = ("memory", "local", "scratch", "project")


def stage(
    pack: str | Path,
    *,
    to: str | Path = "auto",
    parts: Sequence[int] | None = None,
    store: Any = None,
    fan_out: int = 1,
    tiers: Sequence[Tier] | None = None,
    reserve_bytes: int | None = None,
    timeout_s: float = WAIT_S,
    desk: Path | None = None,
) -> Staged:
    """Return the pack as a copy on the fastest storage of this node that has room; its parts are on their way.

    Called by every worker that reads the pack: there is one copy a node. `to` is a folder, a kind of tier ("memory",
    "local", "scratch", "project") or "auto". `parts` are those that this node reads, in the order in which it wants
    them. With a `store`, a rendezvous store, the nodes that use the same one read the source once and pass it on.
    `timeout_s` without a byte that arrives is too long: what is missing is then read in place, or an error.
    """
    origin = open_origin(pack)
    content = read_small(origin, NAME)
    table = Desk(desk)
    manifest = _manifest(origin, content, table)
    unknown = set(parts or ()) - set(range(len(manifest.parts)))
    if unknown:
        raise ConfigError(f"part {min(unknown)} was asked for, but {pack} has parts 0 to {len(manifest.parts) - 1}.")
    name = f"{Path(origin.name).stem}-{pack_id(content)}.pack"
    sweeper: Sweeper | None = None
    with table.alone(timeout_s=timeout_s):
        table.clean(places() if to == "auto" or to in KINDS else [Path(to)])
        found = _existing(table, name, to)
        if found is not None:
            copy, reason = table.join(found, timeout_s=timeout_s), f"{found} is here already."
        else:
            kinds = (to,) if to in KINDS else LOCAL_KINDS if store is not None else KINDS
            tiers = _tiers(to, tiers, kinds, reserve_bytes)
            choice = _choose(origin, manifest, tiers, parts=parts, is_asked_for=to != "auto")
            reason = choice.reason
            if choice.tier is None:
                return _not_staged(origin, reason)
            copy = table.join(folder_of(choice.tier.path, name), timeout_s=timeout_s)
            sweeper = _begun(copy, content, {"parts": choice.parts, "source": origin.name, "reason": reason})
    return Staging(
        copy, origin, manifest, reason=reason, timeout_s=timeout_s, sweeper=sweeper, store=store, fan_out=fan_out
    )


def _begun(copy: Copy, manifest: bytes, plan: dict[str, Any]) -> Sweeper:
    """Make a pack without parts of a new copy; return the process that removes it if need be."""
    sweeper = Sweeper(copy.path)
    try:
        write_whole(copy.path / NAME, manifest)
        (copy.path / "parts").mkdir(exist_ok=True)
        write_plan(copy.path, plan)
    except OSError as error:
        copy.leave()
        sweeper.leave()
        raise DataError(f"no copy can be made at {copy.path}: {error}.") from None
    return sweeper


def _manifest(origin: Origin, content: bytes, table: Desk) -> Manifest:
    if isinstance(origin, FolderOrigin):
        return read_manifest(origin.path)
    with tempfile.TemporaryDirectory(dir=table.path) as folder:
        Path(folder, NAME).write_bytes(content)
        try:
            return read_manifest(Path(folder))
        except DataError as error:
            raise DataError(str(error).replace(folder, origin.name)) from None


def _existing(table: Desk, name: str, to: str | Path) -> Path | None:
    """Return the folder of the copy called `name` that another worker of this node has made, or None."""
    for path in table.copies():
        is_asked_for = to == "auto" or to in KINDS or path.parent.parent == Path(to).resolve()
        if path.name == name and is_asked_for and is_owned(path) and read_plan(path) is not None:
            return path
    return None


def _tiers(
    to: str | Path, measured: Sequence[Tier] | None, kinds: Collection[str | Path], reserve_bytes: int | None
) -> list[Tier]:
    """Return where the pack may go."""
    if to != "auto" and to not in KINDS:
        return [given_tier(Path(to).resolve(), reserve_bytes=reserve_bytes)]
    every = measured if measured is not None else find_tiers(reserve_bytes=reserve_bytes)
    found = [tier for tier in every if tier.kind in kinds]
    if to in KINDS and not found:
        raise ConfigError(f"--to {to}: this node has no such storage that can be written to. Name a folder.")
    return found


def _choose(
    origin: Origin, manifest: Manifest, tiers: list[Tier], *, parts: Sequence[int] | None, is_asked_for: bool
) -> Choice:
    """Return which of `tiers` the pack goes to; unless one `is_asked_for`, only to one that is worth it."""
    sizes = [sum(file.num_bytes for file in part.files) for part in manifest.parts]
    if is_asked_for or not isinstance(origin, FolderOrigin):
        return choose(tiers, sizes, wanted=parts)
    device, rate = origin.path.stat().st_dev, 0.0
    with contextlib.suppress(OSError):  # a part that is missing is named when it is wanted
        rate = source_rate(origin.path / manifest.parts[-1].files[0].name)
    others = [tier for tier in tiers if tier.path.stat().st_dev != device]
    return choose(others, sizes, wanted=parts, source_bytes_per_s=rate)


def _not_staged(origin: Origin, reason: str) -> Staged:
    if isinstance(origin, FolderOrigin):
        return in_place(origin.path, reason=reason)
    raise DataError(f"{origin.name} cannot be read in place, and no storage of this node has room for it: {reason}")
