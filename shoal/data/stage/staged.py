"""A staged pack as its readers see it: a folder into which parts are still coming, and a way to wait for one."""

import contextlib
import time
import warnings
from pathlib import Path
from typing import Any, Self

from shoal.core.errors import DataError
from shoal.data.pack.manifest import Manifest, read_manifest
from shoal.data.stage.copies import read_plan

WAIT_S = 600.0
"""How long nothing may arrive."""
_HERE, _ELSEWHERE, _STALLED = "here", "elsewhere", "stalled"
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1


class Staged:
    """The copy of a pack at `path`, of the one at `source`. It only looks: others bring the parts.

    Parts are waited for as long as bytes of any of them arrive: `timeout_s` without one is the end of it.

    It can be pickled, and given to other processes of this node. A pack that stays where it is, is its own copy.
    """

    def __init__(
        self,
        path: Path,
        source: str,
        *,
        manifest: Manifest | None = None,
        reason: str = "",
        timeout_s: float = WAIT_S,
    ) -> None:
        self.path, self.source, self.reason, self.timeout_s = path, source, reason, timeout_s
        self.manifest = manifest or read_manifest(path)
        self._stalled: object = None
        """What had arrived when somebody waited in vain: as long as that is all, nobody waits again."""
        self._said: object = None
        """Of which of these was spoken."""

    def path_of(self, part: int) -> Path:
        """Return the folder that holds all files of `part`, which is waited for.

        It is the copy's, or the source's if the part did not fit, or nothing has arrived for `timeout_s`. Raises
        DataError if the part cannot be had at all.
        """
        came = self._await(part, self.timeout_s)
        if came == _HERE:
            return self.path
        if came == _STALLED:
            self._say_stalled(part)
        return self._at_source(part)

    def locate(self, part: int, name: str) -> Path:
        """Return where file `name` of `part` is, which is waited for: what a Pack asks before it maps a file."""
        return self.path_of(part) / name

    def have(self) -> list[int]:
        """Return the parts that are here."""
        return [part for part in range(len(self.manifest.parts)) if self._has(part)]

    def wait(self, part: int | None = None, *, timeout_s: float | None = None) -> None:
        """Wait for `part`, or all that are to come. Raises DataError if one cannot be had, or nothing arrives."""
        patience_s = self.timeout_s if timeout_s is None else timeout_s
        for each in range(len(self.manifest.parts)) if part is None else [part]:
            if (part is not None or self.is_coming(each)) and self._await(each, patience_s) == _STALLED:
                raise DataError(self._stands_still(each, patience_s))

    def arriving(self) -> object:
        """Return something that is another each time that a byte has arrived: by which files, and when written to."""
        parts, found = self.path / "parts", dict[str, int]()
        with contextlib.suppress(OSError):
            found[""] = parts.stat().st_mtime_ns
            for path in parts.iterdir():
                if path.suffix == ".partial":
                    with contextlib.suppress(FileNotFoundError):  # it has just become a part
                        found[path.name] = path.stat().st_mtime_ns
        return found

    def is_coming(self, part: int) -> bool:
        """Return whether `part` is here, or will be."""
        plan = self._plan()
        return self._has(part) or plan is None or part in plan["parts"]

    def report(self) -> dict[str, Any]:
        """Return where the copy is, why there, and how much of it."""
        here = self.have()
        return {"path": str(self.path), "source": self.source, "reason": self.reason, "parts": len(here)}

    def close(self) -> None:
        """Use the copy no more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _look_at, (self.path, self.source, self.reason, self.timeout_s)

    def _await(self, part: int, timeout_s: float) -> str:
        """Return what has become of `part`, once that is known."""
        end_s, poll_s, arrived = time.monotonic() + timeout_s, _FIRST_POLL_S, self.arriving()
        while not self._has(part):
            plan = self._plan()
            if plan is not None and self._is_elsewhere(part, plan):
                return _ELSEWHERE
            if arrived == self._stalled:
                return _STALLED
            if time.monotonic() > end_s:
                before, arrived = arrived, self.arriving()
                end_s, self._stalled = time.monotonic() + timeout_s, arrived if before == arrived else None
            self._pause(poll_s)
            poll_s = min(2 * poll_s, _LAST_POLL_S)
        return _HERE

    def _say_stalled(self, part: int) -> None:
        """Raise if what has not come cannot be read in place; if it can, say so once."""
        stands_still = self._stands_still(part, self.timeout_s)
        if "://" in self.source:
            raise DataError(stands_still)
        if self._said != self._stalled:
            self._said = self._stalled
            warnings.warn(f"{stands_still} What is missing is read in place.", RuntimeWarning, stacklevel=3)

    def _stands_still(self, part: int, timeout_s: float) -> str:
        name = self.manifest.parts[part].name
        return f"part {name} of {self.source} has not come to {self.path}: no byte has arrived for {timeout_s:g} s."

    def _has(self, part: int) -> bool:
        return all((self.path / file.name).exists() for file in self.manifest.parts[part].files)

    def _plan(self) -> dict[str, Any] | None:
        if str(self.path) == self.source:
            return {"parts": [], "elsewhere": [], "failed": {}}
        return read_plan(self.path)

    def _is_elsewhere(self, part: int, plan: dict[str, Any]) -> bool:
        """Return whether `part` will not come; raise if it cannot be had at all."""
        failed: dict[str, str] = plan.get("failed", {})
        if str(part) in failed:
            raise DataError(failed[str(part)])
        return part in plan.get("elsewhere", []) or part not in plan["parts"]

    def _at_source(self, part: int) -> Path:
        folder, files = Path(self.source), self.manifest.parts[part].files
        missing = [file.name for file in files if "://" in self.source or not (folder / file.name).exists()]
        if not missing:
            return folder
        if "://" in self.source:
            raise DataError(f"{missing[0]} of {self.source} did not fit into {self.path}, and cannot be read in place.")
        raise DataError(f"{missing[0]} is missing in {self.source}. Pack the source again, or bring the file back.")

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)


def in_place(path: str | Path, *, reason: str = "") -> Staged:
    """Return the pack at `path` as its own copy."""
    folder = Path(path).resolve()
    return Staged(folder, str(folder), reason=reason)


def _look_at(path: Path, source: str, reason: str, timeout_s: float) -> Staged:
    return Staged(path, source, reason=reason, timeout_s=timeout_s)
