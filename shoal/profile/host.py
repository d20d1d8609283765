"""Measure what this process computes on: products by size, memory, copies, and the start of an operation.

A measurement is a table of seconds by probe ("fp32 512": of one product; "memory": of one byte). `device_from` makes
a Device of one, or of several that workers took at the same time.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from shoal.core.fit import fit_half_rate
from shoal.core.host import processor_name, usable_cores
from shoal.profile.probes import (
    SIZES,
    copy_probes,
    memory_probe,
    operation_probe,
    product_flops,
    product_probe,
    update_probe,
)
from shoal.profile.stopwatch import ROUNDS, measure, seconds_of
from shoal.spec.device import Device

_DTYPES = (torch.float32, torch.bfloat16)
_FEWEST, _MOST = 3, 5
"""How many sizes are measured at least, and at most."""
_BRIEF_ROUNDS = 3
_MOST_OF_TIME = 1 / 30
"""How much of the time one turn of the largest size may take."""

Measured = Mapping[str, float]


def measure_host(*, seconds: float = 0.2) -> Device:
    """Return this host as a device, measured by this process alone with all cores in about `seconds`."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        measured = measure_device(torch.device("cpu"), seconds=seconds, rounds=_BRIEF_ROUNDS)
    finally:
        torch.set_num_threads(threads_before)
    return device_from([measured], shared=True, source="measured by one process", title=processor_name())


def measure_device(
    device: torch.device,
    *,
    seconds: float,
    rounds: int = ROUNDS,
    together: Callable[[], object] = lambda: None,
    agree_least: Callable[[float], float] = lambda value: value,
) -> dict[str, float]:
    """Return the seconds by probe on `device`. Called by every worker that measures at the same time.

    `together` waits for all of them; `agree_least` returns the least of the values they call it with.
    """
    with torch.random.fork_rng(devices=[]):
        probes = []
        for dtype in _DTYPES:
            largest = agree_least(_largest(dtype, device, most_s=_MOST_OF_TIME * seconds))
            probes += [product_probe(size, dtype, device) for size in _sizes_within(int(largest))]
        probes += [memory_probe(device), update_probe(device), *copy_probes(device), operation_probe(device)]
        return measure(probes, device=device, seconds=seconds, rounds=rounds, together=together)


def _largest(dtype: torch.dtype, device: torch.device, *, most_s: float) -> int:
    """Return the largest of SIZES whose three products take no more than `most_s`."""
    for size in SIZES[:-1]:
        probe = product_probe(size, dtype, device)
        seconds_of(probe.work, calls=1, device=device)
        three_s = 3 * seconds_of(probe.work, calls=1, device=device) / probe.amount
        if 8 * three_s > most_s:  # twice the size is eight times the work
            return size
    return SIZES[-1]


def _sizes_within(largest: int) -> list[int]:
    """Return the sizes to measure: up to `largest`, not more than a few, the large ones first of all."""
    last = max(SIZES.index(largest) + 1, _FEWEST)
    return list(SIZES[max(0, last - _MOST) : last])


def device_from(
    measured: Sequence[Measured],
    *,
    shared: bool,
    source: str,
    title: str,
    memory_bytes: int = 0,
    reserved_bytes: int = 0,
) -> Device:
    """Return the device that `measured` is about: one table a worker, taken at the same time.

    With `shared`, all workers ran on the one device, and its rates are the sum of theirs; else each had its own, and
    the rates are those of the mean. The size at which a product has half the rate is that of the faster precision.
    """
    count = len(measured) if shared else 1
    mean = {name: sum(table[name] for table in measured) / len(measured) for name in measured[0]}
    # On a processor a product also takes the start of its operation, which whoever predicts counts on its own.
    started_s = mean["operation"] if shared else 0.0
    rate, half = fit_half_rate(_without(product_points(mean, "fp32"), started_s))
    bf16_rate, bf16_half = fit_half_rate(_without(product_points(mean, "bf16"), started_s))
    return Device(
        source=source,
        title=title,
        memory_bytes=memory_bytes,
        reserved_bytes=reserved_bytes,
        matmul_flops_per_s=count * rate,
        bf16_matmul_flops_per_s=count * bf16_rate,
        memory_bytes_per_s=count / mean["memory"],
        update_bytes_per_s=count / mean["update"],
        operation_s=mean["operation"],
        copy_to_bytes_per_s=count / mean["copy to"],
        copy_from_bytes_per_s=count / mean["copy from"],
        half_rate_flops=half if rate > bf16_rate else bf16_half,
    )


def product_points(measured: Measured, precision: str) -> list[tuple[float, float]]:
    """Return (operations, seconds) of the products in `measured` with `precision`, the smallest first."""
    sizes = sorted(int(name.split()[1]) for name in measured if name.startswith(f"{precision} "))
    return [(float(product_flops(size)), measured[f"{precision} {size}"]) for size in sizes]


def _without(points: list[tuple[float, float]], started_s: float) -> list[tuple[float, float]]:
    return [(flops, max(seconds - started_s, seconds / 2)) for flops, seconds in points]
