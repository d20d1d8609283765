"""Text to token numbers: bytes as they are, or any tokenizer of the tokenizers or transformers library."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.data.sources.source import library, one_line


class Tokenizer(Protocol):
    """What turns documents into numbers below `vocabulary`."""

    vocabulary: int

    def describe(self) -> dict[str, Any]:
        """Return what tells this tokenizer from others."""

    def number(self, token: str) -> int | None:
        """Return the number of a token, or None."""

    def encode(self, documents: Sequence[tuple[str, bytes]]) -> list[NDArray[Any] | DataError]:
        """Return the numbers of each document, given with its label; or why there are none."""


def open_tokenizer(spec: Any) -> Tokenizer:
    """Return the tokenizer of "bytes", a tokenizer.json, a folder with one, a name on the hub, or an object."""
    if spec == "bytes":
        return ByteTokenizer()
    if isinstance(spec, (str, Path)):
        return LibraryTokenizer(_loaded(str(spec)), name=Path(spec).name if Path(spec).exists() else str(spec))
    return LibraryTokenizer(spec, name=type(spec).__name__)


class ByteTokenizer:
    """Each byte is a token."""

    vocabulary = 256

    def describe(self) -> dict[str, Any]:
        """Return its name."""
        return {"name": "bytes", "vocabulary": 256}

    def number(self, token: str) -> int | None:
        """Return the number of a token of one byte."""
        data = token.encode()
        return data[0] if len(data) == 1 else None

    def encode(self, documents: Sequence[tuple[str, bytes]]) -> list[NDArray[Any] | DataError]:
        """Return the bytes."""
        return [np.frombuffer(data, np.uint8) for _, data in documents]


class LibraryTokenizer:
    """A tokenizer of tokenizers, or of transformers, without its special tokens, truncation and padding."""

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._name, self._tokenizer, self._is_fast = name, tokenizer, hasattr(fast, "encode_batch")
        if self._is_fast:
            self._tokenizer = type(fast).from_str(fast.to_str())  # a copy: what is switched off is the user's
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        elif not callable(tokenizer):
            raise ConfigError(
                f"A {name} is no tokenizer of tokenizers or transformers. Give one, its file, its name, or 'bytes'."
            )
        self.vocabulary = 1 + max(self._tokenizer.get_vocab().values(), default=0)

    def describe(self) -> dict[str, Any]:
        """Return its name, its size and a checksum of its words."""
        text = self._tokenizer.to_str() if self._is_fast else repr(sorted(self._tokenizer.get_vocab().items()))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return {"name": self._name, "vocabulary": self.vocabulary, "sha256": digest}

    def number(self, token: str) -> int | None:
        """Return the number of a token, or None."""
        found = self._tokenizer.get_vocab().get(token)
        return None if found is None else int(found)

    def encode(self, documents: Sequence[tuple[str, bytes]]) -> list[NDArray[Any] | DataError]:
        """Return the numbers of each document; one that is not UTF-8 is an error."""
        texts = [_decoded(label, data) for label, data in documents]
        numbers = iter(self._encode([text for text in texts if isinstance(text, str)]))
        return [np.asarray(next(numbers), np.int64) if isinstance(text, str) else text for text in texts]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._is_fast:
            return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        return list(self._tokenizer(texts, add_special_tokens=False)["input_ids"])


def _decoded(label: str, data: bytes) -> str | DataError:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return DataError(
            f"{label} is not UTF-8: byte {error.start} is {data[error.start]:#x}. Mend it, or use tokenizer='bytes'."
        )


def _loaded(spec: str) -> Any:
    path = Path(spec)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            return library("tokenizers", extra="text", what="text with a tokenizer").Tokenizer.from_file(str(file))
        return library("transformers", extra="hf", what=f"text with {spec}").AutoTokenizer.from_pretrained(spec)
    except ConfigError:
        raise
    except Exception as error:  # the libraries raise plain Exceptions
        raise ConfigError(f"tokenizer={spec!r} cannot be loaded: {one_line(error)}.") from error
