"""Which process group reduces which parameter, with which divisor, and flat or in two levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.buckets import GradientSlot
from ds_topo.reducer.options import ReductionOptions
from ds_topo.reducer.parameters import expert_group_name
from ds_topo.reducer.probes import is_two_level_faster
from ds_topo.reducer.reductions import Lane
from ds_topo.reducer.two_level import TwoLevelReduction, hosts_of
from ds_topo.topology.rank_tables import has_two_levels


def assign_lanes(
    slots: Sequence[GradientSlot], options: ReductionOptions, group: ProcessGroup, bucket_bytes: int
) -> tuple[Lane, list[Lane]]:
    """The dense lane over the data-parallel group, and the lane of every slot; sets the slots' scales. Collective.

    Experts are summed over their expert-data group and divided by the size of the whole data-parallel group.

    Raises:
        ValueError: two levels are wanted and the placement has none.
    """
    size = dist.get_world_size(group)
    dtype = options.communication_dtype
    two_level = None if options.two_level is False else _chosen_two_level(slots, options, group, bucket_bytes)
    dense = Lane("data", group, *scaling(options, size, group, two_level is None), dtype, two_level)
    experts = {
        name: Lane(f"experts of {name}", expert_group, *scaling(options, size, expert_group), dtype)
        for name, expert_group in options.expert_groups.items()
    }
    lanes = []
    for slot in slots:
        name = expert_group_name(slot.parameter)
        lane = dense if name is None else experts[name]
        slot.scale = options.scales(size)[0] if slot.is_sparse else lane.before
        lanes.append(lane)
    return dense, lanes


def scaling(
    options: ReductionOptions, data_parallel_size: int, group: ProcessGroup, is_flat: bool = True
) -> tuple[float, float, Any]:
    """Factors before and after the sum over ``group``, and its ``ReduceOp``.

    NCCL averages by itself, and multiplies while it sums; elsewhere gradients are multiplied on their way into the
    bucket.
    """
    before, after = options.scales(data_parallel_size)
    if not is_flat or dist.get_backend(group) != "nccl" or before == 1.0:
        return before, after, dist.ReduceOp.SUM
    if after == 1.0 and before * dist.get_world_size(group) == 1.0:
        return 1.0, 1.0, dist.ReduceOp.AVG
    return 1.0, after, dist._make_nccl_premul_sum(before)  # type: ignore[attr-defined]


def _chosen_two_level(
    slots: Sequence[GradientSlot], options: ReductionOptions, group: ProcessGroup, bucket_bytes: int
) -> TwoLevelReduction | None:
    """Two levels if asked for; without a wish where the placement has them and they measure faster."""
    hosts = hosts_of(group)
    if not has_two_levels(hosts):
        if options.two_level:
            raise ValueError(
                "two_level=True: the group must span at least two hosts with equally many ranks, several each; leave "
                "it out to choose by placement"
            )
        return None
    two_level = TwoLevelReduction(hosts)
    if options.two_level:
        return two_level
    dtype, device = slots[0].dtype, slots[0].parameter.device
    numel = max(1, bucket_bytes // dtype.itemsize // two_level.inner_size) * two_level.inner_size
    if is_two_level_faster(two_level, group, torch.zeros(numel, dtype=dtype, device=device)):
        return two_level
    two_level.destroy()
    return None
