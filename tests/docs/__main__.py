"""Lists every block and command of the pages that the tests do not run, with the reason: python -m tests.docs."""

from collections.abc import Iterator

from tests.docs.blocks import Block, blocks_of, pages
from tests.docs.commands import commands_of
from tests.docs.page import SHOWN_ONLY
from tests.docs.reasons import why_not


def main() -> None:
    """Print them, and how many there are."""
    listed = [found for page in pages() for block in blocks_of(page) for found in _reasons(block)]
    for where, reason in listed:
        if reason:
            print(f"{where}: {reason}")
    not_run = sum(bool(reason) for _, reason in listed)
    print(f"{len(listed) - not_run} blocks and commands are run, {not_run} are not.")


def _reasons(block: Block) -> Iterator[tuple[str, str]]:
    """Yield the block, or its commands, each with why it is not run (empty: it is)."""
    if block.language in SHOWN_ONLY:
        return
    if "not-run" in block.attributes or block.language or block.text.startswith(">>> "):
        yield block.where, block.attributes.get("not-run", "")
        return
    for command in commands_of(block):
        yield command.where, why_not(str(command), full_size=True) or ""


if __name__ == "__main__":
    main()
