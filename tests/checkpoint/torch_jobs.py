"""Train the model of ``plain_torch`` in engines of any layout."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, ProcessTopology, collectives, initialize
from ds_topo.checkpoint.manifest import SavedSplit
from tests.checkpoint.handmade import slice_of
from tests.checkpoint.plain_torch import DEPTH, SAMPLES, TOKENS, WIDTH, Block, Model, adam, batch
from tests.support.reduced_model import SMALL
from tests.support.small_engines import settings, start
from tests.support.training import destroy_engine

BF16 = {"bf16": {"enabled": True}}
SPLITS = {"up": SavedSplit(0, stride=2), "down": SavedSplit(1)}


@dataclass(frozen=True)
class Layout:
    """The layout and settings of an engine."""

    topology: str
    zero: int = 0
    is_pipeline: bool = False
    reduced: bool = False
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        words = [self.topology.replace("=", "").replace(",", "-"), f"zero{self.zero}"]
        words += [name for name in ("is_pipeline", "reduced") if getattr(self, name)]
        return "-".join([*words, *self.settings])

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return ProcessTopology.from_spec(self.topology).world_size()

    def rename(self, name: str) -> str | tuple[str, ...]:
        """Return the model's name, or names, for a name of the engine's module."""
        if not self.is_pipeline:
            return name
        if name.startswith("tied_modules."):
            return "embedding.weight", "head.weight"
        layer, _, rest = name.partition(".")
        return rest if rest == "temperature" else f"blocks.{int(layer) - 1}.{rest}"


class Temperature(nn.Module):
    """The last layer of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor([1.5]))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.temperature


def _logits(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.weight.t()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Job:
    """One rank of an engine."""

    def __init__(self, layout: Layout, *, has_own_start: bool = True) -> None:
        start()
        self.layout = layout
        self.grid = grid = PipelineParallelGrid(layout.topology)
        slices, exchanges = grid.get_slice_parallel_world_size(), self._exchanges()
        module = self._module(slices, exchanges)
        self._give_values(module, slices, has_own_start)
        share = SAMPLES // grid.get_sample_world_size()
        config = settings(
            **{
                "train_micro_batch_size_per_gpu": share // 2,
                "zero_optimization": {"stage": layout.zero},
                "gradient_reducer": SMALL if layout.reduced else False,
                **layout.settings,
            }
        )
        del config["optimizer"]
        options: dict[str, Any] = {} if layout.is_pipeline else {"mpu": grid}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine, *_ = initialize(model=module, config=config, optimizer=adam(module.parameters()), **options)

    def _exchanges(self) -> tuple[Any, ...]:
        """Return what slices do to the input and to the output of a block."""
        if "model" not in self.layout.topology:
            return ()
        group = self.grid.get_group("model")
        return (lambda x: collectives.copy(x, group), lambda x: collectives.reduce(x, group))

    def _module(self, slices: int, exchanges: tuple[Any, ...]) -> nn.Module:
        if not self.layout.is_pipeline:
            return Model(slices, *exchanges)
        layers = [
            TiedLayerSpec("embedding", nn.Embedding, TOKENS, WIDTH),
            *(LayerSpec(Block, slices, *exchanges) for _ in range(DEPTH)),
            TiedLayerSpec("embedding", nn.Embedding, TOKENS, WIDTH, forward_fn=_logits),
            LayerSpec(Temperature),
        ]
        return PipelineModule(layers, grid=self.grid, loss_fn=_loss, partition_method="uniform")

    def _give_values(self, module: nn.Module, slices: int, has_own_start: bool) -> None:
        full = dict(Model().named_parameters(remove_duplicate=False))
        for name, parameter in module.named_parameters():
            new = self.layout.rename(name)
            of_whole = full[new if isinstance(new, str) else new[0]].detach()
            split = SPLITS.get(name.rpartition(".")[2])
            place = self.grid.get_slice_parallel_rank()
            own = of_whole if split is None else slice_of(of_whole, split, place, slices)
            parameter.data.copy_(own if has_own_start else torch.full_like(own, 7))
            if split is not None:
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim, parameter.partition_stride = split.dim, split.stride  # type: ignore[attr-defined]

    def train(self, steps: range) -> list[float]:
        """Return losses over all samples."""
        return [self._step(batch(step)) for step in steps]

    def _step(self, tokens: torch.Tensor) -> float:
        grid = self.grid
        own = tokens.chunk(grid.get_sample_world_size())[grid.get_sample_rank()].chunk(2)
        if self.layout.is_pipeline:
            return float(self.engine.train_batch(iter([(part, part.roll(-1, 1)) for part in own])))
        mean = torch.zeros(())
        for part in own:
            loss = self.engine(part)
            self.engine.backward(loss)
            self.engine.step()
            mean += loss.detach().float() / 2
        dist.all_reduce(mean, group=grid.get_data_parallel_group())
        return float(mean) / grid.get_data_parallel_world_size()

    def destroy(self) -> None:
        destroy_engine(self.engine)
        self.grid.destroy()


@contextmanager
def job(layout: Layout, **options: Any) -> Iterator[Job]:
    """Provide a job until the caller is done with it."""
    deepspeed.utils.logger.setLevel("ERROR")
    made = Job(layout, **options)
    yield made
    made.destroy()
