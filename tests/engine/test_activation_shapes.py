"""The buffers of a pipeline follow the shapes of its batches, in steps and evaluations, or all ranks raise."""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.pipe import schedule
from torch import nn

from ds_topo import DualPipeVModule, PipelineModule, PipelineParallelGrid
from ds_topo.base.supported import DUALPIPEV, require
from ds_topo.engine.pipelines import activation_shapes
from ds_topo.engine.pipelines.batches import Starts
from ds_topo.errors import DisagreementError, EngineOptionError
from tests.support.exhaustive import mark_exhaustive
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

Call: TypeAlias = tuple[str, list[tuple[int, ...]]]
"""``train`` or ``eval``, and the leading sizes of each micro-batch."""

CALLS: dict[str, list[Call]] = {
    "a smaller last batch": [("train", [(2,)] * 4), ("eval", [(2,)] * 4), ("eval", [(1,)] * 4), ("train", [(2,)] * 4)],
    "a larger batch": [("train", [(2,)] * 4), ("eval", [(5,)] * 4), ("train", [(2,)] * 4), ("train", [(3,)] * 4)],
    "within a step": [("train", [(2,), (2,), (2,), (1,)]), ("eval", [(3,), (1,)] * 2), ("train", [(2,)] * 4)],
    "more dimensions": [("train", [(2,)] * 4), ("eval", [(3, 2)] * 4), ("train", [(2, 1), (2,), (1, 3, 1), (2,)])],
    "fewer micro-batches": [("train", [(2,)] * 4), ("eval", [(3,)]), ("eval", [(2,)] * 5), ("train", [(2,)] * 4)],
}
SPECS = ("pipe=2,data=2", "model=2,pipe=2", "pipe=4")
BY_DEFAULT = [
    *(("pipe=2,data=2", "plain", case) for case in CALLS),
    ("model=2,pipe=2", "plain", "within a step"),
    ("model=2,pipe=2", "plain", "a smaller last batch"),
    ("pipe=4", "masked", "within a step"),
]


class Masked(nn.Module):
    """A layer that passes a mask of another type on, before the activation_shapes."""

    def __init__(self, is_first: bool = False, is_last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_first, self.is_last = is_first, is_last

    def forward(self, inputs: Any) -> Any:
        mask, values = ((inputs > 0).long(), inputs) if self.is_first else inputs
        values = torch.tanh(self.linear(values)) + mask
        return values if self.is_last else (mask, values)


def layers(kind: str = "plain") -> list[nn.Module]:
    torch.manual_seed(0)
    if kind == "masked":
        return [Masked(is_first=True), Masked(), Masked(), Masked(is_last=True)]
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)]


def batches(number: int, replica: int, sizes: list[tuple[int, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * number + replica)
    return [(torch.randn(*size, 4, generator=generator), torch.randn(*size, 4, generator=generator)) for size in sizes]


def by_hand(kind: str, replicas: int, calls: list[Call]) -> list[float]:
    """Return the losses of one process."""
    model = nn.Sequential(*copy.deepcopy(layers(kind)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number, (mode, sizes) in enumerate(calls):
        every = [each for replica in range(replicas) for each in batches(number, replica, sizes)]
        loss = sum(F.mse_loss(model(inputs), labels) for inputs, labels in every) / len(every)
        if mode == "train":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _losses(spec: str, kind: str, calls: list[Call], schedule: str = "1F1B", **options: Any) -> list[float]:
    start()
    with PipelineParallelGrid(spec) as grid:
        build = DualPipeVModule if schedule == "DualPipeV" else PipelineModule
        whole = {"pipe_partitioned": False, "grad_partitioned": False}  # DeepSpeed sends parts of the first tensor
        partitions = whole if schedule == "DualPipeV" or kind == "masked" else {}
        module = build(layers(kind), grid=grid, loss_fn=F.mse_loss, **options)
        config = settings(gradient_accumulation_steps=4, pipeline=partitions)
        engine, *_ = deepspeed.initialize(model=module, config=config)
        losses = []
        for number, (mode, sizes) in enumerate(calls):
            own = iter(batches(number, grid.get_sample_rank(), sizes))
            if mode == "train":
                losses.append(float(engine.train_batch(own)))
            else:
                losses.append(float(engine.eval_batch(own, num_micro_batches=len(sizes))))
        engine.destroy()
    return losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("spec", "kind", "case"),
    mark_exhaustive(
        [(spec, kind, case) for spec in SPECS for kind in ("plain", "masked") for case in CALLS],
        default=lambda _, case: case in BY_DEFAULT,
    ),
)
def test_losses_are_those_of_one_process(world: Worlds, spec: str, kind: str, case: str) -> None:
    expected = by_hand(kind, 2 if "data" in spec else 1, CALLS[case])
    for losses in world(4).run(_losses, spec, kind, CALLS[case], timeout=20.0):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "case", mark_exhaustive(CALLS, default=lambda _, case: case in ("within a step", "more dimensions"))
)
def test_dynamic_shapes_work_with_slices(world: Worlds, case: str) -> None:
    expected = by_hand("plain", 1, CALLS[case])
    for losses in world(4).run(_dynamic_losses, CALLS[case], timeout=20.0):
        assert losses == pytest.approx(expected, rel=1e-5)


def _dynamic_losses(calls: list[Call]) -> list[float]:
    return _losses("model=2,pipe=2", "plain", calls, dynamic_shape=True)


DUALPIPE: list[Call] = [("train", [(2,)] * 4), ("eval", [(1,)] * 4), ("eval", [(3,)] * 5), ("train", [(2,)] * 4)]


def test_dualpipe_follows_shapes_between_steps(world: Worlds) -> None:
    expected = by_hand("plain", 2, DUALPIPE)
    for losses in world(4).run(_losses, "pipe=2,data=2", "plain", DUALPIPE, "DualPipeV", timeout=20.0):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_dualpipe_refuses_other_shapes_within_a_step_on_all_ranks(world: Worlds) -> None:
    calls: list[Call] = [("train", [(2,)] * 4), ("eval", [(2,), (2,), (2,), (1,)])]
    require(DUALPIPEV)
    for error in world(4).run(_losses, "pipe=2,data=2", "plain", calls, "DualPipeV", timeout=20.0, expect_failure=True):
        assert isinstance(error, EngineOptionError)
        assert "eval_batch() have inputs of different shapes" in str(error)
        assert "drop_last=True" in str(error)


def _another_shape_on_one_slice(spec: str, reader: str) -> list[str]:
    start()
    errors = []
    with PipelineParallelGrid(spec) as grid:
        module = PipelineModule(layers(), grid=grid, loss_fn=F.mse_loss)
        engine, *_ = deepspeed.initialize(model=module, config=settings())
        is_reader = engine.is_first_stage() if reader == "inputs" else engine.is_last_stage()
        for rows in (2, 2, 2, 3, 2):  # the samples of the first two steps are compared, too
            mine = rows if is_reader and grid.get_axis_rank("model") == 1 else 2
            try:
                engine.train_batch(iter([(torch.ones(mine, 4), torch.ones(mine, 4))] * 2))
            except DisagreementError as error:
                errors.append(str(error))
        engine.destroy()
    return errors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reader", ["inputs", "labels"])
def test_another_shape_on_one_slice_raises_on_all_ranks(world: Worlds, reader: str) -> None:
    stage = 0 if reader == "inputs" else 1
    for errors in world(4).run(_another_shape_on_one_slice, "pipe=2,model=2", reader, timeout=20.0):
        (message,) = errors
        assert f"rank {2 * stage} (pipe={stage}, model=0) and its peers along 'model'" in message
        assert "batches of different shapes" in message


class Sender:
    """What ``SendActivation`` asks of an engine."""

    stage_id, dynamic_shape = 1, False

    def __init__(self) -> None:
        self.starts = Starts()
        self.sent: list[torch.Tensor] = []
        self.pipe_buffers: dict[str, list[Any]] = {"outputs": []}

    def send(self, buffer_id: int) -> None:
        self.sent.append(self.pipe_buffers["outputs"][buffer_id])


def test_a_stage_refuses_to_send_shapes_that_the_next_one_does_not_expect() -> None:
    sender = Sender()
    both: dict[type, Any] = {schedule.SendActivation: Sender.send, schedule.ForwardPass: Sender.send}
    send = activation_shapes.with_checked_sends(both)[schedule.SendActivation]
    first, same, other = torch.ones(2, 4), torch.zeros(2, 4), torch.ones(1, 4)
    sender.pipe_buffers["outputs"] = [first, same, other, other.double(), (first, first)]
    send(sender, 0)
    send(sender, 1)
    with pytest.raises(
        EngineOptionError, match=r"stage 1 .* float32 \[1, 4\], .* float32 \[2, 4\].*dynamic_shape=True"
    ):
        send(sender, 2)
    for buffer in (3, 4):
        with pytest.raises(EngineOptionError):
            send(sender, buffer)
    assert sender.sent == [first, same]
    sender.starts.announced.clear()  # as reset_activation_shape() does
    send(sender, 2)
    sender.dynamic_shape = True
    send(sender, 0)
