"""Which packs are staged on this node, and which nodes have what of them."""

import time
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError
from shoal.data.pack.manifest import NAME
from shoal.data.stage.agent import ask_agent
from shoal.data.stage.copies import RELEASE, Desk, is_owned, pack_id, present_bytes, read_plan
from shoal.data.stage.origin import open_origin, read_small
from shoal.data.stage.staged import Staged

_POLL_S = 0.1


def staged_here(desk: Desk, pack: str | Path | None = None) -> list[dict[str, Any]]:
    """Return what is known of each copy on this node, or of those of `pack` alone."""
    found = []
    for path in _copies(desk, pack):
        plan = read_plan(path)
        if plan is None:
            continue
        try:
            here = Staged(path, plan["source"]).have()
        except DataError:  # being removed
            continue
        found.append(
            {
                "path": str(path),
                "source": plan["source"],
                "reason": plan.get("reason", ""),
                "wants": len(plan["parts"]),
                "has": here,
                "bytes": present_bytes(path),
                "failed": plan.get("failed", {}),
                "is_used": is_owned(path),
                "nodes": ask_agent(path) or [],
            }
        )
    return found


def release(desk: Desk, pack: str | Path, *, timeout_s: float) -> tuple[list[Path], list[Path]]:
    """Have the keepers of the copies of `pack` end; return those copies that were removed, and those still in use."""
    asked = _copies(desk, pack)
    for path in asked:
        (path / RELEASE).touch()
    end_s = time.monotonic() + timeout_s
    while any(path.exists() for path in asked) and time.monotonic() < end_s:
        desk.clean()
        time.sleep(_POLL_S)
    used = [path for path in asked if path.exists()]
    for path in used:
        (path / RELEASE).unlink(missing_ok=True)
    return [path for path in asked if path not in used], used


def _copies(desk: Desk, pack: str | Path | None) -> list[Path]:
    if pack is None:
        return desk.copies()
    identity = pack_id(read_small(open_origin(pack), NAME))
    return [path for path in desk.copies() if path.name.endswith(f"-{identity}.pack")]
