"""The random states of a worker: noted after every step, so it must cost little; made JSON only where it is kept."""

import ctypes
import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.fault.checkpoint.values import from_json, to_json

_MT19937_BYTES = 624 * 4 + 4
"""What numpy's default generator is in memory: its numbers, and which of them is next."""


class RandomStates:
    """The random states of this worker's process, as they were when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def own(self) -> dict[str, Any]:
        """Return them as JSON: what a worker has for itself."""
        version, numbers, gauss = self._python
        name, keys, *rest = self._numpy
        states: dict[str, Any] = {
            "torch": self._torch.numpy().tobytes(),
            "python": (version, array("I", numbers).tobytes(), gauss),
            "numpy": (name, np.asarray(keys).tobytes(), *rest),
        }
        if self._cuda is not None:
            states["cuda"] = self._cuda.numpy().tobytes()
        return {"random": to_json(states, where="the random state")}


def set_random(own: dict[str, Any]) -> None:
    """Set the random states of this process to what `RandomStates.own` returned."""
    states = from_json(own["random"])
    torch.set_rng_state(_bytes(states["torch"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(array("I", numbers)), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(states["cuda"]))


def begin_anew(seed: int, step: int, part: int) -> None:
    """Set the random states of this process to a function of the job's seed, the step and the part of the batch."""
    mixed = hash((seed, step, part))  # of integers: the same in every process
    torch.manual_seed(mixed % 2**63)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _remembering(read: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """Return numpy's state by `read`, which takes 0.1 ms, only where it has changed, which takes 1 us to see.

    A draw changes the generator's memory, except one: of two normal numbers the second is kept beside it (`has_gauss`).
    """
    last: tuple[bytes, tuple[Any, ...]] = b"", ()

    def state() -> tuple[Any, ...]:
        nonlocal last
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # its stubs lack it
        if not isinstance(generator, np.random.MT19937):
            return read()
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if memory != last[0] or last[1][3]:
            last = memory, read()
        return last[1]

    return state


_numpy_state = _remembering(lambda: tuple(np.random.get_state()))
