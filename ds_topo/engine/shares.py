"""Divide the samples of DeepSpeed's own data loaders into shares, one for all ranks that must read the same samples.

``training_data=`` and ``engine.deepspeed_io()`` build such loaders. In a pipeline DeepSpeed would give peers along
``seq`` different samples. Its sampler for data efficiency (curriculum learning) divides batches by the size of the data
parallel group, which counts peers along ``seq``, and sends them from rank 0 to that group, which slices do not share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.engine.config_options import has_dynamic_batches
from ds_topo.engine.one_layout import axes_of_engine
from ds_topo.mpu.differences import DualPipeVEngine
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.axes import PIPE
from ds_topo.topology.rank_tables import RankGroup, sample_axes


class SamplerOfShares(DeepSpeedDataSampler):  # type: ignore[misc]
    """DeepSpeed's sampler for data efficiency, whose group joins all ranks that read, in every share."""

    def get_start_end_idx(self, batch_len: int | None = None) -> tuple[int, int]:
        """Return where this rank's share of a global micro-batch starts and ends."""
        whole = self.micro_batch_times_data_parallel_size
        share = (batch_len or whole) / (whole // self.micro_batch_size)
        return round(self.data_parallel_rank * share), round((self.data_parallel_rank + 1) * share)


def deal_to_all_readers(engine: DeepSpeedEngine, loader: Any) -> None:
    """Let the sampler for data efficiency of a loader send samples to all ranks that read them, if it has one."""
    sampler = loader.data_sampler
    if type(sampler) is DeepSpeedDataSampler and reads_samples(engine):
        sampler.__class__ = SamplerOfShares
        sampler.data_parallel_group = _group_of_readers(engine, engine.mpu)


@contextmanager
def counting_shares(engine: DeepSpeedEngine) -> Iterator[None]:
    """Let the mpu and the attributes of an engine count shares of samples; those of pipelines count replicas."""
    grid, replicas = engine.mpu, engine.dp_world_size
    engine.mpu, engine.dp_world_size = MpuGrid.over(grid), grid.get_sample_world_size()
    try:
        yield
    finally:
        engine.mpu, engine.dp_world_size = grid, replicas


def reads_samples(engine: DeepSpeedEngine) -> bool:
    """Tell whether this rank reads samples: in a pipeline the first and the last stage do, of DualPipeV the first."""
    return not isinstance(engine, PipelineEngine) or engine.mpu.get_axis_rank(PIPE) in _reading_stages(engine)


def _reading_stages(engine: PipelineEngine) -> set[int]:
    return {0} if isinstance(engine, DualPipeVEngine) else {0, engine.mpu.get_axis_size(PIPE) - 1}


def _group_of_readers(engine: DeepSpeedEngine, grid: MpuGrid) -> ProcessGroup:
    """Return the group of all ranks that read samples; collective over them at the first call."""
    if not isinstance(engine, PipelineEngine):
        return grid.get_group(axes_of_engine(grid, False))
    stages = _reading_stages(engine)
    if len(stages) == grid.get_axis_size(PIPE):
        return grid.get_group(grid.topology().axes)
    ranks = [rank for rank in range(grid.world_size) if grid.topology().get_axis_index(PIPE, rank) in stages]
    return grid.create_group(RankGroup(("stages that read samples",), tuple(sorted(grid.to_global(ranks)))))


def deal_dynamic_batches(engine: DeepSpeedEngine) -> None:
    """Let ``engine.data_parallel_group`` join one rank of each share if DeepSpeed deals batches of variable size.

    ``get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed`` deals them by this group. It is used for
    nothing else, except by DeepCompile, which ``OPTIONS`` refuses then.
    """
    if has_dynamic_batches(engine._config):
        engine.data_parallel_group = engine.mpu.get_group(sample_axes(engine.mpu.topology()))
