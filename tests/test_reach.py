"""A job loads the parts that it asks for, and no others; see ``tests/reach.py``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ds_topo.engine import parts, repairs
from ds_topo.engine.on_grid import EngineOnGrid
from tests.reach import KINDS, reach_of
from tests.support.exhaustive import mark_exhaustive

pytestmark = pytest.mark.thorough  # for those who change ds_topo

_ZERO_1 = ("ZeRO 1 with reducer", "shard", "Trainer")
_KINDS_OF_REPAIRS = {
    "micro_batches": tuple(KINDS),
    "backward_passes": tuple(kind for kind in KINDS if kind != "pipeline"),
    "linked_states": _ZERO_1,
    "unused_parameters": ("ZeRO 3",),
    "kept_modules": ("ZeRO 3",),
    "pipeline_timers": ("pipeline",),
}
LIMITS = {
    "plain": (40, 11_700),
    "reducer": (48, 15_500),
    "pipeline": (53, 14_200),
    "ZeRO 1 with reducer": (59, 17_900),
    "ZeRO 3": (46, 12_750),
    "experts": (44, 12_200),
    "shard": (50, 13_900),
    "AutoTP": (44, 12_600),
    "Trainer": (57, 16_450),
}
"""The most files and lines of each kind, on one rank as on two."""
WALK = 20
"""The most files that run from ``initialize`` to the first all-reduce without parts."""
ROOMS = {
    **{f"ds_topo.{name}": () for name in ("cli", "distributed", "layers", "parallel_state", "plan", "verification")},
    **{f"ds_topo.health.{name}": () for name in ("faults", "probes", "session")},
    **{f"ds_topo.health.{name}": () for name in ("heartbeat", "watch", "witness", "activity", "blocked_calls")},
    **{f"ds_topo.launch.{name}": () for name in ("hosts", "orphans", "placement", "tracebacks")},
    "ds_topo.checkpoint": ("pipeline", "Trainer"),
    "ds_topo.engine.quorum": (),
    "ds_topo.reduction.managed": (),
    "ds_topo.reduction.report": (),
    "ds_topo.engine.late_parameters": (),
    "ds_topo.reduction.arrivals": (),
    "ds_topo.reduction.exchange": ("ZeRO 1 with reducer", "shard", "Trainer"),
    "ds_topo.engine.replica_comparison": (),
    "ds_topo.engine.autoparallel": ("AutoTP",),
    "ds_topo.engine.shard": ("shard",),
    "ds_topo.engine.data_efficiency": (),
    "ds_topo.engine.experts": ("experts", "pipeline"),
    "ds_topo.engine.one_layout": ("pipeline", "Trainer"),
    "ds_topo.engine.use": ("Trainer",),
    "ds_topo.engine.pipelines": ("pipeline", "Trainer"),
    "ds_topo.engine.gradient_reducer": ("reducer", "ZeRO 1 with reducer"),
    **{
        f"ds_topo.engine.repairs.{path.stem}": _KINDS_OF_REPAIRS.get(path.stem, ())
        for path in Path(repairs.__path__[0]).glob("[a-z]*.py")
    },
}
"""Modules and packages that can be deleted, each with the kinds of jobs that ask for it."""


def test_every_part_is_named_once() -> None:
    names = [part.mixin for part in parts.PARTS]
    assert len(set(names)) == len(names)
    assert all(issubclass(part.load(), EngineOnGrid) for part in parts.PARTS)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", mark_exhaustive(KINDS, lambda _, kind: kind in ("plain", "ZeRO 1 with reducer")))
def test_a_job_loads_what_it_asks_for_and_works_without_everything_else(kind: str, ranks: int) -> None:
    refused = [room for room, kinds in ROOMS.items() if kind not in kinds]
    modules, ran = reach_of(kind, ranks, refused)
    files, lines = LIMITS[kind]
    assert len(modules) <= files
    assert sum(modules.values()) <= lines
    assert len(ran) <= WALK or kind != "plain"


def test_every_room_exists() -> None:
    assert [room for room in ROOMS if find_spec(room) is None] == []
