"""What every codec is asked to do by several workers. Each function is run by all of them and returns plain arrays."""

from typing import Any

import numpy as np
import torch

from shoal.compress.bf16 import Bf16
from shoal.compress.bucket import Bucket, ShardedBucket
from shoal.compress.codec import Codec
from shoal.compress.feedback import ErrorFeedback
from shoal.compress.sparse import Sparse
from shoal.compress.threshold import Threshold
from tests.compress.counted import Counted, numbers

# A matrix that pays for rank 2, one that does not, a bias, a scalar, and four dims; 8,161 numbers in all.
SHAPES = ((60, 80), (7, 3), (101,), (), (24, 5, 3, 9), (2, 0))
BUCKET = Bucket(tuple("abcdef"), SHAPES)
SHARDED_SHAPES = ((60, 80), (7, 3), (101,), (1,))


def gradient_of(worker: int, step: int, numel: int = BUCKET.width) -> torch.Tensor:
    """Return the gradient of a worker at a step: some of it common to all, with a few large elements."""
    common, own = numbers(numel, seed=1000 + step), numbers(numel, seed=100 * worker + step)
    return (common + 0.5 * own) * (1 + 5 * (numbers(numel, seed=7) > 2))


def pending_of(feedback: ErrorFeedback, names: tuple[str, ...] = BUCKET.names) -> np.ndarray:
    pending = feedback.state_dict()["pending"]
    return torch.cat([pending[name].flatten() for name in names]).numpy()


def sums(workers: Counted, codec: Codec, *, steps: int = 3) -> dict[str, Any]:
    """Exchange some gradients; return what was given, what arrived, what is pending and the bytes of the last."""
    feedback = ErrorFeedback(codec)
    given, arrived = np.zeros(BUCKET.width), []
    for step in range(steps):
        gradient = gradient_of(workers.index, step)
        given += gradient.numpy()
        workers.sent_bytes = 0
        feedback.sum(BUCKET, gradient, workers)
        arrived.append(gradient.numpy())
    said_bytes = codec.sent_bytes(BUCKET.width, workers.count, SHAPES)
    if isinstance(codec, Threshold):
        kept = codec.tell(codec.kept, workers, torch.empty(0))
        workers.sent_bytes -= codec.told_bytes(workers.count)  # for having asked just now
        said_bytes = codec.told_bytes(workers.count) + Sparse.sum_bytes(BUCKET.width, kept, workers.index)
    return {
        "given": given,
        "arrived": np.stack(arrived),
        "pending": pending_of(feedback),
        "sent_bytes": workers.sent_bytes,
        "said_bytes": said_bytes,
    }


def crowded(workers: Counted, codec: Codec) -> tuple[float, float, float]:
    """Return the error of one sum of almost all elements, its bytes, and those of the same in bf16."""
    del codec
    true = torch.stack([gradient_of(worker, 0) for worker in range(workers.count)]).sum(0)
    threshold, gradient = Threshold(multiple=0.01), gradient_of(workers.index, 0)
    workers.sent_bytes = 0
    ErrorFeedback(threshold).sum(BUCKET, gradient, workers)
    sent_bytes = workers.sent_bytes - threshold.told_bytes(workers.count)
    return float((gradient - true).abs().max()), sent_bytes, Bf16().sent_bytes(BUCKET.width, workers.count)


def slices(workers: Counted, codec: Codec, *, steps: int = 3) -> dict[str, Any]:
    """As `sums`, where each worker gets a slice."""
    feedback = ErrorFeedback(codec)
    bucket = ShardedBucket(tuple("abcd"), SHARDED_SHAPES, workers.count)
    given, arrived = np.zeros(bucket.rows * bucket.width), np.zeros(bucket.width)
    for step in range(steps):
        gradient = torch.zeros(bucket.rows, bucket.width)
        parts = dict(
            zip(
                bucket.names,
                (gradient_of(workers.index, step, 60 * 80)[: _numel(s)] for s in SHARDED_SHAPES),
                strict=True,
            )
        )
        bucket.join(parts, gradient)
        given += gradient.flatten().numpy()
        out = torch.empty(bucket.width)
        workers.sent_bytes = 0
        feedback.reduce_scatter(bucket, out, gradient.flatten(), workers)
        arrived += out.numpy()
    state, pending = feedback.state_dict()["pending"], torch.zeros(bucket.rows, bucket.width)
    bucket.join(state, pending)
    return {
        "given": given.reshape(bucket.rows, -1),
        "arrived": arrived,
        "pending": pending.numpy(),
        "sent_bytes": workers.sent_bytes,
        "said_bytes": codec.scattered_bytes(bucket.width, workers.count),
    }


def mean_of_many(workers: Counted, codec: Codec, *, steps: int) -> list[float]:
    """Return how far the mean of the sums of a gradient that never changes is from its sum, after 1, 2, ... steps."""
    feedback = ErrorFeedback(codec)
    gradients = [gradient_of(worker, 0) for worker in range(workers.count)]
    true, total, errors = torch.stack(gradients).sum(0), torch.zeros(BUCKET.width), []
    for step in range(1, steps + 1):
        feedback.sum(BUCKET, out := gradients[workers.index].clone(), workers)
        total += out
        errors.append(float((total / step - true).norm() / true.norm()))
    return errors


def _numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def least_squares(workers: Counted, codec: Codec, *, steps: int) -> tuple[float, float]:
    """Return the loss that descent through the codec ends with, and the least there is.

    The rows of 120 equations for a matrix [40, 20] are dealt out to the workers; the noise in them leaves a loss.
    """
    a, noise = numbers(120, 40, seed=1) / 120**0.5, numbers(120, 20, seed=3)
    b = a @ numbers(40, 20, seed=2) + 0.1 * noise
    mine = slice(workers.index, None, workers.count)
    bucket, x, feedback = Bucket(("x",), ((40, 20),)), torch.zeros(40, 20), ErrorFeedback(codec)
    for step in range(steps):
        gradient = (a[mine].t() @ (a[mine] @ x - b[mine])).flatten()
        feedback.sum(bucket, gradient, workers)
        x -= (
            0.5 * (1 - step / steps) * gradient.view(40, 20)
        )  # slower and slower: rounding is noise, which ends with it
    best = torch.linalg.lstsq(a, b).solution
    return tuple(float((a @ each - b).square().sum()) for each in (x, best))  # type: ignore[return-value]


def train(workers: Counted, codec: Codec, *, steps: int, first: int = 0, states: Any = None) -> dict[str, Any]:
    """Exchange gradients of `steps` steps from `first` on; return the sums, and the state after them."""
    feedback = ErrorFeedback(codec, seed=5)
    if states is not None:
        feedback.load_state_dict(_tensors(states[codec.name][workers.index]))
    arrived = []
    for step in range(first, first + steps):
        feedback.sum(BUCKET, gradient := gradient_of(workers.index, step), workers)
        arrived.append(gradient.numpy())
    return {"arrived": np.stack(arrived), "state": _arrays(feedback.state_dict())}


def _arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _arrays(value) for key, value in state.items()}
    return state.numpy() if isinstance(state, torch.Tensor) else state


def _tensors(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _tensors(value) for key, value in state.items()}
    return torch.from_numpy(np.asarray(state)) if isinstance(state, (np.ndarray, np.generic)) else state
