"""The journal: whole records or none, whatever moment its writer was killed at."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.tasks.journal import Journal, Journals, Record, done_tasks, records


def written(folder: Path, *, holder: str = "a", indices: range = range(3)) -> Path:
    journal = Journal(folder, holder)
    for index in indices:
        journal.append(Record(index, has_failed=index % 5 == 4, seconds=index / 8, data=bytes([index]) * 10 * index))
    journal.close()
    return journal.path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written(tmp_path, indices=range(7))
    found = list(Journals(tmp_path).news())
    assert [record.index for record in found] == list(range(7))
    assert found[3] == Record(3, has_failed=False, seconds=0.375, data=b"\3" * 30)
    assert done_tasks(tmp_path) == {0, 1, 2, 3, 5, 6}


def test_cut_at_any_byte_a_journal_gives_the_whole_records_before(tmp_path: Path) -> None:
    data = written(tmp_path).read_bytes()
    ends = [end for _, end in records(data)]
    for length in range(len(data) + 1):
        assert len(list(records(data[:length]))) == sum(end <= length for end in ends)


@given(place=st.integers(0, 10**6), change=st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, change: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        data = bytearray(written(Path(folder)).read_bytes())
    whole = [record for record, _ in records(bytes(data))]
    data[place % len(data)] ^= change
    for record, _ in records(bytes(data)):
        assert record in whole


def test_news_are_only_what_was_added(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    written(tmp_path, holder="b", indices=range(2))
    assert [record.index for record in journals.news()] == [0, 1]
    assert list(journals.news()) == []
    path = written(tmp_path, holder="a", indices=range(5, 7))
    with path.open("ab") as file:  # a writer in the middle of a record
        file.write(b"\x20\0\0\0")
    assert [record.index for record in journals.news()] == [5, 6]
    assert list(journals.news()) == []


def test_every_start_writes_a_file_of_its_own(tmp_path: Path) -> None:
    assert written(tmp_path) != written(tmp_path)


def test_nothing_is_made_before_the_first_record(tmp_path: Path) -> None:
    Journal(tmp_path, "a").close()
    assert list(tmp_path.iterdir()) == []


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_record_for_which_there_was_no_room_leaves_those_behind_it_to_be_read(tmp_path: Path) -> None:
    journal, journals = Journal(tmp_path, "a"), Journals(tmp_path)
    one, large, other = (Record(index, has_failed=False, seconds=0.0, data=bytes(100 * index)) for index in (1, 9, 2))
    journal.append(one)
    with files_of_at_most(500), pytest.raises(OSError, match="too large") as raised:
        journal.append(large)
    assert raised.value.errno == errno.EFBIG
    assert list(journals.news()) == [one]
    journal.append(other)
    journal.append(large)
    journal.close()
    assert list(journals.news()) == [other, large]
