"""Slurm's compact lists of nodes, ``n[01-03,7],gpu-a``, and of counts, ``2(x3),1``.

The syntax is that of ``scontrol show hostnames``; an own parser, since the lists are all that is needed of Slurm where
its programs are not installed (laptops, containers).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from ds_topo.errors import HostError

MAX_NAMES = 1_000_000
"""No list is expanded beyond this many."""

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]\s,]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})")


def expand_node_list(text: str) -> list[str]:
    """Names of a compact list, in order; numbers keep the zeros that the list writes.

    >>> expand_node_list("n[01-03,7],gpu-a")
    ['n01', 'n02', 'n03', 'n7', 'gpu-a']
    >>> expand_node_list("rack[0-1]-n[8-9]")
    ['rack0-n8', 'rack0-n9', 'rack1-n8', 'rack1-n9']

    Raises:
        HostError: a malformed list, or one of more than a million names.
    """
    names: list[str] = []
    for item in _items(text):
        pieces = _pieces(item, text)
        if len(names) + prod(map(len, pieces)) > MAX_NAMES:
            raise HostError(f"node list {text[:80]!r} has more than {MAX_NAMES} names")
        names += map("".join, product(*pieces))
    return names


def fold_node_list(names: Sequence[str]) -> str:
    """The inverse of ``expand_node_list``: consecutive numbers of names that differ in their last number are folded.

    >>> fold_node_list(["n01", "n02", "n03", "n7", "gpu-a"])
    'n[01-03],n7,gpu-a'
    """
    runs: list[list[tuple[str, str]]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, digits = (match[1], match[2]) if match else (name, "")
        if runs and digits and _follows(runs[-1], prefix, digits):
            runs[-1].append((prefix, digits))
        else:
            runs.append([(prefix, digits)])
    return ",".join(f"{run[0][0]}[{run[0][1]}-{run[-1][1]}]" if len(run) > 1 else "".join(run[0]) for run in runs)


def expand_counts(text: str) -> list[int]:
    """Slurm's counts for one node after the other.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]

    Raises:
        HostError: a malformed list, or one for more than a million nodes.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise HostError(f'counts {text[:80]!r} at {item!r}: expected "N" or "N(xTIMES)", such as "2(x3),1"')
        times = int(match[2] or 1)
        if len(counts) + times > MAX_NAMES:
            raise HostError(f"counts {text[:80]!r} are for more than {MAX_NAMES} nodes")
        counts += [int(match[1])] * times
    return counts


def _items(text: str) -> Iterator[str]:
    """The items of a list: parts between commas outside brackets."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if not 0 <= depth <= 1:
            raise HostError(f"node list {text[:80]!r}: brackets do not match at {text[position : position + 10]!r}")
        if character == "," and depth == 0:
            yield text[start:position].strip()
            start = position + 1
    if depth:
        raise HostError(f"node list {text[:80]!r}: a bracket is not closed")
    yield text[start:].strip()


def _pieces(item: str, text: str) -> list[list[str]]:
    """What each part of an item stands for: ``n[1-2]`` is ``[["n"], ["1", "2"]]``."""
    pieces: list[list[str]] = []
    position = 0
    for match in _PIECE.finditer(item):
        if match.start() != position:
            break
        position = match.end()
        pieces.append([match[2]] if match[1] is None else _numbers(match[1], text))
    if position != len(item) or not pieces:
        raise HostError(
            f'node list {text[:80]!r} at {item[:40]!r}: expected names and bracketed ranges, "n[01-03,7],gpu-a"'
        )
    return pieces


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise HostError(
                f'node list {text[:80]!r} at "[{ranges[:40]}]": expected numbers and ranges such as "01-03,7"'
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise HostError(f"node list {text[:80]!r}: range {part!r} goes down")
        if len(numbers) + last - first >= MAX_NAMES:
            raise HostError(f"node list {text[:80]!r} has more than {MAX_NAMES} names")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def _follows(run: Sequence[tuple[str, str]], prefix: str, digits: str) -> bool:
    """Whether a name is the next of a range that begins like this run."""
    first, last = run[0][1], run[-1][1]
    return prefix == run[0][0] and last != "" and digits == f"{int(last) + 1:0{len(first)}d}"
