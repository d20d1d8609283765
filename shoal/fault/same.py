"""Before the first step: do all workers train the same thing? If not, who differs, and in what.

1. Each worker writes down facts by name: versions, the job's and the plan's fields, the number of samples and a hash of
   a few of them, the parameters. What is long (a dict) is written as its hash.
2. Worker 0 reads all. Where hashes differ it asks for the whole; then it writes the verdict, which is empty if all is
   the same.
3. All workers read the verdict, and raise it.

Example: workers 0, 1 and 3 have samples = 10000, worker 2 has 10001: "worker 2 has 10,001 samples, the others 10,000".

One exchange through the store takes milliseconds. Nothing of a model's values is compared: engines send worker 0's.
"""

import dataclasses
import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch.distributed import PrefixStore, Store

import shoal
from shoal.comm.alive import Watch
from shoal.comm.calls import CALLS
from shoal.comm.rank import Rank
from shoal.core.errors import JobError, PeerLost
from shoal.fault.same_samples import sample_hashes
from shoal.spec.job import Job, is_stream
from shoal.spec.plan import Plan

Facts: TypeAlias = Mapping[str, Any]
"""What a worker has, by name: numbers, words, or dicts of these."""


class Parts(Protocol):
    """What a worker knows of a model, of which it may hold a part: `parallel.layout.Layout`."""

    trained: Mapping[str, torch.Tensor]


_MOST_NAMED = 3
_PHRASES = {
    "samples": "has {} samples",
    "eval samples": "has {} samples to evaluate on",
    "workers": "was started as one of {} workers",
}


def check_same_job(store: Store | None, rank: Rank, job: Job, plan: Plan, watch: Watch | None) -> None:
    """Raise JobError, on all workers, if they have different jobs, data, plans or versions. Called by every worker."""
    if store is not None and watch is not None:
        facts = facts_of(job, plan, rank)
        check_same(store, rank, facts, about="job", timeout_s=plan.timeout_s, check=watch.check)


def check_same_model(store: Store | None, rank: Rank, layout: Parts, plan: Plan, watch: Watch | None) -> None:
    """Raise JobError, on all workers, if they have built different models. Called by every worker.

    The whole models are compared, whichever parts of them workers hold.
    """
    if store is not None and watch is not None:
        facts = parameter_facts(layout.trained)
        check_same(store, rank, facts, about="model", timeout_s=plan.timeout_s, check=watch.check)


def check_same(
    store: Store, rank: Rank, facts: Facts, *, about: str, timeout_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Raise JobError, on all workers, if they have different `facts`. Called by every worker.

    `about` is another word for each call on one store. `check` is called while this waits: it raises if a worker is
    lost. One that does not come in `timeout_s` is lost.
    """
    own = PrefixStore(f"same {about}", store)
    end_s = time.monotonic() + timeout_s
    everybody = [str(worker) for worker in range(rank.workers)]

    def wait_for(keys: Sequence[str]) -> list[Any]:
        with CALLS.waiting_in(f"the comparison of {about}"):
            _wait(own, keys, end_s=end_s, check=check)
        return [json.loads(value) for value in own.multi_get(list(keys))]

    own.set(str(rank.index), json.dumps({name: _short(value) for name, value in facts.items()}))
    if rank.index == 0:
        given = wait_for(everybody)
        different = [name for name in facts if len({json.dumps(one.get(name)) for one in given}) > 1]
        own.set("asked", json.dumps(different))
    (asked,) = wait_for(["asked"])
    if asked:
        own.set(f"whole {rank.index}", json.dumps({name: facts.get(name) for name in asked}))
    if rank.index == 0:
        whole = wait_for([f"whole {worker}" for worker in everybody]) if asked else []
        own.set("verdict", json.dumps(difference(whole) if asked else ""))
    (verdict,) = wait_for(["verdict"])
    if verdict:
        raise JobError(
            f"the workers do not train the same thing: {verdict}. Give all of them the same {about}, and start again."
        )


def difference(facts: Sequence[Facts]) -> str:
    """Return in what the workers with these `facts`, in their order, differ, as a sentence's part; "" if in nothing."""
    for name in dict.fromkeys(name for one in facts for name in one):
        values = [one.get(name) for one in facts]
        if any(isinstance(value, dict) for value in values):
            nested = _in_dicts(name, [value if isinstance(value, dict) else {} for value in values])
            if nested:
                return nested
        elif found := _said(_PHRASES.get(name, f"has {name} {{}}"), values):
            return found
    return ""


def facts_of(job: Job, plan: Plan, rank: Rank) -> dict[str, Any]:
    """Return what all workers of a run must have in common."""
    facts: dict[str, Any] = {
        "workers": rank.workers,
        "torch": torch.__version__,
        "shoal": shoal.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "samples": job.num_samples or 0,
        "eval samples": _count(job.eval_data),
    }
    fields = (
        "batch_size",
        "total_steps",
        "seed",
        "shuffle",
        "clip_norm",
        "unit",
        "eval_every_steps",
        "block_rows",
        "drop_last",
    )
    facts["job"] = {f"Job.{name}": getattr(job, name) for name in fields}
    facts["plan"] = _flat(dataclasses.asdict(plan), "plan")
    facts["sample"] = sample_hashes(job.data)
    return facts


def _count(data: Any) -> int:
    """Return how many samples `data` has; 0 for none, and for a stream that does not say."""
    if data is None:
        return 0
    return data.num_samples or 0 if is_stream(data) else len(data)


def parameter_facts(parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the parameters' types and shapes by name."""
    return {
        "parameter": {
            name: f"{str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}"
            for name, parameter in parameters.items()
        }
    }


def _in_dicts(name: str, values: Sequence[Mapping[str, Any]]) -> str:
    for key in dict.fromkeys(key for value in values for key in value):
        given = [value.get(key) for value in values]
        if name == "sample":
            if found := _other_samples(key, given):
                return found
            continue
        what = f"has parameter {key} as {{}}" if name == "parameter" else f"has {key} = {{}}"
        if found := _said(what, given):
            return found
    return ""


def _other_samples(number: str, hashes: Sequence[str | None]) -> str:
    """Return who has read another sample of that `number`; one that has not read it in time has no hash."""
    usual = _usual([value for value in hashes if value is not None])
    others = [worker for worker, value in enumerate(hashes) if value not in (None, usual)]
    if not others:
        return ""
    return (
        f"{_names(others)} {'has' if len(others) == 1 else 'have'} other data: sample {number} is not that of the rest"
    )


def _said(phrase: str, values: Sequence[Any]) -> str:
    """Return who has another value than the most: "worker 2 has 10,001 samples, the others 10,000"; "" if nobody."""
    shown = [_shown(value) for value in values]
    usual = _usual(shown)
    others: dict[str, list[int]] = {}
    for worker, value in enumerate(shown):
        if value != usual:
            others.setdefault(value, []).append(worker)
    if not others:
        return ""
    parts = [
        f"{_names(workers)} {phrase.format(value) if len(workers) == 1 else _plural(phrase).format(value)}"
        for value, workers in list(others.items())[:_MOST_NAMED]
    ]
    rest = [worker for worker, value in enumerate(shown) if value == usual]
    return f"{', '.join(parts)}, {f'worker {rest[0]}' if len(rest) == 1 else 'the others'} {usual}"


def _usual(shown: Sequence[str]) -> str:
    """Return the value that most have; of two that are as common, that of the first worker."""
    counts = Counter(shown)
    return max(shown, key=lambda value: (counts[value], -shown.index(value)))


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _plural(phrase: str) -> str:
    return phrase.replace("has ", "have ", 1).replace("was ", "were ", 1)


def _names(workers: Sequence[int]) -> str:
    if len(workers) == 1:
        return f"worker {workers[0]}"
    return f"workers {', '.join(map(str, workers[:-1]))} and {workers[-1]}"


def _short(value: Any) -> Any:
    """Return what is written first: a hash, where it is long."""
    if not isinstance(value, dict):
        return value
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _flat(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return nested fields by their names with dots: {"plan.mesh.shard": 2}; predictions are no part of a plan."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}.{name}")
        elif name != "predicted":
            found[f"{prefix}.{name}"] = str(value)
    return found


def _wait(store: Store, keys: Sequence[str], *, end_s: float, check: Callable[[], None]) -> None:
    pause_s = 1e-3
    while not store.check(list(keys)):
        check()
        if time.monotonic() > end_s:
            missing = [key for key in keys if not store.check([key])]
            raise PeerLost(f"not all workers have come to be compared; missing: {', '.join(missing)}.")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
