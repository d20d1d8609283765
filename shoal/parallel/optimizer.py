"""The optimizer over what this worker holds.

Sharded parameters are DTensors. An optimizer that treats every number by itself (SGD, Adam and most others) does the
same on a slice as on the whole, so it is given the slices themselves: plain tensors that share the DTensors' memory,
without the engine's cost for each operation. It is built with the DTensors first, because a job's builder may look at
the shapes of the whole (weight decay for matrices only, a learning rate by width).

An optimizer that looks at whole matrices (Adafactor, Muon) keeps the DTensors, whose arithmetic is that of the whole.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_BY_ITSELF = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
"""Optimizers of torch that treat every number by itself. A subclass may not: only these very classes count."""


def treats_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` is known to treat every number by itself, whatever tensors they lie in."""
    return type(optimizer) in _BY_ITSELF


class Slices:
    """The optimizer's own parameters, and the sharded ones they are slices of."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.pairs: list[tuple[nn.Parameter, DTensor]] = []
        """Each slice that the optimizer has, with the parameter that it is of."""
        if treats_by_itself(optimizer):
            for group in optimizer.param_groups:
                group["params"] = [self._slice(parameter) for parameter in group["params"]]
        elif any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
            for group in optimizer.param_groups:
                if "foreach" in group:
                    group["foreach"] = False  # DTensors of different meshes cannot share an operation

    def bring(self) -> None:
        """Give the slices their gradients, before the optimizer's step."""
        for local, sharded in self.pairs:
            gradient = sharded.grad
            assert gradient is None or isinstance(gradient, DTensor)
            local.grad = None if gradient is None else gradient._local_tensor

    def drop(self) -> None:
        """Let go of all gradients, after it."""
        for local, sharded in self.pairs:
            local.grad = sharded.grad = None

    def _slice(self, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return parameter
        local = nn.Parameter(parameter._local_tensor.detach(), requires_grad=parameter.requires_grad)
        self.pairs.append((local, parameter))
        return local
