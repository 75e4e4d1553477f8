"""The gradient norm of a grid's ranks equals the norm of the whole model."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import get_global_norm_of_tensors
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ds_topo import (
    PipelineModule,
    PipelineParallelGrid,
    ProcessGrid,
    clip_grad_norm_,
    groups,
    initialize,
)
from ds_topo.base.patches import BF16_DISCARDS_INFINITIES
from ds_topo.engine import norms, optimizer_norms
from ds_topo.engine.optimizer_norms import CorrectedNorm, NormsOfBF16
from ds_topo.errors import EngineOptionError, ExpertGroupError
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.small_engines import settings
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


ORDERS = (2.0, 1, 3.0, "inf")


def parameter(value: float, **marks: Any) -> nn.Parameter:
    """Return a parameter of four elements whose gradient has the given norm."""
    made = nn.Parameter(torch.zeros(4))
    made.grad = torch.full((4,), value / 2)
    for name, mark in marks.items():
        setattr(made, name, mark)
    return made


def _parameters(grid: PipelineParallelGrid, name: str, sliced: bool) -> list[nn.Parameter]:
    """A model of replicated, sharded, tied and expert parameters; only gradients of replicas are equal."""
    stage, slice_rank = grid.get_stage_id(), grid.get_slice_parallel_rank()
    place = dist.get_rank(groups._get_expert_parallel_group(name))
    expert = {"allreduce": False, "group_name": name}
    shard = {"tensor_model_parallel": True}
    made = [
        parameter(1.0 + stage),
        parameter(3.0 + 2 * stage + slice_rank, **shard),
        parameter(50.0, ds_pipe_replicated=stage > 0),
        parameter(10.0 + 4 * stage + 2 * place + (slice_rank if sliced else 0), **expert, **(shard if sliced else {})),
    ]
    if sliced:  # a bias that slices replicate
        made.append(parameter(20.0 + 2 * stage + place, **expert, tensor_model_parallel=False))
    if grid.pipe_parallel_size == 1:
        made[2].ds_pipe_replicated = False  # type: ignore[attr-defined]
    return made


def _values(stages: int, slices: int, places: int, sliced: bool) -> list[float]:
    """Return the norm of the gradient of every parameter of the whole model."""
    values = [50.0]
    for stage in range(stages):
        values.append(1.0 + stage)
        values += [3.0 + 2 * stage + slice_rank for slice_rank in range(slices)]
        for place in range(places):
            if sliced:
                values += [10.0 + 4 * stage + 2 * place + slice_rank for slice_rank in range(slices)]
                values.append(20.0 + 2 * stage + place)
            else:
                values.append(10.0 + 4 * stage + 2 * place)
    return values


def _norm(topology: str, size: int, sliced: bool, partitioned: bool) -> None:
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid(topology) as grid:
        name = groups.create_expert_groups(grid, size, sliced).plan.name
        made = _parameters(grid, name, sliced)
        whole = [parameter(v) for v in _values(grid.pipe_parallel_size, grid.slice_parallel_size, size, sliced)]
        expected = float(nn.utils.get_total_norm([one.grad for one in whole]))
        if not partitioned:
            optimizer = SimpleNamespace(fp16_groups=[made[:2], made[2:]])
            assert float(optimizer_norms.unfused_gradient_norm(optimizer, grid)) == pytest.approx(expected, rel=1e-6)
            flat = [torch.cat([one.grad for one in group]) for group in optimizer.fp16_groups]
            assert float(optimizer_norms.fused_gradient_norm(optimizer, flat, grid)) == pytest.approx(
                expected, rel=1e-6
            )
            gradients = [[one.grad for one in group] for group in optimizer.fp16_groups]
            in_fp32: Any = SimpleNamespace(
                bf16_groups=optimizer.fp16_groups,
                fp32_groups_gradients=gradients,
                mpu=grid,
                corrected_norm=CorrectedNorm(is_needed=True, has_experts=True),
            )
            found, of_experts = NormsOfBF16.get_grads_for_norm(in_fp32)
            norm = get_global_norm_of_tensors(found, mpu=grid)
            assert (float(norm), of_experts) == (pytest.approx(expected, rel=1e-6), {})
            for order in ORDERS[1:]:
                of_one_process = float(nn.utils.clip_grad_norm_(whole, math.inf, order))
                norm = clip_grad_norm_(made, math.inf, grid, order, foreach=False)
                assert float(norm) == pytest.approx(of_one_process, rel=1e-6)
            norm = clip_grad_norm_(made, expected / 4, grid)
            assert float(norm) == pytest.approx(expected, rel=1e-6)
            assert float(made[1].grad.norm()) == pytest.approx(
                float(3.0 + 2 * grid.stage_id + grid.get_axis_rank("model")) / 4, rel=1e-5
            )
            return
        own = [
            index
            for index, p in enumerate(made)
            if index % len(_replicas(p, grid)) == _replicas(p, grid).index(grid.global_rank)
        ]
        optimizer = SimpleNamespace(
            cpu_offload=False,
            device=torch.device("cpu"),
            params_in_partition=[[made[index] for index in own]],
            averaged_gradients={0: [made[index].grad for index in own]},
        )
        assert float(optimizer_norms.zero_gradient_norm(optimizer, grid)) == pytest.approx(expected, rel=1e-6)
        made[0].grad[0] = torch.inf
        assert float(optimizer_norms.zero_gradient_norm(optimizer, grid)) == -1


def _replicas(p: nn.Parameter, grid: PipelineParallelGrid) -> list[int]:
    """Return the ranks over which ZeRO partitions a parameter."""
    if getattr(p, "allreduce", True):
        return grid.dp_group
    return list(dist.get_process_group_ranks(groups._get_expert_data_parallel_group(p.group_name)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize(
    ("topology", "size", "sliced"),
    [
        ("data=2,model=2", 2, True),
        ("model=2,data=2", 1, True),
        ("data=2,model=2", 4, False),
        ("model=2,data=2", 2, False),
        ("pipe=2,data=2", 2, False),
        ("data=2,pipe=2", 1, False),
    ],
)
def test_every_parameter_counts_once(world: Worlds, topology: str, size: int, sliced: bool, partitioned: bool) -> None:
    world(4).run(_norm, topology, size, sliced, partitioned)


# -- marks and norms of a single rank --------------------------------------------------------------------------------


def test_norm_without_gradients_is_zero_and_small_gradients_are_not_clipped() -> None:
    with fake_world(0, 2), PipelineParallelGrid("data=2") as grid:
        frozen = nn.Parameter(torch.zeros(4))
        assert torch.equal(clip_grad_norm_([frozen], 1.0, grid), torch.tensor(0.0))
        tiny = parameter(1e-8)
        clip_grad_norm_([tiny], 1.0, grid)
        assert float(tiny.grad.sum()) == pytest.approx(2e-8)
        small, zero = parameter(3.0), parameter(0.0)
        assert float(clip_grad_norm_(iter([small, zero, frozen]), 3.5, grid)) == pytest.approx(3.0)
        assert float(small.grad.norm()) == 3.0
        assert float(zero.grad.norm()) == 0.0
        assert float(clip_grad_norm_([zero], 0.5, grid)) == 0.0
        assert float(zero.grad.norm()) == 0.0


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_one_rank_clips_as_torch_does(order: Any, foreach: bool | None) -> None:
    def gradients() -> list[nn.Parameter]:
        torch.manual_seed(0)
        made = [nn.Parameter(torch.zeros(size)) for size in (7, 100, 3)]
        for one in made[:2]:
            one.grad = torch.randn(one.shape)
        return made

    ours, theirs = gradients(), gradients()
    with fake_world(0, 1), ProcessGrid("data=1") as grid:
        norm = clip_grad_norm_(iter(ours), 0.5, grid, order, foreach=foreach)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, 0.5, order, foreach=foreach))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours[:2], theirs[:2], strict=True))
        ours[0].grad[3] = torch.nan
        with pytest.raises(RuntimeError, match=r"total norm of order .* is nan, so they cannot be clipped: skip"):
            clip_grad_norm_(ours, 0.5, grid, order, error_if_nonfinite=True)
        assert torch.isnan(clip_grad_norm_(ours[0], 0.5, grid, order))


def _one_rank_has_nan() -> None:
    with ProcessGrid("data=2,model=2") as grid:
        for value, is_sliced in product((math.nan, math.inf), (True, False)):  # slice 0 counts what slices replicate
            on_second_slice = value if grid.get_axis_rank("model") == 1 else 1.0
            for order in (2, math.inf):
                broken = parameter(on_second_slice, tensor_model_parallel=is_sliced)
                assert not clip_grad_norm_(broken, 1.0, grid, order).isfinite()


class _Broken(torch.autograd.Function):
    """The identity, whose gradient is nan if asked for."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, breaks: bool) -> torch.Tensor:
        ctx.breaks = breaks
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * math.nan if ctx.breaks else gradient, None


class _Sliced(nn.Module):
    """A layer that is marked as a slice, and one that slices share, whose bias gets a gradient of nan."""

    breaks = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sliced, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)
        self.sliced.weight.tensor_model_parallel = True  # type: ignore[assignment]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = _Broken.apply(self.shared.bias, self.breaks)
        return F.linear(torch.tanh(self.sliced(hidden)), self.shared.weight, bias)


def _states(case: dict[str, Any], broken: set[int]) -> tuple[Any, ...]:
    """Return the norm, what the second step did, and whether weights are finite; nan on some slices in this step."""
    stages = case.get("stages", 1)
    is_bf16 = "bf16" in case["config"]
    with PipelineParallelGrid(f"pipe={stages},model=2" if stages > 1 else "data=-1,model=2") as grid:
        config = settings(gradient_accumulation_steps=1, gradient_clipping=0.5, **case["config"])
        module: Any = _Sliced()
        given = {"mpu": grid}
        if stages > 1:
            module, given = PipelineModule([LayerSpec(_Sliced)] * stages, grid=grid, loss_fn=_loss), {}
        engine, *_ = initialize(model=module, model_parameters=module.parameters(), config=config, **given)
        for step in range(2):
            for layer in module.modules():
                layer.breaks = step == 1 and grid.get_stage_id() == 0 and grid.get_axis_rank("model") in broken
            inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
            inputs = inputs.bfloat16() if is_bf16 else inputs
            if stages > 1:
                engine.train_batch(iter([(inputs, inputs)]))
            else:
                engine.backward(_loss(engine(inputs), inputs))
                engine.step()
        with deepspeed.zero.GatheredParameters(
            list(module.parameters()), enabled=engine.zero_optimization_stage() == 3
        ):
            weights = [bool(each.isfinite().all()) for each in module.parameters()]
        norm = float(engine.get_global_grad_norm())
        found = norm, engine.was_step_applied(), engine.skipped_steps, weights
        destroy_engine(engine)
    return found


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - targets.float().sin()).square().mean()


def _compare_slices(cases: list[dict[str, Any]]) -> None:
    deepspeed.init_distributed(verbose=False)
    for case in cases:
        found, expected = (_states(case, broken) for broken in ({1}, {0, 1}))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=f"{case}: {found}, {expected}")
        assert not math.isfinite(found[0])


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **more}


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
IN_FP32: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
AUTOCAST: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
NAN_ON_A_SLICE: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"config": config}
        for config in (
            *(_zero(stage) for stage in range(4)),
            _zero(1, gradient_reducer=True, **IN_FP32),
            _zero(1, **IN_FP32),
            _zero(3, **BF16),
            _zero(0, **AUTOCAST),
        )
    ],
    "reduced": [
        {"config": _zero(stage, gradient_reducer=True, **more)} for stage in range(3) for more in ({}, BF16, AUTOCAST)
    ],
    "offloaded": [{"config": {"zero_optimization": {"stage": stage, **OFFLOAD}}} for stage in range(1, 4)],
    "half": [
        *({"config": _zero(stage, **more)} for stage in range(1, 4) for more in (IN_FP32, AUTOCAST)),
        *({"config": _zero(stage, **BF16)} for stage in range(3)),
    ],
    "pipeline": [{"config": _zero(stage, **more), "stages": 2} for stage in range(2) for more in ({}, BF16, AUTOCAST)],
}


@pytest.mark.skipif(not BF16_DISCARDS_INFINITIES, reason="DeepSpeed before 0.19.8 takes such steps in fp32 and bf16")
@pytest.mark.parametrize("cases", mark_exhaustive(NAN_ON_A_SLICE, default=lambda _, name: name == "plain"))
def test_nan_on_one_slice_is_handled_as_nan_on_all(world: Worlds, cases: str) -> None:
    """Also where the first slice counts the gradient: no slice steps alone, and all clip by one norm."""
    world(4 if cases == "pipeline" else 2).run(_compare_slices, NAN_ON_A_SLICE[cases])


def test_nan_of_one_rank_reaches_all(world: Worlds) -> None:
    world(4).run(_one_rank_has_nan)


def _norm_of_dtensors() -> None:
    with ProcessGrid("data=2,model=2") as grid:
        mesh = grid.device_mesh()
        placements = [
            (mesh["model"], [Shard(0)]),
            (mesh["model"], [Replicate()]),
            (mesh, [Replicate(), Shard(1)]),
            (mesh, [Shard(0), Replicate()]),
            (mesh, [Replicate(), Replicate()]),
        ]
        torch.manual_seed(0)
        whole = [torch.randn(4, 6) for _ in placements]
        made = []
        for gradient, (its_mesh, places) in zip(whole, placements, strict=True):
            made.append(nn.Parameter(distribute_tensor(torch.zeros(4, 6), its_mesh, places)))
            made[-1].grad = distribute_tensor(gradient.clone(), its_mesh, places)
        made.append(nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh["model"], [Replicate()])))
        made[-1].grad = DTensor.from_local(whole[0] / 2, mesh["model"], [Partial()])  # their sum is whole[0]
        total = float(nn.utils.get_total_norm([*whole, whole[0]]))
        assert float(clip_grad_norm_(made, total / 4, grid)) == pytest.approx(total, rel=1e-6)
        for parameter, gradient in zip(made, [*whole, whole[0]], strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient / 4)


@pytest.mark.parametrize(
    ("placements", "counting"),
    [
        ([Shard(0), Shard(1)], [0, 1, 2, 3]),
        ([Replicate(), Shard(0)], [0, 1]),
        ([Shard(0), Replicate()], [0, 2]),
        ([Replicate(), Replicate()], [0]),
    ],
)
def test_first_copy_of_a_dtensor_counts(placements: list[Any], counting: list[int]) -> None:
    found = []
    for rank in range(4):
        with fake_world(rank, 4), ProcessGrid("data=2,model=2") as grid:
            mesh = SimpleNamespace(mesh=torch.arange(4).view(2, 2), get_coordinate=lambda: divmod(grid.global_rank, 2))
            one: Any = SimpleNamespace(grad=SimpleNamespace(device_mesh=mesh, placements=placements))
            found += [rank] if norms.counted_here(grid)(one) else []
    assert found == counting


def test_norm_counts_each_element_of_a_dtensor_once(world: Worlds) -> None:
    world(4).run(_norm_of_dtensors)


def test_single_slice_counts_replicated_parameters_of_experts() -> None:
    with fake_world(0, 1), PipelineParallelGrid("data=1") as grid:
        name = groups.create_expert_groups(grid, 1, True).plan.name
        bias = parameter(3.0, allreduce=False, group_name=name, tensor_model_parallel=False)
        assert float(clip_grad_norm_([bias], 5.0, grid)) == pytest.approx(3.0)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_partition_norm_counts_parameters_of_its_slice(cpu_offload: bool) -> None:
    with fake_world(1, 2), PipelineParallelGrid("model=2") as grid:
        shards = [parameter(value, model_parallel=True) for value in (3.0, 4.0, 12.0)]
        replicated, padding = parameter(100.0), torch.full((4,), 1000.0)
        padding._zero_padding = True  # type: ignore[attr-defined]
        groups_of = [[shards[0], replicated, shards[1]], [shards[2]]]
        optimizer = SimpleNamespace(
            cpu_offload=cpu_offload,
            device=torch.device("cpu"),
            params_in_partition=[[*groups_of[0], parameter(50.0, model_parallel=True)], groups_of[1]],
            averaged_gradients={0: [p.grad for p in groups_of[0]], 1: [padding, shards[2].grad]},
            norm_for_param_grads={id(p): p.grad.norm() for group in groups_of for p in group},
            get_param_id=id,
        )
        assert float(optimizer_norms.zero_gradient_norm(optimizer, grid)) == pytest.approx(13.0)


def test_updates_of_muon_without_loss_scale_count_as_scaled_gradients() -> None:
    with fake_world(0, 1), PipelineParallelGrid("data=1") as grid:
        scaled, update = parameter(3.0), parameter(1.0)
        optimizer = SimpleNamespace(
            cpu_offload=False,
            device=torch.device("cpu"),
            params_in_partition=[[scaled], [update]],
            averaged_gradients={0: [scaled.grad], 1: [update.grad]},
            groups_lacking_loss_scale={1},
            loss_scale=4.0,
        )
        assert float(optimizer_norms.zero_gradient_norm(optimizer, grid)) == pytest.approx(5.0)


@pytest.mark.parametrize("rank", range(4))
def test_first_copy_of_a_partition_counts_dense_parameters(rank: int) -> None:
    with fake_world(rank, 4), PipelineParallelGrid("data=2,shard=2") as grid:
        dense, expert = parameter(3.0), parameter(4.0, allreduce=False)
        norm = optimizer_norms.partition_norm([(each, each.grad) for each in (dense, expert)], grid)
        assert float(norm) == pytest.approx(4.0 if grid.get_copy_rank() else 5.0)


@pytest.mark.parametrize("mark", ["ds_id", "_hp_mapping"])
def test_gradients_inside_an_optimizer_of_deepspeed_are_refused(mark: str) -> None:
    message = "whose optimizer keeps the gradients"
    with fake_world(0, 1), ProcessGrid("data=1") as grid, pytest.raises(RuntimeError, match=message):
        clip_grad_norm_([parameter(1.0, **{mark: None})], 1.0, grid)


@pytest.mark.parametrize("counts", [(1, 1), (1, 2)])
@pytest.mark.parametrize("kind", [FP16_Optimizer, FP16_UnfusedOptimizer])
def test_stages_with_other_numbers_of_groups_are_refused_where_they_would_hang(kind: type, counts: Any) -> None:
    engine: Any = SimpleNamespace(optimizer=mock.Mock(spec=kind, param_groups=[]), mpu=mock.Mock())
    with mock.patch.object(optimizer_norms, "gathered", return_value=[*counts]):
        if kind is FP16_UnfusedOptimizer and counts == (1, 2):
            with pytest.raises(EngineOptionError, match=r"parameters in \[1, 2\] groups of the optimizer"):
                optimizer_norms._group_counts_differ(engine)
        else:
            assert optimizer_norms._group_counts_differ(engine) == (counts == (1, 2))


@pytest.mark.parametrize(("logs", "limit", "stages"), [(True, 0.5, 2), (False, 0.5, 1)])
def test_log_says_where_a_pipeline_clips_by_another_norm(logs: bool, limit: float, stages: int) -> None:
    engine = mock.Mock(spec=PipelineEngine, mpu=mock.Mock(), optimizer=None, is_pipeline=True)
    engine.gradient_clipping.return_value = limit
    engine.mpu.get_pipe_parallel_world_size.return_value = stages
    with mock.patch.object(norms, "log_dist") as log:
        norms._log_clipping(engine)
    assert log.called == logs


# -- norms that cannot be corrected ----------------------------------------------------------------------------------


def _engine(**differences: Any) -> Any:
    """Return an engine in bf16 without ZeRO, with one MoE layer, on the second slice of the first stage."""
    given = {
        "optimizer": object(),
        "clipping": 0.0,
        "fp16": False,
        "bf16": True,
        "layers": ["ep_size_2"],
        "slice_rank": 1,
        "marks": {"tensor_model_parallel": True},
    } | differences
    layers = [mock.Mock(spec=MoE, expert_group_name=name) for name in given["layers"]]
    return SimpleNamespace(
        mpu=mock.Mock(
            **{
                "get_model_parallel_world_size.return_value": 3,
                "get_stage_id.return_value": 0,
                "get_slice_parallel_rank.return_value": given["slice_rank"],
            }
        ),
        optimizer=given["optimizer"],
        has_moe_layers=bool(layers),
        gradient_clipping=lambda: given["clipping"],
        fp16_enabled=lambda: given["fp16"],
        bfloat16_enabled=lambda: given["bf16"],
        module=SimpleNamespace(
            modules=lambda: [nn.Linear(1, 1), *layers],
            parameters=lambda: [parameter(1.0), parameter(1.0, **given["marks"])],
        ),
    )


def _check(engine: Any, *others: tuple[int, list[str], bool]) -> tuple[int, list[str], bool] | None:
    """Return the value that this rank sends to two others during the check of its engine; None if it sends nothing."""
    shown: list[Any] = []

    def gather(own: Any, group: object) -> list[Any]:
        shown.append(own)
        return [*others, own]

    with mock.patch.object(optimizer_norms, "gathered", gather):
        optimizer_norms._check_norm(engine)
    return shown[0] if shown else None


EQUAL = ((0, ["ep_size_2"], True), (1, ["ep_size_2"], True))


def test_optimizers_with_correct_norms_are_not_checked() -> None:
    assert _check(_engine(bf16=False), *EQUAL) is None
    for kind in (DeepSpeedZeroOptimizer, FP16_UnfusedOptimizer):
        assert _check(_engine(optimizer=mock.Mock(spec=kind)), *EQUAL) is None
    for half in ({}, {"fp16": True}, {"fp16": True, "bf16": False}):
        assert _check(_engine(**half), *EQUAL) == (0, ["ep_size_2"], True)


@pytest.mark.parametrize("corrects", [True, False])
def test_bf16_optimizer_is_checked_without_corrected_norms(corrects: bool) -> None:
    engine = _engine(optimizer=mock.Mock(spec=BF16_Optimizer))
    engine.mpu.correct_norms = corrects
    assert (_check(engine, *EQUAL) is None) == corrects


def test_stages_with_experts_of_other_sizes_are_refused() -> None:
    layers = [f"ep_size_{size}" for size in (4, 2, 4, 9, 7, 8, 3, 5, 6)]
    both = sorted({*layers})
    assert _check(_engine(layers=layers), (0, both, True), (1, both, True)) == (0, both, True)
    assert _check(_engine(layers=layers), (0, both, True), (0, both, True)), "a single stage"
    for stages in ([(0, both, True), (1, ["ep_size_2"], True)], [(2, [], True), (1, both, True)]):
        with pytest.raises(ExpertGroupError, match=r"different sizes, {0: \['ep_size_2', .*'ep_size_9'\], 1: "):
            _check(_engine(layers=layers), *stages)


def test_slices_with_nothing_but_experts_are_refused() -> None:
    shard_of_expert = {"tensor_model_parallel": True, "allreduce": False}
    for marks, slice_rank in (({}, 0), (shard_of_expert, 0), ({"tensor_model_parallel": True}, 1)):
        assert _check(_engine(marks=marks, slice_rank=slice_rank), *EQUAL) == (0, ["ep_size_2"], True)
    for marks in ({}, shard_of_expert):
        with pytest.raises(ExpertGroupError, match="some slices hold no tensor-parallel parameters beside experts"):
            _check(_engine(marks=marks), *EQUAL)
        without_experts: list[tuple[int, list[str], bool]] = [(0, [], True), (1, [], True)]
        assert _check(_engine(marks=marks, layers=[]), *without_experts) == (0, [], False)


def test_nan_of_one_rank_is_the_largest_gradient_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda values, *_, **__: values[0].fill_(3.0))  # the maximum may omit nan
    with fake_world(0, 2), PipelineParallelGrid("data=2") as grid:
        for own, is_nan in ((math.nan, True), (1.0, False)):
            assert norms.sum_over_grid(torch.tensor(own), grid, is_largest=True)[0].isnan() == is_nan


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([], False),
        ([torch.empty(0), torch.tensor([1.0, -1e38])], False),  # whose square is infinite
        ([torch.tensor([65504.0] * 9, dtype=torch.half), torch.ones(2)], False),
        ([torch.tensor([1.0, torch.nan, 2.0])], True),
        ([torch.ones(3, dtype=torch.bfloat16), torch.tensor([-torch.inf], dtype=torch.bfloat16)], True),
        ([torch.sparse_coo_tensor([[2]], [[torch.inf, 0.0]], (4, 2), check_invariants=True)], True),
        ([torch.sparse_coo_tensor([[2]], [[1.0, 0.0]], (4, 2), check_invariants=True)], False),
    ],
)
def test_overflows_are_elements_that_are_not_finite(values: list[torch.Tensor], found: bool) -> None:
    assert bool(optimizer_norms.overflows(values)) == found
