"""What happens in a run besides its steps, one sentence each."""

from collections.abc import Callable
from typing import Any

from shoal.core.units import format_seconds
from shoal.report.logs.log import clean, number
from shoal.report.logs.missing import ranks_in_words


def tell(event: dict[str, Any]) -> str:
    """Return the event as a sentence; empty for one that is not worth it."""
    words = _SENTENCES.get(event["kind"])
    return clean(words(event)) if words else ""


def metric_in_words(value: Any) -> str:
    """Return a metric with four digits behind the point."""
    finite = number(value)
    return "not finite" if finite is None else f"{finite:.4f}"


def _eval(event: dict[str, Any]) -> str:
    metrics = event.get("metrics")
    if not isinstance(metrics, dict):
        return ""
    values = ", ".join(f"eval {name} {metric_in_words(value)}" for name, value in metrics.items())
    return f"step {event.get('step')}: {values}"


def _hang(event: dict[str, Any]) -> str:
    return f"Waiting: {event.get('sentence', '')}"


def _loss(event: dict[str, Any]) -> str:
    is_asked = event.get("ended") and event.get("ended") == event.get("dead")
    return f"{'Ended' if is_asked else 'Lost'}: {_who(event.get('dead'))}. {_went_on(event)}"


def _joined(event: dict[str, Any]) -> str:
    return f"Joined: {_who(event.get('joined'))}. {_went_on(event)}"


def _went_on(event: dict[str, Any]) -> str:
    took_s = number(event.get("recovery_s"))
    took = "" if took_s is None else f", {format_seconds(took_s)} later"
    return f"{event.get('workers')} go on after step {event.get('step')}{took}."


def _who(ranks: Any) -> str:
    known = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
    return ranks_in_words(known) if known else "a worker"


def _checkpoint(event: dict[str, Any]) -> str:
    if event.get("error"):
        return f"step {event.get('step')}: no checkpoint: {event['error']}"
    return f"step {event.get('step')}: a checkpoint is written"


def _error(event: dict[str, Any]) -> str:
    return f"Worker {event.get('worker')}: {event.get('type', 'error')}: {event.get('message', '')}"


_SENTENCES: dict[str, Callable[[dict[str, Any]], str]] = {
    "eval": _eval,
    "hang": _hang,
    "loss": _loss,
    "joined": _joined,
    "checkpoint": _checkpoint,
    "error": _error,
}
