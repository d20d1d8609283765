import math
import time
from pathlib import Path

import pytest

from shoal.core.events import STEP_PARTS, EventLog, EventReader, last_events


def test_a_reader_sees_each_event_once_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    reader = EventReader(path)
    assert reader.poll() == []
    log = EventLog(path)
    log.write("step", step=1)
    assert [event["step"] for event in reader.poll()] == [1]
    log.write("step", step=2)
    log.write("step", step=3)
    assert [event["step"] for event in reader.poll()] == [2, 3]
    assert reader.poll() == []
    log.close()


def test_a_line_half_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1}\n{"kind": "st')
    reader = EventReader(path)
    assert len(reader.poll()) == 1
    with path.open("ab") as file:
        file.write(b'ep", "step": 2}\n')
    assert [event["step"] for event in reader.poll()] == [2]
    assert reader.damaged_lines == 0


def test_damaged_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(b'garbage\n{"kind": "end"}\n[1, 2]\n\xff\xfe\n')
    reader = EventReader(path)
    assert [event["kind"] for event in reader.poll()] == ["end"]
    assert reader.damaged_lines == 3


def test_a_number_that_json_does_not_know_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-0.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.write("step", loss=float("nan"))
    log.close()


@pytest.mark.parametrize(("loss", "part_loss"), [(0.1 + 0.2, 2.5), (math.nan, 1.0), (1.0, None), (math.inf, -math.inf)])
def test_the_event_of_a_step_has_its_parts_and_null_for_no_number(
    loss: float, part_loss: float | None, tmp_path: Path
) -> None:
    path = tmp_path / "rank-0.jsonl"
    log = EventLog(path)
    log.write_step(
        7,
        epoch=1,
        loss=loss,
        part_loss=part_loss,
        samples=3,
        weight=2.5,
        batch_weight=8.0,
        seconds={"forward_s": 0.25, "other_s": 0.5},
        more={"part": 2},
    )
    log.close()
    (event,) = EventReader(path).poll()
    assert abs(event.pop("time") - time.time()) < 60
    assert event.pop("loss") == (loss if math.isfinite(loss) else None)
    assert event.pop("part_loss") == (part_loss if part_loss is not None and math.isfinite(part_loss) else None)
    assert {name: event.pop(name) for name in STEP_PARTS} == dict.fromkeys(STEP_PARTS, 0.0) | {"forward_s": 0.25}
    numbers = {"step": 7, "epoch": 1, "samples": 3, "weight": 2.5, "batch_weight": 8.0, "step_s": 0.75}
    assert event == {"kind": "step", "part": 2, **numbers}


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1}\n' * 10_000 + b'{"kind": "step", "step": 2}\n{"kind": "end"}\n')
    events = last_events(path)
    assert [event["kind"] for event in events[-2:]] == ["step", "end"]
    assert len(events) < 5000


@pytest.mark.parametrize("last", ["", '{"kind": "memory", "labels": "%s"}\n' % ("x" * 300_000)])
def test_last_words_are_found_however_long_they_are_and_whatever_follows(last: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    words = f'{{"kind": "error", "traceback": "{"y" * 300_000}"}}\n'
    path.write_text('{"kind": "step", "step": 1}\n' * 1000 + words + last)
    assert next(event["kind"] for event in last_events(path) if event["kind"] != "step") == "error"


def test_what_another_process_said_before_the_last_start_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"kind": "error"}\n{"kind": "start"}\n{"kind": "step", "step": 4}\n{"kind": "st')
    assert [event["kind"] for event in last_events(path)] == ["start", "step"]
    assert last_events(tmp_path / "none.jsonl") == []
