"""How long the search for a plan takes: a 96-layer GPT of 175 billion parameters on 1,024 devices.

    python benchmarks/search.py

Prints the seconds of the search alone, and of the whole ranking that `shoal plan` shows, simulation and reasons
included; the trace is not: a profile is made by counting.
"""

import time
from collections.abc import Callable

from shoal.planner.calibration.megatron import gpt_profile
from shoal.planner.catalog import read_link
from shoal.planner.machine import machine_of
from shoal.planner.search.ranking import rank_plans
from shoal.planner.search.search import search
from shoal.spec.cluster import Cluster, Node
from shoal.spec.profile import Profile

BATCH = 1536


def bench_search(*, rounds: int = 5) -> dict[str, float]:
    """Return the seconds of the search and of the ranking, each the middle of `rounds`."""
    cluster = a100_cluster(nodes=128)

    def found() -> None:
        search(fresh_profile(), machine_of(cluster), batch_size=BATCH)

    def ranked() -> None:
        rank_plans(fresh_profile(), cluster, batch_size=BATCH)

    return {"search_s": _middle(found, rounds), "ranking_s": _middle(ranked, rounds)}


def a100_cluster(*, nodes: int) -> Cluster:
    """Return nodes of 8 A100s with 4 adapters of InfiniBand HDR."""
    node = Node(host="node", cores=64, memory_bytes=10**12, device="a100-80", devices=8, count=nodes)
    return Cluster(nodes=(node,), between=read_link("ib-hdr"), adapters=4)


def fresh_profile() -> Profile:
    """Return the profile, made anew so that nothing of it is prepared yet."""
    gpt_profile.cache_clear()
    return gpt_profile(width=12288, heads=96, layers=96, sequence=2048)


def _middle(work: Callable[[], None], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[rounds // 2]


if __name__ == "__main__":
    figures = bench_search()
    profile, cluster = fresh_profile(), a100_cluster(nodes=128)
    ranking = rank_plans(profile, cluster, batch_size=BATCH)
    best = ranking.plans[0]
    print(f"{profile.parameters / 1e9:.0f}B parameters, {profile.num_layers} layers, 1,024 devices, batch {BATCH:,}")
    print(f"search    {figures['search_s']:.3f} s  ({ranking.looked_at:,} plans costed)")
    print(f"ranking   {figures['ranking_s']:.3f} s  (five plans simulated, and why the others lost)")
    print(f"best      {best.plan.mesh}, zero={best.plan.zero}, micro-batch {best.plan.batch.micro_batch}, "
          f"recompute={best.plan.recompute}: {best.time.step_s:.2f} s a step")  # fmt: skip
