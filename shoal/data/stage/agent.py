"""One worker's part in staging: own the copy, lead when nobody else does, and leave."""

import atexit
import contextlib
import json
import os
import platform
import secrets
import threading
import warnings
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError
from shoal.core.files import write_whole
from shoal.data.pack.manifest import NAME, Manifest
from shoal.data.stage.ask import Neighbour
from shoal.data.stage.copies import Copy, pack_id, read_plan, write_plan
from shoal.data.stage.fetch import Fetcher
from shoal.data.stage.keeper import Sweeper
from shoal.data.stage.origin import FolderOrigin, Origin
from shoal.data.stage.peers import Peers, address_of_store
from shoal.data.stage.serve import Server
from shoal.data.stage.staged import Staged
from shoal.data.stage.turns import FolderTurns, NoTurns, StoreTurns, Turns

_TAKE_OVER_S = 0.2
_JOIN_S = 30.0
AGENT = "agent.json"


class Staging(Staged):
    """A copy that this process owns, and fetches if no other one of this node does."""

    def __init__(
        self,
        copy: Copy,
        origin: Origin,
        manifest: Manifest,
        *,
        reason: str,
        timeout_s: float,
        sweeper: Sweeper | None = None,
        store: Any = None,
        fan_out: int = 1,
    ) -> None:
        super().__init__(copy.path, origin.name, manifest=manifest, reason=reason, timeout_s=timeout_s)
        self._copy, self._origin, self._store, self._fan_out = copy, origin, store, fan_out
        self._sweeper = sweeper
        self._ended, self._pid = threading.Event(), os.getpid()
        self._fetcher: Fetcher | None = None
        self._peers: Peers | None = None
        self._server: Server | None = None
        self.is_leader = False
        self._thread = threading.Thread(target=self._work, name="stage", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Use the copy no more: it is removed if nobody else does. Nodes that are being sent a file have `linger_s`."""
        if not self._stop(linger_s):
            return
        self._copy.leave()
        self._leave_sweeper()

    def hand_over(self, *, linger_s: float = 0.0) -> int:
        """Close, but return a descriptor that owns the copy: whoever holds it open keeps the copy alive."""
        self._stop(linger_s)
        self._copy.leader.release()
        self._leave_sweeper()
        return self._copy.owners.detach()

    def who_has(self) -> list[dict[str, Any]]:
        """Return for each node that stages this pack its number, host, and the parts that it has."""
        if self._peers is not None:
            return self._peers.everyone()
        return ask_agent(self.path) or [self._alone()]

    def report(self) -> dict[str, Any]:
        """Return where the copy is, why there, how much of it, and what this process moved for it."""
        found = {**super().report(), "is_leader": self.is_leader}
        if self._fetcher is not None:
            counts = self._fetcher.counts
            found |= {"source_bytes": counts.source_bytes, "neighbour_bytes": counts.neighbour_bytes}
            found |= {"refetched": counts.refetched, "sent_bytes": self._server.sent_bytes if self._server else 0}
        return found

    def _leave_sweeper(self) -> None:
        if self._sweeper is not None:
            self._sweeper.leave()

    def _stop(self, linger_s: float) -> bool:
        """End the thread and the server; return False if that was done before, or is a forked child's parent's."""
        atexit.unregister(self.close)
        if self._ended.is_set() or os.getpid() != self._pid:
            return False
        if self._server is not None and linger_s > 0:
            self._server.linger(linger_s)
        self._ended.set()
        if self._fetcher is not None:
            self._fetcher.end()
        self._thread.join(_JOIN_S)
        return True

    def _alone(self) -> dict[str, Any]:
        plan = read_plan(self.path) or {"parts": []}
        return {"number": 0, "host": platform.node(), "wants": len(plan["parts"]), "has": self.have(), "read_bytes": 0}

    def _pause(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise DataError(f"the staging of {self.source} to {self.path} was closed while a part was waited for.")

    def _work(self) -> None:
        """Lead, once nobody else does."""
        while not self._copy.leader.take():
            if self._ended.wait(_TAKE_OVER_S):
                return
        self.is_leader = True
        try:
            with contextlib.ExitStack() as opened:
                self._lead(opened)
                self._ended.wait()
        except Exception as error:
            self._excuse(error)

    def _lead(self, opened: contextlib.ExitStack) -> None:
        plan = read_plan(self.path) or {"parts": list(range(len(self.manifest.parts)))}
        parts = [part for part in plan["parts"] if part not in plan.get("elsewhere", [])]
        for left in (self.path / "parts").glob("*.partial"):
            left.unlink(missing_ok=True)
        turns = self._join()
        fetcher = Fetcher(self.path, self.manifest, self._origin, peers=self._peers, turns=turns)
        self._fetcher = fetcher
        if self._ended.is_set():
            turns.close()
            return
        fetcher.expect(parts)
        if self._peers is not None:
            self._serve(fetcher, self._peers, parts, opened)

        def on_part(_: int) -> None:
            if fetcher.counts.elsewhere or fetcher.counts.failed:
                failed = {str(part): why for part, why in fetcher.counts.failed.items()}
                elsewhere = [*plan.get("elsewhere", []), *fetcher.counts.elsewhere]
                write_plan(self.path, {**plan, "elsewhere": elsewhere, "failed": failed})
            if self._peers is not None:
                self._peers.tell(self.have(), read_bytes=fetcher.counts.source_bytes)

        try:
            fetcher.run(parts, on_part=on_part)
        finally:
            turns.close()

    def _join(self) -> Turns:
        """Prepare to be one of several nodes, if there is a store; return who may read the source when."""
        identity = pack_id((self.path / NAME).read_bytes())
        if self._store is not None:
            store = self._store.clone() if hasattr(self._store, "clone") else self._store  # nobody waits for our calls
            self._peers = Peers(store, identity, fan_out=self._fan_out)
            return StoreTurns(store, identity, me=secrets.token_hex(8))
        if isinstance(self._origin, FolderOrigin):
            return FolderTurns(self._origin.path / ".readers")
        return NoTurns()

    def _serve(self, fetcher: Fetcher, peers: Peers, parts: list[int], opened: contextlib.ExitStack) -> None:
        server = Server(fetcher.arrivals, host=address_of_store(self._store), token=peers.token, who_has=peers.everyone)
        opened.callback(server.close)
        self._server = server
        peers.join(host=platform.node(), address=server.address, parts=parts)
        content = {"address": server.address, "token": peers.token.decode()}
        write_whole(self.path / AGENT, json.dumps(content))
        opened.callback((self.path / AGENT).unlink, missing_ok=True)

    def _excuse(self, error: Exception) -> None:
        """Say that the staging failed, and let what is missing be read in place."""
        plan = read_plan(self.path) or {"parts": list(range(len(self.manifest.parts)))}
        missing = [part for part in plan["parts"] if not self._has(part)]
        why = f"staging {self.source} failed: {type(error).__name__}: {error}"
        lost = {"failed": dict.fromkeys(map(str, missing), why)} if "://" in self.source else {"elsewhere": missing}
        with contextlib.suppress(OSError):
            write_plan(self.path, {**plan, **lost})
        warnings.warn(f"{why}. What is missing is read in place.", RuntimeWarning, stacklevel=1)


def ask_agent(path: Path) -> list[dict[str, Any]] | None:
    """Return what the process that serves the copy at `path` knows of all nodes, or None without such a process."""
    try:
        agent = json.loads((path / AGENT).read_bytes())
        host, port = agent["address"]
        with Neighbour((host, port), agent["token"].encode()) as neighbour:
            found: list[dict[str, Any]] = neighbour.who_has()
    except (OSError, ValueError, KeyError):
        return None
    return found
