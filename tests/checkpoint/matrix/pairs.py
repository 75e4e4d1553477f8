"""Draw pairs of jobs at random, load a checkpoint of the first into the second, and compare every value.

    python -m tests.checkpoint.matrix --seed 0 --pairs 300
    python -m tests.checkpoint.matrix --seed 0 --only 17
    python -m tests.checkpoint.matrix --seed 0 --first 1000 --pairs 90

Values are read from the live engines by DeepSpeed's own functions for debugging, and put together here. Nothing of
``ds_topo.checkpoint`` takes part. Each pair ends in one of two ways. *Exact*: every weight, master weight, optimizer
state, number, buffer and hyperparameter is the same bit by bit, and the second job continues with the losses of the
first. *Refused*: every rank raises the same error, which names a cause and a remedy.
"""

from __future__ import annotations

import random
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe import PipelineModule as StockPipelineModule
from deepspeed.utils import groups as deepspeed_groups
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, ProcessTopology, checkpoint, groups, initialize
from ds_topo.base import supported
from ds_topo.errors import CheckpointError, TopologyError
from tests.support.moe_training import Expert, Mixture
from tests.support.small_engines import start
from tests.support.training import destroy_engine, engine_config
from tests.support.world import Worlds

WIDTH, SAMPLES, BEFORE, AFTER = 8, 8, 2, 2
TIED = TiedLayerSpec("end", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"])
"""By default DeepSpeed sums the gradients of the weight alone, and the copies of the bias differ between stages."""
STATES = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "RMSprop": ("square_avg",),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "Adafactor": ("variance",),
}
"""States of every element, by optimizer."""
HAS_STAGE_3 = supported.number(deepspeed.__version__) >= supported.PARTITIONED_PARAMETERS_ON_CPU.oldest
FROZEN = re.compile(r"\b(linear|split)\.")
ROUTES = ("live", "torch", "to stock", "from stock")
"""The second job loads DeepSpeed's files, or torch's format; or stock DeepSpeed loads what a job in its layout has
loaded and saved again; or the first job is stock DeepSpeed."""
REMEDY = re.compile(
    r"\b(use|give|load|set|save|choose|convert|build|put|register|freeze|write|leave|train)\b", re.IGNORECASE
)

Values = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One of the two jobs."""

    topology: str
    zero: int
    precision: str = "fp32"
    optimizer: str = "AdamW"
    groups: str = "one"
    frozen: bool = False
    experts: int = 0
    """The expert parallel size; 0 for none."""
    tied: bool = False
    buffer: str = ""
    """``equal`` on all slices, or ``split`` over them; empty for none."""
    is_pipeline: bool = False
    method: str = "uniform"
    options: tuple[tuple[str, Any], ...] = ()
    """Further options of ``zero_optimization``; ``reducer`` turns on our reducer."""
    is_stock: bool = False
    """True if the job runs without ds_topo."""

    @property
    def ranks(self) -> int:
        return ProcessTopology.from_spec(self.topology).world_size()

    def __str__(self) -> str:
        words = [self.topology, f"ZeRO {self.zero}", self.precision, self.optimizer]
        words += [self.groups] if self.groups != "one" else []
        words += [name for name in ("frozen", "tied", "is_pipeline", "is_stock") if getattr(self, name)]
        words += [f"experts={self.experts}"] if self.experts else []
        words += [f"buffer {self.buffer}"] if self.buffer else []
        words += [f"{key}={value}" for key, value in self.options]
        return " ".join(words)


@dataclass(frozen=True)
class Pair:
    """Two jobs."""

    number: int
    source: Side
    target: Side
    route: str

    def __str__(self) -> str:
        return f"{self.number:4} {self.route:10} {self.source} -> {self.target}"


# -- the generator -----------------------------------------------------------------------------------------------------

PLAIN = (
    *("data=1", "data=2", "data=4", "model=2", "data=2,model=2", "model=2,data=2"),
    *("seq=2,data=1", "seq=2,data=2", "data=2,shard=2"),
)
PIPES = ("pipe=1", "pipe=2", "pipe=2,data=2", "data=2,pipe=2", "pipe=2,model=2", "model=2,pipe=2", "data=2")
UNEQUAL_PIPES = ("pipe=4", "pipe=2", "pipe=2,data=2", "data=2,pipe=2", "pipe=1", "data=2")
STOCK_PIPES = ("pipe=2", "pipe=2,data=2", "pipe=4")
EXPERT_PIPES = ("pipe=2", "pipe=2,data=2", "data=2,pipe=2", "pipe=4", "data=2", "data=4", "pipe=1")
SPECIAL = 1000
"""The first number of pairs of pipelines with experts, with unequal groups on their stages, and of stock pipelines."""
DENSE_EXPERTS = ("data=1", "data=2", "data=4", "data=2,model=2", "model=2,data=1")


def draw_pair(seed: int, number: int) -> Pair:
    """Return a pair, which depends on the two numbers alone."""
    draw = random.Random(f"{seed} {number}")
    if number >= SPECIAL:
        return _draw_special(draw, number)
    route = draw.choice(("live", "live", "live", "torch", "torch", "to stock", "from stock"))
    kind = "plain" if "stock" in route else draw.choice(("plain", "plain", "pipeline", "experts"))
    model = Side("data=1", 0)
    if kind == "pipeline":
        model = replace(model, is_pipeline=True, tied=draw.random() < 0.5)
    elif kind == "experts":
        model = replace(model, experts=1)
    else:
        model = replace(model, tied=draw.random() < 0.3)
    model = replace(model, frozen=kind != "experts" and draw.random() < 0.3, buffer=draw.choice(("", "equal", "split")))
    if kind == "experts":
        model = replace(model, buffer="")
    source = _side(draw, model, kind, is_stock=route == "from stock")
    target = _side(draw, model, kind, is_stock=route == "to stock")
    same: dict[str, Any] = {"optimizer": source.optimizer} if route != "live" or draw.random() < 0.95 else {}
    if "stock" in route:
        same |= {"frozen": source.frozen, "precision": source.precision}
    if "stock" in route:
        same |= {name: getattr(source, name) for name in ("precision", "groups")}
    if route == "torch":  # its files do not say which parameters are frozen
        same |= {"frozen": source.frozen}
    return Pair(number, source, _possible(replace(target, **same), kind), route)


def _draw_special(draw: random.Random, number: int) -> Pair:
    kind = draw.choice(("experts", "unequal", "stock"))
    route = "from stock" if kind == "stock" else draw.choice(("torch", "live", "live"))
    model = Side("data=1", 0, is_pipeline=True, tied=kind != "experts" and draw.random() < 0.5)
    if kind != "experts":
        model = replace(model, frozen=draw.random() < 0.3, buffer=draw.choice(("", "equal")))
    specs = {"experts": EXPERT_PIPES, "unequal": UNEQUAL_PIPES, "stock": STOCK_PIPES}[kind]
    sides = []
    for is_stock in (kind == "stock", False):
        topology, zero = draw.choice(specs if is_stock or kind != "stock" else PIPES[:4]), draw.randrange(2)
        degree = ProcessTopology.from_spec(topology).get_dim("data") or 1
        side = replace(model, topology=topology, zero=zero, method=draw.choice(("uniform", "parameters")))
        side = replace(side, is_stock=is_stock, experts=0 if kind != "experts" else draw.choice((1, degree)))
        side = replace(side, groups={"experts": "one", "unequal": "split"}.get(kind) or "one")
        sides.append(side)
    groups = draw.choice(("one", "decay")) if kind == "stock" else sides[0].groups
    precision = draw.choice(("fp32", "fp32", "bf16", "fp16"))
    if kind == "experts" and precision == "fp16":
        precision = "fp32"
    if any(side.zero == 0 for side in sides):
        precision = "fp32"
    optimizer = "AdamW" if kind == "experts" else draw.choice(("AdamW", "SGD", "NAdam"))
    same = {"groups": groups, "precision": precision, "optimizer": optimizer}
    return Pair(number, replace(sides[0], **same), replace(sides[1], **same), route)


def _side(draw: random.Random, model: Side, kind: str, *, is_stock: bool) -> Side:
    specs = {"plain": PLAIN, "pipeline": PIPES, "experts": DENSE_EXPERTS}[kind]
    topology = draw.choice(("data=1", "data=2", "data=4") if is_stock else specs)
    zero = draw.randrange({"plain": 4 if HAS_STAGE_3 else 3, "pipeline": 2, "experts": 3}[kind])
    optimizer = draw.choice(("AdamW", "AdamW", "Adam", "SGD", "RMSprop", "NAdam", "Adamax", "Adafactor"))
    precision = draw.choice(("fp32", "fp32", "bf16", "fp16", "bf16 sums"))
    options: list[tuple[str, Any]] = []
    if zero in (1, 2) and draw.random() < 0.3 and not model.is_pipeline:
        options.append(draw.choice((("round_robin_gradients", True), ("offload_optimizer", {"device": "cpu"}))))
    if zero == 3 and draw.random() < 0.4:
        options.append(draw.choice((("sub_group_size", 40), ("offload_optimizer", {"device": "cpu"}))))
    if zero == 3 and topology == "data=4" and not is_stock and draw.random() < 0.5:
        options.append(("zero_hpz_partition_size", 2))
    if zero in (1, 2) and not options and kind == "plain" and not is_stock and draw.random() < 0.2:
        options.append(("reducer", True))
    sizes = [one for one in (1, 2, 4) if ProcessTopology.from_spec(topology).get_dim("data") % one == 0]
    return _possible(
        replace(
            model,
            topology=topology,
            zero=zero,
            precision=precision,
            optimizer=optimizer,
            groups=draw.choice(("one", "one", "decay")),
            frozen=model.frozen if draw.random() < 0.95 else not model.frozen,
            experts=draw.choice(sizes) if kind == "experts" else 0,
            method=draw.choice(("uniform", "parameters")),
            options=tuple(options),
            is_stock=is_stock,
        ),
        kind,
    )


def _possible(side: Side, kind: str) -> Side:
    """Replace what DeepSpeed does not offer together."""
    if kind == "experts":
        side = replace(side, optimizer="AdamW", groups="one", frozen=False)
        if side.precision == "bf16 sums":
            side = replace(side, precision="bf16")
        if side.zero == 0 and side.precision != "fp32":
            side = replace(side, precision="fp32")
    if "shard" in side.topology:
        side = replace(side, zero=max(1, side.zero))
        if side.zero < 3:  # offload is refused
            side = replace(side, options=tuple(one for one in side.options if one[0] != "offload_optimizer"))
    if side.precision == "bf16 sums":
        side = replace(side, zero=max(1, side.zero))
    if side.precision == "bf16 sums" and (side.zero > 1 or any(key == "reducer" for key, _ in side.options)):
        side = replace(side, precision="bf16")
    if side.precision == "bf16 sums":
        side = replace(side, options=())
    if side.optimizer == "Adafactor" and side.precision == "fp16":
        side = replace(side, precision="fp32")
    if side.optimizer == "Adafactor":  # our reducer refuses it
        side = replace(side, options=tuple(one for one in side.options if one[0] != "reducer"))
    if side.optimizer == "Adafactor" and side.is_pipeline:  # copies of tied weights drift apart in the first job
        side = replace(side, tied=False)
    if side.is_stock and side.buffer == "split":
        side = replace(side, buffer="equal")
    if side.is_pipeline and side.precision == "fp16" and side.zero == 0:
        side = replace(side, precision="bf16")
    return side


# -- the job -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A linear layer, a norm and a feed-forward layer that slices split."""

    def __init__(self, slices: Any = None, buffer: str = "", place: int = 0, count: int = 1) -> None:
        super().__init__()
        self.linear, self.norm, self.split = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Expert(slices)
        self.split.expand.weight.partition_dim, self.split.contract.weight.partition_dim = 0, 1
        if buffer:
            whole = torch.arange(8.0) / 8
            self.register_buffer("offset", whole.chunk(count)[place].clone() if buffer == "split" else whole)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + torch.tanh(self.linear(self.norm(hidden)))
        if hasattr(self, "offset"):
            hidden = hidden + 0.0 * self.offset.sum().to(hidden.dtype)
        return hidden + self.split(hidden)


class Net(nn.Module):
    """Blocks between two linear layers, which may be one."""

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.last(hidden)
        return result


def split_dim(name: str) -> int | None:
    """Return the dimension along which slices split a parameter or buffer of a block."""
    if "split.expand" in name:
        return 0
    return 1 if "split.contract" in name else None


class Job:
    """One rank of a side."""

    def __init__(self, side: Side, route: str) -> None:
        start()
        self.side = side
        self.grid = None if side.is_stock else PipelineParallelGrid(side.topology)
        if self.grid is not None and side.precision == "fp16" and side.zero == 0 and "stock" in route:
            self.grid.correct_norms = False  # stock DeepSpeed does not multiply losses by their scale there
        self.slices = 1 if self.grid is None else self.grid.get_slice_parallel_world_size()
        self.place = 0 if self.grid is None else self.grid.get_slice_parallel_rank()
        module = self._module()
        for name, buffer in module.named_buffers():
            assert buffer.numel(), name
        self._fill(module)
        for name, parameter in module.named_parameters():
            if side.frozen and FROZEN.search(name):
                parameter.requires_grad_(False)
        stages = ProcessTopology.from_spec(side.topology).get_dim("pipe") or 1
        samples = dist.get_world_size() // stages if self.grid is None else self.grid.get_sample_world_size()
        place = dist.get_rank() % samples if self.grid is None else self.grid.get_sample_rank()
        self.samples, self.sample = samples, place
        config = engine_config(SAMPLES // samples // (2 if side.is_pipeline else 1), 2 if side.is_pipeline else 1)
        options = {key: value for key, value in side.options if key != "reducer"}
        config["zero_optimization"] = {"stage": side.zero, **options}
        half = side.precision.partition(" ")[0]
        if half == "bf16":
            config["bf16"] = {"enabled": True}
        elif half == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 4}
        if side.precision == "bf16 sums":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        if ("reducer", True) in side.options:
            config["gradient_reducer"] = True
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(half, torch.float32)
        if (size := options.get("zero_hpz_partition_size")) is not None:
            groups.create_zero_partition_groups(self.grid, size)
        arguments: dict[str, Any] = {"model": module, "config": config}
        if side.experts:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
            arguments["model_parameters"] = list(module.parameters())
        else:
            arguments["optimizer"] = self._optimizer(module)
        if not side.is_pipeline and self.grid is not None:
            arguments["mpu"] = self.grid
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine: Any
            self.engine, *_ = (deepspeed.initialize if side.is_stock else initialize)(**arguments)
        for name, buffer in self.engine.module.named_buffers():
            if side.buffer == "split" and name.endswith("offset"):
                buffer.partition_dim = 0

    def _module(self) -> nn.Module:
        side, grid = self.side, self.grid
        slices = grid.get_slice_parallel_group() if grid is not None and self.slices > 1 else None
        if side.experts and side.is_pipeline:
            middle = [LayerSpec(Mixture, side.experts), LayerSpec(Block), LayerSpec(Mixture, side.experts)]
            layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), *middle, LayerSpec(nn.Linear, WIDTH, WIDTH)]
            module = PipelineModule(layers, grid=grid, loss_fn=F.mse_loss, partition_method=side.method)
            groups.create_expert_groups(module.mpu(), side.experts)
            return module
        if side.experts:
            groups.create_expert_groups(grid, side.experts)
            return Net(nn.Linear(WIDTH, WIDTH), [Mixture(side.experts), Block(slices)], nn.Linear(WIDTH, WIDTH))
        arguments = (slices, side.buffer, self.place, self.slices)
        if not side.is_pipeline:
            first = nn.Linear(WIDTH, WIDTH)
            blocks = [Block(*arguments) for _ in range(2)]
            return Net(first, blocks, first if side.tied else nn.Linear(WIDTH, WIDTH))
        ends = TIED if side.tied else LayerSpec(nn.Linear, WIDTH, WIDTH)
        layers = [ends, *[LayerSpec(Block, *arguments)] * 2, ends]
        if side.is_stock:
            stages = ProcessTopology.from_spec(side.topology).get_dim("pipe")
            return StockPipelineModule(layers, num_stages=stages, loss_fn=F.mse_loss, partition_method=side.method)
        return PipelineModule(layers, grid=grid, loss_fn=F.mse_loss, partition_method=side.method)

    def _fill(self, module: nn.Module) -> None:
        """Fill parameters with values that depend on their names alone."""
        for name, parameter in module.named_parameters():
            shape, dim = list(parameter.shape), split_dim(name)
            if dim is not None:
                shape[dim] *= self.slices
            generator = torch.Generator().manual_seed(zlib.crc32(self.whole_name(name, parameter).encode()))
            whole = torch.randn(*shape, generator=generator) * 0.3
            parameter.data.copy_(whole if dim is None else whole.chunk(self.slices, dim)[self.place])

    def _optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        some = [one for one in module.parameters() if one.requires_grad]
        parameters: Any = some
        if self.side.groups == "decay":
            wide, narrow = ([one for one in some if (one.dim() > 1) == is_wide] for is_wide in (True, False))
            parameters = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
        elif self.side.groups == "split":  # a stage without a block has one group
            names = {id(one): name for name, one in module.named_parameters()}
            inside, outside = ([one for one in some if ("split" in names[id(one)]) == is_in] for is_in in (True, False))
            parameters = [{"params": outside, "weight_decay": 0.0}, {"params": inside, "weight_decay": 0.1}]
            parameters = [group for group in parameters if group["params"]]
        kind = getattr(torch.optim, self.side.optimizer)
        more = {"momentum": 0.9} if self.side.optimizer == "SGD" else {}
        found: torch.optim.Optimizer = kind(parameters, lr=0.01, **more)
        return found

    @staticmethod
    def whole_name(name: str, parameter: torch.Tensor) -> str:
        """Return a name with an expert's number in the whole layer."""
        if (group := getattr(parameter, "group_name", None)) is None:
            return name
        first = deepspeed_groups._get_expert_parallel_rank(group)
        count = 4 // deepspeed_groups._get_expert_parallel_world_size(group)
        return re.sub(r"(deepspeed_experts\.)(\d+)", lambda found: f"{found[1]}{first * count + int(found[2])}", name)

    def train(self, steps: range) -> list[float]:
        """Train; return losses over all samples."""
        losses = []
        for step in steps:
            inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
            targets = inputs.roll(1, dims=1).sin()
            inputs, targets = (one.chunk(self.samples)[self.sample].to(self.dtype) for one in (inputs, targets))
            if self.side.is_pipeline:
                loss = self.engine.train_batch(iter(zip(inputs.chunk(2), targets.chunk(2), strict=True)))
            else:
                loss = F.mse_loss(self.engine(inputs).float(), targets.float())
                self.engine.backward(loss)
                self.engine.step()
            mean = loss.detach().float().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / dist.get_world_size())
        return losses

    def values(self) -> Values:
        """Return everything that this rank has, by name in the whole model; slices carry their place."""
        engine, optimizer = self.engine, self.engine.optimizer
        inner = optimizer
        while getattr(inner, "optimizer", inner) is not inner:
            inner = inner.optimizer
        found: Values = {}
        copies: dict[int, torch.Tensor] = {}
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}  # a grid gives its optimizers classes of its own
        if "FP16_UnfusedOptimizer" in kinds:
            for own, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                copies.update((id(one), master) for one, master in zip(own, masters, strict=True))
        if "FP16_Optimizer" in kinds:
            raise AssertionError("not drawn")
        if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        in_order = (
            self._in_round_robin(optimizer, inner) if ("round_robin_gradients", True) in self.side.options else {}
        )
        keys = STATES[self.side.optimizer]
        rates = {
            id(one): (group["lr"], group.get("weight_decay"))
            for group, members in zip(inner.param_groups, self._members(optimizer, inner), strict=True)
            for one in members
        }
        for local, parameter in engine.module.named_parameters():
            name = self.whole_name(local, parameter)
            held = parameter
            if hasattr(parameter, "ds_tensor"):
                with deepspeed.zero.GatheredParameters([parameter]):
                    held = parameter.detach().clone()
            found[f"{name}|module"] = held.detach().clone()
            if not parameter.requires_grad:
                continue
            found[f"{name}|group"] = torch.tensor(rates[id(parameter)], dtype=torch.float64)
            master = copies.get(id(parameter), parameter)
            is_whole = inner is optimizer or master is not parameter
            if id(parameter) in in_order:
                found.update({f"{name}|{key}": value for key, value in in_order[id(parameter)].items()})
                continue
            value = master if is_whole else safe_get_full_fp32_param(parameter)
            found[f"{name}|master"] = value.detach().clone()
            for key in keys:
                state = inner.state[master].get(key) if is_whole else safe_get_full_optimizer_state(parameter, key)
                if state is not None:
                    found[f"{name}|{key}"] = state.detach().clone()
        found.update((f"{name}|buffer", one.detach().clone()) for name, one in engine.module.named_buffers())
        for state in inner.state.values():
            for key in ("step", "mu_product"):
                if key in state:
                    number = torch.tensor(float(state[key]), dtype=torch.float64)
                    assert torch.equal(found.setdefault(f"|{key}", number), number), key
        found["|steps"] = torch.tensor([engine.global_steps, engine.skipped_steps, engine.global_samples])
        return found

    def _members(self, optimizer: Any, inner: Any) -> Any:
        """Return the parameters of each group."""
        if hasattr(optimizer, "sub_group_to_group_id"):
            merged: list[list[Any]] = [[] for _ in inner.param_groups]
            for number, own in enumerate(optimizer.fp16_groups):
                merged[optimizer.sub_group_to_group_id[number]] += own
            return merged
        for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
            if hasattr(optimizer, name):
                return getattr(optimizer, name)
        return [group["params"] for group in inner.param_groups]

    def _in_round_robin(self, optimizer: Any, inner: Any) -> dict[int, Values]:
        """Return the master weights and states where DeepSpeed's functions ignore ``round_robin_gradients``."""
        found: dict[int, Values] = {}
        for number, own in enumerate(optimizer.round_robin_bit16_groups):
            part, group = optimizer.single_partition_of_fp32_groups[number], optimizer.real_dp_process_group[number]
            for key in ("master", *STATES[self.side.optimizer]):
                flat = part.detach() if key == "master" else inner.state[part].get(key)
                if flat is None:
                    continue
                pieces = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
                dist.all_gather(pieces, flat.contiguous(), group=group)
                whole, at = torch.cat(pieces), 0
                for parameter in own:
                    value = whole[at : at + parameter.numel()].view(parameter.shape).clone()
                    found.setdefault(id(parameter), {})[key] = value
                    at += parameter.numel()
        return found


@contextmanager
def _job(side: Side, route: str) -> Iterator[Job]:
    try:
        made = Job(side, route)
    except TopologyError as error:  # it must not count as a refusal of the conversion
        raise AssertionError(f"no engine can be built: {error}") from error
    yield made
    destroy_engine(made.engine)
    if made.grid is not None:
        made.grid.destroy()


@contextmanager
def _destroyed_if_refused(job: Job) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, TopologyError):
        destroy_engine(job.engine)
        if job.grid is not None:
            job.grid.destroy()
        raise


Result = tuple[str, Any, Any]
"""``done``, the values and the losses; or ``refused`` or ``failed``, the name of the error and its message."""


def _guarded(work: Any) -> Result:
    """Run a job on this rank; return the error that it raises."""
    try:
        return ("done", *work())
    except (CheckpointError, TopologyError) as error:
        return "refused", type(error).__name__, str(error)


def save_all(cases: Sequence[tuple[Side, Path, str]]) -> list[Result]:
    """Train and save each side on one rank, and continue."""

    def one(side: Side, folder: Path, route: str) -> tuple[Values, list[float]]:
        with _job(side, route) as job:
            job.train(range(BEFORE))
            values = job.values(), job.place
            with _destroyed_if_refused(job):
                if side.is_stock:
                    job.engine.save_checkpoint(str(folder), tag="saved")
                elif route == "torch":
                    dcp.save({"app": checkpoint.TorchState(job.engine)}, checkpoint_id=folder)
                else:
                    checkpoint.save(job.engine, folder, "saved")
            return values, job.train(range(BEFORE, BEFORE + AFTER))

    return [_guarded(lambda case=case: one(*case)) for case in cases]


def load_all(cases: Sequence[tuple[Side, Path, str]]) -> list[Result]:
    """Load each checkpoint into the other side on one rank, and continue."""

    def one(side: Side, folder: Path, route: str) -> tuple[Values, list[float]]:
        if route == "to stock":
            with _job(replace(side, is_stock=False), route) as job:
                with _destroyed_if_refused(job):
                    checkpoint.load(job.engine, folder, "saved")
                checkpoint.save(job.engine, folder, "again")
        with _job(side, route) as job:
            with _destroyed_if_refused(job):
                job.train(range(7, 8))
                if route == "to stock":
                    assert job.engine.load_checkpoint(str(folder), tag="again")[0] is not None
                elif route == "torch":
                    checkpoint.load_torch(job.engine, folder)
                else:
                    checkpoint.load(job.engine, folder, "saved")
            return (job.values(), job.place), job.train(range(BEFORE, BEFORE + AFTER))

    return [_guarded(lambda case=case: one(*case)) for case in cases]


# -- the comparison ----------------------------------------------------------------------------------------------------


def whole(ranks: Sequence[tuple[Values, int]]) -> Values:
    """Put the values of all ranks together. Replicas must be equal bit by bit, and slices form the whole.

    Raises:
        AssertionError: they are not.
    """
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for values, place in ranks:
        for name, value in values.items():
            at = 0 if "deepspeed_experts" in name else place  # ranks of several slices share the experts of a layer
            known = pieces.setdefault(name, {}).setdefault(at, value)
            assert torch.equal(known, value), f"replicas differ in {name}"
    found = {}
    for name, by_place in pieces.items():
        dim = None if name.endswith("|group") else split_dim(name)
        if dim is None and name.endswith("offset|buffer") and by_place[0].numel() < 8:
            dim = 0
        assert 0 in by_place, f"only slices {sorted(by_place)} have {name}"
        first = by_place[0]
        if dim is None:
            assert all(torch.equal(first, one) for one in by_place.values()), f"slices differ in {name}"
        found[name] = first if dim is None else torch.cat([by_place[at] for at in sorted(by_place)], dim)
    return found


def differences(pair: Pair, before: Values, after: Values) -> list[str]:
    """Name the values that differ."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(pair.target.precision.partition(" ")[0], torch.float32)
    wrong = []
    for name, value in after.items():
        key = name.rpartition("|")[2]
        expected = before.get(name)
        if key == "module":
            expected = before.get(name.replace("|module", "|master"), expected)
            expected = expected.to(value.dtype) if expected is not None else None
        elif key == "buffer" and expected is not None and expected.is_floating_point():
            expected = expected.to(half if value.dtype == half else value.dtype)
        elif key == "group" and pair.source.groups != pair.target.groups:
            continue
        if expected is None or expected.dtype != value.dtype or not torch.equal(expected, value):
            wrong.append(name if expected is not None else f"{name} is new")
    is_frozen = pair.target.frozen and not pair.source.frozen
    wrong += [
        f"{name} is gone"
        for name in before.keys() - after.keys()
        if not name.endswith("|buffer") and not (is_frozen and FROZEN.search(name))
    ]
    return wrong


def tolerance(pair: Pair) -> float:
    """Return the greatest difference of losses."""
    kinds = {one.precision for one in (pair.source, pair.target)}
    return 2e-5 if kinds == {"fp32"} else 3e-2


@dataclass
class Report:
    """The results of a run."""

    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def judge(pair: Pair, results: Sequence[Result], saved: Sequence[Result]) -> tuple[str, str]:
    """Return ``exact``, ``refused`` or ``WRONG``, and the reason."""
    kinds = {kind for kind, *_ in results}
    if kinds == {"refused"}:
        said = {text for *_, text in results}
        if len(said) > 1:
            return "WRONG", f"ranks raise different errors: {said}"
        return ("refused", next(iter(said))) if REMEDY.search(next(iter(said))) else ("WRONG", f"no remedy: {said}")
    if kinds != {"done"}:
        return "WRONG", f"some ranks only: {[(kind, text) for kind, _, text in results if kind != 'done']}"
    try:
        wrong = differences(pair, whole([one[1] for one in saved]), whole([one[1] for one in results]))
    except AssertionError as error:
        return "WRONG", str(error)
    if wrong:
        return "WRONG", f"values differ: {wrong[:6]} ({len(wrong)})"
    losses, expected = results[0][2], saved[0][2]
    sides = (pair.source, pair.target)
    has_seq = any("seq" in one.topology for one in sides)
    omit_scale = {"stock" in pair.route and (one.precision, one.zero) == ("fp16", 0) for one in sides}
    differs = pair.source.groups != pair.target.groups or pair.source.frozen != pair.target.frozen
    alike = 1 if has_seq or differs or len(omit_scale) == 2 else AFTER
    for found, wanted in list(zip(losses, expected, strict=True))[:alike]:
        if abs(found - wanted) > tolerance(pair) * abs(wanted):
            return "WRONG", f"losses {losses}, not {expected}"
    return "exact", ""


def run(worlds: Worlds, pairs: Sequence[Pair], folder: Path, at_once: int = 12, show: bool = False) -> Report:
    """Run pairs on warm ranks, those of equal numbers of ranks together."""
    report = Report()
    saved: dict[int, list[Result]] = {}
    found: dict[int, tuple[str, str]] = {}
    for ranks in sorted({pair.source.ranks for pair in pairs}):
        own = [pair for pair in pairs if pair.source.ranks == ranks]
        cases = [(one.source, folder / str(one.number), one.route) for one in own]
        _each(worlds, ranks, own, save_all, cases, at_once, saved, found)
    for number, results in saved.items():
        if results[0][0] != "done":
            found[number] = judge(next(pair for pair in pairs if pair.number == number), results, results)
    loaded: dict[int, list[Result]] = {}
    left = [pair for pair in pairs if pair.number not in found]
    for ranks in sorted({pair.target.ranks for pair in left}):
        own = [pair for pair in left if pair.target.ranks == ranks]
        cases = [(one.target, folder / str(one.number), one.route) for one in own]
        _each(worlds, ranks, own, load_all, cases, at_once, loaded, found)
    for pair in pairs:
        kind, reason = found.get(pair.number) or judge(pair, loaded[pair.number], saved[pair.number])
        report.counts[pair.route, kind] += 1
        report.reasons[re.sub(r"\S*/\S*|'[^']*'|\d+|\[[^]]*\]", "_", reason)[:150]] += kind == "refused"
        report.lines.append(f"{pair}: {kind} {reason}")
        report.wrong += [report.lines[-1]] if kind == "WRONG" else []
        if show:
            print(report.lines[-1], flush=True)
    return report


def _each(
    worlds: Worlds,
    ranks: int,
    pairs: Sequence[Pair],
    function: Any,
    cases: Sequence[Any],
    at_once: int,
    into: dict[int, list[Result]],
    found: dict[int, tuple[str, str]],
) -> None:
    """Call a function with some cases at a time; after a failure with each of them alone."""
    for first in range(0, len(cases), at_once):
        some = range(first, min(first + at_once, len(cases)))
        try:
            results = worlds(ranks).run(function, [cases[at] for at in some], deadline=20 + 8 * len(some), timeout=15)
        except AssertionError as error:
            if len(some) > 1:
                one = (worlds, ranks, pairs, function, cases)
                for at in some:
                    _each(*one[:2], [pairs[at]], function, [cases[at]], 1, into, found)
            else:
                where = "saving" if function is save_all else "loading"
                lines = [line for line in str(error).splitlines() if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
                found[pairs[first].number] = "WRONG", f"{where}: {' | '.join(lines[:2]) or str(error)[-1500:]}"
            continue
        for place, at in enumerate(some):
            into[pairs[at].number] = [rank[place] for rank in results]
