"""A pipeline's step as text: one line a stage, from left to right."""

from shoal.core.units import format_seconds
from shoal.planner.time.schedules import BACKWARD, FORWARD, WEIGHTS
from shoal.planner.time.simulate import Event, Timeline

_LEAST_WIDTH = 40
_LETTERS = {FORWARD: "F", BACKWARD: "B", WEIGHTS: "w"}
_IDLE = "."


def draw(timeline: Timeline, *, width: int) -> str:
    """Return the timeline in `width` columns: micro-batches by number where there is room, F, B and w where not."""
    label = len(f"stage {timeline.stages - 1} ")
    width = max(_LEAST_WIDTH, width) - label
    cell_s = timeline.makespan_s / width
    longest = max(event.end_s - event.start_s for event in timeline.events)
    numbered = longest >= 2 * cell_s and all(event.micro_batch < 10 for event in timeline.events)
    rows = [[_IDLE] * width for _ in range(timeline.stages)]
    for event in timeline.events:
        first, last = round(event.start_s / cell_s), round(event.end_s / cell_s)
        for position, column in enumerate(range(first, min(last, width))):
            rows[event.stage][column] = _sign(event, position, numbered=numbered)
    bubble = max(zip(timeline.bubble_s, range(timeline.stages), strict=True))
    lines = [f"{f'stage {stage} '.rjust(label)}{''.join(row)}" for stage, row in enumerate(rows)]
    lines.append(f"{' ' * label}0{format_seconds(timeline.makespan_s).rjust(width - 1)}")
    lines.append(
        f"F forward, B backward{', w gradients of weights' if _splits(timeline) else ''}, {_IDLE} waiting"
        f"{'; each with the number of its micro-batch' if numbered else ''}. "
        f"Stage {bubble[1]} waits longest: {bubble[0] / timeline.makespan_s:.0%} of the step."
    )
    return "\n".join(lines)


def _sign(event: Event, position: int, *, numbered: bool) -> str:
    return str(event.micro_batch) if numbered and position == 1 else _LETTERS[event.kind]


def _splits(timeline: Timeline) -> bool:
    return any(event.kind == WEIGHTS for event in timeline.events)
