"""A job loads the parts that it asks for, and no others; see ``tests/reach.py``."""

from __future__ import annotations

import pytest

from ds_topo import reduction
from ds_topo.engine import parts
from tests.reach import KINDS, reach_of
from tests.support.exhaustive import mark_exhaustive

_PARTS = {each.where for each in parts.PARTS}
_OF_REDUCERS = {each.where for each in vars(reduction).values() if isinstance(each, reduction.OnDemand)}
_TOOLS = ("cli", "distributed", "health.faults", "health.probes", "health.session", "layers", "parallel_state", "plan")
LIMITS = {
    "plain": (56, 17_400),
    "reducer": (64, 20_700),
    "pipeline": (61, 19_700),
    "ZeRO 1 with reducer": (71, 23_200),
    "ZeRO 3": (56, 17_400),
    "experts": (57, 17_500),
    "shard": (60, 18_500),
    "AutoTP": (56, 17_400),
}
"""The most files and lines of each kind."""


def test_every_part_is_named_once() -> None:
    rows = [each for each in vars(parts).values() if isinstance(each, parts.EnginePart)]
    assert sorted(rows, key=str) == sorted(parts.PARTS, key=str)
    assert len({each.name for each in rows}) == len(_PARTS) == len(rows)
    assert all(each.load().__name__ == each.where for each in rows)


@pytest.mark.parametrize("kind", mark_exhaustive(KINDS, lambda _, kind: kind in ("plain", "ZeRO 1 with reducer")))
def test_a_job_loads_what_it_asks_for(kind: str) -> None:
    modules, _ = reach_of(kind)
    files, lines = LIMITS[kind]
    assert len(modules) <= files
    assert sum(modules.values()) <= lines
    tools = tuple(f"ds_topo.{tool}" for tool in (*_TOOLS, "verification"))
    assert [name for name in modules if name.startswith(tools)] == []
    if kind in ("plain", "reducer", "pipeline", "ZeRO 3", "experts", "AutoTP"):
        assert sorted(_OF_REDUCERS.intersection(modules)) == []
    if kind in ("plain", "ZeRO 3", "experts"):
        assert sorted(_PARTS.intersection(modules)) == []
