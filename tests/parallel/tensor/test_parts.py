"""What a divided model costs and keeps: collectives, bytes, ties, its way from the meta device; what is refused."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.comm.rank import Rank
from shoal.core.errors import PlanError
from shoal.parallel.tensor.divide import Cut, Division, apply_tensor, find_regions, tensor_context
from shoal.parallel.tensor.plan import Style, find_tensor_plan
from shoal.parallel.tensor.torch_private import COLLECTIVES, METADATA, replaces_output, timed_collectives
from tests.parallel.tensor.models import CASES, TOKENS, WIDTH, Feeds, vectors
from tests.parallel.tensor.training import TOLERANCE, built, divided, largest_difference, mesh_of, trained
from tests.support.ranks import RankPool


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives by name. CommDebugMode's hooks on modules make views of what in-place functions write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func.__name__.startswith(("all_", "reduce_")):
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def collectives(rank: Rank, *, case: str, sequence: bool) -> tuple[dict[str, int], dict[str, int], int]:
    """Return how often which collective runs in forward and in backward, and the number of blocks."""
    with mesh_of(rank, tensor=rank.workers) as mesh:
        model = built(case)
        plan = {n: s for n, s in find_tensor_plan(model, tensor=2).items() if s.kind not in ("vocab", "head")}
        apply_tensor(model, mesh, plan, sequence=sequence)
        with tensor_context():
            with Collectives() as forward:
                loss = CASES[case].loss(model, 0)
            with Collectives() as backward:
                torch.autograd.backward(loss)
        return dict(forward.counts), dict(backward.counts), len(find_regions(model, plan))


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].pairs])
def test_a_pair_sums_once_in_forward_and_in_backward_and_gathers_nothing(ranks: RankPool, case: str) -> None:
    forward, backward, blocks = ranks.run(collectives, workers=2, case=case, sequence=False)[0]
    assert forward == backward == {"all_reduce": CASES[case].pairs * blocks}


@pytest.mark.parametrize("case", ["gpt", "gpt2", "llama", "phi3", "bert", "vit"])
def test_with_divided_tokens_a_pair_gathers_once_and_scatters_once(ranks: RankPool, case: str) -> None:
    forward, _, blocks = ranks.run(collectives, workers=2, case=case, sequence=True)[0]
    # One gather more where the run of blocks ends.
    assert forward == {"all_gather_into_tensor": 2 * blocks + 1, "reduce_scatter_tensor": 2 * blocks}


def bytes_of_blocks(rank: Rank, *, case: str) -> tuple[int, int]:
    """Return the bytes of this worker's parts of columns and rows, and those of the plain model."""
    with mesh_of(rank, tensor=rank.workers) as mesh:
        model, division = divided(case, mesh)
        here = {name: p for name, p in model.named_parameters() if name in division.cuts}
        plain = dict(built(case).named_parameters())
        assert all(isinstance(p, DTensor) for p in here.values())
        parts = [p.to_local() for p in here.values() if isinstance(p, DTensor)]
        # The storage: a view of the whole would save nothing.
        return sum(p.untyped_storage().nbytes() for p in parts), sum(plain[name].nbytes for name in here)


@pytest.mark.parametrize("case", ["gpt", "gpt2", "llama", "grouped split"])
def test_a_worker_holds_its_part_of_the_divided_parameters(ranks: RankPool, case: str) -> None:
    for here, plain in ranks.run(bytes_of_blocks, workers=2, case=case):
        assert here * 2 == plain > 10_000


def materialised_from_meta(rank: Rank, *, case: str) -> tuple[float, str]:
    """Divide on the meta device, then fill in each worker's part of the weights of a plain model."""
    with mesh_of(rank, tensor=rank.workers) as mesh:
        plain = built(case)
        weights = {n: p.detach().clone() for n, p in plain.named_parameters(remove_duplicate=False)}
        buffers = {n: b.clone() for n, b in plain.named_buffers()}
        with torch.device("meta"):
            model = CASES[case].build()
        division = apply_tensor(model, mesh, find_tensor_plan(model, tensor=rank.workers))
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.copy_(division.shard_of(name, weights[name]))
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        model.train()
        return largest_difference(trained(model, CASES[case].loss, division), trained(plain, CASES[case].loss))


@pytest.mark.parametrize("case", ["gpt", "gpt2", "llama", "grouped split"])
def test_a_model_on_meta_is_divided_and_filled_part_by_part(ranks: RankPool, case: str) -> None:
    for difference, where in ranks.run(materialised_from_meta, workers=2, case=case):
        assert difference < TOLERANCE, where


def tied_weights(rank: Rank, *, case: str) -> list[str]:
    with mesh_of(rank, tensor=rank.workers) as mesh:
        model, division = divided(case, mesh)
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return [name for tied in names.values() if len(tied) > 1 for name in tied if name in division.cuts]


def test_tied_weights_of_the_vocabulary_are_divided_together_and_stay_tied(ranks: RankPool) -> None:
    assert ranks.run(tied_weights, workers=2, case="gpt2")[0] == ["transformer.wte.weight", "lm_head.weight"]
    tied = ranks.run(tied_weights, workers=2, case="bert")[0]
    assert {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"} <= set(tied)


def in_bf16(rank: Rank, *, case: str) -> float:
    """Return how far the losses are from those of the plain model, with whole tokens or divided ones."""

    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return CASES[case].loss(model, step)

    with mesh_of(rank, tensor=rank.workers) as mesh:
        reference = trained(built(case), loss)
        differences = []
        for sequence in (False, True):
            model, division = divided(case, mesh, sequence=sequence)
            ours = trained(model, loss, division)
            differences += [abs(a - b) / abs(b) for a, b in zip(ours[0], reference[0], strict=True)]
        return max(differences)


@pytest.mark.parametrize("case", ["gpt", "gpt2", "llama", "vit"])
def test_in_bf16_the_losses_are_near(ranks: RankPool, case: str) -> None:
    assert max(ranks.run(in_bf16, workers=2, case=case)) < 1e-2  # a bf16 number has 8 bits: 4e-3


def fifteen_tokens(rank: Rank) -> None:
    with mesh_of(rank, tensor=rank.workers) as mesh, tensor_context():
        model = Feeds()
        apply_tensor(model, mesh, find_tensor_plan(model, tensor=2), sequence=True)
        with pytest.raises(PlanError, match=r"sequence parallelism over tensor=2 .* a sample has 15"):
            model(vectors(0, 4, TOKENS - 1, WIDTH))


def test_a_length_that_does_not_divide_is_refused(ranks: RankPool) -> None:
    ranks.run(fifteen_tokens, workers=2)


def hooked_like_plain(rank: Rank) -> tuple[float, str]:
    with mesh_of(rank, tensor=rank.workers) as mesh:
        reference = trained(built("gpt"), CASES["gpt"].loss)
        model, division = divided("gpt", mesh)
        for module in model.modules():
            module.register_full_backward_hook(lambda *_: None)
        return largest_difference(trained(model, CASES["gpt"].loss, division), reference)


def test_hooks_that_replace_the_output_of_a_packed_projection_change_nothing(ranks: RankPool) -> None:
    for difference, where in ranks.run(hooked_like_plain, workers=2):
        assert difference < TOLERANCE, where


def test_the_parts_of_a_packed_parameter_make_the_whole_again() -> None:
    full = torch.arange(24.0).reshape(12, 2)
    parts = [Division(i, 2, {"w": Cut(0, (8, 2, 2))}) for i in range(2)]
    cut = [part.shard_of("w", full) for part in parts]
    assert cut[0][:, 0].tolist() == [0.0, 2.0, 4.0, 6.0, 16.0, 20.0]
    assert torch.equal(parts[0].whole_of("w", cut), full)
    assert parts[0].shard_of("other", full) is full


def parameter_that_does_not_divide(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
    with (
        mesh_of(rank, tensor=rank.workers) as mesh,
        pytest.raises(PlanError, match="tensor=2 does not divide"),
    ):
        apply_tensor(model, mesh, {"0": Style("column"), "1": Style("row")})


def test_a_parameter_that_does_not_divide_is_refused(ranks: RankPool) -> None:
    ranks.run(parameter_that_does_not_divide, workers=2)


def test_what_we_use_of_torch_in_private_is_still_there() -> None:
    seen: list[Any] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor, linear = torch.zeros(2), nn.Linear(2, 2)
    with Seen():
        assert tensor.shape == (2,)
        assert tensor.dtype is torch.float32
        assert tensor.size(0) == 2
    assert len(seen) == 3
    assert set(seen) <= METADATA
    assert not replaces_output(linear)
    linear.register_full_backward_hook(lambda *_: None)
    assert replaces_output(linear)


def collectives_timed(rank: Rank) -> tuple[Counter[str], Counter[str]]:
    """Return the collectives of a forward and a backward, counted below torch and by `timed_collectives`."""
    counted: Counter[str] = Counter()

    @contextmanager
    def waiting() -> Iterator[None]:
        counted["waits"] += 1
        yield

    with mesh_of(rank, tensor=rank.workers) as mesh:
        model, _ = divided("gpt", mesh)
        with Collectives() as seen, tensor_context(), timed_collectives(waiting):
            CASES["gpt"].loss(model, 0).backward()  # type: ignore[no-untyped-call]
        held = torch.distributed._functional_collectives.all_reduce
        counted["restored"] = int(held.__module__ == torch.distributed._functional_collectives.__name__)
    return seen.counts, counted


def test_every_collective_of_a_divided_model_is_timed(ranks: RankPool) -> None:
    assert {"all_reduce", "wait_tensor"} <= set(COLLECTIVES)
    for seen, counted in ranks.run(collectives_timed, workers=2):
        # Each is begun once and waited for at least once.
        assert counted["waits"] >= 2 * sum(seen.values()) > 0
        assert counted["restored"]
