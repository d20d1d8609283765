"""Tiny texts, and Python objects."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.sources.made import NUM_ROWS, ROWS, WORDS, Made, X, Y


def text_files(where: Path) -> Made:
    for number, word in enumerate(WORDS):
        (where / f"{number:02d}.txt").write_text(word)
    samples = [{"tokens": np.frombuffer(word.encode(), np.uint8)} for word in WORDS]
    return Made(where, samples, files=(where / "00.txt",))


def text_lines(where: Path) -> Made:
    (where / "all.txt").write_text("\n".join([WORDS[0], "", *WORDS[1:]]) + "\r\n")
    samples = [{"tokens": np.array([*word.encode(), 256], np.uint16)} for word in WORDS]
    return Made(where / "all.txt", samples, {"documents": "line", "end_token": 256}, files=(where / "all.txt",))


def text_words(where: Path) -> Made:
    """Separators that can overlap themselves, JSON lines' tokens by a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["?", "wörd", *map(str, range(NUM_ROWS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)  # as many files have it: documents must come whole all the same
    tokenizer.save(str(where / "words.json"))
    (where / "all.text").write_text("===".join(WORDS[:9]) + "=====" + "===".join(WORDS[9:]))
    texts = [*WORDS[:9], "==" + WORDS[9], *WORDS[10:]]
    samples = [{"tokens": np.array([vocabulary.get(x, 0) for x in text.split()], np.uint8)} for text in texts]
    options = {"tokenizer": str(where / "words.json"), "separator": "==="}
    return Made(where / "all.text", samples, options, files=(where / "all.text",))


def json_lines(where: Path) -> Made:
    lines = [json.dumps({"text": word, "id": row}) for row, word in enumerate(WORDS)]
    (where / "all.jsonl").write_text("\n".join(lines))
    samples = [{"tokens": np.frombuffer(word.encode(), np.uint8)} for word in WORDS]
    return Made(where / "all.jsonl", samples, files=(where / "all.jsonl",))


class Rows:
    """A map-style dataset, as torch has them."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return X[row], int(Y[row])


class Stream:
    """An iterable without a length."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"x": X[row], "y": Y[row]} for row in range(NUM_ROWS)])


def dataset(where: Path) -> Made:
    del where
    return Made(Rows(), ROWS)


def iterable(where: Path) -> Made:
    del where
    return Made(Stream(), ROWS)
