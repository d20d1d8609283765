"""What decides, before anything is measured, that a pack stays where it is."""

import os
from pathlib import Path

import pytest

from shoal.data.stage.tiers import is_memory
from shoal.data.stage.worth import resident_fraction, why_not
from tests.data.stage.packs import make_pack


def forget(folder: Path) -> None:
    """Drop the parts from the page cache."""
    for path in (folder / "parts").iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing can be dropped from memory here")
def test_a_pack_that_was_just_read_is_in_memory_and_one_that_was_dropped_is_not(tmp_path: Path) -> None:
    if is_memory(tmp_path):
        pytest.skip("temporary files are in memory here")
    manifest = make_pack(tmp_path / "a.pack", num_parts=20)
    assert resident_fraction(tmp_path / "a.pack", manifest) == 1
    forget(tmp_path / "a.pack")
    assert resident_fraction(tmp_path / "a.pack", manifest) == 0
    assert resident_fraction(tmp_path / "gone.pack", manifest) == 0


def test_only_a_pack_on_shared_storage_that_is_read_and_not_in_memory_is_worth_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_pack(tmp_path / "a.pack")
    path = tmp_path / "a.pack"
    assert "it is on storage of this node (" in (why_not(path, manifest, read_fraction=1) or "")
    monkeypatch.setattr("shoal.data.stage.tiers.file_system", lambda _: "nfs4")
    assert "the job reads 49.9% of its samples" in (why_not(path, manifest, read_fraction=0.499) or "")
    assert "it is in this node's memory already" in (why_not(path, manifest, read_fraction=3) or "")
    monkeypatch.setattr("shoal.data.stage.worth.resident_fraction", lambda *_: 0.5)
    assert why_not(path, manifest, read_fraction=0.5) is None
