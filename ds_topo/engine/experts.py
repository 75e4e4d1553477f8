"""Create the expert groups of a grid, and correct DeepSpeed's engines where they handle experts on a grid wrongly."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import TopKGate
from deepspeed.moe.utils import configure_moe_param_groups
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.base import patches
from ds_topo.base.ledger import always, around, ledger
from ds_topo.engine.norms import check_norm
from ds_topo.errors import ExpertGroupError, ExpertSizeError
from ds_topo.launch.launchers import REFERENCE
from ds_topo.mpu import ExpertGroups, MpuGrid, registry, require_grid
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.axes import EXPERT
from ds_topo.topology.rank_tables import ExpertPlan, RankGroup, name_of_size, zero_partition_ranks

# -- groups and tokens ------------------------------------------------------------------------------------------------


def slices_of_experts(mpu: Any) -> int:
    """Return the number of ranks over which the experts of an mpu are sliced; 1 for an mpu that is not a grid."""
    known = registry.of(mpu)
    return int(mpu.get_slice_parallel_world_size()) if known and known[0].plan.expert_tensor_parallel else 1


@around
def _gathered_into_a_list(gather: Any, tokens: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Gather the tokens of all slices, one after another along ``dim``."""
    if not isinstance(deepspeed_groups.mpu, MpuGrid):
        others: torch.Tensor = gather(tokens, dim)
        return others
    group = deepspeed_groups.mpu.get_slice_parallel_group()
    like = torch.contiguous_format
    parts = [torch.empty_like(tokens, memory_format=like) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tokens.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


# -- an engine with experts -------------------------------------------------------------------------------------------


def check_engine_with_experts(engine: DeepSpeedEngine) -> None:
    """Refuse experts that DeepSpeed would train wrongly in this engine, and pad the capacity of its gates."""
    slices = engine.mpu.get_slice_parallel_world_size()
    for name, module in engine.module.named_modules() if slices > 1 else ():
        groups = registry.find(module.expert_group_name) if isinstance(module, MoE) else None
        if groups and module.enable_expert_tensor_parallelism != groups.plan.expert_tensor_parallel:
            raise ExpertGroupError(
                f"MoE layer {name!r} has enable_expert_tensor_parallelism={module.enable_expert_tensor_parallelism}, "
                f"but its groups were created with expert_tensor_parallel={groups.plan.expert_tensor_parallel}: "
                "give both the same value"
            )
    # DeepSpeed sums dense gradients over ``seq`` there, but averages those of experts.
    if engine.sequence_parallel_size > 1 and engine.has_moe_layers and not engine.zero_optimization():
        raise ExpertGroupError(
            "experts with sequence parallelism and ZeRO stage 0: DeepSpeed would scale the gradients of experts by "
            f"1/{engine.sequence_parallel_size} relative to all others; use ZeRO stage 1 or 2"
        )
    check_norm(engine)
    if slices > 1:  # model parallel peers split the slots of an expert evenly; DeepSpeed asserts that this is possible
        for gate in (each for each in engine.module.modules() if isinstance(each, TopKGate)):
            engine.mpu.on_destroy(gate.register_forward_hook(partial(_pad_capacity, slices)).remove)


def with_groups_in_one_order(engine: DeepSpeedEngine, optimizer: Any, parameters: Any) -> Any:
    """Put the expert groups of an optimizer in an order that all ranks share; return the parameters or groups.

    DeepSpeed collects the names of expert groups in a set, whose order depends on the seed of each process's hashes.
    With several expert parallel sizes, ranks would then call collectives of different process groups, and hang.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.param_groups[:] = in_one_order(optimizer.param_groups)
        return parameters
    if optimizer is None and engine.has_moe_layers:
        parameters = configure_moe_param_groups(parameters)  # as DeepSpeed itself does next
    groups = list(parameters or ())
    return in_one_order(groups) if all(isinstance(group, dict) for group in groups) else parameters


def in_one_order(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort neighboring groups of experts by name, if their options are equal; others keep their places.

    >>> experts = {"moe": True, "lr": 0.1}
    >>> groups = [{"name": "dense"}, {"name": "ep_size_2", **experts}, {"name": "ep_size_1", **experts}]
    >>> [group["name"] for group in in_one_order([*groups, {"name": "ep_size_1", "moe": True, "lr": 0.2}])]
    ['dense', 'ep_size_1', 'ep_size_2', 'ep_size_1']
    """
    ordered: list[dict[str, Any]] = []
    for options, alike in groupby(groups, _options_of_experts):
        ordered += sorted(alike, key=lambda group: "" if options is None else str(group.get("name")))
    return ordered


def _options_of_experts(group: dict[str, Any]) -> dict[str, Any] | None:
    is_of_experts = group.get("moe")
    return {key: group[key] for key in group if key not in ("name", "params")} if is_of_experts else None


def _pad_capacity(slices: int, _gate: object, _inputs: object, routes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round the capacity in ``(auxiliary loss, capacity, experts, ...)`` up to a multiple of ``slices``."""
    loss, capacity, *rest = routes
    return (loss, torch.as_tensor(-(-int(capacity) // slices) * slices), *rest)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@contextmanager
def saving_by_slice(engine: DeepSpeedEngine) -> Iterator[None]:
    """Let each slice write the files that it will load, in a call that saves.

    File names contain the model parallel rank of the writer, and DeepSpeed writes on expert data parallel rank 0 only.
    If replicas of an expert are on several slices, the files of the other slices would be missing.
    """
    _check_optimizer_files(engine)
    automatic = engine._config.expert_parallel_config
    if not automatic.enabled:
        with ledger.bound(patches.WRITER_OF_EXPERTS, _first_writes):
            yield
        return
    own = registry.find(name_of_size(automatic.autoep_size))
    is_folded = engine.autotp_size() > 1 and not engine.zero_optimization_partition_weights()
    if not is_folded or own is None or own.writes_checkpoint:
        yield
        return
    with ledger.bound(patches.WRITER_OF_FOLDED_EXPERTS, always(dist.get_world_size)):
        yield


@around
def _first_writes(place: Any, name: str) -> int:
    known = registry.find(name)
    return int(place(name)) if known is None else int(not known.writes_checkpoint)


def _check_optimizer_files(engine: DeepSpeedEngine) -> None:
    """Refuse sizes whose optimizer files DeepSpeed would not write without ZeRO.

    It writes one file for each expert parallel rank of the greatest size.
    """
    sizes = registry.sizes()
    others = sorted(size for size in sizes if max(sizes) % size)
    if others and not engine.zero_optimization():
        raise ExpertGroupError(
            f"expert parallel sizes {others} do not divide the greatest, {max(sizes)}: without ZeRO, DeepSpeed would "
            "lose the optimizer states of some experts. Use ZeRO stage 1 or 2, or sizes that divide each other"
        )


# -- expert groups ----------------------------------------------------------------------------------------------------


def create_expert_groups(
    grid: MpuGrid,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel: bool = False,
    use_data_before_expert: bool = False,
) -> ExpertGroups:
    """Create the expert groups of one size on all ranks, and register them for ``deepspeed.moe.layer.MoE``.

    Collective over the grid; call it before ``deepspeed.initialize``, once for each ``ep_size`` in the model. A rank
    joins only the two groups that it belongs to. Repeating a call gives the same groups.

    Args:
        grid: the mpu of the engine (``module.mpu()`` of a ``PipelineModule``).
        expert_parallel_size: the layers' ``ep_size``; the degree of the axis ``expert`` by default.
        expert_tensor_parallel: the layers' ``enable_expert_tensor_parallelism``: experts are split along ``model``.
        use_data_before_expert: place the replicas of an expert, not the experts of a layer, on neighboring ranks.

    Raises:
        TypeError: ``grid`` is not a grid.
        ExpertSizeError: the size does not divide the number of ranks that share experts; the message lists valid sizes.
        ExpertGroupError: another grid has groups of that name, or ``expert_tensor_parallel`` differs between sizes.
        DisagreementError: ranks asked for different groups, or a rank did not call the function.

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
    require_grid(grid)
    failure: Exception | None = None
    registry.forget_former_worlds()
    try:
        if REFERENCE in os.environ:  # each process of a reference has all experts
            expert_parallel_size = 1
        elif expert_parallel_size is None:
            if EXPERT not in grid.topology().axes:
                raise ExpertSizeError(
                    f"expert_parallel_size is not given and {grid.topology().spec!r} has no axis {EXPERT!r}: give one "
                    "of both"
                )
            expert_parallel_size = grid.get_axis_size(EXPERT)
        plan = ExpertPlan(grid.topology(), expert_parallel_size, expert_tensor_parallel, use_data_before_expert)
        registry.check(grid, plan)
    except Exception as error:  # of any kind, because the other ranks must raise, too
        failure, plan = error, ExpertPlan(grid.topology(), 1)
    known = registry.find(plan.name)
    own = {
        "experts": plan.expert_ranks(grid.grid_rank),
        "expert data": plan.expert_data_ranks(grid.grid_rank),
    }
    wanted = [RankGroup((kind, plan.name, str(plan)), grid.to_global(ranks)) for kind, ranks in own.items()]
    groups = grid.create_groups(f"{plan}", wanted, failure)
    if known is not None:
        return known
    created = ExpertGroups(grid, plan, *groups)
    registry.add(created, ledger.bind(patches.GATHER_TOKENS, _gathered_into_a_list))
    return created


def create_zero_partition_groups(grid: MpuGrid, size: int) -> ProcessGroup:
    """Create the groups of ZeRO++'s second partition (hpZ) inside the data parallel groups, and register them.

    Collective over the grid; call it before ``deepspeed.initialize`` with the config's ``zero_hpz_partition_size``. All
    ZeRO-3 engines use the groups until the grid is destroyed.

    Raises:
        TypeError: ``grid`` is not a grid.
        ExpertSizeError: the size does not divide the data parallel group; the message lists valid sizes.
        RuntimeError: such groups exist already.
        DisagreementError: ranks asked for different sizes, or a rank did not call the function.
    """
    require_grid(grid)
    failure: Exception | None = None
    ranks: list[int] = []
    try:
        ranks = zero_partition_ranks(grid.topology(), size, grid.grid_rank)
        if deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is not None:
            raise ExpertGroupError(
                "the ZeRO parameter intra parallel group is already initialized, and a process has only one: "
                "destroy its grid first"
            )
    except Exception as error:
        failure = error
    name = f"hpZ {size}"
    (group,) = grid.create_groups(name, [RankGroup((name,), grid.to_global(ranks))], failure)
    deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group
    grid.on_destroy(partial(_forget_zero_partition, group))
    return group


def _forget_zero_partition(group: ProcessGroup) -> None:
    if deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is group:
        deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
