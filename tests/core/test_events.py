from pathlib import Path

import pytest

from shoal.core.events import EventLog, EventReader


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
