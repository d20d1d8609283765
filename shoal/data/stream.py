"""Data that can only be read from its beginning to its end: torch's and Hugging Face's IterableDataset, and their like.

1. Every worker reads the whole stream, and keeps its own positions of each global batch: samples [b * B, (b + 1) * B)
   are global batch b of an epoch, however many workers there are.
2. Where the stream ends, the next epoch begins: it is read anew, after `set_epoch(epoch)` where it has one.
3. Where a run goes on at a later step, the stream is read again up to there.

So a stream that gives the same samples whenever it is read trains the same model with any number of workers, and after
a resume. What it lacks is random access: a worker's reading takes as long as one worker's, a resume is not instant, and
shoal does not shuffle.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from shoal.core.errors import DataError


class Stream:
    """What is read in its own order: `source` is anything that `iter()` begins to read anew."""

    is_stream = True

    def __init__(self, source: Any) -> None:
        self.source = source
        self.num_samples = _length(source)
        """How many samples an epoch has, if the source says so."""
        self._head: list[Any] = []

    def epoch(self, number: int) -> Iterator[Any]:
        """Begin to read epoch `number`, from 0."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(number)
        return iter(self.source)

    def head(self, count: int) -> list[Any]:
        """Return the first `count` samples, fewer if there are no more; read once, and kept."""
        if len(self._head) < count:
            self._head = self.read_head(count)
        return self._head[:count]

    def read_head(self, count: int) -> list[Any]:
        """Return the first `count` samples, read now."""
        found = list(islice(self.epoch(0), count))
        if not found:
            raise DataError(f"the stream {type(self.source).__name__} has no samples: there is nothing to train on.")
        return found


def _length(source: Any) -> int | None:
    try:
        return len(source) or None
    except (TypeError, NotImplementedError):
        return None
