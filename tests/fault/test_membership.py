"""Who is in a generation: agreed on through a real store by members that are threads here, and processes elsewhere."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from shoal.comm import others
from shoal.comm.members import await_members, last_generation, tell_dead, tell_last, tell_started
from shoal.core.errors import PeerLost, WorkerFailed
from shoal.fault import membership as room
from shoal.fault.generation import Generation, Member
from shoal.fault.membership_ear import Ear
from tests.support.membership import WAIT_S, Run
from tests.support.waiting import wait_until


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.members.set("finished", "1")  # whoever still waits in a thread
    for ear in made.ears:
        ear.close()
    made.pool.shutdown()


def test_all_that_were_started_are_in_the_first_generation_in_the_order_of_their_numbers(run: Run) -> None:
    members = run.start("2.0", "0.0", "1.0")
    generation = run.agreed(*members)
    assert (generation.number, generation.names) == (0, ("0.0", "1.0", "2.0"))
    assert [member.rank_in(generation).index for member in members] == [2, 0, 1]
    assert last_generation(run.members) == 0


def test_the_first_generation_waits_for_all_that_were_started(run: Run) -> None:
    first, second = run.start("0.0", "1.0")
    (waiting,) = run.agree(first)
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    assert run.agree(second)[0].result(WAIT_S) == waiting.result(WAIT_S)


def test_survivors_go_on_without_one_that_is_dead_and_know_who_it_was(run: Run) -> None:
    members = run.start("0.0", "1.0", "2.0")
    before = run.agreed(*members)
    tell_dead(run.members, "1.0", "was killed by SIGKILL")
    now = run.agreed(members[0], members[2], step=41)
    assert (now.number, now.names, now.step) == (1, ("0.0", "2.0"), 41)
    assert members[0].lost_since(before, now)["1.0"]["why"] == "was killed by SIGKILL"
    rank = members[2].rank_in(now)
    assert (rank.index, rank.workers, rank.number, rank.local_workers) == (1, 2, 2, 2)


def test_one_that_dies_while_the_others_wait_for_it_is_not_waited_for(run: Run) -> None:
    members = run.start("0.0", "1.0", "2.0")
    run.agreed(*members)
    waiting = run.agree(members[1], members[2])  # the lowest does not come
    with pytest.raises(TimeoutError):
        waiting[0].result(0.2)
    tell_dead(run.members, "0.0", "was killed by SIGKILL")
    assert {future.result(WAIT_S).names for future in waiting} == {("1.0", "2.0")}  # type: ignore[union-attr]


def test_one_that_said_it_is_there_and_died_is_not_in_the_list(run: Run) -> None:
    members = run.start("0.0", "1.0", "2.0")
    run.agreed(*members)
    members[0]._announce(1, Member("0.0", 5))
    tell_dead(run.members, "0.0", "was killed by SIGKILL")
    assert run.agreed(members[1], members[2]).names == ("1.0", "2.0")


def test_a_process_of_this_host_that_is_gone_is_found_without_the_launcher(run: Run) -> None:
    code = (
        "import sys; from datetime import timedelta; import torch.distributed as dist;"
        "from shoal.comm.rank import Rank; from shoal.fault.membership import Membership;"
        "port = int(sys.argv[1]); rank = Rank(0, 2, 0, 2, '127.0.0.1', port, True, member='1.0');"
        "store = dist.TCPStore('127.0.0.1', port, is_master=False, wait_for_workers=False);"
        "Membership(store, rank, fits=lambda n: n, timeout_s=20, wait_s=20).agree(0)"
    )
    (survivor,) = run.start("0.0", "1.0")[:1]
    process = subprocess.Popen([sys.executable, "-c", code, str(run.port)])
    try:
        assert run.agreed(survivor).names == ("0.0", "1.0")
    finally:
        process.wait(WAIT_S)
    assert run.agreed(survivor).names == ("0.0",)


def test_hosts_that_have_one_name_are_told_apart(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    members, agreed = run.start("0.0", "1.0"), []
    for member, host in zip(members, ("localhost 5d3c", "localhost 77ab"), strict=True):
        monkeypatch.setattr(room, "host_id", lambda host=host: host)
        agreed.extend(run.agree(member))
        wait_until(lambda: run.members.add("comers 0", 0) == len(agreed))
    generation = agreed[0].result(WAIT_S)
    assert generation is not None
    assert [(rank.local_index, rank.local_workers) for rank in (m.rank_in(generation) for m in members)] == [(0, 1)] * 2


def test_a_process_number_of_another_host_with_this_ones_name_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    there = others.Other("localhost", process=ended.pid, processes=others.process_of_this()["processes"])
    assert others.is_gone(there, "localhost")
    monkeypatch.setattr(others, "host_id", lambda: "localhost 77ab")
    assert not others.is_gone(there, "localhost")


def test_one_that_is_silent_is_given_up_and_told_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SILENT_S", 0.3)
    members = run.start("0.0", "1.0")
    run.agreed(*members)
    assert run.agreed(members[0]).names == ("0.0",)  # 1.0 has never beaten
    assert run.members.check(["dead 1.0"])


def test_one_that_only_waits_to_be_let_in_gives_nobody_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SILENT_S", 0.05)
    (member,) = run.start("0.0")
    run.agreed(member)  # alone: nobody watches it, and it does not beat
    (waiting,) = run.agree(run.member("1.1"), step=-1)
    with pytest.raises(TimeoutError):
        waiting.result(0.5)
    assert not run.members.check(["dead 0.0"])


def test_a_replacement_is_let_in_when_the_members_leave_their_generation(run: Run) -> None:
    members = run.start("0.0", "1.0")
    run.agreed(*members)
    tell_dead(run.members, "1.0", "was killed")
    now = run.agreed(members[0], step=7)
    ear = run.ear(members[0], now)
    comer = run.member("1.1")
    (waiting,) = run.agree(comer, step=-1)
    wait_until(lambda: ear.leaves_after(9))
    assert not waiting.done()
    ear.close()
    (stayed,) = run.agree(members[0], step=9)
    generation = waiting.result(WAIT_S)
    assert generation == stayed.result(WAIT_S)
    assert generation is not None
    assert [(member.name, member.step) for member in generation.members] == [("0.0", 9), ("1.1", -1)]


def test_all_members_leave_after_the_same_step(run: Run) -> None:
    members = run.start("0.0", "1.0")
    generation = run.agreed(*members)
    ears = [run.ear(member, generation) for member in members]
    run.agree(run.member("2.0"))
    meeting, left = threading.Barrier(2), []

    def train(ear: Ear) -> None:
        for step in range(100_000):
            if ear.leaves_after(step):
                left.append(step)
                return
            meeting.wait(WAIT_S)  # no step ends without both

    for future in [run.pool.submit(train, ear) for ear in ears]:
        future.result(WAIT_S)
    assert left[0] == left[1]


def test_members_hear_at_once_that_one_is_dead_and_what_they_wait_in_fails(run: Run) -> None:
    members = run.start("0.0", "1.0")
    generation = run.agreed(*members)
    ear = run.ear(members[0], generation)
    waiting = run.pool.submit(ear.store.get, "what never comes")
    tell_dead(run.members, "1.0", "was killed by SIGKILL")
    with pytest.raises(dist.DistNetworkError):
        waiting.result(WAIT_S)
    assert ear.over in ("worker 1 was killed by SIGKILL", "a member was lost while the groups were formed.")


def test_the_end_of_one_that_only_waits_does_not_disturb_those_who_train(run: Run) -> None:
    members = run.start("0.0", "1.0")
    ear = run.ear(members[0], run.agreed(*members))
    tell_dead(run.members, "2.0", "was killed")
    run.agree(run.member("2.1"), step=-1)
    wait_until(lambda: ear.leaves_after(3) or ear._is_armed)  # it has heard all that was said before
    assert ear.over == ""


def test_two_generations_at_once_do_not_mix(run: Run) -> None:
    members = run.start("0.0", "1.0", "2.0", "3.0")
    run.agreed(*members)
    tell_dead(run.members, "3.0", "was killed")
    first = run.agreed(*members[:3], step=4)
    tell_dead(run.members, "2.0", "was killed")  # while groups are formed
    comer = run.agree(run.member("3.1"), step=-1)[0]  # it may be in time for the next list, or for the one after
    second = run.agree(*members[:2], step=4)
    found = {future.result(WAIT_S) for future in second}
    assert first.number == 1
    assert len(found) == 1
    (generation,) = found
    assert generation is not None
    assert generation.number == 2
    assert {"0.0", "1.0"} <= set(generation.names) <= {"0.0", "1.0", "3.1"}
    if "3.1" not in generation.names:
        assert comer.cancel() or not comer.done()


def test_those_who_hold_state_go_before_those_who_hold_none(run: Run) -> None:
    pairs: Callable[[int], int] = lambda count: count // 2 * 2  # noqa: E731
    await_members(run.members, ["0.1", "1.0", "2.0"])
    members = [run.member(name, fits=pairs) for name in ("0.1", "1.0", "2.0")]
    futures = [run.pool.submit(member.agree, step) for member, step in zip(members, (-1, 6, 6), strict=True)]
    assert {future.result(WAIT_S).names for future in futures[1:]} == {("1.0", "2.0")}  # type: ignore[union-attr]
    assert not futures[0].done()


def pairs(count: int) -> int:
    """How many can train where two hold a model together."""
    return count // 2 * 2


def test_those_who_cannot_train_wait_for_a_replacement_and_say_so_in_the_end(run: Run) -> None:
    await_members(run.members, ["0.0"])
    with pytest.raises(WorkerFailed, match=r"the 1 worker that is left does not hold a whole model, and no"):
        run.member("0.0", fits=pairs, wait_s=0.2).agree(3)


def test_they_do_not_wait_where_the_launcher_says_that_nobody_comes(run: Run) -> None:
    await_members(run.members, ["0.0"])
    (waiting,) = run.agree(run.member("0.0", fits=pairs, wait_s=1e6))
    for number in range(1, 7):
        tell_last(run.members, number)
    with pytest.raises(TimeoutError):
        waiting.result(0.2)  # worker 7 may still come
    tell_last(run.members, 7)
    with pytest.raises(WorkerFailed, match=r"workers 1, 2, 3, 4, 5, 6, 7 are lost, and are started no more"):
        waiting.result(WAIT_S)


def test_one_that_was_added_may_still_come_and_one_that_is_started_again_as_well(run: Run) -> None:
    await_members(run.members, ["0.0"])
    (waiting,) = run.agree(run.member("0.0", fits=pairs, wait_s=1e6))
    tell_started(run.members, 8, workers=8)
    tell_last(run.members, 7)
    tell_started(run.members, 7, workers=8)
    for number in range(1, 7):
        tell_last(run.members, number)
    tell_last(run.members, 8)
    with pytest.raises(TimeoutError):
        waiting.result(0.2)  # worker 7 may still come
    tell_last(run.members, 7)
    with pytest.raises(WorkerFailed, match=r"workers 1, 2, 3, 4, 5, 6, 7, 8 are lost, and are started no more"):
        waiting.result(WAIT_S)


def test_they_go_on_with_less_than_a_whole_mesh_if_they_may(run: Run) -> None:
    await_members(run.members, ["0.0"])
    member = run.member("0.0", fits=pairs, fits_at_last=lambda count: count, wait_s=1e6)
    for number in range(1, 8):
        tell_last(run.members, number)
    assert run.agreed(member).names == ("0.0",)
    assert member.would_grow(Generation(0, (Member("0.0"),))) is False


def test_a_run_that_is_finished_needs_nobody_any_more(run: Run) -> None:
    (member,) = run.start("0.0")
    run.agreed(member)
    member.finish()
    assert run.member("1.1").agree() is None


def test_nobody_goes_on_without_a_member_whose_own_code_has_raised(run: Run) -> None:
    names = ("0.0", "1.0", "2.0")
    await_members(run.members, names)
    members = [run.member(name, timeout_s=0.5) for name in names]
    run.agreed(*members)
    members[2].fail()
    tell_dead(run.members, "2.0", "has ended without a word")
    for future in run.agree(*members[:2], step=1):
        with pytest.raises(PeerLost, match="another worker has raised"):
            future.result(WAIT_S)
    assert last_generation(run.members) == 0
