"""What every loader is asked for, and whether a batch is that."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Task:
    """Batches of one kind: random-resized crops of "images", windows of "tokens", or "rows"."""

    kind: str
    batch_size: int
    threads: int
    """How many threads, or worker processes, a loader may use."""
    workers: int = 0
    """How many worker processes this side uses, where it has a choice."""
    window: int = 1025
    """Tokens a sample."""
    size: int = 224
    """Height and width of a crop."""
    antialias: bool = False
    """Whether crops that are made smaller are averaged (as Pillow does it) or four neighbours are mixed (bilinear)."""
    column: str = ""
    """The pack's column."""
    compression: str = "none"
    """Of that column in the pack."""
    write_s: float = 60.0
    """A writer that takes longer stops there, and its loader reads what there is."""

    @property
    def filter(self) -> str:
        """The name of the resize filter."""
        return "antialiased" if self.antialias else "bilinear"

    def wrong(self, batch: Any) -> str:
        """Return in what a whole batch, a tensor or an array, differs from what was asked for; "" if in nothing."""
        shape, dtype = tuple(batch.shape), str(batch.dtype).removeprefix("torch.")
        if self.kind == "images":
            wanted = {(self.batch_size, 3, self.size, self.size), (self.batch_size, self.size, self.size, 3)}
            is_right = shape in wanted and dtype == "uint8"
        elif self.kind == "tokens":
            is_right = shape == (self.batch_size, self.window) and dtype == "int64"
        else:
            is_right = shape[0] == self.batch_size
        return "" if is_right else f"it gave a batch of {dtype}{list(shape)}"
