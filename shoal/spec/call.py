"""How a Job's model is called: one rule, for training, evaluation and tracing."""

from collections.abc import Mapping
from typing import Any

from shoal.spec.job import Job


def call_model(model: Any, job: Job, batch: Any) -> Any:
    """Return the model's output for `batch`: a tuple is passed by position, a dict by keyword, the rest as it is."""
    inputs = _first(batch) if job.inputs is None else job.inputs(batch)
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs)


def plain(batch: Any) -> Any:
    """Return a batch that is some other mapping, such as the BatchEncoding of a tokenizer, as a dict; others as is."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) else batch
