"""benchmarks/loading_exact.py at a small size: nothing differs, and what differs would be seen."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import loading_exact
from benchmarks.loading_exact_data import Dataset, make_datasets


def test_every_global_batch_is_the_same_however_it_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert loading_exact.main(["--small"]) == 0
    assert "\n0 of " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["rows", "tokens", "images"])
def test_another_seed_is_seen(name: str, tmp_path: Path) -> None:
    dataset: Dataset = {each.name: each for each in make_datasets(tmp_path, small=True)}[name]
    dataset.expected = [*loading_exact.hashes(dataset, (1.0,), threads=1)]
    changed = dataclasses.replace(dataset, seed=6)
    found = [*loading_exact.hashes(changed, (0.5, 0.5), threads=1)]
    differing, total = loading_exact._differing(iter([(0, found)]), dataset)
    assert differing == total > 0
