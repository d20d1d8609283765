"""Profile: what a model costs, traced without running it."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Product:
    """Equal matrix products: `batch` times (rows x inner) by (inner x columns), `count` of them in a pass."""

    rows: int
    columns: int
    inner: int
    batch: int = 1
    count: int = 1

    @property
    def flops(self) -> int:
        """Operations of one of them."""
        return 2 * self.batch * self.rows * self.columns * self.inner


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The forward or the backward of one layer over one micro-batch."""

    flops: int = 0
    """Operations in matrix products, convolutions and attention."""
    moved_bytes: int = 0
    """Bytes that all other operations read and write."""
    operations: int = 0
    """How many operations do work: each costs its start, however small it is."""
    products: tuple[Product, ...] = ()
    """Those of the operations that are plain matrix products, by shape; the rest of `flops` is none of them."""
    peak_bytes: int = 0
    """The most alive at once in this pass, beyond what the layers before have left, and the gradients."""
    peak_fixed_bytes: int = 0
    """That part of it which does not grow with the micro-batch: weights in another precision, new gradients."""
    peak_own_bytes: int = 0
    """The peak with the gradients of this layer's own parameters, as they come to be."""
    peak_operation: str = ""
    """The operation that reaches the peak."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A part of the model, one of those that run one after the other; bytes are those of one micro-batch."""

    name: str
    """The path of its module, or of the first of them: "transformer.h.0"."""
    kind: str = ""
    """The class of its module."""
    repeats: int = 1
    """How many layers in a row are like this one. All figures are of one."""
    block: bool = False
    """Whether it is one of a run of layers built alike: what is computed again, gathered and cut by one."""
    parameters: int = 0
    parameter_bytes: int = 0
    """Parameters and buffers. Tied weights count where they are first used."""
    padding: float = 0.0
    """What the allocator adds to its parameters, as a fraction; to their gradients and optimizer state, too."""
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    """State the optimizer keeps between steps."""
    forward: Pass = Pass()
    backward: Pass = Pass()
    saved_bytes: int = 0
    """Made by its forward and still there when the backward begins."""
    saved_fixed_bytes: int = 0
    """That part of it which does not grow with the micro-batch: weights in another precision."""
    saved_products_bytes: int = 0
    """That part of it which products made: what stays when everything else is computed again."""
    cast_bytes: int = 0
    """What its forward leaves for the rest of the forward only, such as biases that autocast has cached; less than 0
    where it also frees what layers before it left."""
    cast_fixed_bytes: int = 0
    """That part of it which does not grow with the micro-batch."""
    output_bytes: int = 0
    """What it hands to the next layer."""
    pairs: int = 0
    """Pairs of a column-wise and a row-wise split product that tensor parallelism finds: attention and MLP make two."""
    split_parameters: int = 0
    """How many of the parameters tensor parallelism divides."""
    split_saved_bytes: int = 0
    """How much of what is saved it divides."""
    vocabulary: int = 0
    """Rows of its embedding, or numbers that its head gives for a token: divided where the tensor degree divides it."""
    heads: int = 0
    """Attention heads (of keys, where these are fewer); 0 without attention. A tensor degree must divide them."""
    key_value_heads: int = 0
    """Heads of keys and values where the module names them; 0: as many as `heads`, as far as anybody knows."""
    batch_norms: tuple[str, ...] = ()
    """Names, within it, of batch norms that take their statistics from the micro-batch."""

    def degree(self, tensor: int) -> int:
        """Return over how many of the `tensor` workers of a group its products are divided: all or 1."""
        return tensor if self.pairs or (self.vocabulary and self.vocabulary % tensor == 0) else 1


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The cost of one forward and backward of a micro-batch, layer by layer, and of one optimizer step."""

    micro_batch: int
    """The samples it was traced with."""
    precision: str = "fp32"
    dtype: str = "float32"
    """Of most parameters."""
    layers: tuple[Layer, ...]
    """In the order in which they run; the last holds the loss."""
    input_bytes: int = 0
    """The micro-batch itself."""
    optimizer_work_bytes: int = 0
    """The most alive at once in the optimizer's step, beyond parameters, gradients and state."""
    optimizer_moved_bytes: int = 0
    """Bytes that one optimizer step reads and writes."""
    optimizer_operations: int = 0
    cut_by_count: bool = False
    """Whether its engine cuts a pipeline by the number of blocks, whatever they cost: Megatron's does."""

    def total(self, of: Callable[[Layer], int]) -> int:
        """Return the sum of `of` over all layers, each counted as often as it is there."""
        return sum(layer.repeats * of(layer) for layer in self.layers)

    @property
    def parameters(self) -> int:
        """How many numbers are trained or frozen in the model."""
        return self.total(lambda layer: layer.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Parameters and buffers."""
        return self.total(lambda layer: layer.parameter_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Gradients of all parameters that have one."""
        return self.total(lambda layer: layer.gradient_bytes)

    @property
    def optimizer_bytes(self) -> int:
        """State the optimizer keeps between steps."""
        return self.total(lambda layer: layer.optimizer_bytes)

    @property
    def flops(self) -> int:
        """Operations of forward and backward in products, convolutions and attention."""
        return self.total(lambda layer: layer.forward.flops + layer.backward.flops)

    @property
    def moved_bytes(self) -> int:
        """Bytes that all other operations of forward and backward read and write."""
        return self.total(lambda layer: layer.forward.moved_bytes + layer.backward.moved_bytes)

    @property
    def operations(self) -> int:
        """How many operations do work in forward, backward and optimizer step."""
        passes = self.total(lambda layer: layer.forward.operations + layer.backward.operations)
        return passes + self.optimizer_operations

    @property
    def products_in(self) -> str:
        """The precision of its products: that of autocast, or of the parameters themselves."""
        return "bf16" if self.precision == "bf16" or self.dtype in ("bfloat16", "float16") else "fp32"

    @property
    def num_layers(self) -> int:
        """How many layers run, one after the other."""
        return self.total(lambda _: 1)

    @property
    def heads(self) -> int:
        """The number that a tensor degree must divide: the greatest common divisor of all layers' heads."""
        return math.gcd(*(heads for layer in self.layers for heads in (layer.heads, layer.key_value_heads)))

    @property
    def batch_norms(self) -> tuple[str, ...]:
        """Names of layers that take statistics from the micro-batch; of equal ones, those of the first."""
        return tuple(f"{layer.name}.{name}".strip(".") for layer in self.layers for name in layer.batch_norms)
