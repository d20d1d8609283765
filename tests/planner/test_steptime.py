"""The step time: worked examples on round numbers, and the pipeline's simulation."""

import dataclasses
import math

import pytest

from shoal.planner.collectives.buckets import LEAST_BUCKET_BYTES
from shoal.planner.machine import Machine
from shoal.planner.time.simulate import Piece, simulate_pipeline
from shoal.planner.time.steptime import StepTime, largest_part, step_time
from shoal.spec.device import Device, Link
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.profile import Layer, Pass, Product, Profile
from shoal.spec.sync import Sync

MB = 1024 * 1024
LINK = Link(source="round", bytes_per_s=100, latency_s=0)
SLOW_LINK = Link(source="round", bytes_per_s=10, latency_s=0)
DEVICE = Device(
    source="round", matmul_flops_per_s=100, bf16_matmul_flops_per_s=200, memory_bytes_per_s=10, operation_s=0.5
)
HOST = Machine(device=DEVICE, per_node=8, shared=True, inside=dataclasses.replace(LINK, overlaps=False), between=LINK)
GPUS = Machine(device=DEVICE, per_node=4, nodes=8, inside=LINK, between=SLOW_LINK, adapters=2)
BLOCK = Layer(
    name="blocks.0",
    repeats=8,
    block=True,
    parameters=100,
    parameter_bytes=400,
    gradient_bytes=400,
    forward=Pass(flops=800, moved_bytes=20, operations=2),
    backward=Pass(flops=1600, moved_bytes=40, operations=4),
    saved_bytes=100,
    split_saved_bytes=50,
    output_bytes=40,
    pairs=2,
    split_parameters=100,
)
MODEL = Profile(micro_batch=2, layers=(BLOCK,), optimizer_moved_bytes=3200, optimizer_operations=8)


def time_of(
    profile: Profile = MODEL, machine: Machine = GPUS, *, batch_size: int = 2, overlap: bool = True, **plan: object
) -> StepTime:
    mesh = {name: plan.pop(name) for name in ("pipeline", "replicate", "shard", "tensor") if name in plan}
    batch = Batch(micro_batch=plan.pop("micro_batch", None))  # type: ignore[arg-type]
    full = Plan(mesh=Mesh(**mesh), batch=batch, **plan)  # type: ignore[arg-type]
    return step_time(profile, full, machine, batch_size=batch_size, overlap=overlap)


def changed(**changes: object) -> Profile:
    return dataclasses.replace(MODEL, layers=(dataclasses.replace(BLOCK, **changes),))  # type: ignore[arg-type]


def test_a_host_computes_and_starts_one_after_the_other_and_waits_for_nobody_alone() -> None:
    time = time_of(machine=HOST)
    assert time.compute_s == pytest.approx(8 * (2400 / 100 + 60 / 10 + 6 * 0.5))
    assert time.optimizer_s == pytest.approx(3200 / 10 + 8 * 0.5)
    assert time.comm_s == time.bubble_s == time.inside_bytes == time.between_bytes == 0
    assert time.step_s == time.compute_s + time.optimizer_s


def test_a_gpu_starts_ahead_so_the_longer_of_work_and_starts_counts() -> None:
    assert time_of().compute_s == pytest.approx(8 * (2400 / 100 + 60 / 10))
    many = changed(forward=dataclasses.replace(BLOCK.forward, operations=100))
    assert time_of(many).compute_s == pytest.approx(8 * (100 * 0.5 + 1600 / 100 + 40 / 10))


def test_workers_of_one_host_share_its_rates_and_gpus_do_not() -> None:
    assert time_of(machine=HOST, replicate=2, batch_size=4).compute_s == pytest.approx(8 * (2 * (24 + 6) + 3))
    assert time_of(replicate=2, batch_size=4).compute_s == time_of().compute_s


def test_bf16_products_go_at_their_own_rate_and_a_small_one_reaches_half_of_it() -> None:
    product = Product(rows=5, columns=4, inner=20)  # 800 operations, 200 elements
    record = Pass(flops=800, products=(product,))
    profile = dataclasses.replace(changed(forward=record, backward=Pass()), precision="bf16")
    machine = dataclasses.replace(GPUS, device=dataclasses.replace(DEVICE, memory_bytes_per_s=1e9))
    assert time_of(profile, machine, precision="bf16").compute_s == pytest.approx(8 * 800 / 200)
    halved = dataclasses.replace(machine.device, half_rate_flops=800)
    slower = dataclasses.replace(machine, device=halved)
    assert time_of(profile, slower, precision="bf16").compute_s == pytest.approx(2 * 8 * 800 / 200)
    narrow = dataclasses.replace(machine, device=dataclasses.replace(DEVICE, memory_bytes_per_s=10))
    assert time_of(profile, narrow, precision="bf16").compute_s == pytest.approx(8 * 200 * 2 / 10)  # its bytes count


def test_samples_scale_and_micro_batches_add_up() -> None:
    once, thrice = time_of(batch_size=2), time_of(batch_size=6, micro_batch=2)
    accumulated = 3 * 8 * 3 * 400 / 10  # a gradient is read, read and written
    assert thrice.compute_s == pytest.approx(3 * once.compute_s + accumulated)
    assert time_of(batch_size=4).compute_s == pytest.approx(2 * once.compute_s)
    assert time_of(batch_size=5, micro_batch=2).compute_s == pytest.approx(thrice.compute_s * 2.5 / 3)


def test_full_recompute_is_another_forward_and_selective_all_of_it_but_products() -> None:
    product = Product(rows=10, columns=20, inner=2)
    profile = changed(forward=Pass(flops=800, moved_bytes=2000, operations=2, products=(product,)))
    none_s, selective_s, full_s = (time_of(profile, recompute=how).compute_s for how in ("none", "selective", "full"))
    assert full_s - none_s == pytest.approx(8 * (800 / 100 + 2000 / 10 + (4 * (20 + 40 + 200) / 10 - 800 / 100)))
    assert selective_s - none_s == pytest.approx(8 * 2000 / 10)
    outside = dataclasses.replace(profile, layers=(dataclasses.replace(profile.layers[0], block=False),))
    assert time_of(outside, recompute="full").compute_s == pytest.approx(none_s)


def test_tensor_parallelism_divides_products_and_what_is_split_and_sums_outputs() -> None:
    time = time_of(tensor=2)
    assert time.compute_s == pytest.approx(8 * (2400 / 2 / 100 + 60 * 0.75 / 10))  # half of what is saved is split
    summed_s = 2 * (2 - 1) / 2 * 40 / 100
    assert time.tensor_s == pytest.approx(8 * 4 * summed_s)  # 2 pairs, forward and backward
    assert time.inside_bytes == 8 * 4 * 40
    assert time.optimizer_s == pytest.approx(3200 / 2 / 10)
    again = time_of(tensor=2, recompute="full")
    assert again.tensor_s == pytest.approx(8 * 6 * summed_s)
    whole = changed(pairs=0)
    assert time_of(whole, tensor=2).compute_s == pytest.approx(time_of(whole).compute_s)


def test_divided_by_tokens_the_rest_of_a_block_is_divided_and_as_many_bytes_are_sent() -> None:
    at_once = dataclasses.replace(GPUS, device=dataclasses.replace(DEVICE, operation_s=0))
    plain, sequence = (time_of(machine=at_once, tensor=2, sequence=each) for each in (False, True))
    assert sequence.compute_s == pytest.approx(8 * (2400 / 2 / 100 + 60 / 2 / 10))
    assert sequence.tensor_s == pytest.approx(plain.tensor_s)
    assert sequence.inside_bytes == plain.inside_bytes
    many = dataclasses.replace(GPUS, device=dataclasses.replace(DEVICE, operation_s=100))
    starts = [time_of(machine=many, tensor=2, sequence=each).tensor_s for each in (False, True)]
    assert starts == pytest.approx([8 * 4 * 3 * 100, 8 * 4 * 6 * 100])  # two messages for each sum
    outside = changed(block=False)
    assert time_of(outside, tensor=2, sequence=True) == time_of(outside, tensor=2)


def test_tensor_parallelism_beyond_a_node_is_slow() -> None:
    inside, across = time_of(tensor=4), time_of(tensor=8)
    assert inside.between_bytes == 0 < across.between_bytes
    # 4 workers of a node on 2 adapters of 10: 5 each, for a quarter of the 40 bytes.
    summed_s = 2 * 3 / 4 * 40 / 100 + 2 * 1 / 2 * 40 / 4 / 5
    assert across.tensor_s == pytest.approx(8 * 4 * summed_s)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 16)])
def test_equal_stages_take_as_long_as_their_simulation(
    schedule: str, chunks: int, stages: int, micro_batches: int
) -> None:
    profile = changed(repeats=16, output_bytes=0, gradient_bytes=0)
    time = time_of(
        profile, pipeline=stages, schedule=schedule, chunks=chunks, micro_batch=2, batch_size=2 * micro_batches
    )
    each_s = 16 / stages / chunks * 10.0
    piece = Piece(forward_s=each_s, backward_s=2 * each_s, weights_s=each_s)
    timeline = simulate_pipeline(
        [piece] * (stages * chunks), stages=stages, micro_batches=micro_batches, schedule=schedule
    )
    assert time.compute_s + time.bubble_s == pytest.approx(timeline.makespan_s)
    assert time.bubble_s == pytest.approx(max(timeline.bubble_s))


def test_the_slowest_stage_sets_the_pace_near_to_what_the_simulation_says() -> None:
    head = dataclasses.replace(BLOCK, name="head", repeats=1, block=False, output_bytes=0, gradient_bytes=0)
    body = dataclasses.replace(head, name="blocks.0", repeats=8, block=True)
    profile = dataclasses.replace(MODEL, layers=(body, head))
    time = time_of(dataclasses.replace(profile, cut_by_count=True), pipeline=4, micro_batch=2, batch_size=32)
    pieces = [Piece(forward_s=n * 10.0, backward_s=n * 20.0) for n in (2, 2, 2, 3)]
    timeline = simulate_pipeline(pieces, stages=4, micro_batches=16, schedule="1f1b")
    assert time.compute_s == pytest.approx(16 * 3 * 30)
    assert time.compute_s + time.bubble_s == pytest.approx(timeline.makespan_s, rel=0.01)


def test_several_pieces_a_stage_are_those_that_the_model_is_cut_into() -> None:
    head = dataclasses.replace(BLOCK, name="head", repeats=1, block=False, gradient_bytes=0, output_bytes=0)
    body = dataclasses.replace(head, name="blocks.0", repeats=8, block=True)
    profile = dataclasses.replace(MODEL, layers=(body, head))
    # 9 layers as 2, 2, 2 and 2 with the head: stages of 4 and 5.
    time = time_of(profile, pipeline=2, schedule="interleaved", chunks=2, micro_batch=2, batch_size=8)
    assert time.compute_s == pytest.approx(4 * 5 * 30)
    assert time.bubble_s == pytest.approx(4 * 30 / 2)


def test_sends_between_stages_show_once_on_the_way_there_and_back_and_always_where_nothing_overlaps() -> None:
    time = time_of(pipeline=4, micro_batch=2, batch_size=8)
    assert time.pipeline_s == pytest.approx(2 * 3 * 40 / 100)
    assert time.inside_bytes == 2 * 4 * 40
    host = time_of(machine=HOST, pipeline=4, micro_batch=2, batch_size=8)
    assert host.pipeline_s == pytest.approx((2 * 3 + 2 * 3) * 40 / (100 * 2 / 4))
    across = time_of(pipeline=2, replicate=4, micro_batch=2, batch_size=32)
    assert across.pipeline_s == pytest.approx(2 * 40 / (10 * 2 / 4))  # 4 workers share 2 adapters
    assert across.between_bytes == 2 * 4 * 40


def test_an_all_reduce_hides_behind_the_backward_but_for_its_last_bucket() -> None:
    big = changed(gradient_bytes=25 * MB)
    all_s = 8 * 25 * MB / 100
    assert time_of(big, replicate=2, batch_size=4, overlap=False).data_s == pytest.approx(all_s)
    backward_s = 8 * 20
    assert time_of(big, replicate=2, batch_size=4).data_s == pytest.approx(all_s - backward_s)
    fast = dataclasses.replace(GPUS, inside=dataclasses.replace(LINK, bytes_per_s=1e8))
    assert time_of(big, fast, replicate=2, batch_size=4).data_s == pytest.approx(LEAST_BUCKET_BYTES / 1e8)
    # 19 * 0.02 s * 1e8 * 2 is more than the most, 64 MB, of which 200 MB are four.
    late = dataclasses.replace(fast, inside=dataclasses.replace(fast.inside, latency_s=0.02))
    assert time_of(big, late, replicate=2, batch_size=4).data_s == pytest.approx((8 * 25 * MB / 1e8 + 2 * 0.02) / 4)
    said = time_of(big, late, replicate=2, batch_size=4, sync=Sync(bucket_bytes=100 * MB))
    assert said.data_s == pytest.approx((8 * 25 * MB / 1e8 + 2 * 0.02) / 2)
    assert time_of(changed(gradient_bytes=0), replicate=2, batch_size=4).data_s == 0


def test_zero_sends_what_an_all_reduce_sends_and_half_more_with_sharded_parameters() -> None:
    sent = [time_of(shard=4, zero=zero, batch_size=8).inside_bytes for zero in (1, 2, 3)]
    plain = time_of(replicate=4, batch_size=8).inside_bytes
    assert sent == [plain, plain, plain * 3 // 2]
    assert plain == 2 * 3 / 4 * 8 * 400
    assert time_of(shard=4, zero=1, batch_size=8).optimizer_s == pytest.approx(3200 / 4 / 10)


def test_micro_batches_multiply_what_sharded_parameters_send() -> None:
    once, twice = (time_of(shard=4, zero=3, micro_batch=2, batch_size=batch).inside_bytes for batch in (8, 16))
    assert twice == 2 * once
    once, twice = (time_of(shard=4, zero=1, micro_batch=2, batch_size=batch).inside_bytes for batch in (8, 16))
    assert twice == once
    once, twice = (time_of(shard=4, zero=2, micro_batch=2, batch_size=batch).inside_bytes for batch in (8, 16))
    assert twice == once * 3 / 2  # gathered once a step, scattered in every micro-batch


def test_zero_1_is_zero_2_with_one_micro_batch_and_gathers_beside_the_forward() -> None:
    first, second = (time_of(shard=4, zero=zero, batch_size=8) for zero in (1, 2))
    assert first == second
    layer_s = 3 / 4 * 400 / 100
    assert first.data_s == pytest.approx(2 * layer_s)  # one gather, one scatter


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_in_a_pipeline_zero_gathers_once_and_scatters_behind_the_last_backward(zero: int) -> None:
    time = time_of(shard=2, pipeline=2, zero=zero, micro_batch=2, batch_size=16)
    stage_bytes = 4 * 400
    layer_s = 1 / 2 * 400 / 100
    assert time.data_s == pytest.approx(layer_s + 1 / 2 * stage_bytes / 100)
    sends = 2 * 4 * 40
    assert time.inside_bytes == 2 * stage_bytes / 2 + sends


def test_replicas_that_are_pipelines_show_their_whole_all_reduce() -> None:
    big = changed(gradient_bytes=25 * MB)
    fast = dataclasses.replace(GPUS, inside=dataclasses.replace(LINK, bytes_per_s=1e8))
    pipelines = time_of(big, fast, replicate=2, pipeline=2, micro_batch=2, batch_size=16)
    assert pipelines.data_s == pytest.approx(4 * 25 * MB / 1e8)
    whole = time_of(big, fast, replicate=2, batch_size=4)
    assert whole.data_s == pytest.approx(LEAST_BUCKET_BYTES / 1e8), "those of whole models hide all but the last bucket"


def test_shards_inside_a_node_and_replicas_between_send_less_over_the_network() -> None:
    both = time_of(shard=4, replicate=8, zero=2, batch_size=64, overlap=False)
    assert both.between_bytes == int(2 * 7 / 8 * 8 * 400 / 4)
    assert both.inside_bytes == 2 * 3 / 4 * 8 * 400
    gathered_s = 2 * 3 / 4 * 3200 / 100
    assert both.data_s == pytest.approx(gathered_s + 2 * 7 / 8 * 3200 / 4 / (10 * 2 / 4))


def test_exposed_gathers_of_sharded_parameters_are_one_layer_where_computing_is_long() -> None:
    time = time_of(shard=4, zero=3, batch_size=8)
    layer_s = 3 / 4 * 400 / 100
    assert time.data_s == pytest.approx(layer_s + 2 * layer_s)  # one gather; one gather and one scatter


def test_servers_local_steps_and_codecs() -> None:
    many = {"replicate": 4, "batch_size": 8}
    one, four = (time_of(sync=Sync(mode="server", servers=k), **many).data_s for k in (1, 4))  # type: ignore[arg-type]
    assert one == pytest.approx(2 * 4 * 3200 / 100)
    assert four == pytest.approx(one / 4)
    plain = time_of(overlap=False, **many)  # type: ignore[arg-type]
    local = time_of(sync=Sync(mode="local", local_steps=4), **many)  # type: ignore[arg-type]
    assert local.data_s == pytest.approx(plain.data_s / 4)
    assert local.inside_bytes == plain.inside_bytes // 4
    squeezed = time_of(sync=Sync(codec="bf16"), overlap=False, **many)  # type: ignore[arg-type]
    # Encoded once; decoded are the slices of three others, and the sums.
    assert squeezed.data_s == pytest.approx(plain.data_s / 2 + (1 + 3 / 4 + 1) * 3200 / 10)
    assert squeezed.inside_bytes == plain.inside_bytes // 2
    gathered = time_of(sync=Sync(codec="topk"), overlap=False, **many)  # type: ignore[arg-type]
    assert gathered.inside_bytes == int(3 * 3200 * (0.01 + 1 / 65536))


def test_the_largest_share_counts() -> None:
    assert largest_part(Plan(mesh=Mesh(replicate=2), batch=Batch(shares=(0.75, 0.25))), 8) == 6
    assert largest_part(Plan(mesh=Mesh(replicate=3)), 8) == math.ceil(8 / 3)
    assert largest_part(Plan(mesh=Mesh(replicate=10)), 30) == 3
