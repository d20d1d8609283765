"""Live shares, decided: who takes how much of each global batch, by what the workers were measured to take.

Every so often each replica says what its last steps took: a window. All replicas decide the same from the same windows:

1. A replica's step takes fixed + own + each * samples: `fixed` is measured apart (the optimizer); `own` and `each` come
   from windows in which it had different numbers of samples. As long as it had one only, `own` is 0. Windows that do
   not fit the newest within a quarter are forgotten: the replica has become slower or faster meanwhile.
2. The samples are handed out so that all are done together (`spec.parts.hand_out`), at least one to each.
3. That is worth it where a step is predicted to take 5% less, and twice what the medians may be off by on top; and if
   the window before says so as well: its proposal, judged by this window's measure. Noise does not repeat itself.
4. The first window after a change tells whether that was so. If a step takes no less than before, as where workers
   share the same cores, the change is taken back, and twice as many windows in a row must agree to the next.

Example: 4 replicas with 8 of 32 samples each take 80, 80, 80 and 320 ms. They are given 10, 10, 10 and 2: after that a
step takes 100 ms, 69% less. In the next window the last takes 90 ms for its 2 samples, so 3.3 ms + 38 ms * samples fits
it better than before; nothing is 5% better than 10, 10, 10, 2, and so nothing changes until somebody gets faster.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.spec.parts import hand_out

WORTH = 0.05
"""How much less a step must be predicted to take. Below that, the medians of 4 equal workers on 2 busy cores differ."""
_AGREE, _MOST_AGREE = 2, 64
_FITS = 1.25
"""By how much a window may be off what those before say, so that they are about the same worker."""
_WINDOWS = 8
"""How many windows of a replica are remembered."""
_APART = 1.2
"""How different numbers of samples must be to tell what one costs from what all cost together."""


@dataclass(frozen=True)
class Window:
    """What the last steps took; one number for each replica."""

    samples: tuple[int, ...]
    """Of each step."""
    seconds: tuple[float, ...]
    """The median of a step's data, forward and backward: what grows with the samples."""
    fixed_s: tuple[float, ...]
    """The median of what does not, as the optimizer."""
    step_s: float
    """The median of a whole step, waiting included."""
    noise: float = 0.0
    """How far the medians may be off, relatively."""
    most: tuple[int, ...] = ()
    """How many samples each can take, by its memory."""


@dataclass(frozen=True)
class Change:
    """Other parts of the global batch, from the next step on."""

    samples: tuple[int, ...]
    sample_s: tuple[float, ...]
    """What a sample takes on each replica."""
    gain: float
    """How much less a step is predicted to take, as a fraction."""
    is_back: bool = False
    """Whether this takes the change before back, which has not been worth it."""

    @property
    def shares(self) -> tuple[float, ...]:
        """The fraction of each global batch that each replica takes."""
        return tuple(part / sum(self.samples) for part in self.samples)


@dataclass
class _Costs:
    """What a step takes on one replica, besides what is fixed: own_s + each_s * samples."""

    seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_WINDOWS))
    """The samples and seconds of windows."""
    own_s: float = 0.0
    each_s: float = 0.0

    def learn(self, samples: int, seconds: float) -> None:
        """Take one more window in."""
        if self.seen and not self._fits(samples, seconds) and not self._is_apart(samples):
            self.seen.clear()
        self.seen.append((samples, seconds))
        self.own_s, self.each_s = self._line()
        if not self._fits(samples, seconds):
            self.seen.clear()
            self.seen.append((samples, seconds))
            self.own_s, self.each_s = self._line()
        off = seconds / self._expected_s(samples)  # the newest counts most: the line goes through it
        self.own_s, self.each_s = self.own_s * off, self.each_s * off

    def _expected_s(self, samples: int) -> float:
        return self.own_s + self.each_s * samples

    def _fits(self, samples: int, seconds: float) -> bool:
        return self._expected_s(samples) / _FITS <= seconds <= self._expected_s(samples) * _FITS

    def _is_apart(self, samples: int) -> bool:
        """Whether the samples of a window are the first to tell the two costs apart."""
        had = {before for before, _ in self.seen}
        return len(had) == 1 and not max(had) / _APART < samples < min(had) * _APART

    def _line(self) -> tuple[float, float]:
        """Return own_s and each_s by least squares; own_s is 0 where it would be less, or nothing tells them apart."""
        samples, seconds = [float(n) for n, _ in self.seen], [s for _, s in self.seen]
        simple = seconds[-1] / samples[-1]
        if max(samples) < _APART * min(samples):
            return 0.0, simple
        mean_n, mean_s = sum(samples) / len(samples), sum(seconds) / len(seconds)
        across = sum((n - mean_n) * (s - mean_s) for n, s in zip(samples, seconds, strict=True))
        each_s = across / sum((n - mean_n) ** 2 for n in samples)
        own_s = mean_s - each_s * mean_n
        if each_s <= 0 or own_s < 0:
            return 0.0, simple
        return own_s, each_s


class Balance:
    """Decides from window to window; every replica has one, and all decide alike."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._costs: list[_Costs] = []
        self._proposed: list[tuple[int, ...]] = []
        """What the last windows proposed, one after the other, that were worth it."""
        self._agree = _AGREE
        self._before: tuple[tuple[int, ...], float] | None = None
        """The parts and the step's seconds before the last change, until it is judged."""

    def decide(self, window: Window, *, may_change: bool = True) -> Change | None:
        """Return the parts from the next step on, if others are better than those that are; `may_change`: now."""
        self._learn(window)
        if (back := self._judged(window)) is not None:
            return back
        parts = self._hand_out(window)
        needed = WORTH + 2 * window.noise
        agreed = [each for each in self._proposed if self._gain(each, window) >= needed]
        self._proposed = agreed if len(agreed) == len(self._proposed) else []
        gain = self._gain(parts, window)
        if gain < needed:
            self._proposed = []
            return None
        self._proposed.append(parts)
        if len(self._proposed) < self._agree or not may_change:
            self._proposed = self._proposed[-self._agree :]
            return None
        self._proposed, self._before = [], (window.samples, window.step_s)
        return Change(parts, self._sample_s(window), gain)

    def _learn(self, window: Window) -> None:
        self._costs = self._costs or [_Costs() for _ in window.samples]
        for costs, samples, seconds in zip(self._costs, window.samples, window.seconds, strict=True):
            costs.learn(samples, seconds)

    def _judged(self, window: Window) -> Change | None:
        """Return what takes the last change back, if this window, the first since, shows that it was not worth it."""
        if self._before is None:
            return None
        (parts, step_s), self._before = self._before, None
        if window.step_s < step_s:
            self._agree = _AGREE
            return None
        self._agree = min(2 * self._agree, _MOST_AGREE)
        return Change(parts, self._sample_s(window), 1 - step_s / window.step_s, is_back=True)

    def _hand_out(self, window: Window) -> tuple[int, ...]:
        fixed = [fix + costs.own_s for fix, costs in zip(window.fixed_s, self._costs, strict=True)]
        each = [max(costs.each_s, 1e-9) for costs in self._costs]
        return tuple(hand_out(self._batch_size, sample_s=each, fixed_s=fixed, most=window.most))

    def _gain(self, parts: Sequence[int], window: Window) -> float:
        """Return how much less a step takes with `parts`, as a fraction, by this window's measure."""
        rest_s = max(0.0, window.step_s - self._last_s(window.samples, window))
        now_s = self._last_s(window.samples, window) + rest_s
        return 1 - (self._last_s(parts, window) + rest_s) / max(now_s, 1e-12)

    def _last_s(self, parts: Sequence[int], window: Window) -> float:
        """Return when the last replica is done with its part."""
        rows = zip(parts, window.fixed_s, self._costs, strict=True)
        return max(fix + costs.own_s + costs.each_s * part for part, fix, costs in rows)

    def _sample_s(self, window: Window) -> tuple[float, ...]:
        return tuple(seconds / part for seconds, part in zip(window.seconds, window.samples, strict=True))
