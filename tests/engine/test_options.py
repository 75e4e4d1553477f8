"""Options of DeepSpeed's config that assume an order of ranks are accepted in that order and refused in others."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.domino import async_linear
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo import PipelineParallelGrid, groups, initialize
from ds_topo.engine.checks import check_model
from ds_topo.engine.options import ConfigOnGrid, check_config
from ds_topo.errors import EngineOptionError
from tests.support.fake_world import fake_world
from tests.support.small_engines import settings, start
from tests.support.training import engine_config
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

QUANTIZED = {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}
ZENFLOW = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "zenflow": {"update_interval": 2}}}
SECOND_PARTITION = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
AUTO_EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}
AUTO_TENSOR = {"tensor_parallel": {"autotp_size": 2}}
AUTO_SEQUENCE = {"compile": {"passes": ["autosp"]}, "sequence_parallel_size": 2}
MESH = {"sequence_parallel_size": 2, "data_parallel_size": 2}
HYBRID = {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("data=2,model=2", QUANTIZED, "zero_quantized_gradients .* switch it off"),
    ("data=2,model=2", ZENFLOW, "zenflow at stage 1 or 2 .* switch it off"),
    ("data=2,model=2", SECOND_PARTITION, r"create_zero_partition_groups\(grid, 2\)"),
    ("seq=2,model=2", SECOND_PARTITION, r"create_zero_partition_groups\(grid, 2\)"),
    ("pipe=2,data=2", AUTO_EXPERTS, "AutoEP.* a grid without 'pipe'"),
    ("model=2,data=2", AUTO_EXPERTS, 'AutoEP.* bwc_tensor_model_parallel_world_size .*"tensor_parallel": {}'),
    ("data=4", {"expert_parallel": {"enabled": True, "autoep_size": 3}}, "AutoEP.* must divide the stage size"),
    (
        "data=4",
        {"expert_parallel": {**AUTO_EXPERTS["expert_parallel"], "expert_tensor_parallel_size": 2}},
        "AutoEP.*expert_tensor_parallel_size=1; .*validate_autoep_config",
    ),
    (
        "data=2,seq=2",
        {**AUTO_EXPERTS, "zero_optimization": {"stage": 3}},
        "AutoEP.*ZeRO stage 3 with an axis 'seq' of 2 .*Use stage 1 or 2",
    ),
    ("model=4", AUTO_TENSOR, "set tensor_parallel.autotp_size to 4, or create the grid with model=2"),
    ("data=4", AUTO_TENSOR, "no axis 'model'.* remove tensor_parallel.autotp_size"),
    ("seq=4", AUTO_SEQUENCE, r"sequence_parallel_size 2 \(AutoSP\), but 'seq=4' has seq=4: name seq=2 in the topology"),
    ("data=4", AUTO_SEQUENCE, r"sequence_parallel_size 2 \(AutoSP\), but 'data=4' has seq=1"),
    (
        "seq=2,data=2",
        {**AUTO_SEQUENCE, "zero_optimization": {"stage": 2}},
        "AutoSP.* at ZeRO stage 2: .* use stage 0",
    ),
    ("seq=2,data=2", MESH, "seq=2 as the last axis"),
    ("data=4", HYBRID, "model axis of 2"),
    ("model=2,data=2", {**HYBRID, **AUTO_TENSOR}, "hybrid_engine with tensor_parallel .* Leave tensor_parallel out"),
    ("pipe=2,data=2", HYBRID, "model axis of 2"),
]
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("seq=2,data=2", QUANTIZED),
    ("data=4", ZENFLOW),
    ("data=4", SECOND_PARTITION),
    ("seq=2,data=2", AUTO_EXPERTS),
    ("seq=2,data=2", AUTO_SEQUENCE),
    ("model=2,seq=2", {"compile": {"passes": ["autosp"]}}),
    ("expert=2,data=2", AUTO_EXPERTS),
    ("model=2,data=2", {**AUTO_EXPERTS, **AUTO_TENSOR}),
    ("model=2,data=2", AUTO_TENSOR),
    ("data=2,model=2", {"tensor_parallel": {"autotp_size": 0}}),
    ("data=2,seq=2", MESH),
    ("model=2,data=2", HYBRID),
]


def _join() -> None:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)


def _initialize(grid: PipelineParallelGrid, options: dict[str, Any]) -> Any:
    model = nn.Linear(8, 8)
    config = engine_config(1, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **options)
    engine, *_ = deepspeed.initialize(model=model, mpu=grid, config=config, model_parameters=list(model.parameters()))
    return engine


def _refuse(topology: str, options: dict[str, Any], message: str) -> None:
    _join()
    untouched = DeepSpeedEngine.__init__
    with PipelineParallelGrid(topology) as grid, pytest.raises(EngineOptionError, match=re.compile(message, re.S)):
        _initialize(grid, options)
    assert DeepSpeedEngine.__init__ is untouched


@pytest.mark.parametrize(("topology", "options", "message"), REFUSED)
def test_options_that_assume_another_order_are_refused(
    world: Worlds, topology: str, options: dict[str, Any], message: str
) -> None:
    world(4).run(_refuse, topology, options, message)


def _refuse_long_sequence_training() -> None:
    """Create the groups of long sequence training before the engine, as programs do."""
    _join()
    untouched = DeepSpeedEngine.__init__
    parallel_state_sp.initialize_sequence_parallel(2)
    with PipelineParallelGrid("seq=2,data=2") as grid, pytest.raises(EngineOptionError, match="ALST"):
        _initialize(grid, {})
    with PipelineParallelGrid("data=2,seq=2") as grid:
        _initialize(grid, {}).destroy()
    assert DeepSpeedEngine.__init__ is untouched


def test_long_sequence_training_is_refused_in_another_order(world: Worlds) -> None:
    world(4).run(_refuse_long_sequence_training)


AUTOSP, PASSES = {"compile": {"passes": ["autosp"]}}, {"compile": {"passes": ["autosp", "autotp"]}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}
CANNOT_COMBINE: list[tuple[str, dict[str, Any], str]] = [
    ("seq=2,pipe=2", AUTOSP, r"\(AutoSP\) with a PipelineModule: .* use a model without a pipeline"),
    ("pipe=2,data=2", {"zero_optimization": {"stage": 3}}, r"ZeRO stage 3 in a pipeline: .*use stage 1"),
    (
        "seq=2,model=2",
        {**AUTOSP, **AUTO_TENSOR},
        r"\(AutoSP\) with tensor_parallel \(AutoTP\): .* use DistributedAttention",
    ),
    ("data=2,model=2", {**PASSES, **AUTO_TENSOR}, r"'autotp' with \['autosp'\]: .*check DeepSpeedEngine.compile"),
    (
        "seq=2,model=2",
        AUTO_TENSOR,
        r"\(ALST\) with tensor_parallel \(AutoTP\): .* use DistributedAttention in the model",
    ),
    ("pipe=2,model=2", {**EXPERTS, **AUTO_TENSOR}, "AutoEP.* Use deepspeed.moe.layer.MoE in the layers"),
    ("seq=2,model=2", {**EXPERTS, **AUTO_TENSOR}, "AutoEP.*check validate_autoep_config of DeepSpeed"),
    (
        "model=2,data=2",
        {**EXPERTS, **AUTO_TENSOR, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        r"AutoEP.*zero_hpz_partition_size .check _validate_zero3_moe_compatibility of DeepSpeed.* Use stage 1 or 2",
    ),
]


@pytest.mark.parametrize(("topology", "options", "message"), CANNOT_COMBINE)
def test_what_deepspeed_cannot_combine_is_refused_with_its_check_and_an_alternative(
    topology: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_world(0, 4), PipelineParallelGrid(topology) as grid:
        if "ALST" in message:
            monkeypatch.setattr(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", grid.get_group("seq"))
        if "zero_hpz" in str(options):
            groups.create_zero_partition_groups(grid, 2)
        config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **options}, grid)
        with pytest.raises(EngineOptionError, match=message):
            check_config(ConfigOnGrid(config, grid, is_pipeline="pipe" in topology))


def _accept(topology: str, options: dict[str, Any]) -> None:
    _join()
    with PipelineParallelGrid(topology) as grid:
        if options == MESH:
            shape, names = (2, 2), ("data_parallel", "sequence_parallel")
            deepspeed_groups.mesh_device = deepspeed.comm.initialize_mesh_device(shape, names)
        check_config(ConfigOnGrid(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **options}, grid), grid))


@pytest.mark.parametrize(("topology", "options"), ACCEPTED)
def test_options_that_assume_this_order_are_accepted(world: Worlds, topology: str, options: dict[str, Any]) -> None:
    world(4).run(_accept, topology, options)


def _accept_groups_that_were_created() -> None:
    _join()
    with PipelineParallelGrid("data=2,model=2") as grid:
        groups.create_zero_partition_groups(grid, 2)
        check_config(
            ConfigOnGrid(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **SECOND_PARTITION}, grid), grid)
        )


def test_a_second_partition_of_created_groups_is_accepted(world: Worlds) -> None:
    world(4).run(_accept_groups_that_were_created)


def _build_super_offload() -> None:
    _join()
    options = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}}
    with PipelineParallelGrid("data=1") as grid, pytest.raises(AssertionError, match="only supports NVIDIA CUDA GPUs"):
        _initialize(grid, options)


def test_super_offload_on_a_cpu_raises_deepspeeds_own_error(world: Worlds) -> None:
    world(1).run(_build_super_offload)


def _wrap(spec: str) -> str:
    start()
    with PipelineParallelGrid(spec) as grid:
        try:
            initialize(model=DistributedDataParallel(torch.nn.Linear(4, 4)), mpu=grid, config=settings())[0].destroy()
        except EngineOptionError as error:
            return str(error)
    return ""


def test_ddp_over_ranks_with_other_parameters_is_refused(world: Worlds) -> None:
    for rank, said in enumerate(world(4).run(_wrap, "data=2,model=2")):
        assert "ranks [0, 1, 2, 3] the parameters of the first one" in said
        assert f"other ones than rank {rank}" in said
    assert world(2).run(_wrap, "data=2") == ["", ""], "here it is only slow"


def test_domino_with_the_group_of_an_earlier_grid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_linear, "TP_group", None)
    options = SimpleNamespace(params_dtype=torch.float32, perform_initialization=False)
    engine: Any = SimpleNamespace(client_optimizer=None)
    with fake_world(0, 4):
        for spec in ("data=4", "model=2,data=2"):
            with PipelineParallelGrid(spec) as grid:
                group = grid.get_tensor_model_parallel_group()
                layer = async_linear.DominoAsyncColumnParallelLinear(4, 4, group, options, lambda weight: None)
                if spec == "data=4":
                    check_model(engine, layer, grid)
                    continue
                with pytest.raises(EngineOptionError, match="TP_group = None"):
                    check_model(engine, layer, grid)
