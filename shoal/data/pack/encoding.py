"""The samples of a source's slices, encoded: many at a time where the source has them so, images by several threads.

The thread that asks reads: some objects allow no other. Meanwhile others encode the images that were read before.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from shoal.core.errors import DataError
from shoal.data.pack.encode import (
    IMAGE_CHUNK_BYTES,
    Batch,
    Encoded,
    Sample,
    batch_rows,
    chunks,
    encode_batch,
    encode_rows,
    without_first,
)
from shoal.data.pack.reused import ReusedMemory
from shoal.data.pack.schema import Column


class Encoding:
    """Encodes rows of these columns. If not `is_strict`, samples that do not fit are left out and named."""

    def __init__(self, columns: Sequence[Column], *, is_strict: bool, threads: int) -> None:
        self._columns, self._most_ahead = columns, threads
        self._has_images = any(column.kind == "image" for column in columns)
        self._encode = partial(encode_rows, columns, is_strict=is_strict, memory=ReusedMemory().take)
        self._threads = ThreadPoolExecutor(threads)

    def __enter__(self) -> "Encoding":
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def encoded(self, source: Any, part: Any, *, first: int, samples: Iterator[Sample] | None) -> Iterator[Encoded]:
        """Yield the samples of a slice from number `first` on; `samples` are all of them, if they were read before."""
        if samples is None and hasattr(source, "read_batches"):
            batches, seen = source.read_batches(part), 0
            while True:
                try:
                    batch = next(batches, None)
                except DataError:
                    break  # its samples are read one by one: to say which cannot be read, or to leave out only those
                if batch is None:
                    return
                if seen + batch[0] > first:
                    yield from self._batch(without_first(batch, first - seen))
                    first = seen + batch[0]
                seen += batch[0]
        yield from self._rows(itertools.islice(source.read(part) if samples is None else samples, first, None))

    def _batch(self, batch: Batch) -> Iterator[Encoded]:
        try:
            encoded = encode_batch(self._columns, batch)
        except DataError:  # of images, or something in it does not fit
            yield from self._rows(iter(batch_rows(batch)))
        else:
            yield encoded

    def _rows(self, samples: Iterator[Sample]) -> Iterator[Encoded]:
        if not self._has_images:
            yield from map(self._encode, chunks(samples))
            return
        waiting: deque[Future[Encoded]] = deque()
        for chunk in chunks(samples, chunk_bytes=IMAGE_CHUNK_BYTES):
            waiting.append(self._threads.submit(self._encode, chunk))
            if len(waiting) > self._most_ahead:
                yield waiting.popleft().result()
        for each in waiting:
            yield each.result()
