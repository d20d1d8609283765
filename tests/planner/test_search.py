"""The search, held against trying every plan; and what it proposes, against the rules for plans."""

import dataclasses
from collections.abc import Iterable

import pytest

from shoal.planner.calibration.megatron import gpt_profile
from shoal.planner.catalog import read_device, read_link
from shoal.planner.machine import Machine
from shoal.planner.memory.peak import needed_bytes, peak
from shoal.planner.search.search import Candidate, is_lossy, search
from shoal.planner.search.space import Shape, Space
from shoal.planner.search.validate import room_bytes, validate
from shoal.planner.stages import longest_piece, most_pieces
from shoal.planner.time.steptime import step_time
from shoal.spec.profile import Layer, Pass, Profile
from shoal.spec.sync import Sync

GPT = gpt_profile(width=1024, heads=8, layers=6, sequence=512)
BATCH = 24


def machine(
    *, nodes: int = 2, per_node: int = 4, memory_gb: float = 80, link: str = "ib-hdr", shared: bool = False
) -> Machine:
    device = dataclasses.replace(read_device("a100-80"), memory_bytes=int(memory_gb * 1e9))
    inside = read_link("nvlink-3")
    return Machine(device=device, nodes=nodes, per_node=per_node, inside=inside, between=read_link(link), shared=shared)


def every_plan(space: Space) -> list[Candidate]:
    """Cost every plan of the space, and return those that fit, the best first."""
    found = []
    for shape in space.shapes():
        room = room_bytes(space.machine, shape.workers)
        samples = -(-space.batch_size // shape.data)
        for plan in space.plans(shape, lossy=True):
            worst = peak(space.profile, plan, samples=samples, device=space.machine.device)
            if room is None or needed_bytes(worst, space.machine.device) <= room:
                time = step_time(space.profile, plan, space.machine, batch_size=space.batch_size)
                found.append(Candidate(shape=shape, plan=plan, time=time, peak=worst))
    return sorted(found, key=lambda candidate: candidate.rank)


def best_of_shapes(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the best of each of the five best shapes, of candidates in their order."""
    best: dict[Shape, Candidate] = {}
    for candidate in candidates:
        best.setdefault(candidate.shape, candidate)
    return list(best.values())[:5]


@pytest.mark.parametrize(
    "there",
    [
        machine(memory_gb=2.2),
        machine(memory_gb=1.2),
        machine(link="ethernet-1"),
        machine(link="ethernet-10", memory_gb=2.2),
        machine(nodes=1, per_node=8),
        machine(nodes=3, per_node=2, memory_gb=1.5),
        machine(shared=True),
    ],
    ids=["2.2 GB", "1.2 GB", "1 Gb", "10 Gb, 2.2 GB", "one node", "3 x 2", "processors"],
)
def test_the_search_finds_what_trying_every_plan_finds(there: Machine) -> None:
    everything = every_plan(Space(profile=GPT, machine=there, batch_size=BATCH))
    for lossy in (False, True):
        expected = best_of_shapes(c for c in everything if lossy or c.plan.sync == Sync())
        found = search(GPT, there, batch_size=BATCH, lossy=lossy)
        assert [c.plan for c in found.best] == [c.plan for c in expected]
        assert [c.step_s for c in found.best] == pytest.approx([c.step_s for c in expected])
        inexact = next((c for c in everything if is_lossy(c.plan.sync)), None)
        if inexact is not None and inexact.step_s < expected[0].step_s:
            assert found.lossy is not None
            assert found.lossy.plan == inexact.plan


def test_the_search_looks_at_a_fraction_of_all_plans() -> None:
    space = Space(profile=GPT, machine=machine(nodes=8, per_node=8), batch_size=64)
    plans = sum(1 for shape in space.shapes() for _ in space.plans(shape, lossy=True))
    assert search(GPT, space.machine, batch_size=64).looked_at < plans / 5


@pytest.mark.parametrize("memory_gb", [80, 2.2, 1.2])
def test_every_plan_that_is_proposed_can_run(memory_gb: float) -> None:
    there = machine(memory_gb=memory_gb)
    for candidate in search(GPT, there, batch_size=BATCH).best:
        validate(candidate.plan, GPT, there, batch_size=BATCH, num_samples=1000)


@pytest.mark.parametrize("link", ["ethernet-1", "ib-hdr"])
def test_only_gradients_that_meet_in_an_all_reduce_are_proposed_unless_asked(link: str) -> None:
    there = machine(link=link, nodes=8, per_node=1)
    space = Space(profile=GPT, machine=there, batch_size=BATCH)
    assert {plan.sync for shape in space.shapes() for plan in space.plans(shape)} == {Sync()}
    assert {candidate.plan.sync for candidate in search(GPT, there, batch_size=BATCH).best} == {Sync()}
    planned = [plan.sync.mode for shape in space.shapes() for plan in space.plans(shape, lossy=True)]
    assert {"server", "local"} <= set(planned)


def test_a_model_with_batch_norms_takes_its_part_at_once_and_is_no_pipeline() -> None:
    layers = tuple(dataclasses.replace(each, batch_norms=("norm",)) if each.block else each for each in GPT.layers)
    profile = dataclasses.replace(GPT, layers=layers)
    there = machine()
    best = search(profile, there, batch_size=BATCH).best
    assert best
    for candidate in best:
        validate(candidate.plan, profile, there, batch_size=BATCH, num_samples=1000)
        assert candidate.plan.mesh.pipeline == 1


def test_pipelines_that_shorten_the_longest_stage_by_cost_or_by_count_are_tried() -> None:
    for there, layers in ((machine(nodes=1, per_node=8), 6), (machine(nodes=2, per_node=8), 12)):
        for profile in (GPT, gpt_profile(width=512, heads=8, layers=layers, sequence=512)):
            most = min(most_pieces(profile), there.workers)
            lengths = [(longest_piece(profile, n), -(-most_pieces(profile) // n)) for n in range(1, most + 1)]
            expected = [1] + [
                n + 1 for n in range(1, most) if lengths[n][0] < lengths[n - 1][0] or lengths[n][1] < lengths[n - 1][1]
            ]
            space = Space(profile=profile, machine=there, batch_size=BATCH)
            assert [pipeline for tensor, pipeline in space.degrees() if tensor == 1] == expected


def test_nothing_that_changes_the_result_is_proposed_unless_asked() -> None:
    slow = machine(link="ethernet-1", nodes=8, per_node=1)
    exact, lossy = search(GPT, slow, batch_size=BATCH), search(GPT, slow, batch_size=BATCH, lossy=True)
    assert not any(is_lossy(candidate.plan.sync) for candidate in exact.best)
    assert is_lossy(lossy.best[0].plan.sync)
    assert exact.lossy is not None
    assert exact.lossy.plan == lossy.best[0].plan, "it says what would have won"
    assert exact.lossy.step_s < exact.best[0].step_s


def test_a_model_without_attention_is_not_divided() -> None:
    layer = Layer(name="0", repeats=4, block=True, parameters=10**6, parameter_bytes=4 * 10**6,
                  gradient_bytes=4 * 10**6, forward=Pass(flops=10**9), backward=Pass(flops=2 * 10**9),
                  saved_bytes=10**6, output_bytes=10**5)  # fmt: skip
    profile = Profile(micro_batch=1, layers=(layer,))
    found = search(profile, machine(), batch_size=16)
    assert found.best
    assert all(candidate.plan.mesh.tensor == 1 for candidate in found.best)


def test_tensor_parallelism_lands_inside_a_node_because_it_is_cheaper_there() -> None:
    wide = gpt_profile(width=8192, heads=64, layers=8, sequence=2048)
    found = search(wide, machine(nodes=4, per_node=8, memory_gb=40), batch_size=32)
    assert 1 < found.best[0].plan.mesh.tensor <= 8


def test_where_the_batch_is_small_fewer_workers_are_taken() -> None:
    found = search(GPT, machine(nodes=8, per_node=8), batch_size=3)
    best = found.best[0]
    assert best.plan.mesh.data <= 3
    assert best.shape.workers < 64


def test_of_plans_that_are_as_good_the_simplest_is_taken() -> None:
    layers = tuple(Layer(name=str(i), forward=Pass(flops=10**9 + i), output_bytes=10) for i in range(3))
    best = search(Profile(micro_batch=1, layers=layers), machine(nodes=1, per_node=1), batch_size=1).best[0]
    assert (best.plan.recompute, best.plan.zero, best.plan.schedule) == ("none", 0, "1f1b")


def test_where_nothing_fits_nothing_is_found() -> None:
    assert search(GPT, machine(memory_gb=0.1), batch_size=BATCH).best == []
