"""Staging as late as can be: no part comes before somebody waits for one; or all before the first is read."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from shoal.data.stage.fetch import Ended, Fetcher
from shoal.data.stage.staged import Staged

_LOOK_S, _TIMEOUT_S = 0.002, 60.0


@contextmanager
def late_parts(folder: Path) -> Iterator[None]:
    """Have each part fetched, in the planned order, only while a reader waits for one that is not here.

    `folder` is where the processes of a node tell each other what they wait for. This process alone is changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path_of, fetch_part = Staged.path_of, Fetcher._fetch_part

    def ask(staged: Staged, part: int, **options: Any) -> Path:
        if not staged._has(part):
            (folder / f"{part}").touch()
        return path_of(staged, part, **options)

    def fetch_when_asked(fetcher: Fetcher, part: int) -> None:
        def is_waited_for() -> bool:
            asked = (int(path.name) for path in folder.iterdir())
            files = (fetcher._manifest.parts[number].files for number in asked)
            return any(not (fetcher._path / file.name).exists() for held in files for file in held)

        while not is_waited_for():
            if fetcher.ended.wait(_LOOK_S):
                raise Ended
        fetch_part(fetcher, part)

    with mock.patch.object(Staged, "path_of", ask), mock.patch.object(Fetcher, "_fetch_part", fetch_when_asked):
        yield


@contextmanager
def early_parts() -> Iterator[None]:
    """Have whoever reads a part wait until all parts are here."""
    path_of = Staged.path_of
    whole: set[Path] = set()

    def wait_for_all(staged: Staged, part: int, **options: Any) -> Path:
        if staged.path not in whole:
            whole.add(staged.path)  # before: waiting asks for each part
            staged.wait(timeout_s=60)
        return path_of(staged, part, **options)

    with mock.patch.object(Staged, "path_of", wait_for_all):
        yield


def until(is_so: Callable[[], bool]) -> None:
    """Return when it is so."""
    end_s = time.monotonic() + _TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(_LOOK_S)
