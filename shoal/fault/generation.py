"""A generation: the members that train together, as its closed list says (membership.py)."""

from dataclasses import dataclass

from shoal.comm.members import number_of


@dataclass(frozen=True)
class Member:
    """A process, as it says of itself that it is there."""

    name: str
    """NUMBER.START, see comm/members.py."""
    step: int = -1
    """How many steps the state that it holds has done; -1: it holds none."""
    evaluated: int = -1
    """After which step it has evaluated last."""
    host: str = ""
    """See `host_id`."""
    process: int = 0
    processes: int = 0

    @property
    def number(self) -> int:
        """Which worker it is."""
        return number_of(self.name)


@dataclass(frozen=True)
class Generation:
    """A closed list."""

    number: int
    members: tuple[Member, ...]
    """By rank."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the members are called, by rank."""
        return tuple(member.name for member in self.members)

    @property
    def step(self) -> int:
        """The most steps that a state has done which some member holds; -1 if nobody holds any."""
        return max(member.step for member in self.members)

    def prefix(self) -> str:
        """Return the prefix of all that this generation says in the store."""
        return f"generation {self.number}"
