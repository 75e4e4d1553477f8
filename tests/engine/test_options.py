"""Options of DeepSpeed's config that assume an order of ranks: refused in others, accepted in theirs."""

from __future__ import annotations

import re
import warnings
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_topo import EngineOptionError, PipelineParallelGrid, groups
from ds_topo.engine.options import check_engine
from ds_topo.errors import ExpertGroupError
from tests.support.ranks import run_ranks

QUANTIZED = {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}
SECOND_PARTITION = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
AUTO_EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}
AUTO_TENSOR = {"tensor_parallel": {"autotp_size": 2}}
AUTO_SEQUENCE = {"compile": {"passes": ["autosp"]}, "sequence_parallel_size": 2}
MESH = {"sequence_parallel_size": 2, "data_parallel_size": 2}
HYBRID = {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("data=2,model=2", QUANTIZED, "zero_quantized_gradients .* switch it off"),
    ("data=2,model=2", SECOND_PARTITION, r"create_zero_partition_groups\(grid, 2\)"),
    ("seq=2,model=2", SECOND_PARTITION, r"create_zero_partition_groups\(grid, 2\)"),
    ("pipe=2,data=2", AUTO_EXPERTS, "AutoEP.* different parameters"),
    ("model=2,data=2", AUTO_TENSOR, "model=2 as the last axis"),
    ("data=4", AUTO_TENSOR, "model=2 as the last axis"),
    ("seq=2,data=2", AUTO_SEQUENCE, "AutoSP.* seq=2 as the last axis"),
    ("data=4", AUTO_SEQUENCE, "AutoSP.* seq=2 as the last axis"),
    ("seq=2,data=2", MESH, "seq=2 as the last axis"),
    ("data=4", HYBRID, "model axis of 2"),
    ("pipe=2,data=2", HYBRID, "model axis of 2"),
]
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("seq=2,data=2", QUANTIZED),
    ("data=4", SECOND_PARTITION),
    ("seq=2,data=2", AUTO_EXPERTS),
    ("data=2,model=2", AUTO_TENSOR),
    ("data=2,seq=2", AUTO_SEQUENCE),
    ("data=2,seq=2", MESH),
    ("model=2,data=2", HYBRID),
]


def _initialize(grid: PipelineParallelGrid, options: dict[str, Any]) -> None:
    model = nn.Linear(8, 8)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **options}
    deepspeed.initialize(model=model, mpu=grid, config=config, model_parameters=list(model.parameters()))


def _refused() -> None:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    untouched = DeepSpeedEngine._do_sanity_check
    for topology, options, message in REFUSED:
        with PipelineParallelGrid(topology) as grid, pytest.raises(EngineOptionError, match=re.compile(message, re.S)):
            _initialize(grid, options)
        deepspeed_groups.mesh_device = None
    parallel_state_sp.initialize_sequence_parallel(2)
    with PipelineParallelGrid("seq=2,data=2") as grid, pytest.raises(EngineOptionError, match="ALST"):
        _initialize(grid, {})
    with PipelineParallelGrid("data=2,seq=2") as grid:
        _initialize(grid, {})
    assert DeepSpeedEngine._do_sanity_check is untouched
    dist.barrier()


def _accepted() -> None:
    for topology, options in ACCEPTED:
        with PipelineParallelGrid(topology) as grid:
            if options is MESH:
                deepspeed_groups.mesh_device = deepspeed.comm.initialize_mesh_device(
                    (2, 2), ("data_parallel", "sequence_parallel")
                )
            check_engine(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **options}, grid), grid)
            deepspeed_groups.mesh_device = None
    with PipelineParallelGrid("data=2,model=2") as grid:
        groups.create_zero_partition_groups(grid, 2)
        check_engine(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **SECOND_PARTITION}, grid), grid)


def _refused_and_accepted() -> None:
    _refused()
    parallel_state_sp._release_sequence_parallel_groups()
    _accepted()


def test_options_that_assume_an_order() -> None:
    run_ranks(4, _refused_and_accepted, deadline=180)


def _ask_groups() -> tuple[list[int], int]:
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=2,model=2") as grid:
        deepspeed_groups.mpu = grid
        with pytest.raises(EngineOptionError, match="zero_quantized_gradients"):
            groups._get_local_all_to_all_group()
        groups._create_zero_param_parallel_group(2)
        with pytest.raises(ExpertGroupError, match="already initialized"):
            groups._create_zero_param_parallel_group(2)
        ranks = dist.get_process_group_ranks(groups._get_zero_param_intra_parallel_group())
    assert groups._get_zero_param_intra_parallel_group() is None
    with PipelineParallelGrid("seq=2,data=2") as grid:
        deepspeed_groups.mpu = grid
        exchange = len(groups._get_local_all_to_all_group())
    deepspeed_groups.mpu = None
    return ranks, exchange


def test_partition_and_exchange_groups_of_the_current_grid() -> None:
    answers = run_ranks(4, _ask_groups)
    assert [ranks for ranks, _ in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(exchange > 0 for _, exchange in answers)
