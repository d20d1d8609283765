"""What ZeRO-2 and -3 hold of parameters gathered from all shards, and of gradients on their way to them.

As FSDP2 does it, with one group for each block and one, the root, for the rest:
1. The root is gathered at the start of the forward and stays to the end of the backward.
2. A block is gathered into a flat buffer, then copied out. In the forward the flat buffer stays until the next block
   is gathered: two of its sizes. In the backward the next one's flat buffer is there already: again two.
3. Its gradients go into a flat buffer to be reduced, which stays until the next block is done: one more.
   While the root's own layers run, before and after the blocks, one buffer of a block is left.
4. ZeRO-2 does not free a block after its forward: all blocks up to this one are there.
"""

from dataclasses import dataclass

from shoal.planner.memory.sizes import Sizes
from shoal.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Bytes beyond the shards while a layer runs."""

    forward: int = 0
    backward: int = 0


def gathered_bytes(plan: Plan, layers: list[tuple[Sizes, int]], position: int, nth: int) -> Gathered:
    """Return what is gathered while number `nth` of the layers at `position` runs."""
    if plan.zero < 2:
        return Gathered()
    root = sum(count * sizes.parameters for sizes, count in layers if not sizes.block)
    block = max((sizes.parameters for sizes, _ in layers if sizes.block), default=0)
    here = layers[position][0]
    if plan.zero == 3:
        forward, backward = (2, 3) if here.block else (1, 1)
        return Gathered(forward=root + forward * block, backward=root + backward * block)
    kept = sum(count * sizes.parameters for sizes, count in layers[:position] if sizes.block)
    kept += (nth + 1) * here.parameters if here.block else 0
    return Gathered(forward=root + kept + block, backward=root + kept + block)
