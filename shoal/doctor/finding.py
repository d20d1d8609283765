"""What a check has found."""

from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"
"""Fine; it works, but slower, or not everywhere; training breaks on it."""


@dataclass(frozen=True)
class Finding:
    """One thing about this installation."""

    subject: str
    level: str
    fact: str
    """What is true."""
    remedy: str = ""
    """What to do about it; empty where all is well."""
    details: tuple[str, ...] = ()
    """More lines about it."""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.level != OK), "what is not well has a remedy"


def ok(subject: str, fact: str, *details: str) -> Finding:
    """Return that all is well."""
    return Finding(subject, OK, fact, details=details)


def warning(subject: str, fact: str, remedy: str, *details: str) -> Finding:
    """Return that something is slower than it could be, or does not work everywhere."""
    return Finding(subject, WARNING, fact, remedy, details)


def problem(subject: str, fact: str, remedy: str, *details: str) -> Finding:
    """Return that training breaks on something."""
    return Finding(subject, PROBLEM, fact, remedy, details)
