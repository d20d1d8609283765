"""A real pack, read while it is still being staged: the same rows as from the source."""

import threading
from pathlib import Path

import numpy as np
import pytest

from shoal.data.pack.reader import Pack
from shoal.data.pack.writer import pack
from shoal.data.stage.staging import stage
from tests.data.stage.file_server import serving

TIMEOUT_S = 60.0
NUM_ROWS = 4000


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of several parts, in a folder of its own."""
    root = tmp_path_factory.mktemp("source")
    numbers = np.random.default_rng(0)
    rows = ({"x": numbers.random(32, dtype=np.float32), "name": f"row {row}"} for row in range(NUM_ROWS))
    pack(rows, root / "a.pack", part_bytes=100_000, workers=1, compression={"x": "none", "name": "zstd"})
    return root


def test_rows_of_the_parts_that_are_here_can_be_read_and_those_of_others_are_waited_for(
    packed: Path, tmp_path: Path
) -> None:
    source = Pack(packed / "a.pack")
    assert len(source.manifest.parts) > 2
    assert len(source.manifest.parts[0].files) == 2
    last = source.manifest.parts[-1].files[0].name
    with serving(packed) as server:
        gate = server.gates.setdefault(f"a.pack/{last}", threading.Event())
        with stage(f"{server.url}/a.pack", to=tmp_path / "fast", desk=tmp_path / "desk") as staged:
            copy = Pack(staged.path, locate=staged.locate)
            assert copy[0]["name"] == "row 0"
            assert server.reached.wait(TIMEOUT_S)
            assert len(staged.have()) == len(source.manifest.parts) - 1
            found: list[str] = []
            reader = threading.Thread(target=lambda: found.append(copy[NUM_ROWS - 1]["name"]))
            reader.start()
            assert found == []
            gate.set()
            reader.join(TIMEOUT_S)
            assert found == [f"row {NUM_ROWS - 1}"]
            for row in range(0, NUM_ROWS, 7):
                np.testing.assert_array_equal(copy[row]["x"], source[row]["x"])
            copy.close()
    source.close()
