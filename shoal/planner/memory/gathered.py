"""What FSDP2 holds of parameters gathered from all shards, and of gradients on their way to them.

There is one group for each block and one, the root, for the rest:
1. The root is gathered at the start of the forward and stays to the end of the backward.
2. A block is gathered into a flat buffer, then copied out. In the forward the flat buffer stays until the next block
   is gathered: two of its sizes. In the backward the next one's flat buffer is there already: again two.
3. Its gradients go into a flat buffer to be reduced, which stays until the next block is done: one more.
   While the root's own layers run, before and after the blocks, one buffer of a block is left.
4. Only ZeRO-3 frees a block after its forward. Otherwise all blocks up to this one are there; and with several
   micro-batches, from the end of the first forward to the beginning of the last backward, all of them.
5. A pipeline has several micro-batches on their way, frees nothing until its step is done, and sends gradients then.
6. With a shard axis of 1 nothing is gathered, but the parameters are copied all the same.

Example: a root of 4 MB and 10 blocks of 1 MB. In the backward of block 6, ZeRO-3 has 4 + 3 * 1 = 7 MB gathered, ZeRO-2
4 + 6 + 1 = 11 MB; while micro-batches accumulate, 4 + 10 + 1 = 15 MB.
"""

from dataclasses import dataclass

from shoal.planner.engine import frees_parameters, on_fsdp2, scatters_after, scatters_each
from shoal.planner.memory.sizes import Sizes
from shoal.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Bytes beyond the shards while a layer runs."""

    forward: int = 0
    backward: int = 0


class Groups:
    """The groups of one worker's layers, and what is gathered of them in a step."""

    def __init__(self, plan: Plan, layers: list[tuple[Sizes, int]], *, micro_batches: int) -> None:
        self.layers = layers
        self.used, self.frees = on_fsdp2(plan), frees_parameters(plan)
        self.each, self.after = scatters_each(plan), scatters_after(plan)
        self.is_sharded = plan.mesh.shard > 1
        self.several = micro_batches > 1
        self.root = sum(count * sizes.parameters for sizes, count in layers if not sizes.block)
        self.block = max((sizes.parameters for sizes, _ in layers if sizes.block), default=0)
        self.whole = sum(count * sizes.parameters for sizes, count in layers)

    def while_running(self, position: int, nth: int) -> Gathered:
        """Return what is there beside the shards while number `nth` of the layers at `position` runs."""
        here = self.layers[position][0]
        if not self.used:
            return Gathered()
        if self.frees:
            forward, backward = (2, 3) if here.block else (1, 1)
            return Gathered(forward=self.root + forward * self.block, backward=self.root + backward * self.block)
        if self.after:
            return Gathered(forward=self.whole, backward=self.whole)
        kept = sum(count * sizes.parameters for sizes, count in self.layers[:position] if sizes.block)
        kept += self.root + ((nth + 1) * here.parameters if here.block else 0)
        least = self.whole if self.several else 0
        backward = least + self.block if self.several and self.each else max(least, kept + self.block)
        return Gathered(forward=max(least, kept + (self.block if self.is_sharded else 0)), backward=backward)

    def at_the_end(self) -> int:
        """Return what is there when the last group's gradients are sent: its parameters, and they in a flat buffer."""
        if self.after:
            return self.whole + max(self.root, self.block)
        return 2 * self.root if self.used else 0
