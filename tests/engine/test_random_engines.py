"""Random small models in random engines train with our reducer as with DeepSpeed's own reduction, or are refused.

The default set tries the same few engines each time; ``pytest -m exhaustive`` tries 200 others.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._utils import _unflatten_dense_tensors
from torch.utils.checkpoint import checkpoint

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from tests.support.failing import FailsInBackward
from tests.support.world import Worlds

pytestmark = [pytest.mark.thorough, pytest.mark.backends("gloo", exhaustive=("strict",))]

WIDTH = 8
STEPS = 5
TIED = ["linear.weight", "linear.bias", "other.weight", "other.bias"]


@dataclass(frozen=True)
class Engine:
    """The model, engine and options of one case."""

    topology: str
    layers: tuple[str, ...]
    zero: int = 0
    bf16: bool = False
    wide_sums: bool = False
    accumulation: int = 1
    clip: float = 0.0
    bucket_bytes: int = 600
    overlap: bool | None = None
    hook_before: str = ""
    hook_after: str = ""
    evaluates: bool = False
    resumes: bool = False
    crosses: bool = False
    """If True, the case resumes from a checkpoint of the other reduction; both have the same format."""
    overlap_parameters: bool = False
    fails: bool = False

    @property
    def is_pipeline(self) -> bool:
        return "pipe" in self.topology


NOTHING = tuple(_unflatten_dense_tensors(torch.empty(0), [torch.empty(0, 3)])[0].shape)
"""The shape of a parameter without elements; torch 2.8, with which DeepSpeed lays out parameters, makes it ``[0]``."""


class Layer(nn.Module):
    """A layer ``[b, WIDTH] -> [b, WIDTH]`` of one of several kinds; its computation may depend on the step."""

    step = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "embedding":
            self.table = nn.Embedding(11, WIDTH)
        elif kind == "large":
            self.expand, self.contract = nn.Linear(WIDTH, 2100), nn.Linear(2100, WIDTH)
        elif kind == "scalar":
            self.scale, self.nothing = nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.empty(NOTHING))
        elif kind == "norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        else:
            self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "frozen":
            self.linear.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.change_of(hidden))

    def change_of(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kind == "embedding":
            changed: torch.Tensor = self.table((hidden.detach().float() * 10).long().abs().sum(1) % 11)
        elif self.kind == "large":
            changed = self.contract(torch.relu(self.expand(hidden)))
        elif self.kind == "scalar":
            changed = hidden * self.scale + self.nothing.sum()
        elif self.kind == "norm":
            changed = self.norm(hidden)
        elif self.kind == "twice":
            changed = self.other(hidden)
            for _ in range(2 if self.step != 3 else 3):
                changed = checkpoint(self.linear, changed, use_reentrant=True)
        elif self.kind == "sometimes":
            changed = self.linear(hidden) if self.step % 2 else self.other(hidden)
        elif self.kind == "unused":
            changed = self.linear(hidden)
        else:
            changed = self.other(self.linear(hidden))
        return changed


# DeepSpeed broadcasts parameters as bytes: neither scalars nor strided ones train there. It keeps buffers wide.
NOT_IN_BF16 = {"embedding", "norm"}
KINDS = ["plain", "frozen", "unused", "sometimes", "twice", "scalar", "large", "norm", "tied"]


class Model(nn.Module):
    """A chain of layers; a tied layer shares the weight of the first."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = Layer("plain")
        self.layers = nn.ModuleList(first if kind == "tied" else Layer(kind) for kind in engine.layers)
        self.layers.append(first)

    def forward(self, hidden: torch.Tensor, fails: bool = False) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return FailsInBackward.apply(hidden) if fails else hidden


def scale_gradient(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.75)


def hook(parameter: nn.Parameter, kind: str) -> None:
    """Register a hook of the given kind, as a user would."""
    if kind == "tensor":
        parameter.register_hook(lambda gradient: gradient * 0.5)
    elif kind == "accumulated":
        parameter.register_post_accumulate_grad_hook(scale_gradient)


def config_of(engine: Engine, reduced: bool) -> dict[str, Any]:
    sizes = {"bucket_bytes": engine.bucket_bytes, "first_bucket_bytes": 200, "overlap": engine.overlap}
    if engine.zero:
        sizes["overlap_parameters"] = engine.overlap_parameters
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": engine.accumulation,
        "gradient_clipping": engine.clip,
        "zero_optimization": {"stage": engine.zero},
        "bf16": {"enabled": engine.bf16},
        # With a rate of 0.05, rounding grows 30 times in a step.
        "optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "gradient_reducer": sizes if reduced else False,
    }
    if engine.bf16 and engine.wide_sums:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def build(engine: Engine, grid: PipelineParallelGrid, reduced: bool) -> Any:
    """Create an engine; only our own errors may be raised before the first step."""
    if engine.is_pipeline:
        torch.manual_seed(0)
        tied = [
            TiedLayerSpec("first", Layer, "plain", tied_weight_attr=TIED) if kind == "tied" else LayerSpec(Layer, kind)
            for kind in engine.layers
        ]
        layers = [TiedLayerSpec("first", Layer, "plain", tied_weight_attr=TIED), *tied]
        module: Any = PipelineModule(
            layers, grid=grid, loss_fn=F.mse_loss, seed_layers=True, partition_method="uniform"
        )
    else:
        module = Model(engine)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if trained:
        hook(trained[0], engine.hook_before)
    mpu = {} if engine.is_pipeline else {"mpu": grid}
    made, *_ = initialize(
        model=module, config=config_of(engine, reduced), model_parameters=list(module.parameters()), **mpu
    )
    if trained:
        hook(trained[-1], engine.hook_after)
    return made


def samples(step: int, micro_batch: int, grid: PipelineParallelGrid, bf16: bool) -> tuple[torch.Tensor, torch.Tensor]:
    seed = 1000 * step + 100 * micro_batch + grid.get_sample_rank()
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    inputs = inputs.bfloat16() if bf16 else inputs
    return inputs, inputs.roll(1, dims=1).sin()


def train_step(made: Any, engine: Engine, grid: PipelineParallelGrid, step: int) -> float:
    """Train one step; return its loss on this rank."""
    Layer.step = step
    batches = [samples(step, micro_batch, grid, engine.bf16) for micro_batch in range(engine.accumulation)]
    if engine.is_pipeline:
        return float(made.train_batch(iter(batches)))
    total = 0.0
    for micro_batch, (inputs, targets) in enumerate(batches):
        if engine.fails and step == 2 and micro_batch == engine.accumulation - 1:
            try:
                made.backward(F.mse_loss(made(inputs.requires_grad_(), True), targets))
            except ArithmeticError:
                made.zero_grad()
                if hasattr(made.optimizer, "clear_hp_grads"):
                    made.optimizer.clear_hp_grads()
        loss = F.mse_loss(made(inputs), targets)
        made.backward(loss)
        made.step()
        total += float(loss)
    return total


def evaluate(made: Any, engine: Engine, grid: PipelineParallelGrid) -> float:
    inputs, targets = samples(99, 0, grid, engine.bf16)
    if engine.is_pipeline:
        return float(made.eval_batch(iter([(inputs, targets)] * engine.accumulation)))
    made.eval()
    with torch.no_grad():
        loss = float(F.mse_loss(made(inputs), targets))
    made.train()
    return loss


@contextmanager
def shared_folder() -> Iterator[str]:
    """Return a temporary folder that all ranks share."""
    name = [tempfile.mkdtemp(prefix="engines-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    try:
        yield name[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(name[0])


def train(engine: Engine, reduced: bool) -> dict[str, Any]:
    """Return losses and parameters, or the error before the first step."""
    with PipelineParallelGrid(engine.topology) as grid:
        try:
            made = build(engine, grid, reduced)
        except ValueError as error:
            return {"refused": str(error)}
        losses = []
        for step in range(STEPS):
            if engine.resumes and step == 3:
                with shared_folder() as folder:
                    made.save_checkpoint(folder)
                    made.destroy()
                    made = build(engine, grid, reduced ^ engine.crosses)
                    assert made.load_checkpoint(folder)[0] is not None
            losses.append(train_step(made, engine, grid, step))
            if engine.evaluates:
                losses.append(evaluate(made, engine, grid))
        parameters = {name: p.detach().float().clone() for name, p in made.module.named_parameters()}
        made.destroy()
        return {"losses": losses, "parameters": parameters}


def both_ways(engine: Engine) -> str:
    """Return the reason why our reducer refused to train; None if it trained.

    With an axis ``shard``, DeepSpeed's reduction is compared on both topologies: over ``shard``, and over all replicas.
    """
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    everywhere = replace(engine, topology=engine.topology.replace("shard", "+rows"))
    theirs, ours = train(copy.deepcopy(everywhere), False), train(engine, True)
    assert "refused" not in theirs
    if "shard" in engine.topology:
        _compare(engine, train(copy.deepcopy(engine), False), theirs)
    if "refused" in ours:
        return str(ours["refused"])
    _compare(engine, ours, theirs)
    return ""


def _compare(engine: Engine, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    tolerance = 3e-2 if engine.bf16 else 1e-4
    if engine.wide_sums and "twice" in engine.layers:
        tolerance *= 2  # DeepSpeed sums repeated gradients in bf16 before it widens them
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=tolerance, atol=tolerance)
    for name, value in theirs["parameters"].items():
        torch.testing.assert_close(
            ours["parameters"][name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


OF_FOUR = ["data=4", "data=2,model=2", "model=2,data=2", "data=2,seq=2", "pipe=2,data=2", "data=2,pipe=2", "pipe=4"]
OVER_SHARD = [
    *("data=2,shard=2", "shard=2,data=2", "shard=4", "data=4,shard=1", "pipe=2,shard=2", "shard=2,pipe=2"),
    *("model=2,shard=2", "shard=2,model=2", "seq=2,shard=2", "shard=2,seq=2"),
]
OVER_SHARD_OF_EIGHT = [
    ",".join(f"{axis}=2" for axis in order)
    for axis in ("pipe", "model", "seq")
    for order in permutations(("data", "shard", axis))
]


@st.composite
def engines(draw: st.DrawFn, topologies: Sequence[str]) -> Engine:
    """Draw a combination that DeepSpeed itself trains."""
    topology = draw(st.sampled_from(topologies))
    is_pipeline = "pipe" in topology
    kinds = KINDS if is_pipeline else [*KINDS, "embedding"]
    layers = tuple(draw(st.lists(st.sampled_from(kinds), min_size=4 if is_pipeline else 1, max_size=7)))
    stages = [0, 1] if is_pipeline or "twice" in layers else [0, 1, 2]  # DeepSpeed's stage 2 fails there itself
    zero = draw(st.sampled_from(stages))
    bf16 = not NOT_IN_BF16.intersection(layers) and draw(st.booleans())
    accumulation = draw(st.integers(1, 3))
    hooks = ["", "tensor", "accumulated"]
    return Engine(
        topology,
        layers,
        zero,
        bf16,
        wide_sums=bf16 and zero == 1 and draw(st.booleans()),
        accumulation=accumulation,
        clip=draw(st.sampled_from([0.0, 0.1])),
        bucket_bytes=draw(st.sampled_from([300, 2000, 10**6])),
        overlap=draw(st.sampled_from([None, True, False])),
        hook_before=draw(st.sampled_from(hooks)),
        hook_after=draw(st.sampled_from(hooks)),
        evaluates=draw(st.booleans()),
        resumes=not (bf16 and topology == "pipe=4") and draw(st.booleans()),  # DeepSpeed cannot load its own file
        crosses=draw(st.booleans()),
        overlap_parameters=draw(st.booleans()),
        fails=not is_pipeline and zero < 2 and draw(st.booleans()),  # DeepSpeed's stage 2 cannot continue after it
    )


@pytest.mark.parametrize(
    ("topologies", "ranks", "examples", "derandomize"),
    [
        (OF_FOUR, 4, 5, True),
        pytest.param(OF_FOUR, 4, 200, False, marks=pytest.mark.exhaustive),
        pytest.param(OVER_SHARD, 4, 60, False, marks=pytest.mark.exhaustive),
        pytest.param(OVER_SHARD_OF_EIGHT, 8, 40, False, marks=pytest.mark.exhaustive),
    ],
    ids=["few", "many", "shard", "shard_of_eight"],
)
def test_random_engines_train_as_with_deepspeeds_reduction(
    world: Worlds, topologies: Sequence[str], ranks: int, examples: int, derandomize: bool
) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(engines(topologies))
    def trains_alike(engine: Engine) -> None:
        refusals.append(world(ranks).run(both_ways, engine)[0])

    refusals: list[str] = []
    trains_alike()
    assert sum(map(bool, refusals)) <= len(refusals) // 3, refusals


@pytest.mark.parametrize(
    "engine",
    [
        Engine("data=2", ("twice",), zero=1, bucket_bytes=300, hook_before="accumulated"),
        Engine("data=2", ("plain", "large"), zero=1, accumulation=2, bucket_bytes=300, hook_before="accumulated"),
        Engine("pipe=2", ("plain",) * 4, bf16=True, accumulation=2, bucket_bytes=300, hook_after="accumulated"),
    ],
    ids=["further gradients", "micro-batches", "BF16_Optimizer"],
)
def test_hooks_see_the_gradients_that_they_see_without_the_reducer(world: Worlds, engine: Engine) -> None:
    """A hook that halves ``parameter.grad`` halves what earlier backward passes have added to it, too.

    ``BF16_Optimizer`` takes the gradient of each micro-batch out of ``parameter.grad``.
    """
    assert world(2).run(both_ways, engine)[0] == ""
