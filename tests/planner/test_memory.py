"""The arithmetic of memory, on a model small enough to add up by hand."""

import dataclasses
from typing import Any

import pytest

from shoal.planner.memory.peak import in_flight, needed_bytes, peak, peaks_of_stages
from shoal.spec.device import Device
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.profile import Layer, Pass, Profile

BLOCK = Layer(
    name="blocks.0",
    repeats=4,
    block=True,
    parameters=100,
    parameter_bytes=400,
    gradient_bytes=400,
    optimizer_bytes=800,
    forward=Pass(peak_bytes=1200),
    backward=Pass(peak_bytes=1500, peak_own_bytes=1600, peak_operation="mm"),
    saved_bytes=1000,
    saved_products_bytes=600,
    output_bytes=100,
    pairs=2,
    split_parameters=80,
    split_saved_bytes=500,
    heads=8,
)
STEM = Layer(name="stem", parameters=50, parameter_bytes=200, gradient_bytes=200, optimizer_bytes=400, saved_bytes=100)
HEAD = Layer(
    name="head",
    parameters=50,
    parameter_bytes=200,
    gradient_bytes=200,
    optimizer_bytes=400,
    forward=Pass(peak_bytes=50),
    backward=Pass(peak_bytes=60, peak_own_bytes=60),
    saved_bytes=200,
    output_bytes=100,
)
MODEL = Profile(micro_batch=2, layers=(STEM, BLOCK, HEAD), input_bytes=10, optimizer_work_bytes=300)
STATES = 2000 + 4000  # parameters and optimizer state


def plan(**fields: Any) -> Plan:
    return Plan(**fields)


def test_the_peak_is_where_a_layer_runs_on_top_of_what_those_before_it_saved() -> None:
    worst = peak(MODEL, plan(), samples=2)
    # The last block: what lasts, the batch, the stem's 100 and three blocks' 1000, its own peak, the head's gradient.
    assert worst.moment == "backward of blocks.0 (number 4 of 4)"
    assert worst.operation == "mm"
    assert worst.peak_bytes == STATES + 10 + 3100 + 1600 + 200
    assert worst.parts["gradients"] == 200
    assert worst.parts["activations"] == 3100


def test_gradients_that_stay_count_in_full() -> None:
    data_parallel = peak(MODEL, plan(mesh=Mesh(replicate=2)), samples=2)
    accumulated = peak(MODEL, plan(batch=Batch(micro_batch=2)), samples=8)
    assert data_parallel.peak_bytes == accumulated.peak_bytes == STATES + 10 + 3100 + 1500 + 2000


def test_activations_go_with_the_samples_at_once_and_what_is_fixed_does_not() -> None:
    assert peak(MODEL, plan(), samples=4).parts["activations"] == 2 * 3100
    assert peak(MODEL, plan(batch=Batch(micro_batch=1)), samples=4).parts["activations"] == 3100 // 2
    cast = dataclasses.replace(BLOCK, saved_fixed_bytes=400)
    fixed = dataclasses.replace(MODEL, layers=(STEM, cast, HEAD))
    assert peak(fixed, plan(), samples=4).parts["activations"] == 200 + 3 * (400 + 2 * 600)


def test_the_optimizers_work_space_is_the_peak_where_it_is_the_largest() -> None:
    hungry = dataclasses.replace(MODEL, optimizer_work_bytes=2000 + 8000)
    worst = peak(hungry, plan(), samples=2)
    assert worst.moment == "the optimizer's step"
    assert worst.peak_bytes == STATES + 10 + 2000 + 10000


def test_recompute_keeps_the_outputs_and_selective_also_the_products() -> None:
    full = peak(MODEL, plan(recompute="full", mesh=Mesh(replicate=2)), samples=2)
    selective = peak(MODEL, plan(recompute="selective", mesh=Mesh(replicate=2)), samples=2)
    assert full.parts["activations"] == 100 + 3 * 100
    assert selective.parts["activations"] == 100 + 3 * 700
    assert full.parts["transient"] == 1500
    # Where gradients come and go, the first block is the worst: its activations are few, and all gradients are there.
    alone = peak(MODEL, plan(recompute="full"), samples=2)
    assert alone.moment == "backward of blocks.0 (number 1 of 4)"
    assert alone.parts["gradients"] == 200 + 3 * 400


def test_autocasts_cache_of_recomputed_layers_lasts_for_the_forward_and_is_off_with_zero_3() -> None:
    cast = dataclasses.replace(BLOCK, saved_fixed_bytes=900, backward=Pass(peak_bytes=1000, peak_own_bytes=1000))
    model = dataclasses.replace(MODEL, layers=(STEM, cast, HEAD), precision="bf16")
    worst = peak(model, plan(precision="bf16", recompute="full"), samples=2)
    assert worst.moment == "forward of blocks.0 (number 4 of 4)"
    assert worst.parts["activations"] == 100 + 3 * (100 + 900)
    spread = peak(model, plan(precision="bf16", recompute="full", mesh=Mesh(shard=2), zero=3), samples=2)
    assert spread.parts["activations"] <= 100 + 3 * 100


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_with_zero_only_shards_last(zero: int) -> None:
    worst = peak(MODEL, plan(mesh=Mesh(shard=8), zero=zero), samples=2)
    assert worst.parts["parameters"] == 2000 // 8
    assert worst.parts["optimizer"] == 4000 // 8


def test_zero_3_gathers_the_root_and_a_few_blocks() -> None:
    worst = peak(MODEL, plan(mesh=Mesh(shard=8), zero=3), samples=2)
    assert worst.moment.startswith("backward of blocks.0")
    assert (
        worst.parts["communication"] == 400 + 3 * 400
    )  # stem and head; a block, the next one, and gradients on their way
    assert worst.parts["gradients"] == 200  # the head's stay whole until the root is done


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_keep_what_they_have_gathered_and_are_alike_with_one_micro_batch(zero: int) -> None:
    worst = peak(MODEL, plan(mesh=Mesh(shard=8), zero=zero), samples=2)
    assert worst.parts["communication"] == 400 + 4 * 400 + 400  # all blocks up to this one, and gradients on their way
    assert worst.parts["gradients"] == 200
    assert worst.parts["transient"] == 1600


@pytest.mark.parametrize(
    ("zero", "communication", "gradients", "transient"),
    [
        (1, 2000 + 400, 2000, 1500),  # all gathered, all gradients whole; those of a block on their way in the last one
        (2, 2000 + 400, 2000 // 8 + 200, 1600),  # shards of all gradients; the head's are whole until the root is done
        (3, 400 + 3 * 400, 2000 // 8 + 200, 1600),
    ],
)
def test_zero_with_several_micro_batches(zero: int, communication: int, gradients: int, transient: int) -> None:
    worst = peak(MODEL, plan(mesh=Mesh(shard=8), zero=zero, batch=Batch(micro_batch=2)), samples=8)
    assert worst.moment == "backward of blocks.0 (number 4 of 4)"
    assert worst.parts["communication"] == communication
    assert worst.parts["gradients"] == gradients
    assert worst.parts["transient"] == transient


def test_a_pipeline_holds_its_stage_whole_whatever_the_stage_of_zero() -> None:
    found = [
        peaks_of_stages(MODEL, plan(mesh=Mesh(pipeline=2, shard=4), zero=zero, batch=Batch(micro_batch=2)), samples=8)
        for zero in (1, 2, 3)
    ]
    assert found[0] == found[1] == found[2]
    for stage, worst in enumerate(found[0]):
        assert worst.stage == stage
        assert worst.parts["communication"] == 200 + 2 * 400
        assert worst.parts["gradients"] == 200 + 2 * 400
        assert worst.parts["parameters"] == (200 + 2 * 400) // 4


def test_replicas_of_a_divided_model_hold_their_parameters_twice_in_a_step() -> None:
    alone = peak(MODEL, plan(mesh=Mesh(tensor=2)), samples=2)
    replicas = peak(MODEL, plan(mesh=Mesh(tensor=2, replicate=2)), samples=2)
    held = alone.parts["parameters"]
    assert replicas.parts["parameters"] == held
    assert replicas.parts["communication"] == held + int(400 * (0.2 + 0.8 / 2))  # copies, and a block's gradients


def test_where_nothing_is_saved_sending_the_roots_gradients_can_be_the_worst_moment() -> None:
    root = dataclasses.replace(STEM, parameters=5000, parameter_bytes=20_000, gradient_bytes=20_000)
    model = dataclasses.replace(MODEL, layers=(root, BLOCK, HEAD), optimizer_work_bytes=0)
    worst = peak(model, plan(mesh=Mesh(shard=8), zero=3), samples=1)
    assert worst.moment == "sending the last gradients"
    assert worst.parts["communication"] == 2 * (20_000 + 200)
    assert worst.parts["gradients"] == 20_000 + 200 + 4 * 400 // 8


def test_tensor_parallelism_divides_what_lies_between_its_products() -> None:
    worst = peak(MODEL, plan(mesh=Mesh(tensor=4)), samples=2)
    assert worst.parts["parameters"] == 400 + 4 * int(400 * (0.2 + 0.8 / 4))
    assert worst.parts["activations"] == 100 + 3 * int(1000 * (0.5 + 0.5 / 4))


def test_divided_by_tokens_all_that_a_block_saves_is_divided_and_a_pairs_input_is_whole() -> None:
    worst = peak(MODEL, plan(mesh=Mesh(tensor=4), sequence=True), samples=2)
    assert worst.parts["activations"] == 100 + 3 * (1000 // 4)
    assert worst.parts["transient"] == 1500 // 4 + 100 * 3 // 4 + int(100 * (0.2 + 0.8 / 4))
    again = peak(MODEL, plan(mesh=Mesh(tensor=4, replicate=2), sequence=True, recompute="full"), samples=2)
    assert again.parts["activations"] == 100 + 3 * (100 // 4)


def test_a_pipeline_divides_the_layers_and_piles_up_micro_batches() -> None:
    pipeline = plan(mesh=Mesh(pipeline=2), batch=Batch(micro_batch=2))
    worst = peak(MODEL, pipeline, samples=8)
    assert worst.stage == 0
    assert worst.parts["parameters"] == 200 + 2 * 400
    assert worst.parts["activations"] == 2100 + 100 + 1000  # one micro-batch whole, and the first block of the next
    all_at_once = dataclasses.replace(pipeline, schedule="gpipe")
    worst = peak(MODEL, all_at_once, samples=8)
    assert worst.stage == 1
    assert worst.parts["activations"] == 3 * 2200 + 1000


def test_every_stage_has_its_own_peak_and_the_worst_is_that_of_the_plan() -> None:
    pipeline = plan(mesh=Mesh(pipeline=4), batch=Batch(micro_batch=2))
    stages = peaks_of_stages(MODEL, pipeline, samples=8)
    assert [each.stage for each in stages] == [0, 1, 2, 3]
    assert [each.parts["activations"] for each in stages] == [3 * 1100 + 100, 2 * 1000, 1000, 0]
    assert max(each.peak_bytes for each in stages) == peak(MODEL, pipeline, samples=8).peak_bytes


def test_a_stage_with_more_blocks_than_the_first_and_the_last_may_be_the_worst() -> None:
    busy = [dataclasses.replace(each, forward=Pass(flops=3000, peak_bytes=1)) for each in (STEM, HEAD)]
    block = dataclasses.replace(BLOCK, forward=Pass(flops=1000, peak_bytes=1200), repeats=6)
    model = dataclasses.replace(MODEL, layers=(busy[0], block, busy[1]))
    worst = peak(model, plan(mesh=Mesh(pipeline=3), batch=Batch(micro_batch=2)), samples=6)
    assert worst.stage == 1


def test_a_stage_with_two_pieces_holds_both() -> None:
    asked = plan(mesh=Mesh(pipeline=2), schedule="interleaved", chunks=2, batch=Batch(micro_batch=2))
    for worst, parameters in zip(peaks_of_stages(MODEL, asked, samples=8), (1000, 1000), strict=True):
        assert worst.parts["parameters"] == parameters


def test_every_schedule_holds_as_many_micro_batches_as_it_says() -> None:
    base = plan(mesh=Mesh(pipeline=4), batch=Batch(micro_batch=1))
    assert [in_flight(base, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(dataclasses.replace(base, schedule="gpipe"), 0, 8) == 8
    assert in_flight(dataclasses.replace(base, schedule="zero-bubble"), 3, 8) == 4
    assert in_flight(dataclasses.replace(base, schedule="interleaved", chunks=2), 0, 8) == (2 * 3 + 4 + 1) / 2
    assert in_flight(base, 0, 2) == 2


def test_the_allocators_padding_and_the_heap_count_as_fragmentation() -> None:
    padded = dataclasses.replace(BLOCK, padding=0.1)
    model = dataclasses.replace(MODEL, layers=(STEM, padded, HEAD))
    states = STATES + 200
    assert peak(model, plan(), samples=2).parts["fragmentation"] == int(states * 160 / 2000)
    processor = device(heap_fraction=0.5, library_bytes=70)
    worst = peak(MODEL, plan(), samples=2, device=processor)
    assert worst.parts["fragmentation"] == (3100 + 1600 + 200) // 2
    assert worst.parts["framework"] == 70


def test_a_device_must_have_the_peak_its_error_and_what_the_process_takes() -> None:
    worst = peak(MODEL, plan(), samples=2)
    assert needed_bytes(worst, device(reserved_bytes=1000)) == -(-worst.peak_bytes * 105 // 100) + 1000


def device(**fields: Any) -> Device:
    rates = {"matmul_flops_per_s": 1e12, "bf16_matmul_flops_per_s": 1e13, "memory_bytes_per_s": 1e12}
    return Device(**{"source": "test", "operation_s": 1e-5, **rates, **fields})
