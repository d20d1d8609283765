"""What a GPT costs as Megatron-LM trained it in 2021 and 2022: its Profile, by counting; and the Plan of a row.

Widths below are h, sequences s, heads a; bytes are those of one sample in half precision, so an activation has 2 s h.

1. A block has products for queries, keys and values (h x 3h), the way out of attention (h x h) and the MLP (h x 4h and
   back), and two for each head's scores (s x s); the backward has each of them twice.
2. Everything else moves bytes: norms, dropouts and residuals 11 activations in a forward, GELU and transposes 12 more,
   which tensor parallelism divides; scores are written out, not fused with the products.
3. What a block saves without recompute is s h (34 + 5 a s / h) bytes, of which s h * 10 stay whole under tensor
   parallelism (Korthikanti et al., 2022).
4. The embedding is split by vocabulary and tied to the head, which ends in a cross-entropy in float32.
"""

from functools import lru_cache
from typing import Any

from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.profile import Layer, Pass, Product, Profile

VOCABULARY = 51_200
"""GPT-2's 50,257 words, padded so that 8 workers and 128 divide them."""

_SCORE_MOVES = (8, 10)
"""How often a forward and a backward move the matrix of scores. One fused kernel for scale, mask and softmax, and a
dropout, come to 4.5 and 5.5, separate ones in float32 to 12 and 16; 8 and 10 fits the public measurements best."""
_UNFUSED_SCORE_MOVES = (12, 16)
_OPERATIONS = (40, 75)
_UNFUSED_OPERATIONS = 20
"""More in each pass where the fused kernel does not take the shape."""
_LOGIT_BYTES = (40, 22)
"""A logit is cast to float32 (6 bytes), its maximum found (4), subtracted (8), exponentiated (8), summed (4) and
divided (8), with 2 to spare; on the way back scaled (16) and cast (6)."""
_OPTIMIZER_BYTES = 40
"""A parameter in Adam's step: gradient unscaled (4), weight, gradient and both moments read, all but the gradient
written (28), copied to half precision (6), with 2 to spare."""


def gpt_plan(*, tensor: int, data: int, pipeline: int, micro_batch: int) -> Plan:
    """Return how Megatron ran it: mixed precision, full recompute, 1F1B, no ZeRO."""
    return Plan(
        mesh=Mesh(tensor=tensor, replicate=data, pipeline=pipeline),
        batch=Batch(micro_batch=micro_batch),
        precision="bf16",
        recompute="full",
    )


def fuses_softmax(*, heads: int, tensor: int, micro_batch: int) -> bool:
    """Return whether Megatron's fused softmax takes the scores: where a worker has a multiple of 4 matrices of them.

    `FusedScaleMaskSoftmax.is_kernel_available` (megatron/model/fused_softmax.py, 2021).
    """
    return heads * micro_batch // tensor % 4 == 0


@lru_cache(maxsize=256)
def gpt_profile(
    *, width: int, heads: int, layers: int, sequence: int, fused_softmax: bool = True, cut_by_count: bool = False
) -> Profile:
    """Return the profile of a GPT of `layers` blocks, at one sample; `cut_by_count`: as Megatron cuts a pipeline."""
    blocks = _block(width, heads, layers, sequence, fused_softmax)
    parts = (_embedding(width, sequence), blocks, _head(width, sequence))
    parameters = sum(layer.repeats * layer.parameters for layer in parts)
    return Profile(
        micro_batch=1,
        precision="bf16",
        layers=parts,
        input_bytes=8 * sequence,
        optimizer_moved_bytes=_OPTIMIZER_BYTES * parameters,
        optimizer_operations=100,
        cut_by_count=cut_by_count,
    )


def _block(width: int, heads: int, layers: int, sequence: int, fused: bool) -> Layer:
    activation, scores = 2 * sequence * width, 2 * heads * sequence * sequence
    forward_moves, backward_moves = _SCORE_MOVES if fused else _UNFUSED_SCORE_MOVES
    forward, backward = (count + (0 if fused else _UNFUSED_OPERATIONS) for count in _OPERATIONS)
    saved = sequence * width * 34 + 5 * heads * sequence * sequence
    return Layer(
        **_trained(12 * width * width + 13 * width, split=12 * width * width + 7 * width),
        name="blocks.0",
        kind="ParallelTransformerLayer",
        repeats=layers,
        block=True,
        forward=_pass(_products(width, heads, sequence), 23 * activation + forward_moves * scores, forward),
        backward=_pass(_products(width, heads, sequence, count=2), 31 * activation + backward_moves * scores, backward),
        saved_bytes=saved,
        split_saved_bytes=saved - 10 * sequence * width,
        output_bytes=activation,
        pairs=2,
        heads=heads,
    )


def _products(width: int, heads: int, sequence: int, count: int = 1) -> tuple[Product, ...]:
    each = width // heads
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    linear = [Product(rows=sequence, columns=columns, inner=inner, count=count) for columns, inner in shapes]
    scores = Product(rows=sequence, columns=sequence, inner=each, batch=heads, count=count)
    mixed = Product(rows=sequence, columns=each, inner=sequence, batch=heads, count=count)
    return *linear, scores, mixed


def _embedding(width: int, sequence: int) -> Layer:
    activation = 2 * sequence * width
    return Layer(
        **_trained((VOCABULARY + sequence) * width, split=VOCABULARY * width),
        name="embedding",
        kind="Embedding",
        forward=Pass(moved_bytes=7 * activation, operations=12),
        backward=Pass(moved_bytes=5 * activation, operations=10),
        saved_bytes=activation // 2,
        output_bytes=activation,
        pairs=1,
    )


def _head(width: int, sequence: int) -> Layer:
    activation, logits = 2 * sequence * width, sequence * VOCABULARY
    product = Product(rows=sequence, columns=VOCABULARY, inner=width)
    twice = Product(rows=sequence, columns=VOCABULARY, inner=width, count=2)
    return Layer(
        **_trained(2 * width, split=0),  # the final norm: the weights of the logits are the embedding's
        name="head",
        kind="CrossEntropy",
        forward=_pass((product,), 2 * activation + _LOGIT_BYTES[0] * logits, 50),
        backward=_pass((twice,), 3 * activation + _LOGIT_BYTES[1] * logits, 80),
        saved_bytes=4 * logits,
        split_saved_bytes=4 * logits,
        output_bytes=4 * sequence,
        pairs=1,
    )


def _trained(parameters: int, *, split: int) -> dict[str, Any]:
    """Return the bytes of parameters in half precision with gradients, master copy and Adam's moments in float32."""
    return {
        "parameters": parameters,
        "parameter_bytes": 2 * parameters,
        "gradient_bytes": 4 * parameters,
        "optimizer_bytes": 12 * parameters,
        "split_parameters": split,
    }


def _pass(products: tuple[Product, ...], moved_bytes: int, operations: int) -> Pass:
    flops = sum(product.count * product.flops for product in products)
    return Pass(flops=flops, products=products, moved_bytes=moved_bytes, operations=operations)
