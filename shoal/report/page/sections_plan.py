"""The section about how a run was made: its plan and why it is so, its machines, its software."""

from collections.abc import Iterator

from shoal.core.units import format_bytes, format_seconds
from shoal.report.page.sections import Section, bullets, definitions, text
from shoal.report.summary import Summary
from shoal.report.verdict import counted, percent, rate_in_words
from shoal.spec.plan import Plan

_SHOWN = 16
"""Of shares and of nodes."""


def plan_section(summary: Summary) -> Section | None:
    """Return the plan in words, and the reasons that the run has noted."""
    if summary.plan is None:
        return None
    body = bullets(plan_sentences(summary.plan)) + "<h3>Why</h3>" + bullets(reasons(summary))
    return Section("plan", "The plan and why", body)


def plan_sentences(plan: Plan) -> Iterator[str]:
    """Yield what the plan does."""
    mesh = plan.mesh
    if mesh.replicate > 1:
        yield f"{mesh.replicate} copies of the model, each on its own part of every global batch."
    if mesh.shard > 1:
        spread = ("", "the optimizer's state", "gradients and optimizer", "parameters, gradients and optimizer")
        yield f"Each copy spread over {mesh.shard} workers: {spread[plan.zero]} (ZeRO {plan.zero})."
    if mesh.tensor > 1:
        yield f"{mesh.tensor} workers compute each layer together."
    if mesh.pipeline > 1:
        yield f"A pipeline of {mesh.pipeline} stages, schedule {plan.schedule}."
    if mesh.workers == 1:
        yield "One worker with the whole model."
    if plan.batch.micro_batch is not None:
        yield f"At most {counted(plan.batch.micro_batch, 'sample')} in one forward; larger parts are accumulated."
    if plan.batch.shares:
        yield f"Shares of a global batch: {_shares(plan.batch.shares)}."
    how = {"deadline": "those there in time", "local": f"every {plan.sync.local_steps} steps", "server": "at servers"}
    if plan.mesh.data > 1:
        yield f"Gradients meet by {plan.sync.mode}" + (f": {how[plan.sync.mode]}." if plan.sync.mode in how else ".")
    if plan.recompute != "none":
        yield f"The backward computes activations again: {plan.recompute}."
    yield f"Numbers in {plan.precision}" + (", compiled by torch.compile." if plan.compile else ".")
    every = plan.checkpoint.every_steps
    if every or plan.checkpoint_s:
        yield f"A checkpoint every {counted(every, 'step') if every else format_seconds(plan.checkpoint_s or 0.0)}."


def reasons(summary: Summary) -> Iterator[str]:
    """Yield why the run was run so, as far as it has noted it."""
    said = summary.communication
    if summary.plan:
        yield from summary.plan.why or ("The plan does not say why it is this one.",)
    if summary.predicted:
        predicted = summary.predicted
        yield (
            f"The planner predicted {format_seconds(predicted.step_s)} a step and "
            f"{rate_in_words(predicted.samples_per_s)} samples/s for it, and a peak of "
            f"{format_bytes(max(predicted.peak_bytes, default=0))}."
        )
    if said:
        yield f"Gradients are summed by {said.way}, in buckets of {format_bytes(said.bucket_bytes)}: {said.why}."
        if said.codec_why:
            yield f"Codec {said.codec}: {said.codec_why}."
    for shares in summary.shares[-3:]:
        gain = f", predicted to bring {shares.predicted_gain:.2f}x" if shares.predicted_gain else ""
        yield f"Shares from step {shares.step:,} on: {_shares(shares.shares)}, by the measured speeds{gain}."
    for sentence in summary.staging:
        yield f"Pack {sentence}"


def circumstances_section(summary: Summary) -> Section:
    """Return what the run was made of: the job, the machines, the software."""
    return Section("circumstances", "Circumstances", definitions(_circumstances(summary)))


def _circumstances(summary: Summary) -> Iterator[tuple[str, str]]:
    job, plan, record = summary.job, summary.plan, summary.record
    if record:
        yield "command", f"<code>{text(record.command)}</code>"
        yield "started", f"{text(record.started)} on {text(record.host)}"
    if summary.wall_s is not None:
        yield "wall time", format_seconds(summary.wall_s)
    if job:
        yield "job", f"<code>{text(job.file)}</code>, seed {job.seed}"
        samples = counted(job.num_samples, "sample") if job.num_samples else "a stream"
        yield "data", f"{samples}, {job.batch_size:,} in a global batch"
    if plan:
        yield "shares", _shares(plan.shares)
        yield "micro-batch", "the whole part at once" if plan.batch.micro_batch is None else f"{plan.batch.micro_batch}"
        yield "precision", text(plan.precision)
    for node in summary.cluster.nodes[:_SHOWN] if summary.cluster else ():
        devices = f"{node.devices} x {text(node.device)}" if node.devices else text(node.device)
        yield "node", f"{text(node.host)}: {devices}, {node.cores} cores, {format_bytes(node.memory_bytes)} memory"
    if record:
        yield "versions", text(", ".join(f"{name} {version}" for name, version in record.versions.items()))


def _shares(shares: tuple[float, ...]) -> str:
    words = ", ".join(percent(share) for share in shares[:_SHOWN])
    return words + (f" and {len(shares) - _SHOWN} more" if len(shares) > _SHOWN else "")
