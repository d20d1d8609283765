"""What the launcher and its workers tell each other of who is there; all of it under one prefix of the store.

    awaited            the members that launchers have started together: a list waits for all of them, but for the dead
    dead MEMBER        this process has ended, and why; written by the launcher, or by members who give one up
    last NUMBER        nobody is started any more as worker NUMBER; written by the launcher
    numbers            how many numbers workers may have, where some were added to those of the plan
    now                the number of the last generation whose list is closed
    list G             who is in generation G, in the order of ranks (fault/membership.py)
    news G, news G/N   how much there is to hear in generation G, and each piece: that it is over, that one waits, ...
    finished           the run has come to its end: nobody need join it any more
    done MEMBER        this process has done what it had to, and ends in order
    failed             the code of a worker has raised: nobody goes on without it, and launchers end the run
    over               a worker has failed, and the launchers of all hosts end the others
    ended              how many hosts have no worker any more that trains

A member is called NUMBER.START: "3.0" is worker 3, "3.1" the process that replaced it.
"""

import json
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

PREFIX = "members"
AWAITED, NOW, FINISHED, FAILED, OVER, ENDED = "awaited", "now", "finished", "failed", "over", "ended"
NUMBERS = "numbers"


def members_of(store: dist.Store) -> dist.Store:
    """Return the part of the `store` of a run that all of this is in."""
    return dist.PrefixStore(PREFIX, store)


def member_name(number: int, start: int) -> str:
    """Return what the process is called that was started as worker `number`, after `start` others."""
    return f"{number}.{start}"


def number_of(member: str) -> int:
    """Return which worker a member is."""
    return int(member.partition(".")[0])


def first_names(numbers: Iterable[int]) -> list[str]:
    """Return what the first processes of these workers are called."""
    return [member_name(number, 0) for number in numbers]


def await_members(members: dist.Store, names: Iterable[str]) -> None:
    """Say who is started together. Called by a launcher, before it starts them; there may be one on each host."""
    names, before = list(names), b""
    while True:
        known = json.loads(before) if before else []
        after = json.dumps([*known, *(name for name in names if name not in known)])
        found = members.compare_set(AWAITED, before.decode(), after)
        if found == after.encode():
            return
        before = found


def tell_dead(members: dist.Store, member: str, why: str) -> None:
    """Say that `member` has ended, and end the generation that it may be in."""
    note_dead(members, member, why)
    # Members of a list that is closed only after this was read find the word above: they look there once more.
    generation = last_generation(members)
    if generation is not None and member in [each["name"] for each in json.loads(members.get(list_key(generation)))]:
        tell(members, generation, over=f"worker {number_of(member)} {why}")


def note_dead(members: dist.Store, member: str, why: str, *, is_asked: bool = False) -> None:
    """Write that `member` has ended, or is about to; who is told of another's end then knows of both.

    `is_asked`: somebody wants the run to go on with fewer workers.
    """
    members.compare_set(dead_key(member), "", json.dumps({"why": why, "time": time.time(), "is_asked": is_asked}))


def tell_last(members: dist.Store, number: int) -> None:
    """Say that nobody is started any more as worker `number`. Called by the launcher, when that one is lost."""
    members.set(last_key(number), "1")


def tell_started(members: dist.Store, number: int, *, workers: int) -> None:
    """Say that there is a worker `number` from now on, of a plan for `workers`. Called by a launcher that adds one."""
    if number >= numbers_of(members, workers):
        members.set(NUMBERS, str(number + 1))
    members.delete_key(last_key(number))


def numbers_of(members: dist.Store, workers: int) -> int:
    """Return how many numbers the workers of a run may have, of which the plan has `workers`."""
    return max(workers, int(members.get(NUMBERS))) if members.check([NUMBERS]) else workers


def last_key(number: int) -> str:
    """Return where it stands that nobody is started any more as worker `number`."""
    return f"last {number}"


def list_key(generation: int) -> str:
    """Return where it stands who is in a generation."""
    return f"list {generation}"


def dead_key(member: str) -> str:
    """Return where it stands that a member has ended."""
    return f"dead {member}"


def done_key(member: str) -> str:
    """Return where it stands that a member ends in order."""
    return f"done {member}"


def last_generation(members: dist.Store) -> int | None:
    """Return the number of the last generation whose list is closed."""
    return int(members.get(NOW)) if members.check([NOW]) else None


def tell(members: dist.Store, generation: int, **news: Any) -> None:
    """Tell all members of a generation something: `over=why`, `waits=member`, or `left=member`."""
    number = members.add(f"news {generation}", 1)
    members.set(news_key(generation, number), json.dumps(news))


def news_key(generation: int, number: int) -> str:
    """Return where the piece of news of that number stands."""
    return f"news {generation}/{number}"
