"""What codecs cost: the steps that each needs more are those that the page says were measured."""

import re

from shoal.compress.codecs import CODECS
from shoal.training.codec_rates import ITERATIONS
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "communication.md").read_text()


def test_the_steps_that_a_codec_needs_are_those_of_the_page() -> None:
    base = re.search(r"\| DDP, uncompressed \| [\d.]+ \| (\d+) \|", PAGE)
    rows = re.findall(
        r"^\| `(\w+)` \| (?:more than )?(\d+) \| ", PAGE.partition("**Steps to that loss**")[2], re.MULTILINE
    )
    assert base is not None
    assert {name: int(steps) / int(base[1]) for name, steps in rows} == ITERATIONS
    assert set(ITERATIONS) == set(CODECS)
