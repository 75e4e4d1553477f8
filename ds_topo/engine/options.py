"""What DeepSpeed's engines assume about the order of ranks, refused or put right as long as a grid exists.

Several options of DeepSpeed's config lay groups over neighboring ranks of the world and ask no mpu. An engine whose mpu
is a grid checks them before it builds anything; engines with another mpu notice nothing.
"""

from __future__ import annotations

import sys
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine import changes
from ds_topo.engine.inputs import agree_on_settings, check_engine_inputs, check_engine_without_mpu, check_mpu
from ds_topo.engine.mpu import MpuGrid
from ds_topo.errors import EngineOptionError
from ds_topo.ledger import Change, Make, ledger
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.expert_tables import zero_partition_ranks


def _with_checks(do_sanity_check: Any) -> Any:
    @wraps(do_sanity_check)
    def checked(engine: DeepSpeedEngine) -> None:
        if not isinstance(engine.mpu, MpuGrid):
            check_mpu(engine.mpu)
            if engine.mpu is None:
                check_engine_without_mpu(engine)
            do_sanity_check(engine)
            return
        failure: Exception | None = None
        try:
            check_engine(engine._config, engine.mpu)
            check_engine_inputs(engine, engine.mpu)
            do_sanity_check(engine)
        except Exception as error:
            failure = error
        agree_on_settings(engine, engine.mpu, failure)

    return checked


def check_engine(config: DeepSpeedConfig, grid: MpuGrid) -> None:
    """Raise if an option of a ``DeepSpeedConfig`` would use other groups than the grid's.

    Raises:
        EngineOptionError: the message names the option, what DeepSpeed would do, and what to do instead.
    """
    if config.zero_config.zero_quantized_gradients:
        check_exchange_between_all_ranks("zero_quantized_gradients", grid)
    if config.expert_parallel_config.enabled:
        check_exchange_between_all_ranks("expert_parallel (AutoEP)", grid)
    if config.zero_config.zero_hpz_partition_size > 1:
        _check_second_partition(config.zero_config.zero_hpz_partition_size, grid)
    if config.tensor_parallel_config.autotp_size > 1:
        _check_neighbors("tensor_parallel.autotp_size (AutoTP)", MODEL, config.tensor_parallel_config.autotp_size, grid)
    if "autosp" in (getattr(config.compile_config, "passes", None) or []):
        size = config._param_dict.get("sequence_parallel_size", 1)
        _check_neighbors("sequence_parallel_size (AutoSP)", SEQ, size, grid)
    _check_device_mesh(grid)
    _check_long_sequence_training(grid)
    _check_hybrid_engine(config.hybrid_engine, grid)


def check_exchange_between_all_ranks(option: str, grid: MpuGrid) -> None:
    """Raise unless all ranks of the job hold the same parameters; ``option`` exchanges between neighbors of the world.

    Raises:
        EngineOptionError: the grid has ``pipe`` or ``model``, or is not the whole job.
    """
    if not _uses_data_axis_alone(grid) or grid.world_size != dist.get_world_size():
        raise EngineOptionError(
            f"{option} exchanges between all ranks of the job, but those of {grid.topology().spec!r} hold different "
            "parameters: switch it off, or use data parallelism alone"
        )


def _uses_data_axis_alone(grid: MpuGrid) -> bool:
    """Whether every rank of the job is a replica: no pipe and no model axis."""
    return all(grid.get_axis_size(axis) == 1 for axis in (PIPE, MODEL))


def _check_second_partition(size: int, grid: MpuGrid) -> None:
    size = min(size, len(grid.dp_group))  # as DeepSpeed does
    wanted = list(grid.to_global(zero_partition_ranks(grid.topology(), size, grid.grid_rank)))
    group = deepspeed_groups._get_zero_param_intra_parallel_group()
    first = dist.get_rank() // size * size
    found = list(range(first, first + size)) if group is None else dist.get_process_group_ranks(group)
    if found != wanted:
        raise EngineOptionError(
            f"zero_hpz_partition_size {size}: ranks {found} would share a second partition, but in "
            f"{grid.topology().spec!r} they hold different parameters, or another size was asked for before: call "
            f"groups.create_zero_partition_groups(grid, {size}) before deepspeed.zero.Init and deepspeed.initialize"
        )


def _check_neighbors(option: str, axis: str, size: int, grid: MpuGrid) -> None:
    """Raise unless the grid's groups along an axis are the runs of ``size`` neighbors that DeepSpeed takes."""
    first = dist.get_rank() // size * size
    found = grid.get_ranks(axis) if axis in grid.topology().axes else [dist.get_rank()]
    if found != list(range(first, first + size)):
        raise EngineOptionError(
            f"{option} {size} joins {size} neighboring ranks of the job, but along {axis!r} the topology "
            f"{grid.topology().spec!r} joins ranks {found}: name {axis}={size} as the last axis, or switch it off"
        )


def _check_device_mesh(grid: MpuGrid) -> None:
    mesh = deepspeed_groups.mesh_device
    if mesh is not None:
        _check_neighbors("mesh_param or sequence_parallel_size with data_parallel_size", SEQ, mesh.size(1), grid)
        check_exchange_between_all_ranks("mesh_param or sequence_parallel_size with data_parallel_size", grid)


def _check_long_sequence_training(grid: MpuGrid) -> None:
    """``UlyssesSPAttentionHF.register_with_transformers`` makes groups of its own, unless the grid is in use."""
    state = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    group = state._SEQUENCE_PARALLEL_GROUP if state is not None else None
    if group is None:
        return
    found = sorted(dist.get_process_group_ranks(group))
    expected = grid.get_ranks(SEQ) if SEQ in grid.topology().axes else [dist.get_rank()]
    if found != expected:
        raise EngineOptionError(
            f"sequence_parallel_size of UlyssesSPAttentionHF (ALST) joins ranks {found}, but along {SEQ!r} the "
            f"topology {grid.topology().spec!r} joins ranks {expected}: call ds_topo.use(grid) before "
            f"register_with_transformers(), name seq={len(found)} as the last axis, or switch it off"
        )


def _check_hybrid_engine(options: HybridEngineConfig, grid: MpuGrid) -> None:
    """With an mpu the hybrid engine slices over the group of pipe x model, whatever size it is told."""
    size, slices = options.inference_tp_size, grid.get_model_parallel_world_size()
    if options.enabled and size > 1 and (size != slices or grid.pipe_parallel_size > 1):
        raise EngineOptionError(
            f"hybrid_engine.inference_tp_size {size} with {grid.topology().spec!r}: DeepSpeed would slice for {size} "
            f"ranks but over a group of {slices}; give the topology a model axis of {size} and no pipe axis, or set "
            "it to 1"
        )


def _with_sum_over_seq(configure_zero_optimizer: Any) -> Any:
    """ZeRO-3 with one scale of gradients.

    Every stage sums gradients over ``seq`` and averages them over ``data``, but ZeRO-3 where it uses reduce-scatter:
    it divides by all ranks, too much by the degree of ``seq``. (It does so with ``reduce_scatter`` true, the default,
    without ``contiguous_gradients``, and for parameters larger than ``reduce_bucket_size``.)
    """

    @wraps(configure_zero_optimizer)
    def configure(engine: DeepSpeedEngine, optimizer: Any) -> Any:
        configured = configure_zero_optimizer(engine, optimizer)
        if isinstance(engine.mpu, MpuGrid) and isinstance(configured, DeepSpeedZeroOptimizer_Stage3):
            factor = configured.sequence_parallel_size
            if factor > 1:
                make = partial(_times, factor)
                engine.mpu.on_destroy(ledger.bind(changes.AVERAGE_AND_SCATTER, make, configured))
        return configured

    return configure


def _times(factor: int, average: Any) -> Any:
    @wraps(average)
    def multiplied(*arguments: Any) -> list[torch.Tensor]:
        return [partition.mul(factor) for partition in average(*arguments)]

    return multiplied


WHILE_A_GRID_EXISTS: tuple[tuple[Change, Make], ...] = (
    (changes.SANITY_CHECK, _with_checks),
    (changes.CONFIGURE_ZERO, _with_sum_over_seq),
)
