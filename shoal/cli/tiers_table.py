"""`shoal stage --tiers`: the storage of this node, how large, how fast, and how long it keeps what is written."""

import dataclasses
import json
from typing import Literal

from shoal.core.units import format_bytes


def show_tiers(*, as_json: bool) -> int:
    """Measure this node's storage and print it."""
    from shoal.data.stage.lifetime import IN_WORDS, measured_places

    places = measured_places()
    if as_json:
        print(json.dumps({"tiers": [dataclasses.asdict(place) | {"path": str(place.path)} for place in places]}))
        return 0
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("storage", "reads", "room", "size", "what is written there", "folder"):
        justify: Literal["left", "right"] = "right" if name in ("reads", "room", "size") else "left"
        table.add_column(name, justify=justify, no_wrap=name != "folder", overflow="fold")
    for place in places:
        rate = "not measured" if place.read_bytes_per_s is None else f"{format_bytes(place.read_bytes_per_s)}/s"
        lasts = IN_WORDS[place.lifetime] + (", shared" if place.is_shared else "")
        sizes = format_bytes(place.room_bytes), format_bytes(place.size_bytes)
        table.add_row(Text(place.name), rate, *sizes, lasts, Text(str(place.path)))
    Console().print(table)
    return 0
