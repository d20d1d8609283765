"""How long batches are waited for: so many seconds, or as long as what they are made of still arrives."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import DataError
from shoal.data.loader import Loader
from shoal.data.loading.patience import Patience
from shoal.data.stage.staging import stage
from tests.data.packs import rows_pack
from tests.data.stage.file_server import serving


def test_it_lasts_once_where_nothing_arrives_and_again_for_every_byte() -> None:
    begin_s = time.monotonic()
    assert not Patience(0.02).lasts(nothing_comes)
    assert time.monotonic() - begin_s >= 0.02
    arrivals = iter([1, 2, 3, 3])
    begin_s = time.monotonic()
    assert not Patience(0.02, lambda: next(arrivals)).lasts(nothing_comes)
    assert time.monotonic() - begin_s >= 4 * 0.02
    assert next(arrivals, None) is None
    assert Patience(7, lambda: 0).lasts(lambda _: True)


def nothing_comes(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False


@pytest.mark.parametrize("options", [{}, {"workers": 1}], ids=["threads", "processes"])
def test_a_loader_waits_longer_than_those_who_wait_for_its_parts(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "source").mkdir()
    rows_pack(tmp_path / "source" / "a.pack", 100)
    with serving(tmp_path / "source") as server:
        server.gates["a.pack/parts/00000.arrow"] = threading.Event()
        with stage(f"{server.url}/a.pack", to=tmp_path / "fast", desk=tmp_path / "desk", timeout_s=4) as staged:
            loader = Loader(staged, batch_size=4, shuffle=False, timeout_s=3, **options)
            with pytest.raises(DataError, match=r"part 00000 of http.* no byte has arrived for 4 s"):
                next(iter(loader))
