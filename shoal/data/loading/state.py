"""Where a loader stands, as `state_dict()` says it and `load_state_dict()` reads it.

The state is that of the batch given last, whatever was loaded ahead. After one of the last batch there is nothing left
of the iteration; one that was taken when the iteration had ended goes on with the next. All this is as torchdata's
StatefulDataLoader has it. With which epoch the iteration began is in it, so that one over several epochs ends where it
would have ended; workers, threads and processes are not.
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
    first_epoch: int
    """With which the iteration began that the step is of."""
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
    about = {"version": _VERSION, "epoch": epoch, "position": position, "first_epoch": place.first_epoch}
    return {**about, **place.meaning}


def read_state(state: Mapping[str, Any], place: Place) -> tuple[int, int]:
    """Return the step at which a loader goes on that stands at `place` now, and the first epoch of its iteration."""
    if state.get("version") != _VERSION or not {"epoch", "position", "first_epoch"} <= state.keys():
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
    step = state["epoch"] * place.schedule.steps_per_epoch + min(batch, place.schedule.steps_per_epoch)
    return int(step), int(state["first_epoch"])
