"""A few samples of a dataset as hashes: do two workers read the same data?"""

import hashlib
import random
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from shoal.spec.job import is_stream

_T = TypeVar("_T")
_HEAD = 3
"""How many samples of a stream are read for this, twice."""

HASHED_S = 0.5
"""How long samples may take to be read for this; those that take longer are left out."""


def sample_hashes(data: Any) -> dict[str, str]:
    """Return a hash of the first, the middle and the last sample, as far as they are the same whenever they are read.

    A sample that cannot be read has the name of its error. The random states stay what they are.
    """
    if is_stream(data):
        return _stream_hashes(data)
    found = {}
    count, end_s = len(data), time.monotonic() + HASHED_S
    for number in dict.fromkeys((0, count // 2, count - 1)):
        first, second = (_with_fixed_seed(partial(_read, data, number)) for _ in range(2))
        if time.monotonic() > end_s:
            break
        if first == second:
            found[str(number)] = first
    return found


def _stream_hashes(stream: Any) -> dict[str, str]:
    """Return a hash of the first samples of a stream that are the same whenever it is read, whatever the seed."""
    first, second = (_with_fixed_seed(lambda: _hashed_head(stream), seed) for seed in (1, 2))
    return {str(number): one for number, (one, other) in enumerate(zip(first, second, strict=False)) if one == other}


def _hashed_head(stream: Any) -> list[str]:
    try:
        return [_hash(sample) for sample in stream.read_head(_HEAD)]
    except Exception as error:
        return [type(error).__name__]


def _read(data: Any, number: int) -> str:
    try:
        sample = data[number]
    except Exception as error:
        return type(error).__name__
    return _hash(sample)


def _hash(sample: Any) -> str:
    state = hashlib.blake2b(digest_size=8)
    _feed(state, sample)
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    """Add a sample to a hash: its tensors and arrays with types and shapes; of what is unknown, its class."""
    if isinstance(value, Mapping):
        for key in value:
            state.update(repr(key).encode())
            _feed(state, value[key])
    elif isinstance(value, (list, tuple)):
        state.update(f"[{len(value)}".encode())
        for part in value:
            _feed(state, part)
    elif isinstance(value, torch.Tensor):
        _feed(state, value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        state.update(f"{value.dtype} {tuple(value.shape)}".encode())
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        state.update(f"{value.dtype} {value.shape}".encode())
        state.update(value.tobytes())
    elif isinstance(value, (bytes, str, int, float, bool, type(None))):
        state.update(repr(value).encode())
    else:
        state.update(type(value).__name__.encode())


def _with_fixed_seed(function: Callable[[], _T], seed: int = 0) -> _T:
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
            return function()
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
