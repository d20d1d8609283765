"""A staged pack as its readers see it: a folder into which parts are still coming, and a way to wait for one."""

import time
from pathlib import Path
from typing import Any, Self

from shoal.core.errors import DataError
from shoal.data.pack.manifest import Manifest, read_manifest
from shoal.data.stage.copies import read_plan

WAIT_S = 600.0
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1


class Staged:
    """The copy of a pack at `path`, of the one at `source`. It only looks: others bring the parts.

    It can be pickled, and given to other processes of this node. A pack that stays where it is, is its own copy.
    """

    def __init__(self, path: Path, source: str, *, manifest: Manifest | None = None, reason: str = "") -> None:
        self.path, self.source, self.reason = path, source, reason
        self.manifest = manifest or read_manifest(path)

    def path_of(self, part: int, *, timeout_s: float = WAIT_S) -> Path:
        """Return the folder that holds all files of `part`, which is waited for.

        It is the copy's, or the source's if the part did not fit. Raises DataError if the part cannot be had, or after
        `timeout_s`.
        """
        end_s, poll_s = time.monotonic() + timeout_s, _FIRST_POLL_S
        while not self._has(part):
            plan = self._plan()
            if plan is not None and self._is_elsewhere(part, plan):
                return self._at_source(part)
            if time.monotonic() > end_s:
                name = self.manifest.parts[part].name
                raise DataError(f"part {name} of {self.source} has not come to {self.path} within {timeout_s:g} s.")
            self._pause(poll_s)
            poll_s = min(2 * poll_s, _LAST_POLL_S)
        return self.path

    def locate(self, part: int, name: str) -> Path:
        """Return where file `name` of `part` is, which is waited for: what a Pack asks before it maps a file."""
        return self.path_of(part) / name

    def have(self) -> list[int]:
        """Return the parts that are here."""
        return [part for part in range(len(self.manifest.parts)) if self._has(part)]

    def wait(self, part: int | None = None, *, timeout_s: float = WAIT_S) -> None:
        """Wait for `part`, or all that are to come. Raises what `path_of` does."""
        end_s = time.monotonic() + timeout_s
        for each in range(len(self.manifest.parts)) if part is None else [part]:
            if part is not None or self.is_coming(each):
                self.path_of(each, timeout_s=max(0.0, end_s - time.monotonic()))

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
        return _look_at, (self.path, self.source, self.reason)

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


def _look_at(path: Path, source: str, reason: str) -> Staged:
    return Staged(path, source, reason=reason)
