"""A job loads the parts that it asks for, and no others; see ``tests/reach.py``."""

from __future__ import annotations

import pytest

from ds_topo.engine import parts
from tests.reach import KINDS, reach_of
from tests.support.exhaustive import mark_exhaustive

_PARTS = {each.where for each in parts.PARTS}
_TOOLS = (
    *("cli", "distributed", "layers", "parallel_state", "plan", "verification"),
    *("health.faults", "health.probes", "health.session"),
)
_OF_WATCH = ("health.heartbeat", "health.watch", "health.witness")
_OF_FAILURES = ("health.activity", "health.blocked_calls", "launch.tracebacks")
_OF_LAUNCHERS = ("launch.hosts", "launch.orphans", "launch.placement")
"""What hostfiles, Slurm and launchers whose end is noticed need."""
LIMITS = {
    "plain": (51, 14_900),
    "reducer": (67, 21_300),
    "pipeline": (56, 17_200),
    "ZeRO 1 with reducer": (67, 21_300),
    "ZeRO 3": (51, 14_900),
    "experts": (52, 15_000),
    "shard": (65, 20_500),
    "AutoTP": (51, 14_900),
}
"""The most files and lines of each kind, on one rank as on two."""


def test_every_part_is_named_once() -> None:
    rows = [each for each in vars(parts).values() if isinstance(each, parts.EnginePart)]
    assert sorted(rows, key=str) == sorted(parts.PARTS, key=str)
    assert len({each.name for each in rows}) == len(_PARTS) == len(rows)
    assert all(each.load().__name__ == each.where for each in rows)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", mark_exhaustive(KINDS, lambda _, kind: kind in ("plain", "ZeRO 1 with reducer")))
def test_a_job_loads_what_it_asks_for(kind: str, ranks: int) -> None:
    modules, _ = reach_of(kind, ranks)
    files, lines = LIMITS[kind]
    assert len(modules) <= files
    assert sum(modules.values()) <= lines
    unasked = tuple(f"ds_topo.{name}" for name in (*_TOOLS, *_OF_WATCH, *_OF_FAILURES, *_OF_LAUNCHERS))
    assert [name for name in modules if name.startswith(unasked)] == []
    if kind in ("plain", "ZeRO 3", "experts"):
        assert sorted(_PARTS.intersection(modules)) == []
