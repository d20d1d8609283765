"""Finding what can be divided by tokens, and what a divided layer then costs."""

import pytest
from torch import nn

from benchmarks.parallel_cases import gpt
from shoal.planner.memory.sizes import sizes_of
from shoal.profile.trace import trace
from shoal.profile.vocabulary import Vocabulary, find_vocabularies
from shoal.spec.plan import Mesh, Plan


class Model(nn.Module):
    """An embedding, positions, and a head."""

    def __init__(self, *, tied: bool = False, outputs: int = 12) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(12, 4), nn.Embedding(8, 4)
        self.out = nn.Linear(4, outputs, bias=False)
        if tied:
            self.out.weight = self.token.weight


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_and_its_head_are_found_together(tied: bool) -> None:
    assert list(find_vocabularies(Model(tied=tied))) == [Vocabulary(12, ("token",), ("out",))]


def test_an_embedding_without_a_head_of_its_rows_stays_whole() -> None:
    assert list(find_vocabularies(Model(outputs=5))) == []


def test_what_is_not_free_is_not_divided() -> None:
    assert list(find_vocabularies(Model(), is_free=lambda name: name != "out")) == []


def test_a_tied_weight_that_something_else_holds_stays_whole() -> None:
    model = Model(tied=True)
    model.position.weight = model.token.weight  # used as positions, too: also plain embeddings
    assert next(find_vocabularies(model)).embeddings == ("token", "position")
    model.extra = nn.Bilinear(4, 1, 12)
    model.extra._parameters["weight"] = model.position._parameters["weight"]
    assert list(find_vocabularies(model)) == []


def test_the_planner_divides_embedding_and_head_where_the_degree_divides_their_rows() -> None:
    layers = {layer.name: layer for layer in trace(gpt(steps=1, layers=2), micro_batch=2, precision="fp32").layers}
    token, out = layers["token"], layers["out"]
    assert (token.vocabulary, out.vocabulary) == (256, 256)
    assert [out.degree(tensor) for tensor in (1, 2, 3)] == [1, 2, 1]
    halves = Plan(mesh=Mesh(tensor=2))
    assert sizes_of(out, halves, ratio=1.0).parameters == out.parameter_bytes // 2
    positions = token.parameters - token.split_parameters
    assert sizes_of(token, halves, ratio=1.0).parameters == 4 * (positions + token.split_parameters // 2)
