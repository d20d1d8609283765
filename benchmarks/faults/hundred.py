"""A hundred random faults: does every run end, with the losses of the run that nothing disturbed, and how soon?

    python benchmarks/faults/hundred.py [--faults 100] [--seed 0] [--torchrun 12]

Runs of 2 to 6 workers of a small job (float32, AdamW, dropout, samples from a pack, a checkpoint every 20 steps) lose
workers by SIGKILL, one or several at once: in steps, in checkpoints, in recoveries, at the start (inject_random.py).
Most runs are of replicas, some of ZeRO-3. Each must end by itself; the loss at every step and the samples of every step
must be those of an undisturbed run of one worker (hundred_run.py says how that is found).

Beside it, the same model as a plain DDP script under torchrun's elastic restart, with a checkpoint every 20 steps, is
killed in the same manner. A recovery of ours lasts from the kill to the next step done, one of torchrun until the step
in which it was killed is done. Exit 1: something was not as it must be.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script: shoal/ and benchmarks/ are there

from benchmarks.faults import hundred_model
from benchmarks.faults.hundred_peer import PEER_WORKERS, restarts
from benchmarks.faults.hundred_run import Recovery, Trained, differences, largest_difference, recoveries, train
from shoal.data.pack.progress import Quiet
from shoal.data.pack.writer import pack
from shoal.fault.inject_random import random_faults
from shoal.spec.on_loss import OnLoss
from shoal.spec.plan import Mesh, Plan

RUNS = ((2, 0), (3, 3), (4, 0), (6, 0), (4, 3), (5, 0), (3, 0))
"""The workers of each run, and its stage of ZeRO; then from the beginning."""
WAVES, APART = 7, 70
"""In how many steps of a run faults strike, and how far these lie apart: not quite what a replacement takes to come."""
LIMIT_STEPS, LIMIT_RATIO = 1, 3.0


def plan_of(number: int) -> Plan:
    """Return the plan of the run `number`."""
    workers, zero = RUNS[number % len(RUNS)]
    mesh = Mesh(shard=workers) if zero else Mesh(replicate=workers)
    # The state is copied after every step. ("auto" does so where that costs at most 1% of it; these steps are short.)
    on_loss = OnLoss(restarts=1000, snapshot="1")
    return Plan(mesh=mesh, zero=zero, on_loss=on_loss, timeout_s=60)


def schedule_of(workers: int, *, steps: int, apart: int, most: int) -> tuple[int, int]:
    """Return how many faults a run of so many workers has, up to 24, and how far apart: of two, one must come back."""
    apart = 2 * apart if workers == 2 else apart
    waves = (steps - apart - 2) // apart + 1
    return min(most, 4 * workers, max(1, waves * (workers - 1) * 4 // 5)), apart


def make_pack(folder: Path) -> Path:
    """Write the samples into `folder`, and return where they are."""
    path = folder / "samples.pack"
    pack([hundred_model.sample(number) for number in range(hundred_model.NUM_SAMPLES)], path, report=Quiet())
    return path


def disturb(
    plan: Plan, reference: Trained, *, samples: Path, steps: int, count: int, apart: int, seed: int, folder: Path
) -> tuple[list[Recovery], list[str], float]:
    """Return what `count` faults cost a run, what was wrong with it, and how far its losses were off."""
    faults = random_faults(seed, plan.workers, steps - apart, count, apart=apart, spares=True)
    run = train(plan, pack=samples, steps=steps, folder=folder, faults=faults)
    wrong = differences(run, reference, steps=steps)
    found = recoveries(run, workers=plan.workers)
    lost = [each for each in found if each.lost_steps > LIMIT_STEPS]
    wrong += [f"{each.lost_steps} steps were lost by the kill of worker {each.worker}, {each.point}" for each in lost]
    return found, wrong, largest_difference(run, reference) if run.losses else float("nan")


def show(title: str, found: Sequence[Recovery]) -> None:
    """Print a line of the table of recoveries."""
    seconds = sorted(each.seconds for each in found if each.seconds is not None)
    if not seconds:
        print(f"{title:34} {len(found):4}")
        return
    lost = max(each.lost_steps for each in found)
    print(f"{title:34} {len(found):4} {statistics.median(seconds):8.2f} s {seconds[-1]:7.2f} s {lost:11}")


def show_all(found: list[Recovery], peer: list[float]) -> float:
    """Print the table, and return how many times sooner ours go on than torchrun's."""
    print(f"\n{'recovery: from the kill':34} {'':4} {'median':>10} {'worst':>9} {'steps lost':>11}")
    show("shoal, to the next step", found)
    for point in dict.fromkeys(sorted(each.point for each in found)):
        show(f"   {point}", [each for each in found if each.point == point])
    for workers in sorted({each.workers for each in found}):
        show(f"   {workers} workers", [each for each in found if each.workers == workers])
    alone = [each for each in found if not each.others_left]
    if alone:
        show("   nobody was left", alone)
    if not peer:
        return float("nan")
    print(f"{'torchrun, to the step killed in':34} {len(peer):4} {statistics.median(peer):8.2f} s {max(peer):7.2f} s")
    # Alike: not while the processes start, which torchrun's faults do not, and with as many workers.
    alike = [each.seconds for each in found if each.seconds and each.point != "start" and each.workers in PEER_WORKERS]
    ratio = statistics.median(peer) / statistics.median(alike)
    print(f"shoal goes on {ratio:.1f} times sooner (medians; {min(peer) / max(alike):.1f}: its worst, torchrun's best)")
    return ratio


def main() -> int:
    """Do all, print the tables, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="the number of the first run: it decides its plan and faults"
    )
    parser.add_argument("--apart", type=int, default=APART, help="steps between faults")
    parser.add_argument("--waves", type=int, default=WAVES, help="steps of a run in which there are faults")
    parser.add_argument("--torchrun", type=int, default=12, help="faults of torchrun; 0: none")
    parser.add_argument("--keep", type=Path, help="where runs go, and stay (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write all recoveries there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return compare(asked, asked.keep or Path(temporary))


def compare(asked: argparse.Namespace, folder: Path) -> int:
    """Do what was asked in `folder`, and return the exit code."""
    began_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    found, runs, wrong = disturb_all(asked, folder)
    peer = restarts(asked.torchrun, folder=folder / "torchrun") if asked.torchrun else []
    ratio = show_all(found, peer)
    took_s = time.monotonic() - began_s
    print(f"{runs} runs, {len(found)} faults, {took_s:.0f} s: {f'{wrong} runs NOT ok' if wrong else 'all ok'}")
    if asked.json:
        asked.json.write_text(json.dumps({"shoal": [asdict(each) for each in found], "torchrun": peer}, indent=1))
    return 1 if wrong or ratio < LIMIT_RATIO else 0


def disturb_all(asked: argparse.Namespace, folder: Path) -> tuple[list[Recovery], int, int]:
    """Return what all faults have cost, how many runs they were spread over, and in how many something was wrong."""
    steps = asked.apart * (asked.waves + 1)
    samples = make_pack(folder)
    reference = train(Plan(), pack=samples, steps=steps, folder=folder / "undisturbed")
    assert not reference.exit_code, reference.said
    found: list[Recovery] = []
    runs = bad = 0
    while len(found) < asked.faults and runs <= asked.faults:
        number = asked.first + runs
        plan = plan_of(number)
        count, apart = schedule_of(plan.workers, steps=steps, apart=asked.apart, most=asked.faults - len(found))
        settings = {"steps": steps, "count": count, "apart": apart, "seed": asked.seed * 1000 + number}
        some, wrong, off = disturb(plan, reference, samples=samples, folder=folder / f"run-{number}", **settings)
        title = f"run {number}: {plan.workers} workers{', ZeRO-3' if plan.zero else ''}, {len(some)} faults"
        print(f"{title:40} largest difference {off:.1e}  {'; '.join(wrong[:3]) or 'ok'}", flush=True)
        found, runs, bad = found + some, runs + 1, bad + bool(wrong)
    return found, runs, bad


if __name__ == "__main__":
    sys.exit(main())
