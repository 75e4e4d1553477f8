"""What ranks have found out about a fault, and the one message that all of them show. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from ds_topo.errors import listed

FAILED, GONE, STOPPED, UNREACHABLE, HANDLES, ENDED, BLOCKED, TRANSPORT = range(8)
"""Causes, the most telling one first: of several findings those of the first kind explain the others."""
CONCLUSIVE = BLOCKED
"""Of these kinds and those before, a finding ends the job."""
_REMEDIES = {
    FAILED: "Its own output has the traceback.",
    GONE: "Its own output may say more, and the system's log of that host (out of memory? killed?).",
    STOPPED: "SIGCONT would let it go on; what stopped it, a person, a scheduler or a debugger?",
    UNREACHABLE: "Its host is down or cut off: look at its network and its system's log.",
    HANDLES: "A handler of an exception must not keep a rank alive while others wait for it: let the rank end.",
    ENDED: "It took fewer steps, or called fewer collectives, than the others: sys.exit(), return or a break?",
    BLOCKED: "Ranks of one group have called other collectives, or in another order: compare the lines above.",
    TRANSPORT: "All ranks are alive: look at the network between them.",
}
_SHOWN = 6


@dataclass(frozen=True)
class Who:
    """A rank as people know it."""

    rank: int
    host: str
    coordinate: str = ""

    def __str__(self) -> str:
        """For a sentence.

        >>> str(Who(3, "node1", "data=1 model=1"))
        'rank 3 (data=1 model=1) on node1'
        """
        coordinate = f" ({self.coordinate})" if self.coordinate else ""
        return f"rank {self.rank}{coordinate} on {self.host}"


@dataclass(frozen=True)
class Finding:
    """Something that a rank has found out about another one, or itself."""

    kind: int
    who: Who
    what: str
    """What happened: it follows the rank in a sentence."""
    doing: str
    """What it was doing then, as far as is known; it follows the rank, too."""
    seen_by: Who
    meanwhile: str
    """What the rank was doing that has found it."""

    def to_line(self) -> str:
        """What :func:`read` takes."""
        return json.dumps(asdict(self)) + "\n"

    def __str__(self) -> str:
        if self.kind == BLOCKED:
            return f"{self.who} {self.what}"
        lines = [f"{self.who} {self.what}.", f"  It {self.doing}."]
        if self.seen_by != self.who:
            lines.append(f"  Noticed by {self.seen_by}, {self.meanwhile}.")
        return "\n".join(lines)


def read(text: str) -> list[Finding]:
    """The findings of a text of lines."""
    entries = [json.loads(line) for line in text.splitlines() if line]
    return [Finding(**{**entry, "who": Who(**entry["who"]), "seen_by": Who(**entry["seen_by"])}) for entry in entries]


def message(findings: Iterable[Finding], world_size: int) -> str:
    """The cause: of the most telling kind, every rank once, the first few in full."""
    by_rank: dict[int, Finding] = {}
    for finding in sorted(findings, key=lambda finding: (finding.kind, finding.who.rank)):
        by_rank.setdefault(finding.who.rank, finding)
    first = min(finding.kind for finding in by_rank.values())
    of_kind = [finding for finding in by_rank.values() if finding.kind == first]
    if first == BLOCKED:
        of_kind, rest = of_kind[:1], []
    else:
        of_kind, rest = of_kind[:_SHOWN], of_kind[_SHOWN:]
    lines = [headline(world_size), *map(str, of_kind)]
    lines += [f"The same: ranks {listed([finding.who.rank for finding in rest], 32)}."] if rest else []
    return "\n".join([*lines, _REMEDIES[first]])


def headline(world_size: int) -> str:
    """Of the message."""
    return f"ds_topo watch: a fault in a job of {world_size} ranks."


def blocked(waits: Sequence[tuple[int, str]]) -> str:
    """What is said of ranks that wait for each other."""
    lines = [f"  rank {rank}: {doing}" for rank, doing in waits[:_SHOWN]]
    lines += [f"  and {len(waits) - _SHOWN} more"] if len(waits) > _SHOWN else []
    return "\n".join(["and others wait for each other, and no byte moves:", *lines])
