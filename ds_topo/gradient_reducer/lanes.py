"""Which process group reduces which parameter, with which divisor, and flat or in two levels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..process_groups import ProcessGroup
from .buckets import GradientSlot
from .options import ReductionOptions
from .slots import expert_group_name
from .transport import Lane
from .two_level import TwoLevelReduction, host_of_every_rank, is_two_level_faster, split_by_host


def assign_lanes(
    slots: Sequence[GradientSlot], options: ReductionOptions, group: ProcessGroup
) -> tuple[Lane, list[Lane]]:
    """The dense lane over the data-parallel group, and the lane of every slot; sets the slots' scales. Collective.

    Experts are summed over their expert-data group and divided by the size of the whole data-parallel group.

    Raises:
        ValueError: two levels are wanted and the placement has none.
    """
    size = dist.get_world_size(group)
    before, after = options.scales(size)
    is_average = options.op == "average" and options.divisor is None and options.predivide_factor is None
    two_level = None if options.two_level is False else _chosen_two_level(slots, options, group)
    is_native = is_average and two_level is None and dist.get_backend(group) == "nccl"
    dense = Lane("data", group, 1.0 if is_native else before, after, is_native, options.communication_dtype, two_level)
    experts = {
        name: Lane(f"experts of {name}", expert_group, before, after, False, options.communication_dtype)
        for name, expert_group in options.expert_groups.items()
    }
    lanes = []
    for slot in slots:
        name = expert_group_name(slot.parameter)
        lane = dense if name is None else experts[name]
        slot.scale = before if slot.is_sparse else lane.before
        lanes.append(lane)
    return dense, lanes


def _chosen_two_level(
    slots: Sequence[GradientSlot], options: ReductionOptions, group: ProcessGroup
) -> TwoLevelReduction | None:
    """Two levels if asked for; without a wish where the placement has them and they measure faster."""
    by_host = split_by_host(dist.get_process_group_ranks(group), host_of_every_rank(group))
    if by_host is None:
        if options.two_level:
            raise ValueError(
                "two_level=True: the group must span at least two hosts with equally many ranks, several each; leave "
                "it out to choose by placement"
            )
        return None
    two_level = TwoLevelReduction(by_host)
    if options.two_level:
        return two_level
    dtype, device = slots[0].dtype, slots[0].parameter.device
    numel = max(1, options.bucket_bytes // dtype.itemsize // two_level.inner_size) * two_level.inner_size
    if is_two_level_faster(two_level, group, torch.zeros(numel, dtype=dtype, device=device)):
        return two_level
    two_level.destroy()
    return None
