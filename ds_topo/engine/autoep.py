"""Let AutoEP distribute experts over the grid's expert groups, in any order of the axes.

AutoEP replaces the MoE layers of a model of Hugging Face by layers whose experts are on different ranks. DeepSpeed
would create the groups from neighboring ranks of the world. For an engine of a grid, ``create_expert_groups`` creates
them before, where DeepSpeed's functions find them. Together with AutoTP, DeepSpeed also computes the tables of all
ranks, which it compares with these groups; they then come from the grid, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from deepspeed.module_inject.auto_ep_config import validate_autoep_config
from deepspeed.module_inject.auto_ep_folding import FoldingGroupTables
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.engine.experts import create_expert_groups
from ds_topo.errors import EngineOptionError
from ds_topo.ledger import always, ledger
from ds_topo.mpu import patches
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.topology.axes import EXPERT, MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import ExpertPlan

SECTION, SIZE = "expert_parallel", "autoep_size"


def complete_size(config: DeepSpeedConfig, grid: MpuGrid) -> None:
    """Set ``autoep_size`` to the degree of ``expert`` if the config switches AutoEP on without it."""
    if config.expert_parallel_config.enabled and SIZE not in config._param_dict[SECTION]:
        config.expert_parallel_config.autoep_size = max(1, grid.topology().get_dim(EXPERT))


def check(config: DeepSpeedConfig, grid: MpuGrid) -> None:
    """Refuse what AutoEP cannot do, before any group exists.

    Raises:
        EngineOptionError: the message names the check of DeepSpeed, or the axis.
        ExpertSizeError: ``autoep_size`` does not divide the ranks that share experts.
    """
    if not config.expert_parallel_config.enabled:
        return
    slices = max(1, config.tensor_parallel_config.autotp_size)
    if problem := next(_problems(config, grid, slices), ""):
        raise EngineOptionError(f"{SECTION} (AutoEP) on {grid.topology().spec!r}: {problem}")
    plan_of(config, grid)


def _problems(config: DeepSpeedConfig, grid: MpuGrid, slices: int) -> Iterator[str]:
    options, zero, sequences = config.expert_parallel_config, config.zero_config, max(1, grid.topology().get_dim(SEQ))
    if grid.get_axis_size(PIPE) > 1:
        yield (
            "it finds MoE layers by their names in a model of Hugging Face, which a PipelineModule does not have. Use "
            "deepspeed.moe.layer.MoE in the layers, or a grid without 'pipe'"
        )
    if grid.world_size != dist.get_world_size():
        yield "it needs all ranks of the job: create the grid of all of them"
    if grid.get_axis_size(MODEL) != slices:
        yield (
            "its layers can share an axis 'model' with AutoTP only (check bwc_tensor_model_parallel_world_size of "
            'DeepSpeed). Add a section "tensor_parallel": {} if AutoTP shall split the model, or use '
            "deepspeed.moe.layer.MoE in a model that is split already"
        )
    offloads = {name: getattr(zero, f"offload_{name}") is not None for name in ("optimizer", "param")}
    try:
        validate_autoep_config(
            options,
            grid.world_size,
            1,
            slices,
            sequences,
            zero_stage=int(zero.stage),
            deepcompile_enabled=bool(config.compile_config.deepcompile),
            tp_preset_model=config.tensor_parallel_config.preset_model,
            use_data_before_expert_parallel=config.use_data_before_expert_parallel_,
            zero_offload_optimizer=offloads["optimizer"],
            zero_offload_param=offloads["param"],
        )
    except ValueError as error:
        yield f"{error} (check validate_autoep_config of DeepSpeed)"
    of_zero_3 = {
        f"an axis 'seq' of {sequences}": sequences > 1,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
    }
    if zero.stage == 3 and (given := [name for name, is_given in of_zero_3.items() if is_given]):
        yield f"ZeRO stage 3 with {given[0]} (check _validate_zero3_moe_compatibility of DeepSpeed). Use stage 1 or 2"


def check_reducer(config: DeepSpeedConfig) -> None:
    """Refuse our reducer for AutoEP with AutoTP: DeepSpeed then corrects gradients after its own reduction.

    Raises:
        EngineOptionError: the config switches both on.
    """
    if config.expert_parallel_config.enabled and config.tensor_parallel_config.autotp_size > 1:
        raise EngineOptionError(
            "a GradientReducer with AutoEP and AutoTP together: DeepSpeed corrects gradients of slices in its own "
            "reduction, which the reducer replaces. Leave the reducer out, or use only one of expert_parallel and "
            "tensor_parallel"
        )


def plan_of(config: DeepSpeedConfig, grid: MpuGrid) -> ExpertPlan:
    """Return the distribution of the experts of AutoEP."""
    size, is_data_first = config.expert_parallel_config.autoep_size, config.use_data_before_expert_parallel_
    return ExpertPlan(grid.topology(), size, use_data_before_expert=is_data_first)


def over_groups_of_grid(configure: Any) -> Any:
    """Wrap ``_configure_expert_parallel`` to create the grid's groups first.

    DeepSpeed refuses an mpu with slices there, because AutoTP replaces it only later. All sizes are in the config.
    """

    @wraps(configure)
    def configure_expert_parallel(engine: DeepSpeedEngine, *arguments: Any, **options: Any) -> Any:
        if not engine._config.expert_parallel_config.enabled:
            return configure(engine, *arguments, **options)
        grid = engine.mpu
        plan = plan_of(engine._config, grid)
        create_expert_groups(grid, plan.expert_parallel_size, use_data_before_expert=plan.use_data_before_expert)
        engine.mpu = None
        try:
            return configure(engine, *arguments, **options)
        finally:
            engine.mpu = grid

    return configure_expert_parallel


@contextmanager
def tables_of_grid(config: DeepSpeedConfig | None, grid: MpuGrid) -> Iterator[None]:
    """Let DeepSpeed take the tables of ranks of AutoEP with AutoTP from the grid."""
    if config is None or not config.expert_parallel_config.enabled:
        yield
        return

    def expected_folding_group_tables(_: object) -> FoldingGroupTables:
        plan = plan_of(config, grid)
        tables = (grid.model_groups, grid.dp_groups, plan.expert_tables(), plan.expert_data_tables())
        return FoldingGroupTables(*(tuple(tuple(grid.to_global(ranks)) for ranks in table) for table in tables))

    with ledger.bound(patches.FOLDING_TABLES, always(expected_folding_group_tables)):
        yield
