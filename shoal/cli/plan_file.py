"""plan.toml: written with a seal, so that what a person has edited since is not overwritten."""

import hashlib
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.core.files import write_whole
from shoal.core.toml import format_toml
from shoal.spec.plan import Plan

_ABOUT = (
    "# Written by `shoal plan`. Edit it as you like: `shoal plan FILE --check plan.toml` says whether it can run, and\n"
    "# `shoal train FILE --plan plan.toml` runs it. What was edited is not overwritten without --force.\n"
)
_SEAL = "# seal: "


def write_plan(path: Path, plan: Plan, *, force: bool) -> bool:
    """Write `plan` to `path`, whole; return whether it was written: a file that was edited is left, unless `force`."""
    if path.exists() and not force and not is_untouched(path):
        return False
    body = format_toml(plan)
    write_whole(path, f"{_ABOUT}{_SEAL}{_digest(body)}\n\n{body}")
    return True


def is_untouched(path: Path) -> bool:
    """Return whether the file at `path` is as `shoal plan` wrote it."""
    try:
        head, _, rest = path.read_text().partition(_SEAL)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    seal, _, body = rest.partition("\n\n")
    return head == _ABOUT and seal == _digest(body)


def was_edited(path: Path) -> bool:
    """Return whether `shoal plan` wrote the file at `path`, and somebody has changed it since."""
    return path.read_text().startswith(_ABOUT) and not is_untouched(path)


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
