"""Measure the peak memory of the cases on a GPU: `python benchmarks/gpu/memory.py --out FILE.json [--only WORD]`.

Each case trains for three real steps; its peak is the largest of torch.cuda.max_memory_allocated. Then it trains again
with the allocator capped at what `shoal fit` says a device must have: a case that runs out of memory there is a "fits"
that was wrong. Sharded cases run as one worker of a fake world (torch's "fake" process group): its collectives move
nothing, its memory is real. `benchmarks/memory.py` holds predictions against the file that this writes.
"""

import argparse
import datetime
import functools
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as `shoal train` does

import torch
import torch.distributed as dist
from memory_cases import CASES, Case, make_job, predict
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from shoal.planner.catalog import read_device
from shoal.profile.layers import find_layers
from shoal.spec.job import Job

STEPS = 3


def measure(case: Case) -> dict[str, int]:
    """Train `case` and return its peak, in all and by phase."""
    job = make_job(case)
    model = _build(case, job)
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    batch = torch.utils.data.default_collate([job.data[i] for i in range(case.micro_batch)])
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    torch.cuda.reset_peak_memory_stats()
    phases = {"forward_bytes": 0, "backward_bytes": 0, "optimizer_bytes": 0}
    assert job.inputs is not None
    for _ in range(STEPS):
        # The cache of weights in bfloat16 would undo the sharding.
        with torch.autocast(
            "cuda", torch.bfloat16, enabled=case.precision == "autocast", cache_enabled=case.shard == 1
        ):
            loss = job.loss(model(**job.inputs(batch)), batch)
        phases["forward_bytes"] = max(phases["forward_bytes"], _restart_peak())
        loss.backward()
        phases["backward_bytes"] = max(phases["backward_bytes"], _restart_peak())
        optimizer.step()
        phases["optimizer_bytes"] = max(phases["optimizer_bytes"], _restart_peak())
        optimizer.zero_grad(set_to_none=True)
    return {"peak_bytes": max(phases.values()), "reserved_bytes": torch.cuda.max_memory_reserved(), **phases}


def trains_within(case: Case, cap_bytes: int) -> bool:
    """Return whether `case` trains when the allocator may take no more than `cap_bytes`."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / torch.cuda.mem_get_info()[1]))
    try:
        measure(case)
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def _build(case: Case, job: Job) -> Any:
    with torch.device("meta" if case.shard > 1 else "cuda"):
        model = job.model()
    blocks = [member for run in find_layers(model)[1] for member in run.members()]
    if case.recompute == "full":
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if case.shard > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.shard)
        for module in [*blocks, model]:
            fully_shard(module, reshard_after_forward=case.zero == 3)
        model.to_empty(device="cuda")
        for buffer in model.buffers():
            buffer.zero_()
    return model


def _restart_peak() -> int:
    peak_bytes = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak_bytes


def _clean_up() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def measure_case(case: Case) -> dict[str, Any]:
    """Return what was predicted for `case` here, what was measured, and whether the promise holds."""
    begin = time.perf_counter()
    worst, needed = predict(case)
    traced = time.perf_counter()
    row: dict[str, Any] = {"case": case.name, "predicted_bytes": worst.peak_bytes, "trace_s": round(traced - begin, 2)}
    row |= measure(case)
    _clean_up()
    row["trains_within_needed"] = trains_within(case, needed - read_device("h200").reserved_bytes)
    row["error"] = round(worst.peak_bytes / row["peak_bytes"] - 1, 4)
    return row


def main() -> None:
    """Run the cases, print each, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="only cases with this word in their name")
    arguments = parser.parse_args()
    torch.zeros(1, device="cuda")
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    rows: list[dict[str, Any]] = []
    about = {
        "device": torch.cuda.get_device_name(0),
        "memory_bytes": total_bytes,
        "context_bytes": total_bytes - free_bytes - torch.cuda.memory_reserved(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "allocator": os.environ["PYTORCH_ALLOC_CONF"],
    }
    for case in CASES:
        if arguments.only in case.name:
            rows.append(measure_case(case))
            _clean_up()
            print(json.dumps(rows[-1]), flush=True)
            arguments.out.write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
