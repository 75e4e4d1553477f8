"""Let DeepSpeed's data efficiency (curriculum learning, dynamic batching) deal samples by the shares of a grid.

Its sampler divides batches by the size of the data parallel group, which counts peers along ``seq``, and sends them
from rank 0 to that group, which slices do not share.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

from ds_topo.base.classes import Mixin, adopt
from ds_topo.engine.config_options import has_dynamic_batches
from ds_topo.engine.current_mpu import axes_of_engine
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.axes import PIPE
from ds_topo.topology.rank_tables import RankGroup, sample_axes


class DataEfficiency(EngineOnGrid):
    """An engine with ``data_efficiency``, whose sampler sends samples to a group that slices do not share."""

    def complete(self) -> None:
        """Let ``data_parallel_group`` join one rank of each share if DeepSpeed deals batches of variable size.

        ``get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed`` deals them by this group. It is used for
        nothing else, except by DeepCompile, which ``OPTIONS`` refuses then.
        """
        super().complete()
        if has_dynamic_batches(self._config):
            self.data_parallel_group = self.mpu.get_group(sample_axes(self.mpu.topology()))

    def deepspeed_io(self, *arguments: Any, **options: Any) -> Any:
        """Let the loader's sampler send samples to all ranks that read them."""
        loader = super().deepspeed_io(*arguments, **options)
        sampler = loader.data_sampler
        if type(sampler) is DeepSpeedDataSampler and self.mpu.get_axis_rank(PIPE) in self.reading_stages:
            adopt(sampler, SamplerOfShares)
            sampler.data_parallel_group = _group_of_readers(self)
        return loader


class SamplerOfShares(Mixin, DeepSpeedDataSampler):  # type: ignore[misc]
    """DeepSpeed's sampler for data efficiency, whose group joins all ranks that read, in every share."""

    def get_start_end_idx(self, batch_len: int | None = None) -> tuple[int, int]:
        """Return where this rank's share of a global micro-batch starts and ends: several ranks read one sample."""
        whole = self.micro_batch_times_data_parallel_size
        share = (batch_len or whole) / (whole // self.micro_batch_size)
        return round(self.data_parallel_rank * share), round((self.data_parallel_rank + 1) * share)


def _group_of_readers(engine: EngineOnGrid) -> ProcessGroup:
    """Return the group of all ranks that read samples; collective over them at the first call."""
    grid, stages = engine.mpu, engine.reading_stages
    if not engine.is_pipeline:
        return grid.get_group(axes_of_engine(grid, False))
    if len(stages) == grid.get_axis_size(PIPE):
        return grid.get_group(grid.topology().axes)
    ranks = [rank for rank in range(grid.world_size) if grid.topology().get_axis_index(PIPE, rank) in stages]
    return grid.create_group(RankGroup(("stages that read samples",), tuple(sorted(grid.to_global(ranks)))))
