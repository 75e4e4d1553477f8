"""Engines of two replicas train as one engine over both, with whatever an engine has; faults are in tests/cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

from ds_topo import (
    DualPipeVModule,
    GradientReducer,
    PipelineModule,
    PipelineParallelGrid,
    check_replicas,
    initialize,
    use,
)
from ds_topo.engine.quorum import ReplicaOptions
from ds_topo.errors import CheckpointLayoutError, EngineOptionError, ReplicaError
from ds_topo.groups import create_expert_groups
from ds_topo.layers import ParallelLinear
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks
from tests.support.small_engines import settings, start
from tests.support.strict_backend import NAME, StrictProcessGroup

torchft = pytest.importorskip("torchft", reason='torchft is not installed: pip install "ds_topo[torchft]"')
from torchft.coordination import LighthouseServer  # noqa: E402
from torchft.process_group import ProcessGroupWrapper  # noqa: E402

STEPS, WIDTH = 4, 8
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}, "communication_data_type": "fp32"}
BF16 = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
AUTOTP = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*first\.weight$"], "partition_type": "column"},
                {"patterns": [r".*inner\.weight$"], "partition_type": "row"},
            ],
        },
    }
}
PARTS_OFF = {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}


@dataclass(frozen=True)
class Case:
    """A layout of a replica of two ranks, and what an engine has.

    ``overflow`` makes the gradients of one replica infinite in one step.
    """

    spec: str
    zero: int = 0
    kind: str = "plain"
    overflow: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    of_zero: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.spec, f"zero{self.zero}", self.kind, *self.config, *self.of_zero]
        return "-".join([*words, "overflow"] if self.overflow else words)

    @property
    def is_pipeline(self) -> bool:
        """True if the engine trains a pipeline."""
        return self.kind in ("pipeline", "DualPipeV")


class Model(nn.Module):
    """Layers of one kind; returns the outputs."""

    def __init__(self, kind: str, grid: PipelineParallelGrid) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner: Any = nn.Linear(WIDTH, WIDTH)
        if kind == "slices":
            columns, rows = (ParallelLinear(WIDTH, WIDTH, dim=dim, group=grid.get_group("model")) for dim in (1, 0))
            self.inner = nn.Sequential(columns, nn.Tanh(), rows)
        elif kind == "experts":
            torch.manual_seed(5 + grid.grid_rank % 2)
            expert = nn.Linear(WIDTH, WIDTH)
            self.inner = MoE(WIDTH, expert, num_experts=2, ep_size=2, k=1, capacity_factor=4.0, min_capacity=0)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(WIDTH))  # like a running mean, it differs between replicas

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += inputs.detach().float().mean(0)
        found = self.inner(torch.tanh(self.first(inputs.to(self.first.weight.dtype))))
        return self.last(found[0] if isinstance(found, tuple) else found)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]


def loss_of(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - inputs.float().sin()).square().mean()


def data_of(step: int, micro_batch: int, share: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro_batch + share))


def trained(
    case: Case, grid: PipelineParallelGrid, replica: int, more: dict[str, Any]
) -> tuple[list[Any], list[float]]:
    """Train for some steps; return this rank's weights, and the losses and norms."""
    zero = {"stage": case.zero, "stage3_param_persistence_threshold": 0, **case.of_zero}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "eps": 1e-3}}
    config = settings(zero_optimization=zero, optimizer=optimizer, gradient_clipping=0.3, **more | case.config)
    if case.is_pipeline:
        kind = PipelineModule if case.kind == "pipeline" else DualPipeVModule
        module: Any = kind(layers(), grid=grid, loss_fn=loss_of, partition_method="uniform")
        engine, *_ = initialize(model=module, config=config)
    else:
        if case.kind == "experts":
            create_expert_groups(grid, 2)
        engine, *_ = initialize(model=Model(case.kind, grid), mpu=grid, config=config)
    found, share = [], grid.get_sample_rank() + (replica * grid.get_sample_world_size() if "replicas" in more else 0)
    for step in range(STEPS):
        batches = [data_of(step, number, share) for number in range(engine.gradient_accumulation_steps())]
        if case.is_pipeline:
            loss = engine.train_batch(iter([(batch, batch) for batch in batches]))
        else:
            for batch in batches:
                loss = loss_of(engine(batch), batch)
                infinite = case.overflow and step == 1 and replica == 1
                engine.backward(loss * float("inf") if infinite else loss)
                engine.step()
        norm = engine.get_global_grad_norm()
        found += [engine.global_steps, engine.skipped_steps, float(norm) if norm is not None else 0.0]
        found += [float(getattr(engine.optimizer, "cur_scale", 0.0))]
    if "replicas" in more:
        assert engine.replicas.has_committed
        assert engine.replicas.size == 2
        if case.zero < 3:
            check_replicas(engine)
    if engine.gradient_reducer is not None:
        engine.gradient_reducer.wait()
    weights = [getattr(one, "ds_tensor", one).detach().clone() for one in engine.module.parameters()]
    engine.destroy()
    return weights, found


def one_replica(case: Case, replica: int, address: str) -> tuple[list[Any], list[float]]:
    """Train on a rank of one of two replicas."""
    start()
    section = {"min_replica_size": 2, "lighthouse_addr": address, "timeout": 30, "hostname": "localhost"}
    with PipelineParallelGrid(case.spec) as grid:
        return trained(case, grid, replica, {"replicas": section})


def one_job(case: Case) -> tuple[list[Any], list[float]]:
    """Train on a rank of both replicas as one job."""
    start()
    inner = case.spec.replace("data=2", "")
    with PipelineParallelGrid(f"data=2,{inner}" if inner else "data=4") as grid:
        return trained(case, grid, dist.get_rank() // 2, {"gradient_reducer": True} if case.zero < 3 else {})


def in_replicas(
    function: Callable[..., Any], ranks: int, *arguments: Any, backend: str = "gloo", least: int = 2
) -> list[list[Any]]:
    """Run a function on the ranks of two jobs with one lighthouse; return the results of both."""
    server = LighthouseServer("[::]:0", least, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
    with ThreadPoolExecutor(2) as pool:
        run = partial(run_ranks, ranks, function, *arguments, backend=backend)
        jobs = [pool.submit(run, one, server.address()) for one in range(2)]
        found = [job.result() for job in jobs]
    server.shutdown()
    return found


CASES = [
    Case("shard=2", zero=1),
    Case("shard=2", zero=3),
    Case("data=2", zero=0),
    Case("shard=2", zero=2),
    Case("data=2", zero=1),
    Case("pipe=2", zero=1, kind="pipeline"),
    Case("model=2", zero=1, kind="slices"),
    Case("shard=2", zero=1, kind="experts"),
    Case("data=2", zero=0, kind="experts"),
    Case("shard=2", zero=1, overflow=True, config=FP16),
    Case("shard=2", zero=3, overflow=True, config=FP16),
    Case("data=2", zero=0, overflow=True, config=FP16),
    Case("shard=2", zero=1, config=BF16),
    Case("shard=2", zero=1, config=BF16 | SUMS),
    Case("shard=2", zero=2, config=BF16),
    Case("shard=2", zero=3, config=BF16),
    Case("shard=2", zero=3, of_zero=OFFLOAD),
    Case("shard=2", zero=1, config={"gradient_reducer": {"overlap_parameters": True}}),
    Case("pipe=2", zero=1, kind="DualPipeV", config=PARTS_OFF | {"gradient_accumulation_steps": 4}),
    Case("model=2", zero=1, config=AUTOTP),
]
DEFAULT = {9}


@pytest.mark.parametrize("case", mark_exhaustive(CASES, default=lambda number, _: number in DEFAULT), ids=str)
def test_replicas_train_as_one_job(case: Case) -> None:
    """Both replicas are equal to the last bit, and nearly equal to one job."""
    first, second = in_replicas(one_replica, 2, case)
    expected = run_ranks(4, one_job, case)
    tolerance = 2e-2 if "bf16" in case.config else 2e-3 if "fp16" in case.config else 1e-5
    for rank in range(2):
        (weights, found), (others, numbers) = first[rank], second[rank]
        assert found == numbers
        assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))
        assert found == pytest.approx(expected[rank][1], rel=tolerance)
        for mine, theirs in zip(weights, expected[rank][0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        assert found[4 * STEPS - 3] == int(case.overflow)


def _offloaded(_: int, address: str) -> str:
    with pytest.raises(ValueError, match="attach, for replicas below ZeRO 3: an offloaded optimizer") as raised:
        one_replica(Case("data=1", zero=1, of_zero=OFFLOAD), 0, address)
    return str(raised.value)


@pytest.mark.exhaustive
def test_offload_below_zero_3_is_refused() -> None:
    [first], [second] = in_replicas(_offloaded, 1)
    assert first == second


def _in_plain_loop(replica: int, address: str) -> list[float]:
    """Train replicas of one rank by a reducer and torchft's own optimizer; return the weights."""
    start()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    module = nn.Linear(WIDTH, 1)
    nn.init.constant_(module.weight, float(replica))  # one is healed from the other
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=module.load_state_dict,
        state_dict=module.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=address,
        hostname="localhost",
    )
    reducer = GradientReducer(module, manager=manager)
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        with reducer.no_sync():
            module(data_of(step, 0, replica)).mean().backward()
        module(data_of(step, 1, replica)).mean().backward()
        reducer.finish()
        optimizer.step()
    manager.shutdown()
    return [*module.weight.detach().flatten().tolist(), *module.bias.tolist()]


def test_reducer_averages_over_replicas_of_a_manager_in_a_plain_loop() -> None:
    [first], [second] = in_replicas(_in_plain_loop, 1)
    assert first == second
    weight = torch.tensor(first)
    gradients = [data_of(step, number, one).mean(0) for step in range(3) for number in (0, 1) for one in (0, 1)]
    moved = 0.1 * torch.stack(gradients).sum(0) / 2
    start_at = (weight[:WIDTH] + moved).round()  # 0 or 1: where the one began that healed the other
    torch.testing.assert_close(weight[:WIDTH], start_at - moved)
    assert len(start_at.unique()) == 1


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (True, "is no mapping"),
        ({"min_replicas": 2}, r"'min_replicas'. is no option: choose among min_replica_size"),
        ({"min_replica_size": 0}, "at least 1"),
        ({"timeout": -1}, "more than 0"),
        ({"lighthouse_addr": 29510}, "give a text"),
        ({"world_size_mode": "static"}, "choose 'dynamic'"),
    ],
)
def test_section_is_checked(section: Any, words: str) -> None:
    with pytest.raises(EngineOptionError, match=words):
        ReplicaOptions.of_section(section)


class _Regression(nn.Module):
    """A model in the shape that Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layer(inputs)
        return {"loss": loss_of(outputs, inputs), "logits": outputs}


def _by_trainer(folder: str, replica: int, address: str) -> tuple[list[torch.Tensor], list[float]]:
    """Train by Trainer on the samples of one replica; return the weights, and the losses and rates of its log."""
    start()
    section = {"min_replica_size": 2, "lighthouse_addr": address, "timeout": 30, "hostname": "localhost"}
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    with PipelineParallelGrid("shard=2") as grid, use(grid):
        from transformers import Trainer, TrainingArguments

        config = {"zero_optimization": {"stage": 1}, "replicas": section, **auto}
        arguments = TrainingArguments(
            folder,
            deepspeed=config,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            learning_rate=1e-2,
            warmup_steps=2,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
        )
        part = [{"inputs": data_of(number, 0, 4 + replica)[0]} for number in range(32)]
        trainer = Trainer(_Regression(), arguments, train_dataset=part)  # type: ignore[arg-type]
        trainer.train()
        engine = trainer.model_wrapped
        assert engine.replicas.size == 2
        assert engine.replicas.manager.current_step() == STEPS
        weights = [one.detach().clone() for one in engine.module.parameters()]
        rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
        engine.destroy()
        return weights, rates


@pytest.mark.exhaustive
def test_trainer_keeps_replicas_equal(tmp_path: Path) -> None:
    """Each replica has its own part of the dataset."""
    first, second = in_replicas(_by_trainer, 2, str(tmp_path))
    (weights, rates), (others, other_rates) = first[0], second[0]
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))
    assert rates == other_rates
    assert not torch.equal(weights[0], next(_Regression().parameters()))


class _StrictGroups(ProcessGroupWrapper):  # type: ignore[misc]
    """Groups over replicas by the stand-in for NCCL."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        name = f"replicas of quorum {self._quorum_id}"
        creation = SimpleNamespace(group_rank=rank, group_size=world_size, timeout=self._timeout, store=store)
        return StrictProcessGroup(SimpleNamespace(**vars(creation), group_id=name, global_ranks_in_group=[0, 1]))

    def getBackendName(self) -> str:
        return NAME


def _leaving(zero: int, replica: int, address: str) -> tuple[list[Any], set[int]]:
    """Train; the second replica leaves after some steps and comes back. Return the weights, and the sizes seen."""
    start()
    section = {"min_replica_size": 1, "lighthouse_addr": address, "timeout": 30, "hostname": "localhost"}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config = settings(zero_optimization={"stage": zero}, optimizer=optimizer, replicas=section)
    sizes = set[int]()
    with PipelineParallelGrid("shard=2") as grid, mock.patch("torchft.ProcessGroupGloo", _StrictGroups):
        for last in (3, 60) if replica == 1 else (60,):
            engine, *_ = initialize(model=Model("plain", grid), mpu=grid, config=config)
            batches = iter(engine.replicas.data_loader(torch.ones(64, WIDTH)))
            while engine.global_steps < last:
                for _ in range(engine.gradient_accumulation_steps()):
                    batch = next(batches)
                    engine.backward(loss_of(engine(batch), batch))
                    engine.step()
                sizes.add(engine.replicas.size)
                time.sleep(0.05)
            weights = [getattr(one, "ds_tensor", one).detach().clone() for one in engine.module.parameters()]
            engine.destroy()
            time.sleep(4.0 if last == 3 else 0.0)  # the other goes on alone
    return weights, sizes


@pytest.mark.thorough
@pytest.mark.parametrize("zero", mark_exhaustive([1, 3], default=lambda number, _: number == 0))
def test_communicator_over_replicas_is_made_anew_without_touching_the_others(zero: int) -> None:
    """With the stand-in for NCCL inside replicas and over them."""
    first, second = in_replicas(_leaving, 2, zero, backend="strict", least=1)
    assert [sizes for _, sizes in first] == [{1, 2}] * 2
    for (weights, _), (others, _) in zip(first, second, strict=True):
        assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))


def _with_a_spare(replica: int, address: str) -> tuple[list[torch.Tensor], int, bool]:
    """Train one replica and a spare; return the weights, the batches committed, and whether this is the spare."""
    start()
    section = {"lighthouse_addr": address, "hostname": "localhost", "world_size_mode": "fixed_with_spares"}
    config = settings(zero_optimization={"stage": 1}, replicas=section, gradient_accumulation_steps=1)
    with PipelineParallelGrid("data=1") as grid:
        engine, *_ = initialize(model=Model("plain", grid), mpu=grid, config=config)
        for batch in engine.replicas.data_loader(torch.eye(64)[:, :WIDTH]):
            engine.backward(loss_of(engine(batch), batch))
            engine.step()
            if engine.global_steps == STEPS:
                break
        found = [one.detach().clone() for one in engine.module.parameters()]
        batches, is_spare = engine.replicas.manager.batches_committed(), engine.replicas.rank is None
        engine.destroy()
    return found, batches, is_spare


@pytest.mark.exhaustive
def test_spare_adds_no_samples_and_stays_equal() -> None:
    [(weights, batches, is_spare)], [(others, same, is_other)] = in_replicas(_with_a_spare, 1)
    assert batches == same == STEPS
    assert is_spare != is_other
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))


def _of_another_kind(folder: str, different: str, replica: int, address: str) -> str:
    """Train; the second replica comes later, and is different. Return the error."""
    start()
    section = {"lighthouse_addr": address, "timeout": 3, "hostname": "localhost"}
    stage = 2 if different == "stage" and replica == 1 else 1
    config = settings(zero_optimization={"stage": stage}, replicas=section, gradient_accumulation_steps=1)
    has_begun = Path(folder, "has_begun")
    if different == "stage":
        while replica == 1 and not has_begun.exists():
            time.sleep(0.1)
    with PipelineParallelGrid("shard=2") as grid:
        model = Model("plain", grid)
        if different == "weights" and replica == 1:
            nn.init.zeros_(model.last.bias)
        engine, *_ = initialize(model=model, mpu=grid, config=config)
        try:
            while engine.global_steps < 100:
                engine.backward(engine(torch.ones(2, WIDTH)).mean())
                engine.step()
                has_begun.touch()
                time.sleep(0.1)
        except (CheckpointLayoutError, ReplicaError) as error:
            return str(error)
        finally:
            engine.destroy()
    return ""


@pytest.mark.exhaustive
def test_replica_of_another_layout_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    first, second = in_replicas(_of_another_kind, 2, str(tmp_path), "stage", least=1)
    assert first == ["", ""]
    for error in second:
        assert error.startswith(
            "this replica is {'topology': 'shard=2', 'zero': 2}, and the replica that would heal it is {'topology': "
            "'shard=2', 'zero': 1}"
        )


def test_replicas_that_begin_with_other_weights_are_refused(tmp_path: Path) -> None:
    """torchft would heal each rank from another replica, and so mix both models."""
    for errors in in_replicas(_of_another_kind, 2, str(tmp_path), "weights"):
        for error in errors:
            assert error.startswith("replicas differ before the first step: give all replicas the same initial weights")


def _altered(replica: int, address: str) -> str:
    """Train; one replica alters a weight. Then the group is made anew, as when a replica comes. Return the error."""
    start()
    section = {"min_replica_size": 2, "lighthouse_addr": address, "timeout": 10, "hostname": "localhost"}
    config = settings(zero_optimization={"stage": 1}, replicas=section, gradient_accumulation_steps=1)
    with PipelineParallelGrid("data=1") as grid:
        engine, *_ = initialize(model=Model("plain", grid), mpu=grid, config=config)
        for number in range(4):
            try:
                loss = engine(torch.ones(2, WIDTH)).mean()
            except ReplicaError as error:
                return f"{number} {error}"
            if number == 1:
                engine.replicas.manager.report_error(RuntimeError("a cable was moved"))
            engine.backward(loss)
            engine.step()
            if number == 1 and replica == 1:
                engine.module.last.bias.data += 1e-6
    return "no error"


def test_replicas_that_differ_later_are_refused_when_the_quorum_changes() -> None:
    for [error] in in_replicas(_altered, 1):
        assert error.startswith("2 replicas differ after step 1, although all have committed as many steps: give all")
