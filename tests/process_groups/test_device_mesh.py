"""torch's parallelism uses the grid's groups: ``parallelize_module``, ``DTensor``, ``fully_shard``, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from gpt import Block
from parallel_layers import Parallel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, api, parallelize_module

from ds_topo import PipelineParallelGrid
from ds_topo.errors import UnknownAxisError
from tests.support.fake_world import fake_world
from tests.support.gpt_training import TINY, PlainGPT, batch, loss_of, optimizer_of
from tests.support.process_groups import number_of_groups
from tests.support.training import Batch, Run, assert_trained_alike, own_samples, train_by_hand
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


def test_meshes_are_cached_and_dimensions_can_be_renamed() -> None:
    with fake_world(5, 8), PipelineParallelGrid("pipe=2,data=2,model=2") as grid:
        mesh = grid.device_mesh()
        assert mesh is grid.device_mesh("cpu") is grid.device_mesh(names={})
        assert (mesh.device_type, mesh.mesh_dim_names) == ("cpu", ("pipe", "data", "model"))
        renamed = grid.device_mesh(names={"tensor": "tp", "data": "dp"})
        assert renamed.mesh_dim_names == ("pipe", "dp", "tp")
        assert renamed["tp"].get_group() is mesh["model"].get_group()
        with pytest.raises(UnknownAxisError, match="'rows'"):
            grid.device_mesh(names={"rows": "tp"})
        with pytest.raises(ValueError, match="give each another text"):
            grid.device_mesh(names={"model": 1})  # type: ignore[dict-item]


def _inspect(topology: str) -> None:
    with PipelineParallelGrid(topology) as grid:
        for axis in grid.topology().axes:
            grid.get_group(axis)  # a group of one rank is created on request
        groups_before = number_of_groups()
        mesh = grid.device_mesh()
        assert mesh.device_type == "cpu"
        assert list(mesh.mesh_dim_names or ()) == grid.topology().axes
        assert list(mesh.shape) == grid.topology().dims
        coordinate = grid.topology().get_coord(dist.get_rank())
        assert tuple(mesh.get_coordinate() or ()) == tuple(coordinate)
        for axis in grid.topology().axes:
            part = mesh if len(grid.topology().axes) == 1 else mesh[axis]
            assert part.get_group() is grid.get_group(axis)
            assert part.mesh.tolist() == grid.get_ranks(axis)
            assert part.get_local_rank() == grid.get_axis_rank(axis)
        sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1))
        assert torch.equal(sharded.full_tensor(), torch.arange(8.0))
        assert number_of_groups() == groups_before


@pytest.mark.parametrize("topology", ["pipe=2,data=1,model=2", "model=2,seq=2", "data=4"])
def test_the_mesh_uses_the_grids_groups_and_creates_none(world: Worlds, topology: str) -> None:
    world(4).run(_inspect, topology)


class TorchBlock(nn.Module):
    """The example's block in plain torch modules."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.head_width = block.head_width
        self.attention_norm, self.mlp_norm = nn.LayerNorm(TINY.width), nn.LayerNorm(TINY.width)
        self.query, self.key, self.value = (
            _linear(weight, bias) for weight, bias in zip(block.qkv.weight, block.qkv.bias, strict=True)
        )
        self.projection = _linear(block.projection.weight, block.projection.bias)
        self.expand = _linear(block.feed_forward.expand.weight, block.feed_forward.expand.bias)
        self.contract = _linear(block.feed_forward.contract.weight, block.feed_forward.contract.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.attention_norm(hidden)
        heads = [
            part(inner).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.projection(attended)
        return hidden + self.contract(F.gelu(self.expand(self.mlp_norm(hidden))))


class TorchGPT(nn.Module):
    """The example's GPT in plain torch modules, tied embedding included."""

    def __init__(self, model: PlainGPT) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(model.embedding.weight.detach().clone(), freeze=False)
        self.position = nn.Parameter(model.position.weight.detach().clone())
        self.blocks = nn.ModuleList(TorchBlock(block) for block in model.blocks)
        self.norm = nn.LayerNorm(TINY.width)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        hidden, weight = self.norm(hidden), self.embedding.weight
        if isinstance(weight, DTensor) and weight.placements != (Replicate(),):
            whole = DTensor.from_local(hidden, weight.device_mesh, [Replicate()])
            logits = F.linear(whole, weight).redistribute(placements=[Replicate()]).to_local()
        else:
            logits = F.linear(hidden, weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    return linear


WAYS = ("our_tensor_parallelism", "torchs_tensor_parallelism", "fsdp2", "fsdp2_over_tensor_parallelism")


def _module(way: str, grid: PipelineParallelGrid) -> nn.Module:
    """Return the GPT parallelized in one of these ways, or ``alone``, on the grid's groups."""
    if way == "our_tensor_parallelism":
        return PlainGPT(Parallel(grid.get_group("model")))
    mesh, module = grid.device_mesh(), TorchGPT(PlainGPT(Parallel(grid.get_group("pipe"))))
    if "torchs" in way or "over" in way:
        column, row = ColwiseParallel(), RowwiseParallel()
        plan = {"embedding": RowwiseParallel(input_layouts=Replicate())}
        for index in range(TINY.depth):
            plan |= {f"blocks.{index}.{name}": column for name in ("query", "key", "value", "expand")}
            plan |= {f"blocks.{index}.{name}": row for name in ("projection", "contract")}
        module = parallelize_module(module, mesh["model"], plan)
        assert isinstance(module.blocks[0].expand.weight, DTensor)
    if "over" in way:
        for block in module.blocks:
            fully_shard(block, mesh=mesh["data"])
    return fully_shard(module, mesh=mesh["data"]) if "fsdp2" in way else module


def _losses(way: str, grid: PipelineParallelGrid) -> Run:
    """Train with clipped gradients, and with replicas on different samples if FSDP2 averages their gradients."""
    module = _module(way, grid)
    batches: Iterable[Batch] = map(batch, range(5))
    if "fsdp2" in way:
        batches = (own_samples(whole, grid) for whole in batches)
    optimizer = optimizer_of(module.parameters())
    run = train_by_hand(module, optimizer, batches, loss_of, clip=1.0, grid=None if way == "alone" else grid)
    if "fsdp2" in way:
        mean = torch.tensor(run.losses)
        dist.all_reduce(mean, group=grid.get_data_parallel_group())
        run.losses = (mean / grid.get_data_parallel_world_size()).tolist()
    return run


def _train_both(way: str) -> None:
    with PipelineParallelGrid("model=2,data=2") as grid:
        grid.device_mesh()
        alone = _losses("alone", grid)
        groups_before = number_of_groups()
        assert_trained_alike(_losses(way, grid), alone, losses=1e-4)
        assert number_of_groups() == groups_before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_torchs_parallelism_gives_the_same_losses_and_norms(world: Worlds, way: str) -> None:
    if "tensor_parallelism" in way and not way.startswith("our") and hasattr(api, "_validate_tp_mesh_dim"):
        pytest.skip("this torch needs tensor parallelism on the last axis")
    world(4).run(_train_both, way)


def _save(folder: str) -> None:
    with PipelineParallelGrid("data=2,model=2") as grid:
        weight = distribute_tensor(torch.arange(16.0).view(4, 4), grid.device_mesh(), [Shard(0), Shard(1)])
        dcp.save({"weight": weight}, checkpoint_id=folder)


def _load(folder: str) -> None:
    with PipelineParallelGrid("model=4") as grid:
        state = {"weight": distribute_tensor(torch.zeros(4, 4), grid.device_mesh(), [Shard(0)])}
        dcp.load(state, checkpoint_id=folder)
        assert torch.equal(state["weight"].full_tensor(), torch.arange(16.0).view(4, 4))


def test_a_torch_checkpoint_loads_into_another_layout(world: Worlds, other_world: Worlds, tmp_path: Path) -> None:
    world(4).run(_save, str(tmp_path))
    other_world(4).run(_load, str(tmp_path))
