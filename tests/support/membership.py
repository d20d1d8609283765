"""Members that agree on who is there, through a real store, each in a thread of this process."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from shoal.comm.members import await_members, members_of
from shoal.comm.rank import Rank
from shoal.comm.store import LOOPBACK, connect, host_store
from shoal.fault.generation import Generation
from shoal.fault.membership import Membership
from shoal.fault.membership_ear import Ear

WAIT_S = 20


class Run:
    """A store, and members that agree through it, each in a thread of its own."""

    def __init__(self) -> None:
        self.store, self.port = host_store(host=LOOPBACK, timeout_s=WAIT_S)
        self.members = members_of(self.store)
        self.pool = ThreadPoolExecutor(16)
        self.ears: list[Ear] = []

    def member(
        self,
        name: str,
        *,
        fits: Callable[[int], int] = lambda count: count,
        timeout_s: float = WAIT_S,
        **more: Any,
    ) -> Membership:
        rank = Rank(0, 8, 0, 8, LOOPBACK, self.port, store_is_hosted=True, member=name)
        settings = {"wait_s": WAIT_S, **more}
        return Membership(connect(rank, timeout_s=WAIT_S), rank, fits=fits, timeout_s=timeout_s, **settings)

    def agree(self, *members: Membership, step: int = 0) -> list["Future[Generation | None]"]:
        return [self.pool.submit(member.agree, step) for member in members]

    def agreed(self, *members: Membership, step: int = 0) -> Generation:
        """Return what all these members agree on."""
        found = {future.result(WAIT_S) for future in self.agree(*members, step=step)}
        assert len(found) == 1
        (generation,) = found
        assert generation is not None
        return generation

    def ear(self, member: Membership, generation: Generation) -> Ear:
        self.ears.append(Ear(member, generation))
        return self.ears[-1]

    def start(self, *names: str) -> list[Membership]:
        await_members(self.members, names)
        return [self.member(name) for name in names]
