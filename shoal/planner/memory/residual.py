"""What a codec keeps from step to step on each worker (shoal/compress): residuals, and what it remembers beside them.

1. Error feedback keeps what was not sent yet: a float32 for every number that has a gradient. Under ZeRO it is for all
   of them, not for the worker's shard: a worker sends to the slices of all others, and each message leaves something.
2. PowerSGD also keeps the factor Q of each matrix [rows, columns] that it sends as a product: columns * rank numbers.
   Which matrices a layer has is read off its products: x [samples, inner] by W^T [inner, columns] is a weight of
   [columns, inner]. What is left over in a layer with a vocabulary is its embedding, and that of positions.
3. Not counted: a number for each parameter (threshold), what fills up the last block of a bucket (1 KB a worker), and
   factors of matrices that are in no plain product (of convolutions; of embeddings without a head).

With `codec = "auto"` residuals count, since the memory must be there if a codec is taken; not under plans with which
no codec goes.

Example: a block of width 512 with attention and an MLP, 12 * 512^2 numbers: 12.6 MB of residuals. Its factors of rank 4
are of four matrices, with 512, 512, 512 and 2048 columns: 57 KB.
"""

from shoal.planner.engine import codecs_for
from shoal.spec.plan import Plan
from shoal.spec.profile import Layer

PENDING_BYTES = 4
"""float32, whatever the gradients are: what is left of a bfloat16 has its digits below those."""
RANK, LEAST_GAIN = 4, 2
"""PowerSGD's usual rank, and how many times smaller its factors must be (compress/powersgd.py)."""
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def keeps_residuals(plan: Plan) -> bool:
    """Return whether gradients go through a codec, as far as the plan says."""
    if plan.sync.codec == "auto" and not codecs_for(plan):
        return False
    return plan.sync.codec != "none" and plan.mesh.data > 1


def residual_bytes(layer: Layer, plan: Plan, *, gradient_bytes: int, dtype: str) -> int:
    """Return what a codec keeps of `layer` on one worker that has `gradient_bytes` of its gradients, in `dtype`."""
    if not keeps_residuals(plan):
        return 0
    trained = gradient_bytes // _ITEM_BYTES.get(dtype, 4)
    factors = _factor_numel(layer, trained) if plan.sync.codec == "powersgd" else 0
    return PENDING_BYTES * (trained + factors)


def _factor_numel(layer: Layer, trained: int) -> int:
    """Return the numbers of the factors Q of a layer, `trained` of whose numbers have a gradient."""
    left, total = trained, 0
    for product in layer.forward.products:
        weight = product.inner * product.columns
        if product.batch == 1 and product.count * weight <= left:
            left -= product.count * weight
            total += product.count * _columns(rows=product.columns, columns=product.inner)
    width = min(left, layer.split_parameters) // layer.vocabulary if layer.vocabulary else 0
    if width:
        total += _columns(rows=layer.vocabulary, columns=width)
        total += _columns(rows=left // width - layer.vocabulary, columns=width)  # positions, where it has such
    return RANK * total


def _columns(*, rows: int, columns: int) -> int:
    """Return the columns of a matrix that is sent as a product; 0 of one that goes whole."""
    return columns if LEAST_GAIN * RANK * (rows + columns) <= rows * columns else 0
