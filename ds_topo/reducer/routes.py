"""Routes: which process group reduces which parameter, with which divisor, and flat or in two levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.options import ReductionOptions
from ds_topo.reducer.parameter_state import ParameterState
from ds_topo.reducer.probes import is_two_level_faster, suitable_bucket_bytes
from ds_topo.reducer.torch_names import ReduceOp, premultiplied_sum
from ds_topo.reducer.two_level import TwoLevelReduction, hosts_of
from ds_topo.topology.rank_tables import has_two_levels

CommHook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[Any]"]
"""A communication hook of torch's DDP, ``(state, bucket) -> future``; its state may be anything."""


@dataclass(eq=False)
class Route:
    """A process group and how gradients are scaled around the sum over it."""

    label: str
    group: ProcessGroup
    before: float
    """What gradients are multiplied by before the sum (on their way into the bucket)."""
    after: float
    """What they are multiplied by after it."""
    op: ReduceOp
    """NCCL's may divide by itself."""
    communication_dtype: torch.dtype | None
    bucket_bytes: int
    """The capacity of its buckets; equal on all ranks of the group."""
    two_level: TwoLevelReduction | None = None
    hook: CommHook | None = None
    hook_state: object = None
    last_hook: torch.futures.Future[Any] | None = None
    """On a CPU, what the previous bucket's hook returned."""

    def wait_for_hook(self) -> None:
        """On a CPU a hook's callbacks may start collectives, which must not mix with others of this group."""
        if self.last_hook is not None:
            self.last_hook.wait()
            self.last_hook = None

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return dist.get_world_size(self.group)


def assign_routes(
    states: Sequence[ParameterState], options: ReductionOptions, group: ProcessGroup, device: torch.device
) -> tuple[Route, list[Route]]:
    """The dense route over the data-parallel group, and the route of every parameter; sets their scales. Collective.

    Experts are summed over their expert-data group and divided by the size of the whole data-parallel group. Every
    group measures its own link: an expert-data group may span several data-parallel groups.

    Raises:
        ValueError: two levels are wanted and the placement has none.
    """
    size = dist.get_world_size(group)
    dtype = options.communication_dtype
    bucket_bytes = _bucket_bytes(options, group, device)
    two_level = None if options.two_level is False else _chosen_two_level(states, options, group, bucket_bytes)
    dense = Route("data", group, *scaling(options, size, group, two_level is None), dtype, bucket_bytes, two_level)
    used = {state.expert_group_name for state in states}
    experts = {
        name: Route(
            f"experts of {name}",
            expert_group,
            *scaling(options, size, expert_group),
            dtype,
            _bucket_bytes(options, expert_group, device),
        )
        for name, expert_group in options.expert_groups.items()
        if name in used
    }
    routes = []
    for state in states:
        name = state.expert_group_name
        route = dense if name is None else experts[name]
        state.scale = options.scales(size)[0] if state.is_sparse else route.before
        routes.append(route)
    return dense, routes


def _bucket_bytes(options: ReductionOptions, group: ProcessGroup, device: torch.device) -> int:
    return suitable_bucket_bytes(group, device) if options.bucket_bytes is None else options.bucket_bytes


def scaling(
    options: ReductionOptions, data_parallel_size: int, group: ProcessGroup, is_flat: bool = True
) -> tuple[float, float, ReduceOp]:
    """Factors before and after the sum over ``group``, and its ``ReduceOp``.

    NCCL averages by itself, and multiplies while it sums; elsewhere gradients are multiplied on their way into the
    bucket.
    """
    before, after = options.scales(data_parallel_size)
    if not is_flat or dist.get_backend(group) != "nccl" or before == 1.0:
        return before, after, dist.ReduceOp.SUM
    if after == 1.0 and before * dist.get_world_size(group) == 1.0:
        return 1.0, 1.0, dist.ReduceOp.AVG
    return 1.0, after, premultiplied_sum(before)


def _chosen_two_level(
    states: Sequence[ParameterState], options: ReductionOptions, group: ProcessGroup, bucket_bytes: int
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
    dtype, device = states[0].dtype, states[0].parameter.device
    numel = max(1, bucket_bytes // dtype.itemsize // two_level.inner_size) * two_level.inner_size
    if is_two_level_faster(two_level, group, torch.zeros(numel, dtype=dtype, device=device)):
        return two_level
    two_level.destroy()
    return None
