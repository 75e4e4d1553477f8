"""A rank creates no more groups than it has distinct sets of ranks, in published layouts."""

from __future__ import annotations

import pytest

from ds_topo import ProcessTopology
from tests.bench.communicators import LAYOUTS, needed, ours


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_rank_creates_only_groups_that_it_belongs_to(layout: tuple[str, int]) -> None:
    spec, experts = layout
    world_size = ProcessTopology.from_spec(spec).world_size()
    for rank in (0, world_size // 3, world_size - 1):
        count = ours(spec, experts, rank)
        assert count.calls == count.held <= needed(spec, experts, rank)
