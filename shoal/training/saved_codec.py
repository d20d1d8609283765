"""What a codec has not sent yet, as slices, and back, at any number of workers.

Each worker has its own: "codec/WORKER/pending/NAME" is what it owes to the parameter NAME, "codec/WORKER/memory/..."
what the codec remembers. At another number of data workers it is handed over (compress/carry.py), and one that is alone
adds it to its gradients (wired.py). Along the tensor and pipeline axes it cannot be handed over: what is pending there
is of slices. It is then dropped, and that is said. So it is where `sync.codec = "auto"` must take another codec,
because the plan is another one.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shoal.compress.carry import carried
from shoal.fault.checkpoint.reader import read_whole
from shoal.fault.shards import Found, Shard, whole_shard
from shoal.spec.plan import Mesh

if TYPE_CHECKING:
    from shoal.training.run import Run


def codec_alike(run: "Run") -> dict[str, Any] | None:
    """Return the codec's name and how often it was used, if there is one."""
    if run.feedback is None:
        return None
    state = run.feedback.state_dict()
    return {"codec": state["codec"], "exchanges": state["exchanges"]}


def codec_shards(run: "Run") -> Iterator[Shard]:
    """Yield what this worker's codec keeps."""
    if run.feedback is None:
        return
    state, own = run.feedback.state_dict(), f"codec/{run.rank.index}"
    prefix = _prefix(run)
    for name, tensor in state["pending"].items():
        yield whole_shard(f"{own}/pending/{name.removeprefix(prefix)}", tensor)
    for key, tensor in state["memory"].items():
        kind, _, name = key.partition("/")
        yield whole_shard(f"{own}/memory/{kind}/{name.removeprefix(prefix)}", tensor)


def codec_wanted(run: "Run", found: Mapping[str, Found], alike: dict[str, Any]) -> list[Shard]:
    """Return room for what `restore_codec` will want of `found`."""
    owners = tuple(f"codec/{worker}/" for worker in _followed(run, alike))
    return [
        whole_shard(name, torch.empty(each.shape, dtype=each.dtype))
        for name, each in found.items()
        if owners and name.startswith(owners)
    ]


def restore_codec(run: "Run", found: Mapping[str, Found], alike: dict[str, Any], *, say: Callable[[str], None]) -> None:
    """Give this worker's codec what the workers that it follows have not sent."""
    was = alike["codec"]
    if run.feedback is None:
        if was is not None:
            say(f"What codec={was['codec']!r} had not sent yet is dropped: this run has no codec.")
        return
    if was is None:
        return
    if _is_another(run, was):
        now = run.feedback.codec.name
        say(
            f"What codec={was['codec']!r} had not sent yet is dropped: this plan cannot have it, and has codec={now!r}."
        )
        return
    workers = _followed(run, alike)
    if not workers:
        say("What the codec had not sent yet is dropped: it was of slices that this mesh does not have.")
        return
    known = [worker for worker in workers if any(name.startswith(f"codec/{worker}/") for name in found)]
    prefix = _prefix(run)
    if len(known) < len(workers) and any(name.startswith("codec/") for name in found):
        say("What the codec of a lost worker had not sent yet is lost with it.")
    if Mesh(**alike["mesh"]).data == run.plan.mesh.data:
        run.feedback.load_state_dict(_state(found, workers[0], was, prefix))
    else:
        states = [_state(found, worker, was, prefix) for worker in known or workers[:1]]
        run.feedback.load_state_dict(carried(states, run.plan.mesh.data)[run.position.data])


def _is_another(run: "Run", was: dict[str, Any]) -> bool:
    """Return whether `auto` is another codec here, because that of the state does not go with the plan (before.py)."""
    return run.plan.sync.codec == "auto" and run.feedback is not None and run.feedback.codec.name != was["codec"]


def _followed(run: "Run", alike: dict[str, Any]) -> list[int]:
    """Return the workers, by their numbers in the mesh before, whose codecs this worker's goes on from."""
    if run.feedback is None or alike["codec"] is None or _is_another(run, alike["codec"]):
        return []
    before, mesh = Mesh(**alike["mesh"]), run.plan.mesh
    if (before.tensor, before.pipeline) != (mesh.tensor, mesh.pipeline):
        return []
    if before.data == mesh.data:
        return [run.rank.index]
    return [_worker(run, before, data) for data in range(before.data)]


def _worker(run: "Run", before: Mesh, data: int) -> int:
    """Return the number, in the mesh before, of the worker with part `data` and this one's other coordinates."""
    return (run.position.pipeline * before.data + data) * before.tensor + run.position.tensor


def _state(found: Mapping[str, Found], worker: int, was: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return what `worker` had, as `ErrorFeedback.load_state_dict` takes it."""
    pending, memory = {}, {}
    for full, each in found.items():
        if full.startswith(own := f"codec/{worker}/pending/"):
            pending[prefix + full.removeprefix(own)] = read_whole(each)
        elif full.startswith(own := f"codec/{worker}/memory/"):
            kind, _, name = full.removeprefix(own).partition("/")
            memory[f"{kind}/{prefix}{name}"] = read_whole(each)
    return {**was, "pending": pending, "memory": memory}


def _prefix(run: "Run") -> str:
    """Return what stands before a parameter's name where the engine names it."""
    if run.plan.mesh.keeps_whole:
        return "model."  # of training.objective
    return "own." if run.plan.mesh.pipeline > 1 else ""  # of pipeline.stage
