"""Documents and their tokens."""

import gzip
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.core.errors import ConfigError, DataError
from shoal.data.sources.documents import next_document, parted
from shoal.data.sources.find import open_source
from shoal.data.sources.source import Source
from shoal.data.sources.text import TextSource
from shoal.data.sources.tree import LocalTree


def documents(source: Source, about_bytes: int = 1 << 40) -> list[Any]:
    read = [values for part in source.slices(about_bytes) for _, values in source.read(part)]
    return [str(values) if isinstance(values, DataError) else values["tokens"].tobytes() for values in read]


@settings(max_examples=300, deadline=None)
@given(st.text("ab=", max_size=60), st.sampled_from(["=", "==", "=a=", "aa", "ab"]), st.integers(1, 70))
def test_documents_are_the_same_wherever_one_begins_to_look(text: str, separator: str, begin: int) -> None:
    data, mark = text.encode(), separator.encode()
    starts = [offset for offset, _ in parted([data], mark, 0)]
    found = next_document(io.BytesIO(data), begin, mark, len(data))
    assert found in (*starts, len(data))
    assert found > begin or begin >= len(data)


@settings(max_examples=200, deadline=None)
@given(st.text("a=", max_size=60), st.sampled_from(["=", "=="]), st.lists(st.integers(0, 60), max_size=5))
def test_documents_are_the_same_however_the_bytes_arrive(text: str, separator: str, cuts: list[int]) -> None:
    data, bounds = text.encode(), sorted([0, *cuts, 60])
    pieces = [data[begin:end] for begin, end in itertools.pairwise(bounds)]
    found = list(parted(pieces, separator.encode(), 0))
    assert [one for _, one in found] == data.split(separator.encode())
    assert all(data[offset : offset + len(one)] == one for offset, one in found)


def test_a_document_longer_than_what_is_read_at_once_comes_whole(tmp_path: Path) -> None:
    long = b"x" * 3_000_000
    (tmp_path / "a.txt").write_bytes(b"one\n" + long + b"\ntwo")
    source = open_source(tmp_path / "a.txt", documents="line")
    for about_bytes in (10, 1_000_000, 1 << 40):
        assert documents(source, about_bytes) == [b"one", long, b"two"]


def test_compressed_text_is_read_and_named_when_it_is_cut_off(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"word {row}"}) + "\n" for row in range(50)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    assert documents(open_source(tmp_path)) == [f"word {row}".encode() for row in range(50)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-12])
    with pytest.raises(DataError, match=r"a.jsonl.gz is broken after byte"):
        documents(open_source(tmp_path))


def test_lines_that_are_no_json_or_lack_the_field_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nbad\n{"other": 1}\n{"text": 3}\n')
    good, *bad = documents(open_source(tmp_path / "a.jsonl"))
    assert good == b"good"
    assert [line.partition(" is")[0] for line in bad[:2]] == ["a.jsonl: byte 17", "a.jsonl: byte 21"]
    assert bad[2] == "a.jsonl: byte 34: 'text' is a int, not text."


def word_tokenizer() -> Any:
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "<end>": 70_000}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_tokens_are_kept_in_a_type_that_holds_them_and_end_as_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b\nb")
    source = open_source(tmp_path, tokenizer=word_tokenizer(), documents="line", end_token="<end>")
    [column] = source.columns or ()
    assert (column.kind, column.dtype) == ("tokens", "int32")
    assert column.extra == {"vocabulary": 70_001, "end_token": 70_000}
    read = [values["tokens"].tolist() for part in source.slices(1) for _, values in source.read(part)]  # type: ignore[index]
    assert read == [[1, 2, 70_000], [2, 70_000]]
    with pytest.raises(ConfigError, match=r"end_token='<eos>' is no token of Tokenizer"):
        open_source(tmp_path, tokenizer=word_tokenizer(), end_token="<eos>")


def test_a_tokenizer_of_transformers_gives_the_same_tokens(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "a.txt").write_text("a b b")
    fast = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), model_max_length=2)  # type: ignore[no-untyped-call]
    fast.save_pretrained(tmp_path / "saved")
    for tokenizer in (fast, str(tmp_path / "saved"), tmp_path / "saved" / "tokenizer.json", word_tokenizer()):
        source = open_source(tmp_path / "a.txt", tokenizer=tokenizer)
        assert documents(source) == [np.array([1, 2, 2], np.int32).tobytes()]
        assert str(tmp_path) not in json.dumps(source.describe())


def test_text_that_is_not_utf8_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a b\nb \xff\na")
    found = documents(open_source(tmp_path, tokenizer=word_tokenizer(), documents="line"))
    assert found[1].startswith("a.txt: byte 4 is not UTF-8: byte 2 is 0xff")
    assert [len(found[0]), len(found[2])] == [8, 4]


def test_what_is_no_tokenizer_or_no_way_to_part_documents_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        open_source(tmp_path / "a.txt", tokenizer=str(tmp_path / "bad.json"))
    with pytest.raises(ConfigError, match="A int is no tokenizer"):
        open_source(tmp_path / "a.txt", tokenizer=3)
    with pytest.raises(ConfigError, match="documents='page' is not known"):
        TextSource(LocalTree(tmp_path), ["a.txt"], documents="page")
    with pytest.raises(ConfigError, match="separator='' parts nothing"):
        TextSource(LocalTree(tmp_path), ["a.txt"], separator="")
