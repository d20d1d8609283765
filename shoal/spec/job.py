"""Job: what to train."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shoal.core.errors import ConfigError, DataError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train: a model, its loss, its optimizer, its data, and for how long.

    The number of workers is not part of it: `batch_size` is global, and the gradient of a step is the mean over the
    global batch, weighted by `weight`.
    """

    model: Callable[[], Any]
    """Builds the model, an `nn.Module`. Called on every worker, and on fake tensors for planning."""
    loss: Callable[[Any, Any], Any]
    """`loss(output, batch)`: the mean over what `weight` counts, as a scalar tensor."""
    optimizer: Callable[[Any], Any]
    """`optimizer(parameters)`: builds a `torch.optim.Optimizer`."""
    data: Any
    """The path of a pack, a `shoal.View` of one; a map-style dataset: `len(data)` and `data[i]`, or
    `data.__getitems__([i, ...])` where it has one; an IterableDataset; or a DataLoader (docs/models.md)."""
    batch_size: int = 0
    """Samples in a global batch. Of a DataLoader, its own."""
    steps: int | None = None
    """How many optimizer steps to train; or give `epochs`."""
    epochs: int | None = None
    """How many times to see each sample; or give `steps`."""
    inputs: Callable[[Any], Any] | None = None
    """What of a batch the model is called with: a tensor, a tuple (by position) or a dict (by keyword).
    Without it, the first item of a tuple or list batch, otherwise the whole batch."""
    weight: Callable[[Any], Any] | None = None
    """`weight(batch)`: what the loss is a mean over, as a number. Without it, the number of samples."""
    unit: str = "samples"
    """What `weight` counts: the word in "tokens/s"."""
    schedule: Callable[[Any], Any] | None = None
    """`schedule(optimizer)`: builds a learning-rate scheduler, stepped once a step."""
    clip_norm: float | None = None
    """Clip the gradient of the whole model to this norm."""
    eval_data: Any = None
    """What to evaluate on, at the end and every `eval_every_steps`: like `data`."""
    eval_every_steps: int | None = None
    """How often to evaluate. Without it, only at the end."""
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """`{name: metric(output, batch)}`: each a mean over what `weight` counts; reported beside the loss."""
    collate: Callable[[list[Any]], Any] | None = None
    """Samples -> batch. Without it, torch's default_collate; packs are then gathered without making samples."""
    eval_collate: Callable[[list[Any]], Any] | None = None
    """The same for `eval_data`, where that is another."""
    shuffle: bool = True
    """Whether the order of samples is a permutation, another one each epoch, or as they lie."""
    block_rows: int | None = None
    """Shuffle blocks of so many neighbouring samples, and samples among 16 such blocks: for storage that hates random
    reads. Without it, all samples are shuffled among each other."""
    sampler: Any = None
    """A sampler of torch that says which samples make an epoch, in which order, in the place of `shuffle`."""
    drop_last: bool = False
    """Whether a last, partial batch of an epoch is left out."""
    stages: Sequence[str] | None = None
    """Names of the modules with which the second, third, ... stage of a pipeline begins. Without it, they are found."""
    tensor_plan: Mapping[str, str] | None = None
    """`{pattern of module names: "column" | "row" | ...}`: how layers are divided among the workers of the tensor axis
    (docs/parallel.md). Without it, that is found."""
    seed: int = 0
    """Decides the order of samples and the initial weights."""
    notes: tuple[str, ...] = ()
    """What is lost with data that does not come by number, in sentences; found when the job is built."""

    def __new__(cls, **fields: Any) -> "Job":
        """Refuse unknown fields with a suggestion, before dataclass's own TypeError does without."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ConfigError(f"Job has no field {name!r}.{did_you_mean(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer"):
            self._check(name, callable(getattr(self, name)), "must be a function")
        for name in ("inputs", "weight", "schedule", "collate", "eval_collate"):
            value = getattr(self, name)
            self._check(name, value is None or callable(value), "must be a function or None")
        self._take_data()
        self._check("batch_size", _is_positive_int(self.batch_size), "must be a whole number of at least 1")
        for name in ("steps", "epochs", "eval_every_steps", "block_rows"):
            value = getattr(self, name)
            self._check(name, value is None or _is_positive_int(value), "must be a whole number of at least 1")
        self._check("clip_norm", self.clip_norm is None or self.clip_norm > 0, "must be more than 0")
        names = self.stages is None or (
            not isinstance(self.stages, str) and all(isinstance(s, str) for s in self.stages)
        )
        self._check("stages", names, "must be a list of module names")
        self._check("tensor_plan", self.tensor_plan is None or isinstance(self.tensor_plan, Mapping), "must be a dict")
        self._check("seed", isinstance(self.seed, int), "must be a whole number")
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError("a Job has either steps or epochs: give one of the two.")
        self._check_length()

    def _take_data(self) -> None:
        """Open packs, and take what a DataLoader, a stream or the like decides."""
        for name in ("data", "eval_data"):
            object.__setattr__(self, name, _opened(name, getattr(self, name)))
        # By its name, and where there is something to take apart: `shoal.spec` imports no torch.
        if "torch" in sys.modules or not is_map_style(self.data):
            for name, value in importlib.import_module("shoal.data.given").taken(self).items():
                object.__setattr__(self, name, value)
        for name in ("data", "eval_data"):
            value = getattr(self, name)
            good = (value is None and name != "data") or is_map_style(value) or is_stream(value)
            self._check(name, good, _KINDS)

    def _check_length(self) -> None:
        if self.num_samples is None:
            if self.steps is None:
                raise ConfigError(
                    f"Job.epochs={self.epochs} of a stream whose length nobody knows. Give steps, or one with len()."
                )
        elif self.num_samples == 0:
            why = f": drop_last leaves no batch of {self.batch_size}" if self.drop_last else ""
            raise ConfigError(f"Job.data is empty{why}: there is nothing to train on.")
        self._check("block_rows", self.block_rows is None or not is_stream(self.data), "is not for streams")

    def _check(self, name: str, good: bool, rule: str) -> None:
        if not good:
            raise ConfigError(f"Job.{name} {rule}, not {getattr(self, name)!r}.")

    @cached_property
    def num_samples(self) -> int | None:
        """Samples in one pass over the data; None for a stream that does not say how many it has."""
        if is_stream(self.data):
            found: int | None = self.data.num_samples
        else:
            found = len(self.data) if self.sampler is None else _sampler_length(self.sampler)
        return found - found % self.batch_size if found is not None and self.drop_last else found

    @property
    def largest_batch(self) -> int:
        """Samples in a whole global batch: all there are, where these are fewer than `batch_size`."""
        return self.batch_size if self.num_samples is None else min(self.batch_size, self.num_samples)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one pass over the data, the last, partial one included unless `drop_last`."""
        assert self.num_samples is not None
        return -(-self.num_samples // self.batch_size)

    @property
    def total_steps(self) -> int:
        """How many steps the job trains for, from `steps` or `epochs`."""
        return self.steps if self.steps is not None else (self.epochs or 0) * self.steps_per_epoch

    def with_steps(self, steps: int | None) -> "Job":
        """Return the same job with another length; None leaves it as it is."""
        return self if steps is None else dataclasses.replace(self, steps=steps, epochs=None)


_KINDS = "must be a dataset with len() and [index], one to iterate over, a DataLoader, or the path of a pack"


def _opened(name: str, data: Any) -> Any:
    """Return the samples of the pack that a path names; other data as it is."""
    if not isinstance(data, (str, os.PathLike)):
        return data
    # By its name, as `import shoal` finds what is public: only a job that has a pack loads the room that reads it.
    view = importlib.import_module("shoal.data.view").View
    try:
        return view(data)
    except DataError as error:
        raise ConfigError(f"Job.{name}: {error}") from None


def _sampler_length(sampler: Any) -> int:
    length: int = importlib.import_module("shoal.data.sampled").sampler_length(sampler)
    return length


def is_stream(data: Any) -> bool:
    """Return whether `data` is a `shoal.data.stream.Stream`: read in its own order, from its beginning."""
    return getattr(data, "is_stream", False) is True


def is_map_style(data: Any) -> bool:
    """Return whether `data` has a length and can be indexed by sample number."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, (str, bytes, dict))


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
