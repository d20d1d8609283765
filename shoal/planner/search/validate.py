"""A plan held against a model and a machine: can it run? Each error says what to write instead.

`Plan` itself refuses what contradicts itself; here stands what needs to know the model, the batch and the devices.
`check_model`, `check_batch` and `check_sync` need no machine.
"""

import math
from collections.abc import Callable

from shoal.core.errors import PlanError
from shoal.core.units import format_bytes
from shoal.planner.machine import Machine
from shoal.planner.memory.peak import Peak, needed_bytes, peak
from shoal.planner.search.shares import cut_batch
from shoal.planner.stages import cut_into_stages, most_pieces
from shoal.planner.time.schedules import runs_interleaved
from shoal.spec.plan import Mesh, Plan
from shoal.spec.profile import Profile
from shoal.spec.sync import CODECS, WHOLE_CODECS


def validate(plan: Plan, profile: Profile, machine: Machine, *, batch_size: int, num_samples: int) -> None:
    """Raise PlanError where `plan` cannot train this model in global batches of `batch_size` on `machine`."""
    check_mesh(plan, profile, machine)
    full_batch = min(batch_size, num_samples)
    check_batch(plan, full_batch, num_samples=num_samples, profile=profile)
    check_sync(plan)
    check_memory(plan, profile, machine, batch_size=full_batch)


def check_mesh(plan: Plan, profile: Profile, machine: Machine) -> None:
    """Raise PlanError where the mesh has more workers than devices, or cuts the model where it cannot be cut."""
    mesh = plan.mesh
    if mesh.workers > machine.workers:
        raise PlanError(
            f"the mesh {axes(mesh)} has {mesh.workers} workers, and there {_are(machine.workers, 'device')}. "
            f"Use a mesh of at most {machine.workers}, or more nodes."
        )
    check_model(plan, profile)


def check_model(plan: Plan, profile: Profile) -> None:
    """Raise PlanError where the mesh cuts the model where it cannot be cut."""
    mesh = plan.mesh
    if plan.sequence and mesh.tensor == 1:
        raise PlanError("sequence=true needs mesh.tensor of 2 or more.")
    if mesh.tensor > 1:
        _check_tensor(mesh.tensor, profile)
    pieces, most = mesh.pipeline * plan.chunks, most_pieces(profile)
    if pieces > most:
        each = f" with chunks={plan.chunks}" if plan.chunks > 1 else ""
        raise PlanError(
            f"pipeline={mesh.pipeline}{each} cuts the model into {pieces} pieces, and it has {most} layers to cut. "
            f"{_use_pipeline(plan.chunks, most)}"
        )
    if plan.stages:
        cut_into_stages(profile, mesh.pipeline, chunks=plan.chunks, starts=plan.stages)
    for limit in ENGINE_LIMITS:
        sentence = limit(plan)
        if sentence is not None:
            raise PlanError(sentence)


ENGINE_LIMITS: tuple[Callable[[Plan], str | None], ...] = ()
"""What torch's engines cannot do together: each returns a sentence that refuses a plan, or None."""


def _use_pipeline(chunks: int, most: int) -> str:
    if most // chunks >= 2:
        return f"Use pipeline={most // chunks} or less."
    if most >= 4:
        return f"Use fewer chunks: pipeline=2 takes {most // 2} or less."
    return "Use schedule='1f1b'." if most >= 2 and chunks > 1 else "Use pipeline=1."


def _check_tensor(tensor: int, profile: Profile) -> None:
    if profile.total(lambda layer: layer.pairs) == 0:
        raise PlanError(
            f"tensor={tensor}, and the model has no layer that can be divided (attention, or two linear layers in a "
            "row). Use tensor=1."
        )
    for layer in profile.layers:
        for name, heads in (("num_heads", layer.heads), ("num_key_value_heads", layer.key_value_heads)):
            if heads % tensor:
                raise PlanError(f"tensor={tensor} does not divide {name}={heads}. {_use_tensor(profile.heads)}")


def _use_tensor(heads: int) -> str:
    good = [degree for degree in divisors(heads) if degree <= 8] or [1]  # a node has 8 devices, as a rule
    return f"Use tensor={_listed(good)}."


def check_batch(plan: Plan, batch_size: int, *, num_samples: int | None = None, profile: Profile | None = None) -> None:
    """Raise PlanError where a replica has no samples, a pipeline no whole micro-batches, or a batch norm a part of one.

    `batch_size` is that of a full batch: of the job, or all samples where there are fewer.
    """
    parts, mesh = plan.mesh.data, plan.mesh
    if num_samples is not None and parts > num_samples:
        raise PlanError(f"{_replicas(mesh)} for {num_samples} samples. Use at most {num_samples}.")
    if parts > batch_size:
        raise PlanError(
            f"{_replicas(mesh)} for a global batch of {batch_size} samples. "
            f"Use at most {batch_size}, or a larger batch_size."
        )
    samples = cut_batch(plan, batch_size)
    if min(samples) == 0:
        replica = samples.index(0)
        raise PlanError(
            f"the share {plan.shares[replica]:g} of replica {replica} is less than one sample of a global batch of "
            f"{batch_size}. Give it more, or leave it out."
        )
    micro_batch = plan.batch.micro_batch
    if micro_batch is not None and micro_batch > max(samples):
        raise PlanError(
            f"micro_batch={micro_batch} is more than the {max(samples)} samples that a replica takes of a global "
            f"batch. Use micro_batch={max(samples)} or less."
        )
    if profile is not None and profile.batch_norms:
        _check_batch_norms(plan, profile.batch_norms, max(samples))
    if mesh.pipeline > 1:
        _check_micro_batches(plan, samples)


def _check_batch_norms(plan: Plan, names: tuple[str, ...], part: int) -> None:
    micro_batch = plan.batch.micro_batch or part
    if micro_batch < part:
        instead = "without micro_batch" if plan.mesh.pipeline == 1 else "with pipeline=1 and without micro_batch"
        raise PlanError(
            f"{names[0]!r} is a batch norm: with micro_batch={micro_batch} it would take its statistics from a part of "
            f"the batch, and train another model. Use GroupNorm or LayerNorm, or train {instead}."
        )


def _check_micro_batches(plan: Plan, samples: list[int]) -> None:
    stages, part = plan.mesh.pipeline, samples[0]
    if len(set(samples)) > 1 and len(set(plan.batch.shares)) > 1:
        raise PlanError(
            f"shares with pipeline={stages} give parts of {min(samples)} to {max(samples)} samples: all replicas of a "
            "pipeline take equally many. Leave the shares out."
        )
    if len(set(samples)) > 1:
        raise PlanError(
            f"{_replicas(plan.mesh)} with parts of {min(samples)} to {max(samples)} samples: all replicas of a "
            f"pipeline take equally many. Use a number of replicas that divides the global batch of {sum(samples)}."
        )
    micro_batch = plan.batch.micro_batch or part
    fitting = [size for size in divisors(part) if takes(plan.schedule, part // size, stages)]
    if not fitting:
        raise PlanError(
            f"pipeline={stages} needs at least {stages} micro-batches, and a replica takes {part} "
            f"{'sample' if part == 1 else 'samples'}. Use fewer stages, or fewer replicas."
        )
    if part % micro_batch:
        raise PlanError(
            f"micro_batch={micro_batch} does not divide the {part} samples that a replica takes; a pipeline takes "
            f"whole micro-batches. Use micro_batch={_listed(fitting)}."
        )
    if micro_batch not in fitting:
        count = part // micro_batch
        raise PlanError(
            f"{count} micro-batch{'es' * (count > 1)} for pipeline={stages} with schedule={plan.schedule!r}. "
            f"Use micro_batch={_listed(fitting)}."
        )


def takes(schedule: str, micro_batches: int, stages: int) -> bool:
    """Return whether a pipeline of `stages` can run so many micro-batches in this schedule, as torch's engines ask."""
    if schedule == "interleaved" and not runs_interleaved(micro_batches, stages):
        return False
    return schedule == "gpipe" or micro_batches >= stages


def check_sync(plan: Plan) -> None:
    """Raise PlanError where the gradients cannot meet as the plan says."""
    sync, mesh = plan.sync, plan.mesh
    if sync.mode == "all-reduce" and sync.codec in ("none", "auto"):  # auto takes what goes with the plan, or none
        return
    what = f"sync.mode={sync.mode!r}" if sync.mode != "all-reduce" else f"sync.codec={sync.codec!r}"
    if plan.zero and sync.mode == "all-reduce":
        _check_sharded_codec(plan)
        return
    if plan.zero:
        raise PlanError(
            f"{what} with zero={plan.zero}: a worker that holds a shard has no whole gradient to send. "
            "Use zero=0 with mesh.shard=1."
        )
    if not mesh.keeps_whole:
        reason = "servers serve whole models" if sync.mode == "server" else "it takes whole models"
        raise PlanError(f"{what} with the mesh {axes(mesh)}: {reason}. Use only mesh.replicate.")
    if sync.mode != "all-reduce":
        _check_loose(plan)


def _check_loose(plan: Plan) -> None:
    """Raise PlanError where workers that may be apart between two meetings cannot do what the plan says."""
    sync, mesh = plan.sync, plan.mesh
    if sync.mode == "server" and sync.place == "threads" and sync.servers > mesh.replicate:
        raise PlanError(
            f"sync.servers={sync.servers} for {_replicas(mesh)}: the servers live on the workers. "
            f"Use at most {mesh.replicate}, or sync.place='processes'."
        )
    if sync.quorum > mesh.replicate:
        raise PlanError(f"sync.quorum={sync.quorum} of {_replicas(mesh)}. Use at most {mesh.replicate}.")
    if sync.codec not in ("none", "auto") and sync.mode != "local":
        raise PlanError(
            f"sync.codec={sync.codec!r} with sync.mode={sync.mode!r}, which sends gradients as they are. "
            "Use sync.codec='none', or sync.mode='local' or 'all-reduce'."
        )
    if isinstance(plan.on_loss.snapshot_steps, int):
        raise PlanError(
            f"on_loss.snapshot={plan.on_loss.snapshot!r} with sync.mode={sync.mode!r}: workers are apart after most "
            "steps, and each keeps its own. Use on_loss.snapshot='auto'."
        )


def _check_sharded_codec(plan: Plan) -> None:
    """Raise PlanError where FSDP2 has no entry for the codec."""
    sync, mesh = plan.sync, plan.mesh
    if sync.codec in WHOLE_CODECS:
        others = ", ".join(name for name in CODECS if name not in (*WHOLE_CODECS, "none", "auto"))
        raise PlanError(
            f"sync.codec={sync.codec!r} with zero={plan.zero}: it needs whole gradients, and a worker has a slice "
            f"of the sum. Use zero=0, or one of {others}."
        )
    if mesh.replicate > 1:
        raise PlanError(
            f"sync.codec={sync.codec!r} with mesh.replicate={mesh.replicate} beside mesh.shard={mesh.shard}: FSDP2 "
            "sums over the copies by itself, without an entry for a codec. Use mesh.replicate=1, or codec='none'."
        )


def check_memory(plan: Plan, profile: Profile, machine: Machine, *, batch_size: int) -> None:
    """Raise PlanError where the worst worker needs more memory than its device has."""
    there_bytes = room_bytes(machine, plan.workers)
    worst = _worst(plan, profile, machine, batch_size)
    asked_bytes = needed_bytes(worst, machine.device)
    if there_bytes is not None and asked_bytes > there_bytes:
        raise PlanError(
            f"a worker needs {format_bytes(asked_bytes)} ({worst.moment}), and its device has "
            f"{format_bytes(there_bytes)}. Use a smaller micro_batch, recompute='full', or more shards and a higher "
            "zero; `shoal fit` lists what would do."
        )


def fits(plan: Plan, profile: Profile, machine: Machine, *, batch_size: int) -> bool:
    """Return whether every worker's device has the memory that `plan` needs."""
    there_bytes = room_bytes(machine, plan.workers)
    return (
        there_bytes is None or needed_bytes(_worst(plan, profile, machine, batch_size), machine.device) <= there_bytes
    )


def _worst(plan: Plan, profile: Profile, machine: Machine, batch_size: int) -> Peak:
    return peak(profile, plan, samples=max(cut_batch(plan, batch_size)), device=machine.device)


def room_bytes(machine: Machine, workers: int) -> int | None:
    """Return what one of `workers` has: its device's memory, or its part where they share one; None: nobody knows."""
    if not machine.device.memory_bytes:
        return None
    together = min(machine.per_node, math.ceil(workers / machine.nodes)) if machine.shared else 1
    return machine.device.memory_bytes // together


def axes(mesh: Mesh) -> str:
    """Return a mesh in words: "pipeline=2 x replicate=4"; "one worker" where it is that."""
    sizes = {axis: getattr(mesh, axis) for axis in ("pipeline", "replicate", "shard", "tensor")}
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one worker"


def divisors(number: int) -> list[int]:
    """Return all that divide `number`, from 1 up."""
    low = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return low + [number // candidate for candidate in reversed(low) if candidate * candidate != number]


def _listed(numbers: list[int]) -> str:
    *first, last = (str(number) for number in numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _replicas(mesh: Mesh) -> str:
    return f"{mesh.data} {'workers' if mesh.data == mesh.workers else 'replicas'}"


def _are(count: int, what: str) -> str:
    return f"is 1 {what}" if count == 1 else f"are {count} {what}s"
