"""Whether what a page shows is what a command prints, but for its numbers: those are of another machine and day.

Numbers with their units, bars and white space are left out; `...` stands for any lines.
"""

import re

_NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)? ?([kMGT]?B(/s)?|[mun]?s|min|h|days?|[kMGT])?\b(?![-\w])|\d[\d,.]*")
_DRAWN = re.compile(r"[━─█▒░▏▎▍▌▋▊▉╸·+\s-]+")


def plain(text: str) -> str:
    """Return what of a text must be the same."""
    return _DRAWN.sub("", _NUMBER.sub("#", text)).replace("#", "")


def first_difference(shown: tuple[str, ...], printed: str) -> str:
    """Return the first passage of what is `shown` that is not, in its place, in what was `printed`; empty: all is."""
    rest = plain(printed)
    for passage in _passages(shown):
        found = rest.find(plain(passage))
        if found < 0:
            return passage
        rest = rest[found + len(plain(passage)) :]
    return ""


def _passages(shown: tuple[str, ...]) -> list[str]:
    """Return what stands between the lines that are left out: those, and what ends in `...`."""
    passages = [""]
    for line in shown:
        if line.rstrip().endswith("..."):
            passages += [line.rstrip().removesuffix("..."), ""]
        else:
            passages[-1] += line + "\n"
    return [passage for passage in passages if plain(passage)]
