"""The one right order in which a plan is laid over a plain model, and why it is that order.

1. build      on the meta device, unless every worker holds the whole model anyway: nobody needs the memory of it all.
2. pipeline   first, because it decides which layers this worker has at all.
3. tensor     divides single parameters, which sharding can then cut further; the other way round it could not.
4. batch norm, recompute, compile: around a block's computing, inside of what gathers its parameters, so that they are
              there when it is computed again.
5. shard      last: it takes parameters as they are by now, and hooks itself around the blocks.
6. materialise: every worker gets the numbers of its own slices, one parameter at a time.

DDP (`replicate` alone) is wrapped around model and loss together by the training step; see `engine_of`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.comm.collectives import Waiting
from shoal.comm.mesh import Position, data_group
from shoal.comm.shm.group import SharedGroup
from shoal.core.errors import JobError
from shoal.parallel.building.deferred import build_deferred
from shoal.parallel.building.materialise import (
    Places,
    Slice,
    Whole,
    allocate,
    fill,
    fill_buffers,
    find_places,
    parameter_at,
)
from shoal.parallel.exact.batch_norm import apply_batch_norm
from shoal.parallel.exact.dropout import ExactDropout
from shoal.parallel.gradients import count_copies
from shoal.parallel.layout import Layout
from shoal.parallel.pipeline.rehearsal import Call
from shoal.parallel.pipeline.schedule import TiedGradients
from shoal.parallel.pipeline.split import Split, split_model
from shoal.parallel.pipeline.stage import Stage
from shoal.parallel.recompute import apply_recompute
from shoal.parallel.shard import apply_shard
from shoal.parallel.tensor.divide import Division, apply_tensor
from shoal.parallel.tensor.plan import find_tensor_plan
from shoal.parallel.tensor.style import Style
from shoal.profile.layers import find_layers
from shoal.spec.job import Job
from shoal.spec.plan import Plan


def engine_of(plan: Plan) -> str:
    """Return what joins the replicas in backward: "none", "ddp", or "fsdp", which also takes divided models.

    None does where there is one, or where they meet otherwise (sync.mode).
    """
    mesh = plan.mesh
    if mesh.data == 1 or plan.sync.mode != "all-reduce":
        return "none"
    return "ddp" if mesh.keeps_whole else "fsdp"


def apply_plan(
    job: Job,
    plan: Plan,
    *,
    position: Position,
    mesh: DeviceMesh | None,
    device: torch.device,
    call: Call,
    sample: Any = None,
    waiting: Waiting | None = None,
    shared: SharedGroup | None = None,
) -> Layout:
    """Build the job's model and lay `plan` over it, for the worker at `position`. Called by every worker.

    `call(model, micro_batch)` is how the model is called; `sample` a micro-batch to find out where it can be cut.
    `waiting` is entered while the engines wait for communication; `shared` are the workers of the shard axis, if they
    are on one host.
    """
    if plan.mesh.keeps_whole:
        return whole_layout(job, plan, position=position, mesh=mesh, device=device)
    assert mesh is not None
    deferred = build_deferred(lambda: _checked(job.model()), seed=job.seed)
    model = deferred.model
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}  # on meta, and whole
    styles = tensor_styles(job, plan, model) if plan.mesh.tensor > 1 else {}
    split = _split(model, plan, call=call, sample=sample, device=device) if plan.mesh.pipeline > 1 else None
    stages = _stages(model, split, plan, position=position, call=call, device=device) if split else []
    places = {name: held for stage in stages for name, held in stage.places.items()} or find_places(model)
    roots: Sequence[nn.Module] = stages or [model]
    dropout = ExactDropout(find_layers(model)[0], seed=job.seed)
    blocks = [_own_blocks(model, root) for root in roots]
    division = _divide(model, styles, places, mesh, sequence=plan.sequence) if styles else None
    batch_norms = apply_batch_norm(model, _data_group(plan, mesh))
    for own in blocks:
        _around_blocks(own, plan, dropout)
    if engine_of(plan) == "fsdp":
        for root, own in zip(roots, blocks, strict=True):
            # In a pipeline parameters stay gathered for all micro-batches: its schedules run several blocks' forward
            # before a backward, and torch's zero-bubble gives wrong gradients where they are freed between the two.
            zero = plan.zero if plan.mesh.pipeline == 1 else min(plan.zero, 2)
            apply_shard(root, mesh["replicate", "shard"], blocks=own, zero=zero, waiting=waiting, shared=shared)
    tied = TiedGradients(roots, split, group=mesh.get_group("pipeline")) if split else None
    slice_of = division.shard_of if division else None
    _materialise(model, roots, places, deferred.real, slice_of=slice_of, position=position, device=device)
    parameters = {name: p for name in places if (p := parameter_at(places, name)).requires_grad}
    return Layout(
        model=model,
        roots=roots,
        parameters=parameters,
        parts={name: _part(name, p, position, split) for name, p in parameters.items()},
        trained=trained,
        dropout=dropout,
        meets=engine_of(plan) == "fsdp" or bool(batch_norms),
        division=division,
        mesh=mesh,
        waiting=None if plan.compile else waiting,
        sum_tied=tied.sum if tied else lambda: None,
        why_whole=deferred.why_whole,
    )


def tensor_styles(job: Job, plan: Plan, model: nn.Module) -> dict[str, Style]:
    """Return how the layers of `model` are divided: as the job says, else as it is found."""
    return find_tensor_plan(model, tensor=plan.mesh.tensor, asked=job.tensor_plan)


def whole_layout(job: Job, plan: Plan, *, position: Position, mesh: DeviceMesh | None, device: torch.device) -> Layout:
    """Lay out a model that every worker holds all of."""
    torch.manual_seed(job.seed)
    model = _checked(job.model()).to(device)
    dropout = ExactDropout(find_layers(model)[0], seed=job.seed)
    batch_norms = apply_batch_norm(model, _data_group(plan, mesh))
    apply_recompute(_own_blocks(model, model), plan.recompute, contexts=dropout.checkpoint_contexts)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Layout(
        model=model,
        roots=[model],
        parameters=parameters,
        parts={name: 1 / count_copies(p, position) for name, p in parameters.items()},
        trained=parameters,
        dropout=dropout,
        meets=bool(batch_norms) and plan.workers > 1,
        mesh=None,
    )


def _checked(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise JobError(f"model() returned a {type(model).__name__}, not an nn.Module.")
    return model


def _split(model: nn.Module, plan: Plan, *, call: Call, sample: Any, device: torch.device) -> Split:
    split = split_model(call, model, sample, boundaries=plan.stages, device=device)
    if split.unused:
        raise JobError(
            f"{len(split.unused)} parameter(s) take no part in the model's output: {', '.join(split.unused[:5])}. With "
            "several workers every parameter must. Remove them, or set requires_grad=False."
        )
    return split


def _stages(
    model: nn.Module, split: Split, plan: Plan, *, position: Position, call: Call, device: torch.device
) -> list[Stage]:
    """Return this worker's pieces of a pipeline."""
    own = range(position.pipeline, plan.pieces, plan.mesh.pipeline)
    return [Stage(model, split, piece, call=call, device=device) for piece in own]


def _own_blocks(model: nn.Module, root: nn.Module) -> list[nn.Module]:
    """Return the blocks of `model`'s runs that are in `root`."""
    inside = {id(module) for module in root.modules()}
    return [block for run in find_layers(model)[1] for block in run.members() if id(block) in inside]


def _divide(
    model: nn.Module, styles: Mapping[str, Style], places: Places, mesh: DeviceMesh, *, sequence: bool
) -> Division:
    """Divide the layers that this worker has; those of other stages stay as they are, on the meta device."""
    here = {id(module) for held in places.values() for module, _ in held}
    own = {
        name: style for name, style in styles.items() if any(id(m) in here for m in model.get_submodule(name).modules())
    }
    return apply_tensor(model, mesh["tensor"], own, sequence=sequence)


def _data_group(plan: Plan, mesh: DeviceMesh | None) -> Any:
    """Return the group of the workers that have the parts of one global batch; None: there is one part, or they may be
    apart in a forward (sync.mode), and each has statistics of its own."""
    if mesh is None or plan.mesh.data == 1 or plan.sync.mode != "all-reduce":
        return None
    return data_group(mesh)


def _around_blocks(blocks: Sequence[nn.Module], plan: Plan, dropout: ExactDropout) -> None:
    apply_recompute(blocks, plan.recompute, contexts=dropout.checkpoint_contexts)
    if plan.compile:  # a whole model is compiled together with its loss, by the training step
        for block in blocks:
            block.compile()


def _materialise(
    model: nn.Module,
    roots: Sequence[nn.Module],
    places: Places,
    whole: Whole,
    *,
    slice_of: Slice | None,
    position: Position,
    device: torch.device,
) -> None:
    for root in roots:
        allocate(root, root.places if isinstance(root, Stage) else places, device=device)
    fill(places, whole, slice_of=slice_of, shard=position.shard, shards=position.mesh.shard)
    for root in roots:
        if isinstance(root, Stage):
            root.materialise_rest(whole)
        else:
            fill_buffers(model, whole, device=device)


def _part(name: str, parameter: nn.Parameter, position: Position, split: Split | None) -> float:
    """Return what this worker's slice counts in the gradient's norm; a tied weight counts on its first stage only."""
    if split:
        first = next(piece for piece, names in enumerate(split.parameters) if name in names)
        if first % position.mesh.pipeline != position.pipeline:
            return 0.0
    return 1 / count_copies(parameter, position)
