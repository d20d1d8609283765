"""The token embedding of a model, and the head that gives one number for each of its rows: divided by rows, if at all.

Example: GPT(token 256 x 64, position, blocks, norm, out 64 -> 256) has "token" and "out", of 256 rows, also where the
two are one weight. A model with an embedding and no such head has none: its output would have to be divided first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

from torch import nn


@dataclass(frozen=True)
class Vocabulary:
    """Modules that hold a weight with a row for each token."""

    rows: int
    embeddings: tuple[str, ...]
    heads: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of all of them."""
        return self.embeddings + self.heads


def find_vocabularies(model: nn.Module, *, is_free: Callable[[str], bool] = lambda _: True) -> Iterator[Vocabulary]:
    """Yield what could be divided by tokens, among the modules with names that are `is_free`.

    Whatever else has one of the weights is in it, too.
    """
    free = {name: module for name, module in model.named_modules() if is_free(name)}
    for embedding in free.values():
        if not _is_plain_embedding(embedding):
            continue
        same = [m for m in free.values() if type(m) is nn.Linear and m.weight.shape == embedding.weight.shape]
        weights = {id(module.weight) for module in [embedding, *same[-1:]]}
        holders = [(n, m) for n, m in model.named_modules() if {id(p) for p in m._parameters.values()} & weights]
        embeddings = tuple(name for name, module in holders if name in free and _is_plain_embedding(module))
        heads = tuple(name for name, module in holders if name in free and type(module) is nn.Linear)
        if heads and len(embeddings) + len(heads) == len(holders):
            yield Vocabulary(embedding.num_embeddings, embeddings, heads)


def _is_plain_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    is_plain = type(module).forward is nn.Embedding.forward and module._parameters.get("weight") is not None
    return is_plain and not (module.max_norm is not None or module.sparse or module.scale_grad_by_freq)
