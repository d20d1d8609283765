"""What is said of a hang, by what the workers say of themselves."""

from shoal.comm.calls import Call
from shoal.fault.watch_sentence import Entry, explain

ALL = (0, 1, 2, 3)


def waiting(number: int, *, what: str = "all-reduce", detail: str = "bucket 7", lane: str = "group 0") -> Entry:
    """A worker that has entered a call and waits in it."""
    call = Call(lane, number, what, detail, ALL)
    return Entry(step=301, still_s=12.0, place="train.py:40", waits=(call,), entered={lane: number})


def busy(number: int, place: str = "dataset.py:88", lane: str = "group 0") -> Entry:
    """A worker that is in the user's code."""
    return Entry(step=301, still_s=12.1, place=place, is_busy=True, entered={lane: number})


def sentence(*entries: Entry) -> str:
    hang = explain(dict(enumerate(entries)))
    assert hang is not None
    return hang.sentence


def test_the_one_that_is_elsewhere_is_named_with_its_line() -> None:
    found = explain(dict(enumerate([waiting(1204), waiting(1204), waiting(1204), busy(1203)])))
    assert found is not None
    assert found.sentence == (
        "worker 3 is in dataset.py:88 (12.1 s), the others wait in all-reduce #1204, bucket 7 (step 301)."
    )
    assert found.blamed == (3,)
    assert not found.is_final


def test_one_of_two_that_waits_is_named_too() -> None:
    assert sentence(busy(3), waiting(4)).endswith(", worker 1 waits in all-reduce #4, bucket 7 (step 301).")


def test_several_in_one_place_are_named_together() -> None:
    assert sentence(busy(3), waiting(4), busy(3), waiting(4)).startswith(
        "workers 0 and 2 are in dataset.py:88 (12.1 s)"
    )


def test_a_worker_that_has_an_operation_pending_but_is_in_the_users_code_does_not_wait() -> None:
    pending = Entry(still_s=9.0, place="model.py:5", is_busy=True, waits=waiting(4).waits, entered={"group 0": 4})
    assert sentence(waiting(5), pending).startswith("worker 1 is in model.py:5")


def test_a_silent_worker_is_named_with_the_reason() -> None:
    silent = Entry(step=301, silence="is stopped by a signal (silent for 4.0 s)")
    assert sentence(waiting(4), silent, waiting(4)) == (
        "worker 1 is stopped by a signal (silent for 4.0 s), the others wait in all-reduce #4, bucket 7 (step 301)."
    )


def test_workers_that_wait_for_each_other_in_different_collectives_can_never_go_on() -> None:
    extra = waiting(8, detail="shape (3,)")
    memory = Entry(
        step=301, still_s=9.0, waits=(Call("memory", 40, "the sum", "", ALL),), entered={"memory": 40, "group 0": 7}
    )
    found = explain({0: memory, 1: extra, 2: memory, 3: memory})
    assert found is not None
    assert found.is_final
    assert "worker 1 waits in all-reduce #8, shape (3,) (step 301) at train.py:40" in found.sentence
    assert "workers 0, 2 and 3 wait in the sum #40" in found.sentence


def test_one_call_with_two_shapes_can_never_go_on() -> None:
    found = explain({0: waiting(8, detail="shape (3,)"), 1: waiting(8, detail="shape (4,)")})
    assert found is not None
    assert found.is_final


def test_a_chain_of_waits_that_ends_is_no_circle() -> None:
    # 0 waits for 1, who has all it needs and waits for a message: it may yet come.
    late = Entry(still_s=9.0, waits=(Call("", 0, "a message"),), entered={"group 0": 7})
    found = explain({0: waiting(8), 1: late})
    assert found is not None
    assert not found.is_final


def test_all_in_the_same_collective_blames_the_link() -> None:
    found = explain(dict(enumerate([waiting(4)] * 4)))
    assert found is not None
    assert found.blamed == ()
    assert not found.is_final
    assert found.sentence.startswith("workers 0, 1, 2 and 3 wait in all-reduce #4")


def test_nobody_waiting_is_no_hang() -> None:
    assert explain({0: busy(1), 1: busy(1)}) is None
