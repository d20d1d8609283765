"""One layer's bytes on one worker, under a plan: its traced figures, scaled to the micro-batch and cut by the mesh."""

from dataclasses import dataclass

from shoal.planner.engine import on_fsdp2
from shoal.planner.memory.residual import residual_bytes
from shoal.spec.plan import Plan
from shoal.spec.profile import Layer, Pass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one layer."""

    name: str
    block: bool
    parameters: int
    gradients: int
    optimizer: int
    residuals: int
    """What a codec has not sent yet, and remembers."""
    padding: float
    saved: int
    """Kept from its forward to its backward."""
    cast: int
    """Left for the rest of the forward: what autocast has cached and nobody saves. Below 0: freed of others'."""
    forward_peak: int
    backward_peak: int
    backward_own: int
    """The backward's peak with the gradients of its own parameters, as they come."""
    forward_at: str
    backward_at: str


def sizes_of(layer: Layer, plan: Plan, *, ratio: float, dtype: str = "float32") -> Sizes:
    """Return the bytes of `layer` when a micro-batch is `ratio` times the one it was traced with.

    `dtype` is that of its gradients.
    With `plan.sequence` all that a divided block saves is divided; while a pair runs, its input is there whole.
    """
    tensor = layer.degree(plan.mesh.tensor)
    by_tokens = plan.sequence and layer.block and tensor > 1
    whole = 1 - (1 - 1 / tensor) * layer.split_parameters / max(1, layer.parameters)
    kept = 1 - (1 - 1 / tensor) * (1 if by_tokens else layer.split_saved_bytes / max(1, layer.saved_bytes))
    joined = int((1 - 1 / tensor) * layer.output_bytes * ratio) if by_tokens else 0

    def scaled(num_bytes: float, fixed_bytes: float = 0) -> int:
        return int(kept * (fixed_bytes + (num_bytes - fixed_bytes) * ratio))

    def peak_of(record: Pass) -> int:
        return scaled(record.peak_bytes, record.peak_fixed_bytes) + joined

    saved = scaled(layer.saved_bytes, layer.saved_fixed_bytes)
    cast = scaled(layer.cast_bytes, layer.cast_fixed_bytes)
    forward, backward = peak_of(layer.forward), peak_of(layer.backward)
    own = backward + int(whole * (layer.backward.peak_own_bytes - layer.backward.peak_bytes))
    if plan.recompute != "none" and layer.block:
        output = int(layer.output_bytes * ratio) - joined
        again = max(backward, forward + output)  # computed again, with the gradient of its output waiting
        own, backward = own + again - backward, again
        products = scaled(layer.saved_products_bytes) if plan.recompute == "selective" else 0
        saved = min(saved, output + products)
        # Autocast's cache still has the weights that nobody saves now; on FSDP2 it is off.
        cached = int(kept * max(0, layer.saved_fixed_bytes)) if plan.precision == "bf16" else 0
        cast = 0 if on_fsdp2(plan) else max(0, cast) + cached
    gradients = int(whole * layer.gradient_bytes)
    return Sizes(
        name=layer.name,
        block=layer.block,
        parameters=int(whole * layer.parameter_bytes),
        gradients=gradients,
        optimizer=int(whole * layer.optimizer_bytes),
        residuals=residual_bytes(layer, plan, gradient_bytes=gradients, dtype=dtype),
        padding=layer.padding,
        saved=saved,
        cast=cast,
        forward_peak=forward,
        backward_peak=backward,
        backward_own=own,
        forward_at=layer.forward.peak_operation,
        backward_at=layer.backward.peak_operation,
    )
