"""How a Job's model is called: one rule, for training, evaluation and tracing."""

from typing import Any

from shoal.spec.job import Job


def call_model(model: Any, job: Job, batch: Any) -> Any:
    """Return the model's output for `batch`: a tuple is passed by position, a dict by keyword, the rest as it is."""
    inputs = _first(batch) if job.inputs is None else job.inputs(batch)
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs)


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) else batch
