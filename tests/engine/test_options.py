"""Options of DeepSpeed's config that assume an order of ranks are accepted in that order and refused in others.

Every message of the table has a case here, and is in ``examples/guides/combinations.md``.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.domino import async_linear
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo import PipelineParallelGrid, groups, initialize
from ds_topo.base.supported import SLICES_WITH_EXPERTS, require
from ds_topo.checkpoint.manifest import SavedLayout, SavedOptions, SavedStructure
from ds_topo.engine import config_options as table
from ds_topo.engine.checks import check_model
from ds_topo.engine.config import Case, check_config, check_sections_and_sizes, may_assume_ranks
from ds_topo.engine.config_options import (
    OPTIONS,
    Option,
    OptionsOfConfig,
    different_parameters,
    mechanisms_on,
    refusals,
)
from ds_topo.errors import EngineOptionError
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.small_engines import data_efficiency, settings, start
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
DYNAMIC = {"enabled": True, "dynamic_batching": {"enabled": True, "max_tokens": 8, "metrics_path": "unused"}}

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
        "AutoEP.*ZeRO stage 3 with an axis 'seq' of 2, .*Use stage 1 or 2",
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
    ("pipe=2,model=2", HYBRID, "model axis of 2 and no pipe axis"),
    ("data=2,shard=2", QUANTIZED, r"'zero_optimization.zero_quantized_gradients \(qgZ\)'.* name that axis 'data'"),
    (
        "data=4",
        {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
        "elastic_checkpoint at stage 2.*Remove",
    ),
]
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("pipe=2,data=2", {}),
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
    ("pipe=2,model=2", {"hybrid_engine": {"enabled": True, "inference_tp_size": 1}}),
    ("pipe=2,data=2", {"zero_optimization": {"stage": 1}}),
    ("data=4", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}),
    ("data=4", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}),
    ("data=4", {**AUTO_EXPERTS, "zero_optimization": {"stage": 3}}),
    ("data=4", {"tensor_parallel": {"autotp_size": 1}, "compile": {"passes": ["autosp"]}}),
    ("data=2,shard=2", {"zero_optimization": {"stage": 3}}),
    ("data=2,model=2", {"zero_optimization": {**ZENFLOW["zero_optimization"], "stage": 3}}),
    ("pipe=2,data=2", {"data_efficiency": {"enabled": True, "data_sampling": DYNAMIC}}),
    ("data=4", {"data_efficiency": {"enabled": True, "data_sampling": DYNAMIC}, "compile": {"deepcompile": True}}),
]


def _checked(case: Case) -> None:
    """Check a config as an engine does."""
    check_config(case)
    if may_assume_ranks(case):
        OptionsOfConfig.complete_config(case)


def _check(rank: int, topology: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(rank, 4), PipelineParallelGrid(topology) as grid:
        if options == MESH:
            monkeypatch.setattr(deepspeed_groups, "mesh_device", SimpleNamespace(size=lambda dimension: 2))
        config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **options}, grid)
        _checked(Case(config, grid, is_pipeline="pipe" in topology))


@pytest.mark.parametrize(("topology", "options", "message"), REFUSED)
def test_options_that_assume_another_order_are_refused(
    topology: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        with pytest.raises(EngineOptionError, match=re.compile(message, re.S)):
            _check(rank, topology, options, monkeypatch)


@pytest.mark.parametrize(
    ("topology", "members", "refused"),
    [("data=4", 4, 0), ("seq=4", 4, 0), ("pipe=4", 4, 1), ("data=2,model=2", 4, 1), ("data=2", 2, 1)],
)
def test_an_exchange_between_all_ranks_needs_equal_parameters(topology: str, members: int, refused: int) -> None:
    with fake_world(0, 4):
        group = dist.new_group(range(members))
        with PipelineParallelGrid(topology, group) as grid:
            assert len(list(different_parameters("an option", grid))) == refused


@pytest.mark.parametrize(("topology", "options"), ACCEPTED)
def test_options_that_assume_this_order_are_accepted(
    topology: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        _check(rank, topology, options, monkeypatch)


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


@pytest.mark.parametrize(
    ("topology", "options", "message"), mark_exhaustive(REFUSED, lambda number, _: number in (0, 9))
)
def test_engines_with_refused_options_are_not_built(
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
    ("pipe=2,data=2", {"zero_optimization": {"stage": 2}}, r"ZeRO stage 2 in a pipeline: .*use stage 1"),
    ("pipe=2,data=2", {"zero_optimization": {"stage": 3}}, r"ZeRO stage 3 in a pipeline: .*use stage 1"),
    (
        "seq=2,model=2",
        {**AUTOSP, **AUTO_TENSOR},
        r"\(AutoSP\) with tensor_parallel \(AutoTP\): .* use DistributedAttention",
    ),
    (
        "data=2,model=2",
        {**PASSES, **AUTO_TENSOR},
        r"'autotp' with \['autosp'\]: .*refuses this in DeepSpeedEngine.compile",
    ),
    (
        "seq=2,model=2",
        AUTO_TENSOR,
        r"\(ALST\) with tensor_parallel \(AutoTP\), .* Use DistributedAttention in the model",
    ),
    ("pipe=2,model=2", {**EXPERTS, **AUTO_TENSOR}, "AutoEP.* Use deepspeed.moe.layer.MoE in the layers"),
    ("seq=2,model=2", {**EXPERTS, **AUTO_TENSOR}, "AutoEP.*DeepSpeed raises this in validate_autoep_config"),
    (
        "model=2,data=2",
        {**EXPERTS, **AUTO_TENSOR, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        r"AutoEP.*zero_hpz_partition_size, which DeepSpeed refuses in _validate_zero3.* Use stage 1 or 2",
    ),
]


@pytest.mark.parametrize(("topology", "options", "message"), CANNOT_COMBINE)
def test_what_deepspeed_cannot_combine_is_refused_with_its_check_and_an_alternative(
    topology: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "zero_hpz" in str(options):
        require(SLICES_WITH_EXPERTS)  # older releases refuse the two sections by another message
    with fake_world(0, 4), PipelineParallelGrid(topology) as grid:
        if "ALST" in message:
            monkeypatch.setattr(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", grid.get_group("seq"))
        if "zero_hpz" in str(options):
            groups.create_zero_partition_groups(grid, 2)
        config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **options}, grid)
        with pytest.raises(EngineOptionError, match=message):
            _checked(Case(config, grid, is_pipeline="pipe" in topology))


WHOLE = {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
TESTED_ELSEWHERE: list[tuple[str, dict[str, Any], str]] = [
    ("pipe=2,seq=2", {"data_efficiency": data_efficiency("unused")}, "plain"),
    ("pipe=2,seq=2", {"data_efficiency": {"enabled": True, "data_sampling": DYNAMIC}}, "pipeline"),
    (
        "data=2,seq=2",
        {"data_efficiency": {"enabled": True, "data_sampling": DYNAMIC}, "compile": {"deepcompile": True}},
        "plain",
    ),
    ("pipe=2,data=2", {"gradient_accumulation_steps": 3, **WHOLE}, "DualPipeV"),
    ("pipe=2,model=2", {"gradient_accumulation_steps": 4}, "DualPipeV"),
    ("seq=2,data=2", {}, "ALST"),
    ("data=2", AUTO_EXPERTS, "some ranks"),
]
"""Topologies, options, and the kind of engine or what is there besides; each test checks the message."""


def _refusals_with_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, str]]:
    """Yield the line of each refusal of all cases in the source, and its message."""
    for topology, options, about in [*REFUSED, *CANNOT_COMBINE, *TESTED_ELSEWHERE]:
        with fake_world(0, 4), monkeypatch.context() as patch:
            group = dist.new_group([0, 1])
            if "ALST" in about:
                patch.setattr(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", group)
            if options == MESH:
                patch.setattr(deepspeed_groups, "mesh_device", SimpleNamespace(size=lambda dimension: 2))
            with PipelineParallelGrid(topology, group if about == "some ranks" else None) as grid:
                config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **options}, grid)
                is_pipeline = "pipe" in topology and about != "plain"
                case = Case(config, grid, is_pipeline, is_dualpipe=about == "DualPipeV")
                for check in [option.check for option in OPTIONS if option.check and option.is_on(config)]:
                    for message in (yielding := check(case)):
                        innermost: Any = yielding
                        while innermost.gi_yieldfrom is not None:
                            innermost = innermost.gi_yieldfrom
                        yield innermost.gi_frame.f_lineno, message


def test_every_message_of_the_table_has_a_case_and_is_in_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "examples/guides/combinations.md").read_text()
    quoted = [text for text in re.findall(r"`([^`\n]+)`", guide) if len(text) > 40]
    patterns = [re.escape(text).replace(re.escape("..."), ".*") for text in quoted]
    found = list(_refusals_with_places(monkeypatch))
    functions = [each for each in ast.parse(inspect.getsource(table)).body if isinstance(each, ast.FunctionDef)]
    places = [
        node
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Yield) and function.name != "refusals"
    ]
    assert len(places) > 20, "the search finds what there is to find"
    for node in places:
        messages = [message for line, message in found if node.lineno <= line <= (node.end_lineno or 0)]
        assert messages, f"no case for {ast.unparse(node)}"
        assert any(re.fullmatch(pattern, message) for pattern in patterns for message in messages), messages


WITH_REDUCER: dict[str, dict[str, Any]] = {
    "zero_optimization.stage: 3": {"zero_optimization": {"stage": 3}},
    "zero_optimization.zenflow": {"zero_optimization": {"stage": 2, "zenflow": {"overlap_step": False}}},
    "zero_optimization.offload_optimizer": {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    },
    "managed_gradient_accumulation: false": {"managed_gradient_accumulation": False},
    "expert_parallel with tensor_parallel": {**AUTO_EXPERTS, **AUTO_TENSOR},
}


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.with_reducer], ids=lambda option: option.key)
def test_a_reducer_is_refused_before_the_engine_is_built(option: Option) -> None:
    with fake_world(0, 4), PipelineParallelGrid("model=2,data=2") as grid:
        content = {"train_micro_batch_size_per_gpu": 1, **WITH_REDUCER[option.key]}
        for reducer in (False, True):
            config = DeepSpeedConfig({**content, "gradient_reducer": reducer}, grid)
            last = [*refusals(Case(config, grid))][-1:]
            assert (last == [f'config section "gradient_reducer": {option.with_reducer}']) is reducer


@pytest.mark.parametrize(
    ("topology", "options", "expected"),
    [
        ("data=2,model=2", AUTO_TENSOR, {"model": "AutoTP"}),
        ("expert=2,data=2", AUTO_EXPERTS, {"expert": "AutoEP"}),
        ("seq=2,data=2", AUTO_SEQUENCE, {"seq": "AutoSP"}),
        ("model=2,data=2", HYBRID, {"model": "hybrid engine"}),
        ("data=2,shard=2", {"zero_optimization": {"stage": 2}}, {"shard": "ZeRO 2"}),
        ("data=4", SECOND_PARTITION, {"data": "hpZ"}),
    ],
)
def test_the_table_names_what_uses_each_axis(topology: str, options: dict[str, Any], expected: dict[str, str]) -> None:
    with fake_world(0, 4), PipelineParallelGrid(topology) as grid:
        case = Case(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **options}, grid), grid)
        assert mechanisms_on(case) == expected


@pytest.mark.parametrize(
    ("batch", "micro", "steps", "message"),
    [
        (8, 2, 2, ""),
        (
            16,
            2,
            2,
            r"16 is not 2 [(]train_micro.* x 2 [(]gradient_acc.* x 2 [(]repl.* axes read the same.*to 8, or omit",
        ),
        (16, 2, 2, r"In 'model=2,data=2' they are along \['data=2'\]"),
        (12, 2, None, ""),
        (9, 2, None, r"9 is not a multiple of 2 [(]train_micro.*to a multiple of 4"),
        (9, None, None, r"9 is not a multiple of 2 [(]replicas with"),
        (9, 2.5, None, r"train_micro_batch_size_per_gpu is 2.5: give a whole number of samples"),
        (9, -1, None, r"train_micro_batch_size_per_gpu is -1: give a whole number"),
        ("8", 2, 2, r"train_batch_size is '8': give a whole number of samples or steps, at least 1$"),
        ("auto", 2, 2, r"train_batch_size is 'auto': .* Trainer and accelerate replace \"auto\" themselves"),
        (None, None, 2, r'neither "train_batch_size" .* nor "train_micro_batch_size_per_gpu"'),
    ],
)
def test_batch_sizes_name_the_axes_that_count(batch: Any, micro: Any, steps: Any, message: str) -> None:
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    config = {"train_batch_size": batch, **sizes}
    with fake_world(0, 4), PipelineParallelGrid("model=2,data=2") as grid:
        with pytest.raises(EngineOptionError, match=message) if message else nullcontext():
            check_sections_and_sizes(config, grid)
        with pytest.raises(EngineOptionError, match=r'"elasticity" on a grid: .* config \|= grid.batch_sizes'):
            check_sections_and_sizes({**config, "elasticity": {"enabled": True}}, grid)
    with fake_world(0, 4), PipelineParallelGrid("model=4") as grid:
        check_sections_and_sizes({**dict.fromkeys(sizes, 1), "train_batch_size": 1}, grid)
        with pytest.raises(EngineOptionError, match="train_batch_size 3 is not 1 "):
            check_sections_and_sizes({**dict.fromkeys(sizes, 1), "train_batch_size": 3}, grid)


@pytest.mark.parametrize(
    ("topology", "members", "is_pipeline", "refused"),
    [
        ("data=4", [0, 1, 2, 3], False, 0),
        ("pipe=2,data=2", [0, 1, 2, 3], True, 0),
        ("pipe=2,data=2", [0, 1, 2, 3], False, 1),
        ("data=2", [0, 1], False, 0),
        ("data=2", [2, 3], False, 1),
    ],
)
def test_a_curriculum_needs_rank_0_in_each_engine(
    topology: str, members: list[int], is_pipeline: bool, refused: int
) -> None:
    config: Any = None
    with fake_world(members[0], 4):
        group = dist.new_group(members)
        with PipelineParallelGrid(topology, group) as grid:
            assert len(list(table._curriculum(Case(config, grid, is_pipeline)))) == refused


@pytest.mark.parametrize(("topology", "options"), [("data=4", {}), ("model=2,data=2", AUTO_TENSOR)])
def test_experts_with_slices_need_a_release(
    topology: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[object] = []
    monkeypatch.setattr(table, "require", needed.append)
    _check(0, topology, {**AUTO_EXPERTS, **options}, monkeypatch)
    assert needed == ([table.SLICES_WITH_EXPERTS] if options else [])


def test_a_manifest_records_what_the_table_says() -> None:
    kinds = {"layout": SavedLayout, "structure": SavedStructure, "options": SavedOptions}
    recorded = {option.manifest_field.rpartition(".")[::2] for option in OPTIONS if option.manifest_field}
    for path, name in recorded:
        assert name in {each.name for each in fields(kinds[path.rpartition(".")[2]])}
    defaults = DeepSpeedZeroConfig()
    assert {name: getattr(defaults, name, False) for name in asdict(SavedOptions())} == asdict(SavedOptions())
    assert tuple(asdict(SavedOptions())) == table.SAVED_OPTIONS


def _accept(topology: str, options: dict[str, Any]) -> None:
    _join()
    with PipelineParallelGrid(topology) as grid:
        if options == MESH:
            shape, names = (2, 2), ("data_parallel", "sequence_parallel")
            deepspeed_groups.mesh_device = deepspeed.comm.initialize_mesh_device(shape, names)
        _checked(Case(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **options}, grid), grid))


@pytest.mark.parametrize(("topology", "options"), mark_exhaustive(ACCEPTED, lambda _, case: case[1] == MESH))
def test_live_ranks_accept_options_in_this_order(world: Worlds, topology: str, options: dict[str, Any]) -> None:
    world(4).run(_accept, topology, options)


def _accept_groups_that_were_created() -> None:
    _join()
    with PipelineParallelGrid("data=2,model=2") as grid:
        groups.create_zero_partition_groups(grid, 2)
        _checked(Case(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **SECOND_PARTITION}, grid), grid))


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


def test_batch_sizes_may_omit_the_micro_batch() -> None:
    with fake_world(0, 4), PipelineParallelGrid("data=4") as grid:
        check_sections_and_sizes({"train_batch_size": 8, "gradient_accumulation_steps": 2}, grid)
        with pytest.raises(EngineOptionError, match="train_batch_size 12 is not a multiple of 2 "):
            check_sections_and_sizes({"train_batch_size": 12, "gradient_accumulation_steps": 2}, grid)
