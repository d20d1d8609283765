"""Where a loader stands, as `state_dict()` says it and `load_state_dict()` reads it.

The state is that of the batch given last, whatever was loaded ahead; taken at the end of an epoch, it goes on with the
next one. Both is as torchdata's StatefulDataLoader has it. Workers, threads and processes are not in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ConfigError
from shoal.data.order import Order
from shoal.data.partition import Schedule

_VERSION = 1


@dataclass(frozen=True)
class Place:
    """A step, counted from 0 over all epochs, and what gives it its meaning."""

    step: int
    schedule: Schedule
    order: Order

    @property
    def meaning(self) -> dict[str, Any]:
        """What must be the same for a state to mean the same samples."""
        return {
            "num_samples": self.order.num_samples,
            "seed": self.order.seed,
            "shuffle": self.order.is_shuffled,
            "block_rows": self.order.block_rows,
        }


def write_state(place: Place) -> dict[str, Any]:
    """Return the state of a loader: plain numbers."""
    epoch, batch = divmod(place.step, place.schedule.steps_per_epoch)
    position = batch * place.schedule.batch_size
    return {"version": _VERSION, "epoch": epoch, "position": position, **place.meaning}


def read_state(state: Mapping[str, Any], place: Place) -> int:
    """Return the step at which a loader goes on that stands at `place` now."""
    if state.get("version") != _VERSION or not {"epoch", "position"} <= state.keys():
        raise ConfigError(f"this is no state of a shoal.Loader: {dict(state)!r}.")
    for name, here in place.meaning.items():
        if state.get(name) != here:
            raise ConfigError(
                f"the state was taken with {name}={state.get(name)}, but this loader has {name}={here}: it would go on "
                f"with other samples. Make the loader as it was, or start anew."
            )
    batch, rest = divmod(state["position"], place.schedule.batch_size)
    if rest:
        raise ConfigError(
            f"the state stands at sample {state['position']:,} of its epoch, which is no multiple of "
            f"batch_size={place.schedule.batch_size}."
        )
    return int(state["epoch"] * place.schedule.steps_per_epoch + min(batch, place.schedule.steps_per_epoch))
