"""Measuring a device: real and short here; how fast this machine is, nobody knows, so the arithmetic has the checks."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shoal.profile.host import device_from, measure_device, measure_host, product_points
from shoal.profile.probes import (
    copy_probes,
    memory_probe,
    operation_probe,
    product_flops,
    product_probe,
    update_probe,
)
from shoal.profile.stopwatch import Probe, measure

CPU = torch.device("cpu")


def table(*, flops_per_s: float, start_s: float) -> dict[str, float]:
    """Return what a worker measures that multiplies at `flops_per_s`, twice as fast in bfloat16."""
    seconds = {"memory": 1e-10, "update": 5e-11, "copy to": 2e-10, "copy from": 4e-10, "operation": start_s}
    for size in (64, 128, 256, 512, 4096):
        seconds[f"fp32 {size}"] = start_s + (product_flops(size) + 1e6) / flops_per_s
        seconds[f"bf16 {size}"] = start_s + (product_flops(size) + 1e6) / (2 * flops_per_s)
    return seconds


def test_workers_that_share_a_processor_add_up_and_gpus_do_not() -> None:
    tables = [table(flops_per_s=100e9, start_s=5e-6), table(flops_per_s=100e9, start_s=5e-6)]
    shared = device_from(tables, shared=True, source="computed", title="x")
    assert shared.matmul_flops_per_s == pytest.approx(200e9, rel=1e-3)
    assert shared.bf16_matmul_flops_per_s == pytest.approx(400e9, rel=1e-3)
    assert shared.memory_bytes_per_s == pytest.approx(20e9)
    assert shared.copy_to_bytes_per_s == pytest.approx(10e9)
    assert shared.copy_from_bytes_per_s == pytest.approx(5e9)
    assert shared.operation_s == 5e-6
    own = device_from(tables, shared=False, source="computed", title="x")
    assert own.matmul_flops_per_s == pytest.approx(100e9, rel=1e-3)
    assert own.memory_bytes_per_s == pytest.approx(10e9)


def test_the_start_of_an_operation_is_not_counted_twice_on_a_processor() -> None:
    device = device_from([table(flops_per_s=100e9, start_s=5e-6)], shared=True, source="computed", title="x")
    assert device.half_rate_flops == pytest.approx(1e6, rel=0.01)
    on_gpu = device_from([table(flops_per_s=100e9, start_s=5e-6)], shared=False, source="computed", title="x")
    assert on_gpu.half_rate_flops == pytest.approx(1e6 + 5e-6 * 200e9, rel=0.01)


def test_products_are_listed_by_size_with_their_operations() -> None:
    points = product_points(table(flops_per_s=1e9, start_s=0.0), "bf16")
    assert [flops for flops, _ in points] == [2 * size**3 for size in (64, 128, 256, 512, 4096)]


def test_every_worker_waits_for_the_others_before_each_turn_the_same_number_of_times() -> None:
    waits = [0, 0]
    for worker in range(2):

        def work(worker: int = worker) -> None:
            torch.ones(worker * 100_000 + 1).sum()  # one is slower than the other

        def wait(worker: int = worker) -> None:
            waits[worker] += 1

        probes = [Probe(name=name, work=work, amount=1) for name in ("a", "b")]
        assert min(measure(probes, device=CPU, seconds=0.01, together=wait).values()) > 0
    assert waits[0] == waits[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_probe_does_three_products_of_its_size_for_each_of_its_layers(dtype: torch.dtype) -> None:
    probe = product_probe(32, dtype, CPU)
    with FlopCounterMode(display=False) as counter:
        probe.work()
    assert probe.amount % 3 == 0
    assert probe.amount > 3  # one layer alone would stay in the cache
    assert counter.get_total_flops() == probe.amount * product_flops(32)


def test_the_other_probes_run() -> None:
    for probe in (memory_probe(CPU), update_probe(CPU), *copy_probes(CPU), operation_probe(CPU)):
        probe.work()
        assert probe.amount > 0


def test_a_measurement_finds_every_rate_and_leaves_the_process_as_it_was() -> None:
    before = torch.get_rng_state(), torch.get_num_threads()
    device = measure_host(seconds=0.05)
    assert min(device.matmul_flops_per_s, device.bf16_matmul_flops_per_s, device.memory_bytes_per_s) > 0
    assert min(device.copy_to_bytes_per_s, device.copy_from_bytes_per_s, device.operation_s) > 0
    assert device.half_rate_flops >= 0
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.get_num_threads()


def test_workers_measure_the_sizes_that_the_slowest_of_them_can() -> None:
    measured = measure_device(CPU, seconds=0.05, agree_least=lambda _: 256)
    assert [flops for flops, _ in product_points(measured, "fp32")] == [product_flops(size) for size in (64, 128, 256)]
