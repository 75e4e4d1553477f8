"""DeepSpeed's hybrid engine trains on a grid, and generates over the grid's groups.

On a CPU its kernels do not exist, so a stand-in takes the place of their workspace, and the model generates by itself.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime import hybrid_engine
from torch import nn

from ds_topo import PipelineParallelGrid
from tests.support.autotp_training import Gated, batches_of, engine_on, gated, start, train_alone, train_on
from tests.support.training import assert_trained_alike, destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.exhaustive
STEPS = 3


def _train(topology: str, stages: tuple[int, ...]) -> None:
    start()
    alone = train_alone(gated, STEPS)
    with (
        PipelineParallelGrid(topology) as grid,
        mock.patch.object(hybrid_engine, "WorkspaceOp"),
        mock.patch.object(Gated, "generate", nn.Module.__call__, create=True),
    ):
        size = grid.get_slice_parallel_world_size()
        for stage in stages:
            engine: Any = engine_on(
                grid,
                gated,
                grid.get_sample_world_size(),
                hybrid_engine={"enabled": True, "inference_tp_size": size},
                zero_optimization={"stage": stage},
            )
            assert isinstance(engine, hybrid_engine.DeepSpeedHybridEngine)
            assert engine.mp_group is (grid.get_model_parallel_group() if size > 1 else None)
            batches = batches_of(engine.module, STEPS)
            run = train_on(grid, engine, batches)
            assert_trained_alike(run, alone, losses=1e-6, elements=(1e-6, 1e-6))
            engine.eval()
            with torch.no_grad():
                assert engine(batches[0][0]).shape == batches[0][1].shape
            engine.train()
            destroy_engine(engine)


@pytest.mark.parametrize("topology", ["data=2,model=2", "model=2,data=2", "data=4"])
def test_hybrid_engine_trains_as_one_process(world: Worlds, topology: str) -> None:
    world(4).run(_train, topology, (0, 1, 3))
