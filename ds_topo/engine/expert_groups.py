"""Expert and parameter-partition groups of a topology, created on all ranks and shown to DeepSpeed."""

from __future__ import annotations

from contextlib import ExitStack

from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine import changes, moe, norms
from ds_topo.engine.expert_registry import ExpertGroups, registry
from ds_topo.engine.mpu import MpuGrid
from ds_topo.errors import ExpertGroupError, ExpertSizeError
from ds_topo.ledger import always, ledger
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.axes import EXPERT
from ds_topo.topology.expert_tables import ExpertPlan, zero_partition_ranks
from ds_topo.topology.rank_tables import RankGroup


def create_expert_groups(
    grid: MpuGrid,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel: bool = False,
    use_data_before_expert: bool = False,
) -> ExpertGroups:
    """Create the expert groups of one size on all ranks, and let ``deepspeed.moe.layer.MoE`` find them.

    Collective over the grid; call it before ``deepspeed.initialize``, once for each ``ep_size`` in the model. A rank
    joins only the two groups that it belongs to. Repeating a call gives the same groups.

    Args:
        grid: the mpu of the engine (``module.mpu()`` of a ``PipelineModule``).
        expert_parallel_size: the layers' ``ep_size``; the degree of the axis ``expert`` by default.
        expert_tensor_parallel: the layers' ``enable_expert_tensor_parallelism``: experts are split along ``model``.
        use_data_before_expert: replicas of an expert, not the experts of a layer, sit on neighboring ranks.

    Raises:
        ExpertSizeError: a size that does not divide the ranks that share experts; the message lists those that do.
        ExpertGroupError: the name is taken by another grid's table, or the setting differs from other sizes'.
        DisagreementError: ranks asked for different groups, or did not ask.

    >>> import torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    >>> from ds_topo import PipelineParallelGrid
    >>> with PipelineParallelGrid("data=4,pipe=2") as grid:
    ...     experts = create_expert_groups(grid, expert_parallel_size=2)
    ...     experts.expert_ranks, experts.expert_data_ranks
    ([5, 7], [1, 5])
    >>> dist.destroy_process_group()
    """
    failure: Exception | None = None
    registry.forget_former_worlds()
    try:
        if expert_parallel_size is None:
            expert_parallel_size = _size_of_expert_axis(grid)
        plan = ExpertPlan(grid.topology(), expert_parallel_size, expert_tensor_parallel, use_data_before_expert)
        registry.check(grid, plan)
    except Exception as error:  # whatever it is: the others hear of it
        failure, plan = error, ExpertPlan(grid.topology(), 1)
    known = registry.find(plan.name)
    names = ("experts", "expert data")
    ranks = (plan.expert_ranks(grid.grid_rank), plan.expert_data_ranks(grid.grid_rank))
    groups = grid.create_groups(
        f"{plan}",
        [
            RankGroup((kind, plan.name, str(plan)), grid.to_global(members))
            for kind, members in zip(names, ranks, strict=True)
        ],
        failure,
    )
    if known is not None:
        return known
    created = ExpertGroups(grid, plan, *groups)
    with ExitStack() as bindings:
        for change, make in (*moe.WHILE_EXPERTS_EXIST, *norms.WHILE_EXPERTS_EXIST):
            bindings.callback(ledger.bind(change, make))
        registry.add(created, bindings.pop_all().close)
    return created


def create_zero_partition_groups(grid: MpuGrid, size: int) -> ProcessGroup:
    """Create the groups of ZeRO++'s second partition (hpZ) inside the data parallel groups, for DeepSpeed to find.

    Collective over the grid; call it before ``deepspeed.initialize`` with the config's ``zero_hpz_partition_size``. It
    is for all ZeRO-3 engines until the grid is destroyed.

    Raises:
        ExpertSizeError: a size that does not divide the data parallel group; the message lists those that do.
        RuntimeError: there are such groups already.
        DisagreementError: ranks asked for different sizes, or did not ask.
    """
    failure: Exception | None = None
    ranks: list[int] = []
    try:
        ranks = zero_partition_ranks(grid.topology(), size, grid.grid_rank)
        if deepspeed_groups._get_zero_param_intra_parallel_group() is not None:
            raise ExpertGroupError(
                "ZeRO parameter intra parallel group is already initialized: destroy its grid before creating another"
            )
    except Exception as error:
        failure = error
    name = f"hpZ {size}"
    (group,) = grid.create_groups(name, [RankGroup((name,), grid.to_global(ranks))], failure)
    grid.on_destroy(ledger.bind(changes.SECOND_PARTITION, always(group)))
    return group


def _size_of_expert_axis(grid: MpuGrid) -> int:
    if EXPERT not in grid.topology().axes:
        raise ExpertSizeError(
            f"expert_parallel_size is not given and {grid.topology().spec!r} has no axis {EXPERT!r}: give one of them"
        )
    return grid.get_axis_size(EXPERT)
