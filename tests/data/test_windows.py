"""Token streams as samples, beside slices of the documents."""

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ConfigError, DataError
from shoal.data.loader import Loader
from shoal.data.pack.check import check_pack
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.writer import pack
from shoal.data.view import View
from tests.data.packs import document, tokens_pack

NUM_DOCUMENTS = 120


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokens_pack(tmp_path_factory.mktemp("packs") / "tokens.pack", NUM_DOCUMENTS)


def streams(path: Path) -> list[list[tuple[int, int, int]]]:
    """Return, for each part, every token with the number of its document and its position there."""
    number, found = 0, []
    for part in Pack(path).manifest.parts:
        documents = range(number, number + part.num_rows)
        found.append([(int(t), n, at) for n in documents for at, t in enumerate(document(n))])
        number += part.num_rows
    assert len(found) > 3
    return found


@pytest.mark.parametrize(("window", "stride"), [(9, None), (2, None), (16, 16), (33, 5)])
def test_windows_are_slices_of_the_stream_of_each_part(tokens: Path, window: int, stride: int | None) -> None:
    step = stride or window - 1
    wanted = [
        [token for token, _, _ in stream[first : first + window]]
        for stream in streams(tokens)
        for first in range(0, len(stream) - window + 1, step)
    ]
    loader = Loader(tokens, batch_size=7, window=window, stride=stride, shuffle=False)
    assert [row for batch in loader for row in batch["tokens"].tolist()] == wanted
    shuffled = Loader(tokens, batch_size=7, window=window, stride=stride, threads=2)
    assert sorted(row for batch in shuffled for row in batch["tokens"].tolist()) == sorted(wanted)
    assert len(View(tokens, window=window, stride=stride)) == len(wanted)


def test_windows_know_their_documents(tokens: Path) -> None:
    loader = Loader(tokens, batch_size=5, window=25, with_documents=True, shuffle=False)
    rows = [row for batch in loader for row in zip(*(batch[name].tolist() for name in batch), strict=True)]
    wanted = [stream[first : first + 25] for stream in streams(tokens) for first in range(0, len(stream) - 24, 24)]
    for (found, documents, positions), stretch in zip(rows, wanted, strict=True):
        assert found == [token for token, _, _ in stretch]
        assert positions == [at for _, _, at in stretch]
        numbers = [number for _, number, _ in stretch]
        kinds = sorted(set(numbers))
        assert documents == [kinds.index(number) for number in numbers]


def test_packed_rows_hold_whole_documents(tokens: Path) -> None:
    width = 50  # longer than any document
    loader = Loader(tokens, batch_size=4, window=width, pack_documents=True, shuffle=False)
    found: list[list[int]] = []
    for batch in loader:
        for row, documents, positions in zip(*(batch[name].tolist() for name in batch), strict=True):
            for number in range(max(documents) + 1):
                inside = [i for i in range(width) if documents[i] == number]
                assert [positions[i] for i in inside] == list(range(len(inside)))
                found.append([row[i] for i in inside])
            padding = [i for i in range(width) if documents[i] == -1]
            assert all(row[i] == 0 and positions[i] == 0 for i in padding)
            assert padding == list(range(width - len(padding), width))
    assert found == [document(n).tolist() for n in range(NUM_DOCUMENTS) if len(document(n))]


def test_documents_longer_than_a_row_are_cut(tokens: Path) -> None:
    loader = Loader(tokens, batch_size=64, window=8, pack_documents=True, shuffle=False)
    kept = [
        token
        for batch in loader
        for row, documents in zip(batch["tokens"].tolist(), batch["tokens.document"].tolist(), strict=True)
        for token, number in zip(row, documents, strict=True)
        if number >= 0
    ]
    assert kept == [int(token) for n in range(NUM_DOCUMENTS) for token in document(n)]


def test_no_part_is_waited_for_before_a_row_of_it_is_read(tokens: Path) -> None:
    asked: list[int] = []

    def locate(part: int, name: str) -> Path:
        asked.append(part)
        return tokens / name

    view = View(Pack(tokens, locate=locate), window=512, pack_documents=True)
    assert asked == []
    assert len(view) == len(Pack(tokens).manifest.parts), "each part fills a row of 512"
    for number, part in enumerate(streams(tokens)):
        assert view[number]["tokens"].tolist() == [token for token, _, _ in part] + [0] * (512 - len(part))
        assert set(asked) == set(range(number + 1))
    other = View(Pack(tokens, locate=locate), window=500, pack_documents=True)  # which the manifest does not know
    assert len(other) == len(view)
    for row in range(len(view)):
        assert other[row]["tokens"].tolist() == view[row]["tokens"][:500].tolist()


def test_rows_that_the_manifest_counts_wrongly_are_named(tokens: Path, tmp_path: Path) -> None:
    shutil.copytree(tokens, tmp_path / "a.pack")
    said = json.loads((tmp_path / "a.pack" / "manifest.json").read_text())
    assert said["row_widths"][0] == 512
    assert said["parts"][1]["packed_rows"]["tokens"][0] == 1
    said["parts"][1]["packed_rows"]["tokens"][0] = 7
    (tmp_path / "a.pack" / "manifest.json").write_text(json.dumps(said))
    view = View(tmp_path / "a.pack", window=512, pack_documents=True)
    assert view[0]["tokens"].any()
    with pytest.raises(DataError, match=r"part 00001 of .* fills 1 rows of 512 tokens, but the manifest says 7"):
        view[1]
    (problem,) = check_pack(tmp_path / "a.pack")
    assert "column 'tokens' fills 1 rows of 512 tokens, but the manifest says 7" in str(problem)


@pytest.mark.parametrize("options", [{"window": 9}, {"window": 30, "pack_documents": True}])
def test_workers_share_the_same_windows(tokens: Path, options: dict[str, Any]) -> None:
    def rows(**more: Any) -> list[list[list[int]]]:
        return [batch["tokens"].tolist() for batch in Loader(tokens, batch_size=16, epochs=2, **options, **more)]

    alone = rows()
    workers = [rows(shares=(0.3, 0.5, 0.2), index=i, threads=2) for i in range(3)]
    assert [[*chain(*parts)] for parts in zip(*workers, strict=True)] == alone


def test_documents_come_as_they_are_without_a_window(tokens: Path) -> None:
    batch = next(iter(Loader(tokens, batch_size=NUM_DOCUMENTS, shuffle=False)))
    assert [row.tolist() for row in batch["tokens"]] == [document(n).tolist() for n in range(NUM_DOCUMENTS)]


def test_a_compressed_stream_and_one_that_is_too_short_are_refused(tmp_path: Path, tokens: Path) -> None:
    path = tmp_path / "small.pack"
    kinds, rows = {"tokens": "tokens"}, [{"tokens": np.arange(50, dtype=np.int32)}] * 20
    pack(rows, path, columns=kinds, compression={"tokens": "lz4"}, report=Quiet())
    with pytest.raises(DataError, match=r"is compressed \(lz4\), but windows are gathered from its map"):
        Loader(path, batch_size=1, window=9)
    with pytest.raises(DataError, match=r"has not one sample of 100000 tokens"):
        Loader(tokens, batch_size=1, window=100_000)
    with pytest.raises(ConfigError, match=r"window=1: say how many tokens"):
        Loader(tokens, batch_size=1, window=1)
