"""A run's training state as `fault.shards` moves it, and back: into the same mesh or any other.

What there is, and by which names:

    model/NAME, buffer/NAME       parameters, trained or frozen, and buffers, by their names in the job's model
    optimizer/KEY/NAME            the optimizer's state for a parameter (saved_optimizer.py)
    codec/WORKER/...              what a codec has not sent yet (saved_codec.py)
    sync/NAME                     what the way in which workers meet keeps (saved_sync.py)
    own                           the random states of each worker (saved_random.py)
    common                        step, data, schedule, the optimizer's settings, shares, metrics, the mesh

The data position of a run is its step: the order of samples is a function of it. Random states go on alike in the same
mesh; in another one, workers begin anew from the job's seed and the step. (Dropout is a function of the step: exact.)
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.fault.checkpoint.reader import Checkpoint
from shoal.fault.checkpoint.values import from_json, to_json
from shoal.fault.shards import Found, SavedState, Shard, fill, found_in
from shoal.parallel.building.materialise import find_places, parameter_at
from shoal.parallel.deepspeed.start import DeepSpeedLayout
from shoal.parallel.layout import Layout, local_of
from shoal.parallel.pipeline.stage import Stage
from shoal.spec.job import Job
from shoal.training.saved_codec import codec_alike, codec_shards, codec_wanted, restore_codec
from shoal.training.saved_deepspeed import (
    deepspeed_model_shards,
    deepspeed_optimizer_shards,
    make_deepspeed_room,
)
from shoal.training.saved_optimizer import groups_of, make_room, optimizer_shards, set_groups
from shoal.training.saved_random import RandomStates, begin_anew, set_random
from shoal.training.saved_slices import Placement, place
from shoal.training.saved_sync import restore_sync, sync_alike, sync_shards, sync_wanted

if TYPE_CHECKING:
    from shoal.training.run import Run


def state_of(run: "Run") -> SavedState:
    """Return the training state of this worker, live, between steps. Called by every worker."""
    run.settle()
    shards = [*live_shards(run), *codec_shards(run)]
    return SavedState(shards, RandomStates(run.device).own(), {**fixed(run), **changing(run), "metrics": _metrics(run)})


def live_shards(run: "Run") -> list[Shard]:
    """Return the slices that this worker holds, live, between steps, but for what a codec keeps. By every worker."""
    layout, optimizer = run.layout, run.state.optimizer
    if isinstance(layout, DeepSpeedLayout):
        return [*model_shards(run), *deepspeed_optimizer_shards(layout, optimizer)]
    places = _placed(run)
    return [*model_shards(run, places), *optimizer_shards(run.state, places), *sync_shards(run)]


def model_shards(run: "Run", places: dict[str, Placement] | None = None) -> Iterator[Shard]:
    """Yield the slices of parameters and buffers that this worker holds."""
    is_first = run.position.data == 0 and run.position.tensor == 0
    if isinstance(run.layout, DeepSpeedLayout):
        yield from deepspeed_model_shards(run.layout, run.state.optimizer, is_first=is_first)
    else:
        places = places if places is not None else _placed(run)
        held = _held(run.layout)
        for name, placement in places.items():
            yield from placement.shards(f"model/{name}", local_of(held[name].detach()))
    for name, buffer in _buffers(run.layout):
        local = local_of(buffer.detach())
        yield Shard(f"buffer/{name}", local, tuple(local.shape), (0,) * local.dim(), is_mine=is_first)


class Saved(Protocol):
    """A whole state, wherever it lies: a checkpoint, or what the workers hold together in memory."""

    found: dict[str, Found]
    """What tensors it has."""

    @property
    def step(self) -> int:
        """After which step it was taken."""

    def alike(self) -> dict[str, Any]:
        """Return what all workers had alike."""

    def own(self, worker: int) -> dict[str, Any] | None:
        """Return what `worker` had for itself, if that is known."""


def restore(run: "Run", saved: Checkpoint, *, say: Callable[[str], None]) -> None:
    """Go on where `saved` was taken: by this number of workers and this mesh, whatever they were. By every worker."""
    source = str(saved.path)
    go_on_from(run, saved, lambda wanted: fill(wanted, saved.found, source=source), source=source, say=say)


def go_on_from(
    run: "Run", saved: Saved, fill_in: Callable[[list[Shard]], None], *, source: str, say: Callable[[str], None]
) -> None:
    """Go on from `saved`, called `source`, whose numbers `fill_in` fills into slices. Called by every worker."""
    alike = saved.alike()
    _check(run, alike, source=source)
    wanted, finish = _room(run, saved.found)
    codec = codec_wanted(run, saved.found, alike)
    kept = sync_wanted(run, saved.found, alike)
    fill_in([*model_shards(run), *wanted, *codec, *kept])
    finish()
    restore_sync(run, kept, saved.found, alike, say=say)
    set_groups(run.state.optimizer, alike["groups"])
    if run.state.schedule is not None:
        run.state.schedule.load_state_dict(from_json(alike["schedule"]))
    restore_codec(run, found_in(codec), alike, say=say)
    run.share(run.live.restored(alike.get("shares")))
    run.stream_place = alike.get("stream")
    own = saved.own(run.rank.index) if alike["mesh"] == dataclasses.asdict(run.plan.mesh) else None
    if own is not None:
        set_random(own)
    else:
        begin_anew(run.job.seed, saved.step, run.position.data)
    run.step_count = run.state.step = saved.step


def _room(run: "Run", found: dict[str, Found]) -> tuple[list[Shard], Callable[[], None]]:
    """Give the optimizer the state that `found` has; see `make_room`."""
    if isinstance(run.layout, DeepSpeedLayout):
        return make_deepspeed_room(run.layout, run.state.optimizer, found)
    return make_room(run.state, _placed(run), found)


_PLACED: WeakKeyDictionary["Run", dict[str, Placement]] = WeakKeyDictionary()
"""What each run's worker holds: found out once, for it takes milliseconds and never changes."""


def _placed(run: "Run") -> dict[str, Placement]:
    if run not in _PLACED:
        held = _held(run.layout)
        _PLACED[run] = {name: place(run.layout, run.position, name, p) for name, p in held.items()}
    return _PLACED[run]


def _held(layout: Layout) -> dict[str, nn.Parameter]:
    """Return the parameters that this worker holds, trained or frozen, by the first of their names."""
    held = dict(layout.parameters)
    for root in layout.roots:
        places = root.places if isinstance(root, Stage) else find_places(layout.model)
        for name in places:
            if name not in held and not (parameter := parameter_at(places, name)).requires_grad:
                held[name] = parameter
    return held


def _buffers(layout: Layout) -> list[tuple[str, Tensor]]:
    """Return the buffers that this worker holds; those of other stages are on the meta device."""
    return [(name, buffer) for name, buffer in layout.model.named_buffers() if buffer.device.type != "meta"]


def fixed(run: "Run") -> dict[str, Any]:
    """Return what all workers have alike, and what stays so."""
    model: Any = run.model
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    return {
        "data": _data(run.job),
        "mesh": dataclasses.asdict(run.plan.mesh),
        "optimizer": type(run.state.optimizer).__name__,
        "derived_buffers": _derived(run.model),
        "tied": _tied(model),
        "class": type(model).__name__,
        # All of it, also what is as by default: another version of the library may have other defaults.
        "config": config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else None,
        "generation_config": generation.to_json_string() if hasattr(generation, "to_json_string") else None,
        "torch": torch.__version__,
    }


def changing(run: "Run") -> dict[str, Any]:
    """Return what all workers have alike, and what steps change."""
    schedule = run.state.schedule
    return {
        "groups": groups_of(run.state.optimizer),
        "schedule": None if schedule is None else to_json(schedule.state_dict(), where="the schedule"),
        "codec": codec_alike(run),
        "sync": sync_alike(run),
        "shares": run.live.saved(),
        "stream": run.stream_place,
    }


def _metrics(run: "Run") -> dict[str, float]:
    """Return what a checkpoint of this moment is judged by: the evaluation after this step; without any, its loss."""
    step, metrics = run.evaluated
    if run.job.eval_data is None:
        metrics = {"loss": run.settle()}
    elif step != run.step_count:
        metrics = {}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _tied(model: nn.Module) -> dict[str, str]:
    """Return, for each further name of a parameter, the first, by which it is saved."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def _derived(model: nn.Module) -> list[str]:
    """Return the buffers that are no part of the model's state_dict."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    ]


def _data(job: Job) -> dict[str, Any]:
    """Return what gives a step its samples."""
    rare = {"sampler": job.sampler and type(job.sampler).__name__, "drop_last": job.drop_last}
    return {
        "num_samples": job.num_samples,
        "batch_size": job.batch_size,
        "seed": job.seed,
        "shuffle": job.shuffle,
        "block_rows": job.block_rows,
        **{name: value for name, value in rare.items() if value},
    }


def _check(run: "Run", alike: dict[str, Any], *, source: str) -> None:
    """Refuse to go on with other data or another optimizer."""
    now, before = _data(run.job), alike["data"]
    for name in {**before, **now}:
        was, here = before.get(name), now.get(name)
        if was != here:
            raise ConfigError(
                f"{source} was saved with {name}={was}, and the job has {name}={here}: it would go on with other "
                "samples. Resume with the job as it was, or start a new run from its weights (shoal export)."
            )
    kind = type(run.state.optimizer).__name__
    if alike["optimizer"] != kind:
        raise ConfigError(
            f"{source} was saved with the optimizer {alike['optimizer']}, and the job has {kind}. Resume with the job "
            "as it was, or start a new run from its weights (shoal export)."
        )
    if (alike["schedule"] is None) != (run.state.schedule is None):
        had, has = ("no", "has one") if alike["schedule"] is None else ("a", "has none")
        raise ConfigError(f"{source} was saved with {had} schedule, and the job {has}. Resume with the job as it was.")
