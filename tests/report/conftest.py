from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.run_folder import RunFolder
from tests.support import runs


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A whole run of 12 steps on 2 workers."""
    return runs.make_run(tmp_path)


@pytest.fixture
def rich_run(tmp_path: Path) -> RunFolder:
    """A run that has everything a report shows."""
    return runs.make_rich_run(tmp_path)


@pytest.fixture
def make_run() -> Callable[..., RunFolder]:
    """Makes runs: `make_run(folder, steps=3, ...)`."""
    return runs.make_run


@pytest.fixture
def step_fields() -> Callable[[int, int], dict[str, Any]]:
    """Makes the fields of a step event: `step_fields(step, rank)`."""
    return runs.step_fields
