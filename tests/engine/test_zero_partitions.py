"""ZeRO 1 and 2 with gradients sent to their owners give DeepSpeed's own results, also in checkpoints."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from packaging.version import Version
from torch import nn

from ds_topo import GradientReducer, PipelineParallelGrid, initialize
from ds_topo.base.supported import number
from ds_topo.checkpoint.engine_state import named_parameters
from ds_topo.engine import engine_driver, optimizer_gradients, partitioned_optimizers
from ds_topo.errors import DisagreementError
from ds_topo.reduction import exchange
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.memory import peak
from tests.support.ranks import run_ranks
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("strict", exhaustive=("gloo",))

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
WIDE: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
SMALL = {"bucket_bytes": 2000, "first_bucket_bytes": 500, "last_bucket_bytes": 300}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 4))


def _engine(
    grid: PipelineParallelGrid, zero: int, *, reducer: Any = SMALL, model: nn.Module | None = None, **more: Any
) -> Any:
    optimizer = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
    config = settings(
        **{"optimizer": optimizer, "zero_optimization": {"stage": zero}, **more}, gradient_reducer=reducer
    )
    engine, *_ = initialize(model=model or _model(), mpu=grid, config=config)
    return engine


def _train(engine: Any, first: int = 0, steps: int = 4) -> list[tuple[float, float]]:
    """Return the loss of every micro-batch, and the gradient norms."""
    dtype, seen = next(engine.module.parameters()).dtype, []
    for step in range(first, first + steps):
        for micro_batch in range(engine.gradient_accumulation_steps()):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + dist.get_rank())
            inputs, targets = (torch.randn(2, width, generator=generator).to(engine.device, dtype) for width in (8, 4))
            loss = F.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            seen.append((float(loss), float(engine.get_global_grad_norm() or 0)))
    return seen


def _assert_same(seen: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> None:
    """Compare losses bit for bit, and norms with a tolerance, because they are summed in another order."""
    assert [loss for loss, _ in seen] == [loss for loss, _ in wanted]
    torch.testing.assert_close(seen, wanted, rtol=1e-6, atol=1e-6)


def _state(engine: Any) -> list[torch.Tensor]:
    """Return parameters, master weights and optimizer states, by DeepSpeed's functions for single parameters."""
    parameters = list(engine.module.parameters())
    result = [parameter.detach().float() for parameter in parameters]
    result += [safe_get_full_fp32_param(parameter) for parameter in parameters]
    result += [safe_get_full_optimizer_state(parameter, "exp_avg_sq") for parameter in parameters]
    return [value.clone() for value in result]


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (1, {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5}),
    (2, {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5}),
    (1, BF16),
    (2, BF16),
    (1, {**WIDE, "gradient_clipping": 0.5}),
    (2, {**WIDE, "gradient_clipping": 0.5}),
    (1, {"communication_data_type": "bf16"}),
    (1, {"prescale_gradients": False, "gradient_predivide_factor": 4.0}),
]


def _trains_alike(zero: int, more: dict[str, Any]) -> None:
    start()
    with PipelineParallelGrid(f"data={dist.get_world_size()}") as grid:
        theirs = _engine(grid, zero, reducer=False, **more)
        wanted, state = _train(theirs), _state(theirs)
        theirs.destroy()
        for overlap in (False, True):
            ours = _engine(grid, zero, reducer={**SMALL, "overlap_parameters": overlap}, **more)
            seen = _train(ours)
            inexact = {"communication_data_type", "data_types", "gradient_clipping"} & more.keys()
            if dist.get_world_size() <= 2 and not inexact and ours.device.type == "cpu":
                _assert_same(seen, wanted)
                assert all(map(torch.equal, _state(ours), state)), "bit-equal: a sum of two has one order"
            else:
                tolerance = 2e-2 if {"bf16", "communication_data_type"} & more.keys() else 1e-5
                torch.testing.assert_close(seen, wanted, rtol=tolerance, atol=tolerance)
                torch.testing.assert_close(_state(ours), state, rtol=tolerance, atol=tolerance)
            for value in ours.module.parameters():
                first = value.detach().clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, value), "replicas are bit-equal"
            ours.destroy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)], ids="data{}".format)
@pytest.mark.parametrize(("zero", "more"), mark_exhaustive(CASES, lambda number, _: number in (0, 3, 5, 6, 8, 9)))
@pytest.mark.backends("strict", exhaustive=("gloo",))
def test_trains_as_deepspeeds_reduction(world: Worlds, size: int, zero: int, more: dict[str, Any]) -> None:
    world(size).run(_trains_alike, zero, more)


@pytest.mark.parametrize(("zero", "more"), CASES[3:4])
def test_trains_on_one_rank(world: Worlds, zero: int, more: dict[str, Any]) -> None:
    world(1).run(_trains_alike, zero, more)


def _in_fp16(zero: int) -> None:
    """Train with a loss scale, an overflow in the first steps, and one in a later step."""
    start()
    found = []
    with PipelineParallelGrid("data=-1") as grid:
        for reducer in (False, {**SMALL, "overlap_parameters": True}):
            fp16 = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
            engine = _engine(grid, zero, reducer=reducer, fp16=fp16, gradient_accumulation_steps=1)
            scales, norms = [], []
            for step in range(8):
                skipped = engine.skipped_steps
                overflows = step == 6 and dist.get_rank() == dist.get_world_size() - 1
                inputs = torch.full((2, 8), 300.0 if overflows else 0.5 + step).half()
                engine.backward(engine(inputs.to(engine.device)).float().square().mean())
                engine.step()
                scales.append(engine.optimizer.loss_scale)
                norms += [float(engine.get_global_grad_norm())] if engine.skipped_steps == skipped else []
            found.append((scales, _state(engine), torch.tensor(norms)))
            engine.destroy()
    assert found[0][0] == found[1][0]
    assert len(set(found[0][0])) > 2, "some steps overflowed"
    exact = {"rtol": 0, "atol": 0} if engine.device.type == "cpu" else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(found[1][1], found[0][1], **exact)
    torch.testing.assert_close(found[1][2], found[0][2], rtol=1e-3, atol=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [1, 2])
def test_trains_fp16_with_overflows(world: Worlds, zero: int) -> None:
    world(2).run(_in_fp16, zero)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("with_norm", [None, False, True])  # DeepSpeed 0.19.6 has no such option
@pytest.mark.parametrize(
    ("norm", "overflows"), [(0.0, False), (2.0, False), (-1.0, True), (math.inf, True), (math.nan, True)]
)
def test_a_norm_that_is_not_finite_is_an_overflow(
    dtype: torch.dtype, checks: bool, with_norm: bool | None, norm: float, overflows: bool
) -> None:
    asked: list[bool] = []
    option = {} if with_norm is None else {"compute_grad_norm": with_norm}
    with_norm = with_norm is not False
    optimizer: Any = SimpleNamespace(
        **option,
        check_grad_overflow=checks,
        check_overflow=lambda: asked.append(True),
        dtype=dtype,
        scaled_global_norm=lambda: torch.tensor(norm),
        _global_grad_norm=5.0,
    )
    found = partitioned_optimizers.PartitionedZero._checked_norm(optimizer)
    assert (found is not None) == with_norm
    assert len(asked) == checks
    assert optimizer.overflow == (with_norm and overflows and (checks or dtype is torch.float32))
    assert optimizer._global_grad_norm == (math.inf if with_norm else None)


@pytest.mark.parametrize(("rank", "has_mpu", "expected"), [(0, True, 5.0), (1, True, 3.0), (1, False, 5.0)])
def test_uncorrected_norm_of_bf16_counts_shards_on_each_slice(rank: int, has_mpu: bool, expected: float) -> None:
    marks: list[dict[str, Any]] = [{"model_parallel": True}, {}, {"allreduce": False}]
    owned = [nn.Parameter(torch.zeros(1)) for _ in marks]
    for parameter, attributes in zip(owned, marks, strict=True):
        vars(parameter).update(attributes)
    with fake_world(rank, 2), PipelineParallelGrid("model=2") as grid:
        grid.correct_norms = False
        of_two, of_expert = (
            SimpleNamespace(
                index=index,
                owned=parameters,
                gradients=SimpleNamespace(partition=partition, group=grid.get_data_parallel_group()),
                fragments_of=lambda partition: list(partition.split(1)),
            )
            for index, (parameters, partition) in enumerate(
                [(owned[:2], torch.tensor([3.0, 4.0])), (owned[2:], torch.tensor([12.0]))]
            )
        )
        optimizer: Any = SimpleNamespace(
            mpu=grid if has_mpu else None,
            optimizer=SimpleNamespace(param_groups=[{}, {"moe": True, "name": "experts"}]),
        )
        read: Any = partitioned_optimizers.PartitionedBF16.get_grads_for_norm
        for groups, wanted in (([of_two, of_expert], expected), ([of_expert], 0.0)):
            optimizer.reduction = SimpleNamespace(groups=groups)
            dense, of_experts = read(optimizer)
            assert (dense, of_experts) == ([torch.tensor([wanted])], {"experts": [torch.tensor([12.0])]})
            partitions = read(optimizer, for_clipping=True)
            assert [id(each) for each in partitions] == [id(group.gradients.partition) for group in groups]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("are_linked", [False, True])
@pytest.mark.parametrize(
    ("norm", "clip", "taken"),
    [
        (0.0, 1.0, 1.0),
        (2.0, 0.0, 1.0),
        (2.0, 1.0, 0.5),
        (-1.0, 1.0, None),
        (math.inf, 0.0, None),
        (math.nan, 0.0, None),
    ],
)
def test_bf16_steps_on_clipped_gradients_or_discards_them(
    dtype: torch.dtype, are_linked: bool, norm: float, clip: float, taken: float | None
) -> None:
    groups = [
        SimpleNamespace(
            gradients=SimpleNamespace(partition=torch.ones(2, dtype=dtype), dtype=dtype),
            master=nn.Parameter(torch.zeros(2)),
            has_linked_states=is_linked,
        )
        for is_linked in (True, are_linked)
    ]
    optimizer = mock.Mock(reduction=SimpleNamespace(groups=groups), clip_grad=clip, mpu=None)
    optimizer._norm.return_value = torch.tensor(norm)
    seen: list[Any] = []
    optimizer.optimizer.step.side_effect = lambda: seen.extend(group.master.grad.tolist() for group in groups)
    partitioned_optimizers.PartitionedBF16.step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    assert seen == ([] if taken is None else [[pytest.approx(taken, rel=1e-2)] * 2] * 2)
    assert optimizer.overflow == (taken is None)
    assert float(optimizer._global_grad_norm) == (math.inf if taken is None else norm)
    assert optimizer._link_states.called == (taken is not None and not are_linked)
    assert optimizer.update_lp_params.called == (taken is not None)
    assert all((group.master.grad is None) == (taken is None or dtype is torch.bfloat16) for group in groups)


@pytest.mark.parametrize(
    ("own", "accumulates", "flat", "expected"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),  # a second group of another type
    ],
)
def test_gradients_of_zero_accumulate_in_the_type_of_the_config_or_of_their_group(
    own: torch.dtype, accumulates: torch.dtype, flat: torch.dtype, expected: torch.dtype
) -> None:
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in (3, 0, 2)]
    optimizer: Any = SimpleNamespace(
        bit16_groups=[parameters],
        round_robin_bit16_groups=[parameters[::-1]],
        bit16_groups_flat=[torch.zeros(5, dtype=flat)],
        gradient_accumulation_dtype=accumulates,
        dtype=own,
    )
    connection: Any = SimpleNamespace(_flat_group=lambda *arguments: arguments)
    with mock.patch.object(optimizer_gradients, "offsets_in_flat_groups", return_value=[[0, 2, 2]]):
        [found] = optimizer_gradients.PartitionGradients._groups_of_zero(connection, optimizer)
    index, kept, _, *places = found  # type: ignore[misc]
    assert index == 0
    assert [each.numel() for each in kept] == [3, 2], "without empty ones"
    assert places == [[2, 0], expected]


def _on_two_hosts(zero: int, more: dict[str, Any]) -> None:
    with mock.patch("socket.gethostname", return_value=f"host{dist.get_rank() // 2}"):
        _trains_alike(zero, more)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "more"),
    mark_exhaustive([(2, {"gradient_accumulation_steps": 2}), (1, WIDE), (1, {})], lambda number, _: number < 2),
)
@pytest.mark.backends("strict", exhaustive=("gloo",))
def test_trains_as_deepspeeds_reduction_over_several_hosts(world: Worlds, zero: int, more: dict[str, Any]) -> None:
    world(4).run(_on_two_hosts, zero, more)


def _gradients_of_single_parameters(zero: int, more: dict[str, Any]) -> None:
    start()
    found = []
    with PipelineParallelGrid("data=2") as grid:
        for reducer in (False, SMALL):
            engine = _engine(grid, zero, reducer=reducer, gradient_accumulation_steps=1, **more)
            dtype = next(engine.module.parameters()).dtype
            engine.backward(engine(torch.ones(2, 8, dtype=dtype)).float().square().sum())
            found.append([safe_get_full_grad(parameter).clone() for parameter in engine.module.parameters()])
            engine.step()
            engine.destroy()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


KEEPS_BF16 = pytest.mark.skipif(
    number(deepspeed.__version__) < Version("0.19.8"),
    reason="before DeepSpeed 0.19.8, its own reduction keeps these gradients in bf16, and the reducer in fp32",
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("zero", "more"), [(1, {}), (2, {}), pytest.param(1, WIDE, marks=KEEPS_BF16)])
@pytest.mark.backends("gloo", exhaustive=("strict",))
def test_deepspeeds_functions_find_single_gradients(world: Worlds, zero: int, more: dict[str, Any]) -> None:
    world(2).run(_gradients_of_single_parameters, zero, more)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _saved(folder: str, zero: int, more: dict[str, Any]) -> list[torch.Tensor]:
    """Return the state after five steps; the checkpoint is saved after three."""
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine = _engine(grid, zero, reducer={**SMALL, "overlap_parameters": True}, **more)
        _train(engine, 0, 3)
        engine.save_checkpoint(folder)
        _train(engine, 3, 2)
        state = _state(engine)
        engine.destroy()
    return state


def _resumed(folder: str, zero: int, more: dict[str, Any], wanted: list[torch.Tensor]) -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        for reducer in (SMALL, {**SMALL, "overlap_parameters": True}, {"bucket_bytes": 10**6}, False):
            engine = _engine(grid, zero, reducer=reducer, **more)
            if reducer:
                _train(engine, 50, 1)  # states that are overwritten; DeepSpeed itself does not find loaded ones then
            engine.load_checkpoint(folder)
            _train(engine, 3, 2)
            assert all(map(torch.equal, _state(engine), wanted)), f"with {reducer}"
            engine.destroy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("zero", "more"), [(1, {}), (2, {}), (1, BF16), (1, WIDE)])
@pytest.mark.backends("gloo", exhaustive=("strict",))
def test_checkpoints_are_in_deepspeeds_layout(world: Worlds, tmp_path: Path, zero: int, more: dict[str, Any]) -> None:
    """A checkpoint of ours loads in ours with other buckets, in DeepSpeed alone, and in DeepSpeed's script."""
    wanted = world(2).run(_saved, str(tmp_path), zero, more)[0]
    world(2).run(_resumed, str(tmp_path), zero, more, wanted)
    if "data_types" in more:
        return  # the script does not read what BF16_Optimizer writes
    names = dict(_model().named_parameters())
    masters = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert {name: value.shape for name, value in masters.items()} == {n: p.shape for n, p in names.items()}
    again = world(2).run(_masters_after_loading, str(tmp_path), zero, more)[0]
    for name, value in zip(names, again, strict=True):
        assert torch.equal(masters[name], value), name


def _masters_after_loading(folder: str, zero: int, more: dict[str, Any]) -> list[torch.Tensor]:
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine = _engine(grid, zero, **more)
        engine.load_checkpoint(folder)
        masters = [safe_get_full_fp32_param(parameter).clone() for parameter in engine.module.parameters()]
        engine.load_checkpoint(folder, load_module_only=True)
        for master, parameter in zip(masters, engine.module.parameters(), strict=True):
            assert torch.equal(safe_get_full_fp32_param(parameter), parameter.float()), "from the parameters"
            torch.testing.assert_close(parameter.float(), master, rtol=1e-2, atol=1e-2)
        engine.destroy()
    return masters


# -- there and back ----------------------------------------------------------------------------------------------------


def _attached_and_detached(zero: int, more: dict[str, Any]) -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        plain = _engine(grid, zero, reducer=False, **more)
        wanted = _train(plain, 0, 8)
        plain.destroy()
        engine = _engine(grid, zero, reducer=False, **more)
        dictionaries = [type(part._parameters) for part in engine.module.modules()]
        seen = _train(engine, 0, 2)
        before = {name: type(value) for name, value in vars(engine.optimizer).items()}
        for turn, overlap in enumerate((True, False, True)):
            reducer = GradientReducer.attach(engine, **SMALL, overlap_parameters=overlap)
            seen += _train(engine, 2 + 2 * turn, 1)
            reducer.detach()
            assert {name: type(value) for name, value in vars(engine.optimizer).items()} == before
            assert [type(part._parameters) for part in engine.module.modules()] == dictionaries
            seen += _train(engine, 3 + 2 * turn, 1)
        _assert_same(seen, wanted)
        engine.destroy()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("zero", "more"), [(1, {}), (2, {}), (1, BF16), (1, WIDE)])
@pytest.mark.backends("gloo", exhaustive=("strict",))
def test_attach_and_detach_between_steps(world: Worlds, zero: int, more: dict[str, Any]) -> None:
    world(2).run(_attached_and_detached, zero, more)


class Stumbling(nn.Module):
    """A module whose backward fails in a given pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fails = _model(), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body[:3](inputs)
        if self.fails and hidden.requires_grad:
            hidden.register_hook(self._fail)
        return self.body[3:](hidden)

    def _fail(self, _: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")


# -- steps that fail ---------------------------------------------------------------------------------------------------


def _after_something_goes_wrong(zero: int, what: str, overlaps: bool) -> None:
    start()
    ends = []
    with PipelineParallelGrid("data=2") as grid:
        for goes_wrong in (False, True):
            model = Stumbling()
            engine = _engine(
                grid,
                zero,
                model=model,
                reducer={**SMALL, "overlap_parameters": overlaps},
                gradient_accumulation_steps=1,
            )
            _train(engine, 0, 2)
            if goes_wrong and what == "a stray backward":
                engine.module(torch.ones(2, 8)).sum().backward()
                engine.module.zero_grad()
            elif goes_wrong:
                model.fails = dist.get_rank() == 0 or what == "an exception on every rank"
                own = (ArithmeticError, "on purpose") if model.fails else (RuntimeError, "(?s)rank 0 .*on purpose")
                with pytest.raises(own[0], match=own[1]):
                    _train(engine, 2, 1)
                model.fails = False
                engine.zero_grad()
            _train(engine, 2, 3)
            ends.append(_state(engine))
            engine.destroy()
    assert all(map(torch.equal, *ends))


@pytest.mark.thorough
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("zero", "what"),
    [
        (1, "a stray backward"),
        *((zero, f"an exception on {ranks}") for zero in (1, 2) for ranks in ("one rank", "every rank")),
    ],
)
@pytest.mark.backends("gloo")
def test_a_failed_step_leaves_no_gradients(world: Worlds, zero: int, what: str, overlaps: bool) -> None:
    world(2).run(_after_something_goes_wrong, zero, what, overlaps)


def _freezes(zero: int) -> None:
    start()
    ends = []
    with PipelineParallelGrid("data=2") as grid:
        for ours in (False, True):
            engine = _engine(grid, zero, reducer={"bucket_bytes": 1 << 20} if ours else False)
            _train(engine, 0, 1)
            if ours:
                engine.gradient_reducer.detach()
            engine.module[2].weight.requires_grad_(False)
            assert engine.gradient_reducer is None
            reducer = GradientReducer.attach(engine, bucket_bytes=1 << 20) if ours else None
            assert engine.gradient_reducer is reducer
            ends.append((_train(engine, 1, 2), _state(engine)))
            if reducer is not None:
                reducer.detach()
            engine.destroy()
    (wanted, theirs), (seen, state) = ends
    _assert_same(seen, wanted)
    assert all(map(torch.equal, state, theirs))


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 2])
def test_a_parameter_frozen_before_attach_gets_a_zero_gradient(world: Worlds, zero: int) -> None:
    """The gradients of its neighbors are not affected."""
    world(2).run(_freezes, zero)


def _in_the_middle(zero: int) -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine = _engine(grid, zero, gradient_accumulation_steps=2)
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        with pytest.warns(RuntimeWarning, match="gradients of its earlier micro-batches are lost"):
            engine.gradient_reducer.detach()
        if zero == 2:
            with pytest.raises(ValueError, match="attach the reducer after the step"):
                GradientReducer.attach(engine)
        engine.destroy()


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.backends("gloo", exhaustive=("strict",))
def test_detach_between_micro_batches_warns_that_gradients_are_lost(world: Worlds, zero: int) -> None:
    world(2).run(_in_the_middle, zero)


def _state_on_one_rank() -> str:
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine = _engine(grid, 1, reducer=SMALL)
        message = ""
        with mock.patch.object(partitioned_optimizers, "job_timeout", return_value=timedelta(seconds=2)):
            if dist.get_rank() == 0:
                with pytest.raises(DisagreementError) as caught:
                    engine.optimizer.state_dict()
                message = str(caught.value)
        dist.barrier()
        engine.destroy()
        return message


@pytest.mark.backends("gloo", exhaustive=("strict",))
def test_state_dict_on_one_rank_names_the_others(world: Worlds) -> None:
    message = world(2).run(_state_on_one_rank)[0]
    assert "ranks [1] did not come" in message
    assert "optimizer.state_dict(), which all ranks must call together" in message


def _places(more: dict[str, Any]) -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine = _engine(grid, 1, **more)
        _train(engine, 0, 2)
        for one in named_parameters(engine):
            whole, held = safe_get_full_fp32_param(one.parameter).reshape(-1), one.held
            own = held.part_of(held.master).reshape(-1)
            assert torch.equal(own, whole[held.start : held.start + held.numel]), one.local
        engine.destroy()


@pytest.mark.parametrize("more", [{"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, WIDE])
@pytest.mark.backends("gloo", exhaustive=("strict",))
def test_places_of_master_weights_are_those_of_the_layout_in_force(world: Worlds, more: dict[str, Any]) -> None:
    world(2).run(_places, more)


# -- memory -----------------------------------------------------------------------------------------------------------

_BUCKET_BYTES = 25 << 20


def _peak(zero: int, reducer: Any) -> int:
    """Return the peak memory of a rank during a step whose gradients are much larger than its activations."""
    start()
    with PipelineParallelGrid("data=2") as grid:
        own = {"stage": zero, "reduce_bucket_size": _BUCKET_BYTES // 4, "overlap_comm": zero == 2}
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
        engine = _engine(grid, zero, model=model, reducer=reducer, zero_optimization=own, gradient_accumulation_steps=3)
        inputs = torch.ones(2, 1024)

        def step() -> None:
            for _ in range(3):
                engine.backward(engine(inputs).square().mean())
                engine.step()

        return peak(step)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [1, 2])
def test_uses_at_most_one_bucket_more_memory(zero: int) -> None:
    peaks: dict[bool, list[int]] = {False: [], True: []}
    for _ in range(5):  # threads overlap otherwise in each run, which moves a peak by up to two buckets
        for is_ours, reducer in ((False, False), (True, {"bucket_bytes": _BUCKET_BYTES})):
            peaks[is_ours] += run_ranks(2, _peak, zero, reducer)
    assert min(peaks[True]) <= min(peaks[False]) + _BUCKET_BYTES


def _reports() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine = _engine(grid, 1, reducer={**SMALL, "overlap_parameters": True}, gradient_accumulation_steps=1)
        _train(engine, 0, 3)
        report = engine.gradient_reducer.report()
        assert len(report.steps[-1].gathers) == len(engine.gradient_reducer.buckets)
        assert "regions of parameters" in str(report)
        engine.destroy()


def test_report_contains_gathers(world: Worlds) -> None:
    world(2).run(_reports)


def _refusals() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine = _engine(grid, 1, reducer={"overlap_parameters": True})
        with pytest.raises(RuntimeError, match=r"offload_states\(\).*detach\(\) it first"):
            engine.optimizer.offload_states()
        engine.destroy()
        with pytest.raises(ValueError, match=r"overlap_parameters=True: .* ZeRO stages 1 and 2"):
            GradientReducer(_model(), grid=grid, overlap_parameters=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"optimizer": None}, "the engine has no optimizer"),
        ({"enable_backward_allreduce": False}, "the optimizer 'onebitadam' communicates by itself"),
        ({"enable_backward_allreduce": False, "pipeline_parallelism": True}, ""),  # which reduces in its schedule
        ({"stage": 1, "by_element": False}, ""),
        ({"stage": 1, "by_element": False, "is_bf16": True}, "SGD is not known to update each element by itself"),
        ({"stage": 2}, ""),
        ({"stage": 2, "by_element": False}, "SGD is not known to update each element by itself"),
        ({"stage": 2, "micro_steps": 3}, "a step has begun"),
        ({"stage": 1, "micro_steps": 3}, ""),
        ({"is_compiled": True}, "DeepCompile reduces gradients"),
    ],
)
def test_engines_that_no_reducer_fits_are_refused_with_the_reason(changed: dict[str, Any], reason: str) -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    kind = BF16_Optimizer if changed.pop("is_bf16", False) else DeepSpeedZeroOptimizer
    of_zero = mock.Mock(spec=kind, optimizer=inner, param_groups=inner.param_groups)
    case = {"stage": 0, "by_element": True, "micro_steps": 4, "is_compiled": False, "optimizer": of_zero} | changed
    engine: Any = SimpleNamespace(
        _config=None,
        optimizer=case["optimizer"],
        optimizer_name=lambda: "onebitadam",
        enable_backward_allreduce=case.get("enable_backward_allreduce", True),
        pipeline_parallelism=case.get("pipeline_parallelism", False),
        zero_optimization_stage=lambda: case["stage"],
        micro_steps=case["micro_steps"],
        gradient_accumulation_steps=lambda: 2,
        is_deepcompile_active=lambda: case["is_compiled"],
    )
    parts = {"may_have_options": lambda _: False, "is_element_by_element": lambda _: case["by_element"]}
    with mock.patch.multiple(engine_driver, **parts):
        found = engine_driver.why_not_attachable(engine)
    assert bool(found) == bool(reason)
    assert (found or "").startswith(reason)


def test_incompatible_options_and_calls_raise(world: Worlds) -> None:
    world(2).run(_refusals)


def _train_groups(kind: type[torch.optim.Optimizer], stage: int, reducer: bool) -> None:
    """Train two groups with a schedule of the program, beside the same module on the samples of all ranks."""
    start()

    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        optimizer = kind([{"params": module[2].parameters()}, {"params": module[0].parameters(), "lr": 0.02}], lr=0.1)
        return module, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    alone, optimizer, schedule = build()
    module, *given = build()
    options = settings(gradient_accumulation_steps=1, zero_optimization={"stage": stage})
    del options["optimizer"]
    with PipelineParallelGrid("data=2") as grid:
        named = dict(zip(("optimizer", "lr_scheduler"), given, strict=True))
        engine, *_ = initialize(model=module, mpu=grid, config=options | {"gradient_reducer": reducer}, **named)
        for step in range(3):
            inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            loss = F.mse_loss(alone(inputs), inputs.sin())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            own = inputs.chunk(2)[dist.get_rank()]
            engine.backward(F.mse_loss(engine(own), own.sin()))
            engine.step()
            for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(safe_get_full_fp32_param(ours), theirs.detach())
                for key, state in optimizer.state[theirs].items():
                    if state.dim():
                        torch.testing.assert_close(safe_get_full_optimizer_state(ours, key), state)
        engine.destroy()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "stage", "reducer"),
    mark_exhaustive(
        [
            *((torch.optim.Adagrad, stage, reducer) for stage, reducer in ((1, True), (3, False), (1, False))),
            *((torch.optim.AdamW, stage, reducer) for stage, reducer in ((1, True), (1, False), (3, False))),
            *((kind, 2, reducer) for kind in (torch.optim.Adagrad, torch.optim.AdamW) for reducer in (False, True)),
        ],
        lambda number, _: number in (0, 1, 3, 4),
    ),
)
def test_groups_of_an_optimizer_train_and_have_states_as_in_one_process(
    world: Worlds, kind: type[torch.optim.Optimizer], stage: int, reducer: bool
) -> None:
    world(2).run(_train_groups, kind, stage, reducer)


def _one_rank_is_wrong() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine = _engine(grid, 1, reducer=False)
        wrong = {"bucket_bytes": 0} if dist.get_rank() == 1 else {}
        with pytest.raises((ValueError, DisagreementError), match="bucket_bytes=0"):
            GradientReducer.attach(engine, **wrong)
        GradientReducer.attach(engine, **SMALL)
        _train(engine, 0, 2)
        engine.destroy()


def test_an_invalid_option_on_one_rank_is_refused_on_all(world: Worlds) -> None:
    world(2).run(_one_rank_is_wrong, deadline=30)


def _in_slices() -> None:
    """A grid is enough; no reducer is attached."""
    start()
    with PipelineParallelGrid("data=4") as grid, mock.patch.object(exchange.PeerExchange, "gather_now") as gather:
        engine = _engine(grid, 1, reducer=False)
        _train(engine, 0, 2)
        assert gather.call_count == 2
        engine.destroy()
    dist.barrier()
    with mock.patch.object(exchange.PeerExchange, "gather_now") as gather:
        engine, *_ = deepspeed.initialize(model=_model(), config=settings(zero_optimization={"stage": 1}))
        _train(engine, 0, 1)
        assert gather.call_count == 0, "and nothing of it without a grid"
        engine.destroy()


@pytest.mark.backends("gloo")
def test_deepspeeds_own_partitions_are_gathered_in_slices(world: Worlds) -> None:
    world(4).run(_in_slices)
