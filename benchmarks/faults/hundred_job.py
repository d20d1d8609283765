"""The job of hundred.py, on a pack. Every worker writes down the samples of each forward pass, before it."""

import functools
import json
import os
import time
from typing import Any

from torch import Tensor

import shoal
from benchmarks.faults import hundred_model
from shoal.comm.calls import CALLS

SEEN = os.environ.get("SHOAL_BENCH_SEEN", "")


@functools.cache
def seen_file() -> int:
    """Return the file of this process."""
    return os.open(f"{SEEN}/seen-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def inputs(batch: Any) -> Tensor:
    """Return what the model is called with, and write down what it is."""
    numbers = batch["number"]
    if SEEN and CALLS.step > 0 and type(numbers) is Tensor:  # in a step, not while planning on fake tensors
        line = {"time": time.time(), "step": CALLS.step, "samples": numbers.tolist()}
        os.write(seen_file(), json.dumps(line).encode() + b"\n")
        time.sleep(float(os.environ.get("SHOAL_BENCH_STEP_S", "0")))
    return batch["x"]  # type: ignore[no-any-return]


job = shoal.Job(
    model=hundred_model.build,
    inputs=inputs,
    loss=hundred_model.loss,
    optimizer=hundred_model.optimizer,
    data=os.environ["SHOAL_BENCH_PACK"],
    batch_size=hundred_model.BATCH,
    steps=100,
)
