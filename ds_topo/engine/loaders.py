"""Give each rank's data loader its share of the samples: one share for all ranks that must read the same ones.

``training_data=`` and ``engine.deepspeed_io()`` build DeepSpeed's own loaders. In a pipeline they would give peers
along ``seq`` different samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.data import DistributedSampler

from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.mpu import MpuGrid
from ds_topo.process_groups.process_grid import Epochs, FollowedSampler


class DealtSamples(EngineOnGrid):
    """The loaders of an engine."""

    def deepspeed_io(self, *arguments: Any, **options: Any) -> Any:
        """Build a data loader for this rank's share of samples.

        DeepSpeed divides samples by a group that counts peers along ``seq``. Warn of a loader without a batch, and let
        a shuffled sampler begin a new epoch when the loader does.
        """
        with counting_shares(self):
            loader = super().deepspeed_io(*arguments, **options)
        sampler = loader.data_sampler
        if not len(loader):
            whose = f"a batch of {loader.batch_size} on each rank that reads others"
            self.mpu.warn_of_no_batch(loader.dataset, whose)
        if type(sampler) is DistributedSampler:
            sampler.__class__ = FollowedSampler  # the program may have given it, and kept it to call set_epoch
            loader.data_sampler.epochs = Epochs(self.mpu.progress)
        return loader


@contextmanager
def counting_shares(engine: DeepSpeedEngine) -> Iterator[None]:
    """Let the mpu and the attributes of an engine count shares of samples; those of pipelines count replicas."""
    grid, replicas = engine.mpu, engine.dp_world_size
    engine.mpu, engine.dp_world_size = MpuGrid.over(grid), grid.get_sample_world_size()
    try:
        yield
    finally:
        engine.mpu, engine.dp_world_size = grid, replicas
