"""How each kind of event but a step is taken into a worker's log. Each returns whether the event made sense."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.report.logs.facts import Call, Fault, Loading, LoadingOver, MemoryOver, Saved, Shares, TraceFile
from shoal.report.logs.log import WorkerLog, amount, clean, number, whole
from shoal.report.logs.missing import ranks_in_words

Event = dict[str, Any]

_RECOVERY_PARTS = {"detected_s": "noticed", "agreed_s": "agreed", "rebuilt_s": "rebuilt"}
_MOST_KINDS_OF_CALL = 2000
"""Of one worker: gradients of unheard-of many sizes must not fill the memory."""


def _take_start(log: WorkerLog, event: Event) -> bool:  # noqa: ARG001
    log.ended, log.error = False, None  # a worker that starts again has left its failure behind
    return True


def _take_eval(log: WorkerLog, event: Event) -> bool:
    step, metrics = whole(event.get("step")), event.get("metrics")
    if step is None or not isinstance(metrics, dict):
        return False
    log.evals[step] = {clean(name): number(value) for name, value in metrics.items()}
    return True


def _take_staging(log: WorkerLog, event: Event) -> bool:
    if not all(isinstance(event.get(name), str) for name in ("field", "source", "path", "why")):
        return False
    where = f"staged to {event['path']}: " if event.get("is_staged") is True else ""
    log.staging[clean(event["field"])] = clean(f"{event['source']}: {where}{event['why']}")
    return True


def _take_comm(log: WorkerLog, event: Event) -> bool:
    steps, calls = whole(event.get("steps")), event.get("calls")
    if steps is None or not isinstance(calls, list):
        return False
    found = [_call_of(call) for call in calls]
    log.calls_steps += steps
    for call in found:
        if call is not None:
            _add_call(log, call)
    return None not in found


def _call_of(said: Any) -> Call | None:
    if not isinstance(said, dict):
        return None
    words = [said.get(name) for name in ("op", "algorithm", "link")]
    num_bytes, count, seconds = (amount(said.get(name)) for name in ("bytes", "count", "seconds"))
    if num_bytes is None or count is None or seconds is None or not all(isinstance(word, str) for word in words):
        return None
    op, algorithm, link = (clean(word) for word in words)
    return Call(op, algorithm, link, int(num_bytes), int(count), seconds)


def _add_call(log: WorkerLog, call: Call) -> None:
    key = (call.op, call.algorithm, call.link, call.bytes)
    if key in log.calls:
        so_far = log.calls[key]
        log.calls[key] = replace(so_far, count=so_far.count + call.count, seconds=so_far.seconds + call.seconds)
    elif len(log.calls) < _MOST_KINDS_OF_CALL:
        log.calls[key] = call


def _take_data(log: WorkerLog, event: Event) -> bool:
    step, steps = whole(event.get("step")), whole(event.get("steps"))
    names = ("samples", "bytes", "wait_s", "fill_s", "threads", "depth", "fill_cpu_s")
    values = [amount(event.get(name, 0)) for name in names]
    known = [value for value in values if value is not None]
    if step is None or steps is None or len(known) < len(values):
        return False
    samples, num_bytes, wait_s, fill_s, threads, depth, cpu_s = known
    storage = clean(event.get("storage") or "")
    loading = Loading(log.rank, steps, samples, num_bytes, wait_s, fill_s, int(threads), int(depth), storage, cpu_s)
    log.loading.append(LoadingOver(step, loading))
    return True


def _take_memory(log: WorkerLog, event: Event) -> bool:
    step = whole(event.get("step"))
    at_s, held, labels = (event.get(name) for name in ("at_s", "bytes", "labels"))
    if step is None or not isinstance(at_s, list) or not isinstance(held, list) or len(at_s) != len(held):
        return False
    labels = labels if isinstance(labels, list) and len(labels) == len(at_s) else [""] * len(at_s)
    pairs = [(amount(a), amount(b), clean(label)) for a, b, label in zip(at_s, held, labels, strict=True)]
    known = [(a, b, label) for a, b, label in pairs if a is not None and b is not None]
    if len(known) < len(pairs) or not known:
        return False
    times, amounts, words = zip(*known, strict=True)
    log.memory[step] = MemoryOver(log.rank, step, times, amounts, words)
    return True


def _take_trace(log: WorkerLog, event: Event) -> bool:
    step, file = whole(event.get("step")), event.get("file")
    if step is None or not isinstance(file, str):
        return False
    log.traces[step] = TraceFile(log.rank, step, clean(file), clean(event.get("why") or ""))
    return True


def _take_shares(log: WorkerLog, event: Event) -> bool:
    step, shares = whole(event.get("step")), event.get("shares")
    values = [amount(share) for share in shares] if isinstance(shares, list) else [None]
    known = tuple(value for value in values if value is not None)
    if step is None or len(known) < len(values):
        return False
    log.shares.append(Shares(step, known, amount(event.get("predicted_gain"))))
    return True


def _take_checkpoint(log: WorkerLog, event: Event) -> bool:
    step, stall_s = whole(event.get("step")), amount(event.get("stall_s"))
    if step is None or stall_s is None:
        return False
    error = clean(event.get("error") or "")
    write_s, num_bytes = amount(event.get("write_s")) or 0.0, amount(event.get("bytes")) or 0.0
    log.saved.append(Saved(step, stall_s, write_s, num_bytes, error))
    if error:
        log.faults.append(Fault(_time_of(event), step, "checkpoint", error))
    return True


def _take_hang(log: WorkerLog, event: Event) -> bool:
    sentence = event.get("sentence")
    if not isinstance(sentence, str):
        return False
    log.faults.append(Fault(_time_of(event), None, "hang", clean(sentence)))
    return True


def _take_loss(log: WorkerLog, event: Event) -> bool:
    is_asked = event.get("ended") and event.get("ended") == event.get("dead")
    return _take_change(log, event, "ended" if is_asked else "lost", event.get("dead"))


def _take_joined(log: WorkerLog, event: Event) -> bool:
    return _take_change(log, event, "joined", event.get("joined"))


def _take_change(log: WorkerLog, event: Event, kind: str, who: Any) -> bool:
    """Take a loss or an arrival: `who` are the workers' numbers."""
    numbers = [whole(one) for one in who] if isinstance(who, list) else [None]
    ranks = [one for one in numbers if one is not None]
    if len(ranks) < len(numbers) or not ranks:
        return False
    left = whole(event.get("workers"))
    sentence = f"{ranks_in_words(ranks)} {'was' if len(ranks) == 1 else 'were'} {kind}".capitalize()
    sentence = sentence.replace("was joined", "joined").replace("were joined", "joined")
    sentence += f"; {left} {'goes' if left == 1 else 'go'} on." if left is not None else "."
    parts = [(word, amount(event.get(name))) for name, word in _RECOVERY_PARTS.items()]
    fault = Fault(
        time_s=_time_of(event),
        step=whole(event.get("step")),
        kind=kind,
        sentence=sentence,
        recovery_s=amount(event.get("recovery_s")),
        parts_s=tuple((word, seconds) for word, seconds in parts if seconds is not None),
        lost_steps=whole(event.get("lost_steps")),
        workers=tuple(ranks),
    )
    log.faults.append(fault)
    return True


def _take_caught_up(log: WorkerLog, event: Event) -> bool:
    step, missed = whole(event.get("step")), whole(event.get("missed"))
    if step is None or missed is None:
        return False
    sentence = f"Worker {log.rank} was late, and took over the state of another after missing {missed} steps."
    log.faults.append(Fault(_time_of(event), step, "late", sentence, recovery_s=amount(event.get("seconds"))))
    return True


def _take_error(log: WorkerLog, event: Event) -> bool:
    log.error = clean(f"{event.get('type', 'error')}: {event.get('message', '')}")
    return True


def _take_end(log: WorkerLog, event: Event) -> bool:
    peak, state = amount(event.get("peak_bytes")), event.get("state_bytes")
    log.ended, log.peak_bytes = True, None if peak is None else int(peak)
    held = {clean(name): amount(value) for name, value in state.items()} if isinstance(state, dict) else {}
    log.state_bytes = {name: value for name, value in held.items() if value is not None}
    return True


def _time_of(event: Event) -> float:
    return amount(event.get("time")) or 0.0


TAKERS: dict[str, Callable[[WorkerLog, Event], bool]] = {
    "start": _take_start,
    "eval": _take_eval,
    "staging": _take_staging,
    "comm": _take_comm,
    "data": _take_data,
    "memory": _take_memory,
    "trace": _take_trace,
    "shares": _take_shares,
    "checkpoint": _take_checkpoint,
    "hang": _take_hang,
    "loss": _take_loss,
    "joined": _take_joined,
    "caught_up": _take_caught_up,
    "error": _take_error,
    "end": _take_end,
}
