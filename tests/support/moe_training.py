"""Train a small mixture of experts in one process with plain PyTorch, and on every rank with DeepSpeed.

The initial value of a parameter depends only on its name, in which an expert has its number in the whole layer. So any
two ways of training can be compared parameter by parameter.
"""

from __future__ import annotations

import math
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, ProcessTopology, initialize
from ds_topo.groups import create_expert_groups
from ds_topo.topology.rank_tables import ExpertPlan
from tests.support.training import (
    Batch,
    Run,
    assert_trained_alike,
    destroy_engine,
    engine_config,
    own_samples,
    train_by_hand,
    train_engine,
)

WIDTH, HIDDEN, EXPERTS, BATCH, MICRO_BATCHES = 8, 16, 4, 16, 2
DESCENT = {"lr": 0.05, "momentum": 0.9}
"""Plain SGD with momentum, because Adam would hide a wrong factor of a gradient."""
OFFLOAD = {"device": "cpu"}
SMALL_BUCKETS = {"bucket_bytes": 600, "first_bucket_bytes": 100, "last_bucket_bytes": 100}
LOCAL_EXPERT = re.compile(r"deepspeed_experts\.(\d+)\.")


@dataclass(frozen=True)
class Case:
    """A layout, a model and options to train with.

    ``sizes`` has the expert parallel size of each layer, 0 for a dense layer. With ``created`` the user creates the
    groups. With ``reduced`` our reducer reduces the gradients. With ``bias`` experts have one, which slices replicate.
    With ``wide`` gradients accumulate in fp32.
    """

    topology: str
    sizes: tuple[int, ...]
    zero: int = 0
    tensor_parallel: bool = False
    data_first: bool = False
    pipeline: bool = True
    drop_tokens: bool = False
    clip: float = 0.0
    created: bool = True
    bf16: bool = False
    offload: bool = False
    reduced: bool = False
    bias: bool = False
    wide: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return ProcessTopology.from_spec(self.topology).world_size()

    def reference(self, steps: int) -> Run:
        """Train the same model in one process."""
        return train_reference(tuple(size > 0 for size in self.sizes), steps, self.clip, self.bias)

    def __str__(self) -> str:
        """Return a name for ``pytest -k``, such as ``pipe2-data2-experts0210-zero1-clip``."""
        switches = ("tensor_parallel", "data_first", "drop_tokens", "bf16", "offload", "reduced", "bias", "wide")
        words = [self.topology.replace("=", "").replace(",", "-"), f"experts{''.join(map(str, self.sizes))}"]
        words += ["" if self.pipeline else "plain", f"zero{self.zero}", "clip" if self.clip else ""]
        words += [switch for switch in switches if getattr(self, switch)]
        words += [] if self.created else ["created_by_module"]
        return "-".join(word for word in words if word)


class Dense(nn.Linear):
    """A layer without experts."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(super().forward(hidden))


class Expert(nn.Module):
    """An expert of two linear layers, or one slice of them, and a bias that slices replicate."""

    def __init__(self, slices: Any = None, bias: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None
        self.slices = slices
        size = HIDDEN // (1 if slices is None else dist.get_world_size(slices))
        self.expand, self.contract = nn.Linear(WIDTH, size, bias=False), nn.Linear(size, WIDTH, bias=False)
        if slices is not None:
            self.expand.weight.partition_dim, self.contract.weight.partition_dim = 0, 1
            if self.bias is not None:
                self.bias.tensor_model_parallel = False  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> Expert:
        return Expert(self.slices, self.bias is not None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.slices is not None:
            tokens = CopyToSlices.apply(tokens, self.slices)
        partial: torch.Tensor = self.contract(F.gelu(self.expand(tokens)))
        whole = partial if self.slices is None else SumOverSlices.apply(partial, self.slices)
        return whole if self.bias is None else whole + self.bias


class CopyToSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return tokens

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOverSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: Any) -> torch.Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class Mixture(nn.Module):
    """DeepSpeed's MoE layer with a residual connection."""

    def __init__(self, size: int, slices: Any = None, drop_tokens: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.moe = MoE(
            WIDTH,
            Expert(slices, bias),
            num_experts=EXPERTS,
            ep_size=size,
            drop_tokens=drop_tokens,
            capacity_factor=float(EXPERTS) + 0.3,
            use_rts=False,
            min_capacity=1,
            enable_expert_tensor_parallelism=slices is not None,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.moe(hidden)[0]
        return hidden + mixed


class ReferenceMixture(nn.Module):
    """The same in plain PyTorch: each token passes the expert with its greatest score, times that score."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(bias=bias) for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(hidden).softmax(-1).max(-1)
        outputs = torch.stack([expert(hidden) for expert in self.experts])
        return hidden + scores[:, None] * outputs[chosen, torch.arange(len(hidden))]


def canonical_name(name: str, first_expert: int = 0) -> str:
    """Return the name of a parameter in the reference."""
    name = name.replace("moe.deepspeed_moe.gate.wg", "gate").replace("moe.deepspeed_moe.experts.", "")
    return LOCAL_EXPERT.sub(lambda match: f"experts.{first_expert + int(match[1])}.", name)


def value_of(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the initial value of a parameter of the reference."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=generator) * (1.5 if "gate" in name else 0.4)


def whole_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in the reference of a parameter that may be a slice of an expert."""
    if "experts" not in name or "bias" in name:
        return tuple(shape)
    return (HIDDEN, WIDTH) if "expand" in name else (WIDTH, HIDDEN)


def slice_of(name: str, value: torch.Tensor, grid: PipelineParallelGrid, tensor_parallel: bool) -> torch.Tensor:
    """Return this rank's part of a parameter of the reference."""
    if "experts" not in name or "bias" in name or not tensor_parallel:
        return value
    parts = value.chunk(grid.get_slice_parallel_world_size(), dim=0 if "expand" in name else 1)
    return parts[grid.get_slice_parallel_rank()]


def batch(step: int) -> Batch:
    """Return inputs and targets ``[BATCH, WIDTH]`` of a step."""
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.roll(1, dims=1).sin()


def loss_of(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of a model or an engine."""
    return F.mse_loss(module(inputs), targets)


@cache
def train_reference(has_experts: tuple[bool, ...], steps: int, clip: float = 0.0, bias: bool = False) -> Run:
    """Train the reference in one process; ``has_experts`` says which layers have experts."""
    model = nn.Sequential(*(ReferenceMixture(bias) if layer else Dense() for layer in has_experts))
    for name, parameter in model.named_parameters():
        parameter.data = value_of(name, parameter.shape)
    optimizer = torch.optim.SGD(model.parameters(), **DESCENT)
    return train_by_hand(model, optimizer, map(batch, range(steps)), loss_of, clip or math.inf)


class Trainer:
    """The engine of a case on one rank."""

    def __init__(self, case: Case) -> None:
        warnings.simplefilter("ignore", FutureWarning)
        deepspeed.init_distributed(verbose=False)
        self.case = case
        self.grid, module = self._module()
        sizes = sorted(set(case.sizes) - {0})
        topology = self.grid.topology()
        self.plans = {size: ExpertPlan(topology, size, case.tensor_parallel, case.data_first) for size in sizes}
        for size in sizes if case.created else []:
            create_expert_groups(self.grid, size, case.tensor_parallel, case.data_first)
        self._initialize_parameters(module)
        share = BATCH // self.grid.get_sample_world_size()
        self.dtype = torch.bfloat16 if case.bf16 else torch.float32
        config = engine_config(
            share // MICRO_BATCHES,
            MICRO_BATCHES,
            case.clip,
            optimizer={"type": "SGD", "params": DESCENT},
            zero_optimization={"stage": case.zero, **({"offload_optimizer": OFFLOAD} if case.offload else {})},
            bf16={"enabled": case.bf16},
            **({"data_types": {"grad_accum_dtype": "fp32"}} if case.wide else {}),
            gradient_reducer=SMALL_BUCKETS if case.reduced else False,
        )
        self.engine, *_ = initialize(
            model=module,
            config=config,
            model_parameters=list(module.parameters()),
            **({} if case.pipeline else {"mpu": self.grid}),
        )

    def _module(self) -> tuple[PipelineParallelGrid, nn.Module]:
        case = self.case
        if case.pipeline and not case.tensor_parallel:
            module = self._pipeline_module(None, topology=case.topology)
            return module.mpu(), module
        grid = PipelineParallelGrid(case.topology)
        slices = grid.get_slice_parallel_group() if case.tensor_parallel else None
        if case.pipeline:
            module = self._pipeline_module(slices, grid=grid)
            return module.mpu(), module
        layers = (Mixture(size, slices, case.drop_tokens, case.bias) if size else Dense() for size in case.sizes)
        return grid, nn.Sequential(*layers)

    def _pipeline_module(self, slices: Any, **layout: Any) -> PipelineModule:
        more, sizes = (self.case.drop_tokens, self.case.bias), self.case.sizes
        layers = [LayerSpec(Mixture, size, slices, *more) if size else LayerSpec(Dense) for size in sizes]
        return PipelineModule(layers, loss_fn=nn.MSELoss(), partition_method="uniform", **layout)

    def first_expert(self, parameter: torch.nn.Parameter) -> int:
        """Return the number of this rank's first expert in its layer."""
        name = getattr(parameter, "group_name", None)
        if name is None:
            return 0
        plan = next(plan for plan in self.plans.values() if plan.name == name)
        place = plan.expert_ranks(self.grid.grid_rank).index(self.grid.grid_rank)
        return place * (EXPERTS // plan.expert_parallel_size)

    def _initialize_parameters(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            whole = canonical_name(name, self.first_expert(parameter))
            value = value_of(whole, whole_shape(whole, parameter.shape))
            parameter.data = slice_of(whole, value, self.grid, self.case.tensor_parallel).clone()

    def train(self, steps: range) -> Run:
        """Train these steps."""
        samples = (own_samples(batch(step), self.grid) for step in steps)
        cast = ((inputs.to(self.dtype), targets.to(self.dtype)) for inputs, targets in samples)
        run = train_engine(self.engine, self.grid, cast, loss_of)
        run.parameters = self.parameters()
        return run

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's parameters under the reference's names."""
        return {
            canonical_name(name, self.first_expert(parameter)): parameter.detach().clone()
            for name, parameter in self.engine.module.named_parameters()
        }

    def share_of(self, reference: Run) -> Run:
        """Return the expected run of this rank."""
        slices = {
            name: slice_of(name, value, self.grid, self.case.tensor_parallel)
            for name, value in reference.parameters.items()
        }
        return Run(reference.losses, reference.norms, slices)

    def destroy(self) -> None:
        destroy_engine(self.engine)
        self.grid.destroy()


@contextmanager
def trainer(case: Case) -> Iterator[Trainer]:
    """Yield a trainer, and destroy it afterwards."""
    created = Trainer(case)
    yield created
    created.destroy()


def assert_trains_as_one_process(case: Case, reference: Run) -> None:
    """Train on this rank of the case, and compare the run with the case's reference."""
    with trainer(case) as rank:
        run = rank.train(range(len(reference.losses)))
        close = 3e-2 if case.bf16 else 1e-5
        norms = close if run.norms else None
        assert_trained_alike(run, rank.share_of(reference), losses=close, norms=norms, tensors=close)
