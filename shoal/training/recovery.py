"""What a loss, or somebody's coming, has cost: one sentence for the user, one event."""

import time
from typing import Any

from shoal.comm.members import number_of
from shoal.core.events import EventLog, EventReader
from shoal.fault.generation import Generation
from shoal.training.run import Run


class Recovery:
    """The change from one generation to the next, as one member sees it. The first survivor writes it down."""

    def __init__(
        self, before: Generation, now: Generation, lost: dict[str, dict[str, Any]], *, me: str, ended_s: float
    ) -> None:
        self._now = now
        self._lost = {number_of(name): word for name, word in lost.items()}
        self._joined = sorted(member.number for member in now.members if member.name not in before.names)
        survivors = [name for name in now.names if name in before.names]
        self._has_survivors = bool(survivors)
        self._speaks = me == (survivors or now.names)[0]
        self._died_s = min([word["time"] for word in lost.values()], default=ended_s)
        self._ended_s, self._agreed_s, self._rebuilt_s = ended_s, time.time(), 0.0
        self._step = 0
        self._is_noted = False

    def absorb(self, earlier: "Recovery") -> None:
        """Write down what was lost before as well, if that recovery was itself cut short by this one."""
        if not earlier._is_noted:
            self._lost = earlier._lost | self._lost
            self._died_s, self._ended_s = min(earlier._died_s, self._died_s), min(earlier._ended_s, self._ended_s)

    def rebuilt(self, run: Run) -> None:
        """Say that groups, model and state are there again, in `run`."""
        self._rebuilt_s, self._step = time.time(), run.step_count
        workers = f"{run.rank.workers} {'worker goes' if run.rank.workers == 1 else 'workers go'} on"
        said = [
            f"Worker {number} {'' if number in self._ended() else 'is lost: it '}{word['why']}."
            for number, word in sorted(self._lost.items())
        ]
        if self._joined:
            said.append(f"Worker{'s' if len(self._joined) > 1 else ''} {_listed(self._joined)} joined.")
        run.say(f"{' '.join([*said, ''])}{workers} after step {run.step_count}.")

    def note(self, log: EventLog, run: Run) -> None:
        """Write it down, once, when the first step since is done."""
        if self._is_noted:
            return
        self._is_noted = True
        if not self._speaks:
            return
        now_s = time.time()
        spent = {
            "generation": self._now.number,
            "workers": run.rank.workers,
            "step": self._step,
            "agreed_s": round(self._agreed_s - self._ended_s, 4),
            "rebuilt_s": round(self._rebuilt_s - self._agreed_s, 4),
            "recovery_s": round(now_s - self._died_s, 4),
        }
        if self._lost:
            log.write(
                "loss",
                dead=sorted(self._lost),
                ended=self._ended(),
                detected_s=round(self._ended_s - self._died_s, 4),
                lost_steps=max(0, self._reached(run) - self._step),
                **spent,
            )
        if self._joined:
            log.write("joined", joined=self._joined, **spent)

    def _ended(self) -> list[int]:
        """Return those of the lost that were ended as somebody has asked."""
        return sorted(number for number, word in self._lost.items() if word.get("is_asked"))

    def _reached(self, run: Run) -> int:
        """Return the last step that was done before: as survivors know, or as the dead have written down."""
        if self._has_survivors:
            return self._now.step
        logs = [EventReader(path).poll() for path in run.folder.events.glob("rank-*.jsonl")]
        last_s = max(word["time"] for word in self._lost.values())
        steps = [event for log in logs for event in log if event["kind"] == "step" and event["time"] <= last_s]
        return max((event["step"] for event in steps), default=0)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (f" and {numbers[-1]}" if len(numbers) > 1 else str(numbers[-1]))
