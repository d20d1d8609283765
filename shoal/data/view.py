"""A pack as samples: which of its columns, and in which form.

A pack keeps what a dataset is; a view says what a model wants of it: rows as they are, windows of tokens, whole
documents in rows, images cropped to one size. It is a map-style dataset like any other, and the loader knows how to
gather from it many samples at once.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.core.errors import ConfigError, DataError
from shoal.core.fork_lock import ForkLock
from shoal.data.loading.chunk import Chunk
from shoal.data.loading.columns import BytesColumn, ColumnLoader, FixedColumn, RaggedColumn, Request
from shoal.data.loading.crops import ImageOptions
from shoal.data.loading.documents import PackedDocuments
from shoal.data.loading.images import ImageColumn
from shoal.data.loading.ring import GatheredSamples
from shoal.data.loading.slot import Slot
from shoal.data.loading.transform import Transform
from shoal.data.loading.windows import Windows
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import Column
from shoal.data.stage.staged import Staged
from shoal.native.gather_ring import is_available
from shoal.native.order import locate

# A chunk should take longer than handing it over (about 50 us) and not drive everything out of the caches (2026-11,
# 2 cores of a Xeon with 1.25 MB of L2 each).
_CHUNK_BYTES = 8 << 20
_CHUNK_SAMPLES = 16384


class View:
    """Samples of a pack: its path, an open one, or one that is being staged (a part is waited for when it is needed).

    `columns`: only these. `window`: samples are windows of so many tokens, `stride` apart (without it `window` - 1).
    `with_documents`: each token's document in the window and its position in that. `pack_documents`: samples are rows
    of `window` tokens that hold whole documents. `ragged`: arrays of any length come as a "list" of tensors, "padded"
    with zeros beside their lengths, or "packed" one after another beside their offsets. `image`: how images are
    cropped; without it they come encoded. `transform(batch)` is applied to each batch; one that takes two arguments is
    called as `transform(batch, seeds)` (loading/transform.py).
    """

    makes_empty_batches = True

    def __init__(
        self,
        pack: str | os.PathLike[str] | Pack | Staged,
        *,
        columns: Sequence[str] | None = None,
        window: int | None = None,
        stride: int | None = None,
        with_documents: bool = False,
        pack_documents: bool = False,
        ragged: str = "list",
        image: ImageOptions | None = None,
        transform: Callable[..., Any] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "columns": columns,
            "window": window,
            "stride": stride,
            "with_documents": with_documents,
            "pack_documents": pack_documents,
            "ragged": ragged,
            "image": image,
            "transform": transform,
        }
        self.pack = _opened_pack(pack)
        self._columns = _chosen(self.pack, columns)
        self._starts = np.array(self.pack.manifest.first_rows, dtype=np.int64)
        self._transform = None if transform is None else Transform(transform)
        self.arriving = self.pack.arriving
        self._lock = ForkLock()
        self._loaders: list[ColumnLoader] | None = None
        self._tokens = self._stream() if window is not None or pack_documents else None
        if (window is None and with_documents) or (stride is not None and (window is None or pack_documents)):
            raise ConfigError(
                "stride and with_documents are for windows of tokens: give window, without pack_documents."
            )
        self.num_samples = self.pack.num_rows if self._tokens is None else self._tokens.num_samples
        if self.num_samples == 0:
            raise DataError(f"{self.pack.path} has not one sample{f' of {window} tokens' if window else ''}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return _view, (self.pack, self._options)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int) -> Any:
        """Return one sample as the loader gives it in an epoch 0 with seed 0."""
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Iterable[int]) -> list[Any]:
        """Return several samples."""
        wanted = np.array([self._checked(sample) for sample in samples], dtype=np.int64)
        chunk = Chunk(range(len(wanted)), 0, 0, wanted, (1,) * len(wanted))
        return [_only(batch) for batch in self.read(chunk, Slot())]

    def batches_at_once(self, batch_samples: int) -> int:
        """Return how many batches of this size are loaded by one call."""
        samples = max(1, batch_samples)
        sample_bytes = max(1, sum(loader.sample_bytes for loader in self._opened()))
        return max(1, min(_CHUNK_SAMPLES // samples, _CHUNK_BYTES // (samples * sample_bytes)))

    def read(self, chunk: Chunk, slot: Slot) -> Sequence[Any]:
        """Return the batches of `chunk`, dicts of tensors and lists, gathered into `slot`."""
        samples = chunk.samples
        if self._tokens is None:
            part, row = locate(samples, self._starts)
        else:
            part, row = np.empty(0, dtype=np.int32), samples  # windows find their part by themselves
        request = Request(chunk.epoch, chunk.seed, samples, part, row, chunk.sizes)
        every: dict[str, Sequence[Any]] = {}
        for loader in self._opened():
            every |= loader.load(request, slot)
        batches = [dict(zip(every, values, strict=True)) for values in zip(*every.values(), strict=True)]
        if self._transform is None:
            return batches
        return [self._transform(batch, chunk, number) for number, batch in enumerate(batches)]

    @property
    def is_gathered(self) -> bool:
        """Whether a batch is nothing but a gather from maps, which C does by itself."""
        columns = self._opened()
        plain = [column for column in columns if isinstance(column, (FixedColumn, Windows)) and column.is_gathered]
        return self._transform is None and len(plain) == len(columns) and is_available()

    def gathered(self) -> GatheredSamples | None:
        """Return what the samples are gathered from, once every part has been mapped; None before that."""
        columns = [each.gathered() for each in self._opened() if isinstance(each, (FixedColumn, Windows))]
        found = [column for column in columns if column is not None]
        if len(found) < len(self._opened()):
            return None
        return GatheredSamples(found, self._tokens.starts if isinstance(self._tokens, Windows) else self._starts)

    @property
    def is_of_tokens(self) -> bool:
        """Whether samples are windows or rows of tokens, and not rows of the pack."""
        return self._tokens is not None

    def moved_to(self, pack: Pack) -> "View":
        """Return the same view of a copy of the pack."""
        return View(pack, **self._options)

    def transformed(self, transform: Callable[..., Any]) -> "View":
        """Return the same view with a transform."""
        if self._transform is not None:
            raise ConfigError("the view has a transform, and the loader another. Give one of the two.")
        return View(self.pack, **{**self._options, "transform": transform})

    def _checked(self, sample: int) -> int:
        if not -self.num_samples <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of {self.num_samples:,}")
        return sample % self.num_samples

    def _opened(self) -> list[ColumnLoader]:
        if self._loaders is None:
            with self._lock:
                if self._loaders is None:
                    self._loaders = self._open()
        return self._loaders

    def _open(self) -> list[ColumnLoader]:
        if self._tokens is not None:
            return [self._tokens]
        return [self._loader(column) for column in self._columns]

    def _loader(self, column: Column) -> ColumnLoader:
        if column.is_fixed:
            return FixedColumn(self.pack, column)
        if column.kind == "image" and self._options["image"] is not None:
            return ImageColumn(self.pack, column, self._options["image"])
        if column.kind in ("text", "bytes", "image"):
            return BytesColumn(self.pack, column)
        return RaggedColumn(self.pack, column, form=self._options["ragged"])

    def _stream(self) -> Windows | PackedDocuments:
        window, path = self._options["window"], self.pack.path
        tokens = [column for column in self._columns if column.kind == "tokens"]
        if len(tokens) != 1:
            names = ", ".join(f"{column.name} ({column.kind})" for column in self._columns)
            raise ConfigError(
                f"window={window} needs one column of tokens; {path} has {names}. Choose it with columns."
            )
        if window is None or window < 2:
            raise ConfigError(f"window={window}: say how many tokens a sample has, at least 2.")
        if self._options["pack_documents"]:
            return PackedDocuments(self.pack, tokens[0], width=window)
        stride = window - 1 if self._options["stride"] is None else self._options["stride"]
        if not isinstance(stride, int) or stride < 1:
            raise ConfigError(f"stride={stride!r}: say how many tokens windows are apart, at least 1.")
        return Windows(
            self.pack, tokens[0], width=window, stride=stride, with_documents=self._options["with_documents"]
        )


def _opened_pack(pack: str | os.PathLike[str] | Pack | Staged) -> Pack:
    if isinstance(pack, Staged):
        return Pack(pack.path, locate=pack.locate, arriving=pack.arriving)
    return pack if isinstance(pack, Pack) else Pack(Path(pack))


def _view(pack: Pack, options: dict[str, Any]) -> View:
    return View(pack, **options)


def _chosen(pack: Pack, names: Sequence[str] | None) -> list[Column]:
    for name in names or []:
        if name not in pack.columns:
            raise DataError(f"{pack.path} has no column {name!r}. It has: {', '.join(pack.columns)}.")
    return [column for name, column in pack.columns.items() if names is None or name in names]


def _only(batch: Any) -> Any:
    """Return the one sample of a batch."""
    if isinstance(batch, dict):
        return {name: _only(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple, torch.Tensor)) and len(batch) == 1:
        return batch[0]
    return batch
