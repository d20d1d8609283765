"""What a checkpoint costs a training loop: shoal's, torch.save, and DCP's async_save, in one run, taking turns.

    python benchmarks/faults/checkpoint_stall.py [--rounds 15] [--steps 6] [--only replicas]

2 workers train examples/gpt.py (10.7M parameters, AdamW: 128 MB of state). A turn is a save and `--steps` steps after
it, in which the background write ends; what has not ended then is waited for outside of the time. One turn of each
round saves nothing. By the medians over all rounds, on the slower worker:

    stall     how long the loop waited for the save
    slowdown  by how much the steps after it took longer than those of turns without a save
    lost      both, as a share of the time of 20 steps: a checkpoint every 20 steps
    written   when it was all there, at the earliest at the end of the turn

The ways to save:

    shoal                 every worker its share; a thread writes, with checksums, and brings it onto the disk
    torch.save            worker 0 writes all of it while the others wait; to the page cache, not onto the disk
    torch.save, synced    the same, and an fsync, as the others do
    DCP, thread           async_save, with staging memory that is kept; a process group of its own
    DCP, thread, staged   the same, staged in a thread as well; awaited before the next update (use_async_staging)
    DCP, process          async_save, staged in shared memory and written by another process
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script: shoal/ and benchmarks/ are there

from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.launch.local import Watch, launch_local
from shoal.launch.starting import Spawning
from shoal.spec.plan import Checkpoints, Mesh, Plan

NONE, OURS = "none", "shoal"
WAYS = (OURS, "torch.save", "torch.save, synced", "DCP, thread", "DCP, thread, staged", "DCP, process")
PLANS = {
    "replicas": Plan(mesh=Mesh(replicate=2)),
    "ZeRO-3": Plan(mesh=Mesh(shard=2), zero=3),
}
EVERY_STEPS = 20
_NEVER = 10**9
_TIMEOUT_S = 300.0


def measure(
    plan: Plan, ways: list[str], *, rounds: int, steps: int, folder: Path
) -> dict[str, list[list[dict[str, Any]]]]:
    """Return by way (and for turns without a save) what each worker measured in each round."""
    run = RunFolder.create(folder, None, stem="stall")
    # With a checkpoint planned, though never due, memory for it is made ready as in any run that has some.
    write_toml(run.plan_toml, Plan(mesh=plan.mesh, zero=plan.zero, checkpoint=Checkpoints(every_steps=_NEVER)))
    worker = Path(__file__).with_name("checkpoint_stall_worker.py")
    command = [sys.executable, "-W", "ignore", str(worker), str(run.path), str(rounds), str(steps), *ways]
    lines: list[str] = []
    watch = Watch(on_line=lambda index, line: lines.append(f"[worker {index}] {line}"))
    ended = launch_local(Spawning(command), workers=plan.workers, timeout_s=_TIMEOUT_S, watch=watch)
    if any(each.exit_code for each in ended):
        raise SystemExit("\n".join(lines[-60:]))
    texts = [(run.path / f"turns-{index}.json").read_text() for index in range(plan.workers)]
    by_worker = [json.loads(text) for text in texts]
    return {way: [list(turn) for turn in zip(*(each[way] for each in by_worker), strict=True)] for way in (NONE, *ways)}


def slowest(turns: list[list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Return medians over rounds, on the slower worker: what the save took, and from its begin on each of the steps."""
    stall_s = [max(each["stall_s"] for each in turn) for turn in turns]
    first_s = [max(each["stall_s"] + each["steps_s"][0] for each in turn) for turn in turns]
    others_s = [[max(one) for one in zip(*(each["steps_s"] for each in turn), strict=True)][1:] for turn in turns]
    steps_s = [statistics.median(one) for one in zip(*others_s, strict=True)]
    write_s = [max(each["write_s"] for each in turn) for turn in turns]
    medians = {"stall_s": [statistics.median(stall_s)], "write_s": [statistics.median(write_s)]}
    return {**medians, "steps_s": [statistics.median(first_s), *steps_s]}


def show(title: str, turns: dict[str, list[list[dict[str, Any]]]]) -> bool:
    """Print the table of one plan; return whether shoal's share is less than that of all others."""
    bare = [max(one) for turn in turns[NONE] for one in zip(*(each["steps_s"] for each in turn), strict=True)]
    step_s = statistics.median(bare)
    print(f"\n{title}: a step {step_s * 1e3:.0f} ms, {len(turns[NONE])} rounds")
    print(f"{'':22} {'stall':>9} {'slowdown':>9} {'written':>9} {'stall of 20 steps':>18} {'lost of 20 steps':>17}")
    rows, plain_s = {}, sum(slowest(turns[NONE])["steps_s"])
    for way, measured in turns.items():
        if way == NONE:
            continue
        found = slowest(measured)
        stall_s, lost_s = found["stall_s"][0], sum(found["steps_s"]) - plain_s
        rows[way] = lost_s / (EVERY_STEPS * step_s)
        print(
            f"{way:22} {stall_s * 1e3:6.0f} ms {(lost_s - stall_s) * 1e3:6.0f} ms {found['write_s'][0]:7.2f} s "
            f"{stall_s / (EVERY_STEPS * step_s):18.2%} {rows[way]:17.2%}",
            flush=True,
        )
    rest = {way: share for way, share in rows.items() if way != OURS}
    best = min(rest, key=lambda way: rest[way])
    print(f"shoal {rows[OURS]:.2%}, the best other {rest[best]:.2%} ({best})")
    return rows[OURS] < rest[best]


def main() -> int:
    """Print the tables; return 1 if another way costs less."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=6, help="of each turn")
    parser.add_argument("--only", default="", help="the plans with this in their name")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write all that was measured there")
    asked = parser.parse_args()
    found, is_good = {}, True
    for title, plan in PLANS.items():
        if asked.only in title:
            with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                found[title] = measure(plan, asked.ways, rounds=asked.rounds, steps=asked.steps, folder=Path(folder))
            is_good &= show(title, found[title])
    if asked.json:
        asked.json.write_text(json.dumps(found))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
