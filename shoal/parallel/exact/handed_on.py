"""Whether a tensor is a parameter that was handed on: to a layer by the model around it, and by engines on the way.

A model may hand a parameter to its layers as an argument, as DeBERTa does with its table of relative positions. FSDP2
and DTensor pass such arguments through functions of their own, and what comes out is no nn.Parameter any more. The
names of these functions are torch's private ones; tests/parallel/exact/test_handed_on.py says when they have moved.
"""

import torch
from torch import Tensor, nn

_PASSING = {
    "RegisterPostBackwardFunctionBackward",
    "RedistributeBackward",
    "_FromTorchTensorBackward",
    "_ToTorchTensorBackward",
}
_LEAF = "AccumulateGrad"


def is_parameter(tensor: Tensor) -> bool:
    """Return whether `tensor` is a parameter, or one that was only handed on."""
    if isinstance(tensor, nn.Parameter):
        return True
    if torch.compiler.is_compiling():  # which cannot look at graphs
        return False
    node, output = tensor.grad_fn, tensor.output_nr
    while node is not None and node.name().split("::")[-1] in _PASSING:
        edges = node.next_functions
        node, output = edges[output] if output < len(edges) else edges[0]
    # Any other leaf is data that happens to want a gradient.
    return (
        node is not None and node.name().endswith(_LEAF) and isinstance(getattr(node, "variable", None), nn.Parameter)
    )
