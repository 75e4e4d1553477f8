"""A rank is in no more groups than its layout has sets of ranks, and calls for no other's, in published layouts."""

from __future__ import annotations

import pytest

from ds_topo import ProcessTopology
from tests.bench.communicators import LAYOUTS, needed, ours


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_rank_creates_the_groups_of_its_own_sets_alone(layout: tuple[str, int]) -> None:
    spec, experts = layout
    world_size = ProcessTopology.from_spec(spec).world_size()
    for rank in (0, world_size // 3, world_size - 1):
        count = ours(spec, experts, rank)
        assert count.calls == count.held <= needed(spec, experts, rank)
