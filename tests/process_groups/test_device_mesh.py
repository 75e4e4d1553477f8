"""torch's own parallelism on the grid's groups: ``parallelize_module``, ``DTensor``, ``fully_shard``, checkpoints."""

from __future__ import annotations

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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ds_topo import PipelineParallelGrid
from tests.support.gpt_training import TINY, PlainGPT, batch, optimizer_of
from tests.support.ranks import run_ranks


def _inspect(topology: str) -> None:
    grid = PipelineParallelGrid(topology)
    groups_before = len(dist.distributed_c10d._world.pg_map)
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
    assert len(dist.distributed_c10d._world.pg_map) == groups_before


@pytest.mark.parametrize("topology", ["pipe=2,data=1,model=2", "model=2,seq=2", "data=4"])
def test_the_mesh_has_the_grids_groups_and_creates_none(topology: str) -> None:
    run_ranks(4, _inspect, topology)


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
        self.expand = _linear(block.feed_forward.expand.weight[0], block.feed_forward.expand.bias[0])
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


def _train(module: nn.Module, steps: int = 5) -> list[float]:
    optimizer, losses = optimizer_of(module.parameters()), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = module(*batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train_in_every_way() -> list[list[float]]:
    """In one process, with our collectives, with torch's tensor parallelism, FSDP2 and both, on the same groups."""
    grid = PipelineParallelGrid("model=2,data=2")
    alone, parallel = Parallel(grid.get_group("pipe")), Parallel(grid.get_group("model"))
    mesh, groups_before = grid.device_mesh(), len(dist.distributed_c10d._world.pg_map)
    column, row = ColwiseParallel(), RowwiseParallel()
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    for index in range(TINY.depth):
        plan |= {f"blocks.{index}.{name}": column for name in ("query", "key", "value", "expand")}
        plan |= {f"blocks.{index}.{name}": row for name in ("projection", "contract")}
    torchs, both = (parallelize_module(TorchGPT(PlainGPT(alone)), mesh["model"], plan) for _ in range(2))
    assert isinstance(torchs.blocks[0].expand.weight, DTensor)
    sharded = fully_shard(TorchGPT(PlainGPT(alone)), mesh=mesh["data"])
    for block in both.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(both, mesh=mesh["data"])
    losses = [_train(module) for module in (TorchGPT(PlainGPT(alone)), PlainGPT(parallel), torchs, sharded, both)]
    assert len(dist.distributed_c10d._world.pg_map) == groups_before
    return losses


def test_torchs_tensor_and_data_parallelism_give_the_same_losses() -> None:
    for alone, *others in run_ranks(4, _train_in_every_way):
        assert len(others) == 4
        for losses in others:
            torch.testing.assert_close(losses, alone, rtol=1e-4, atol=0)


def _save(folder: str) -> None:
    mesh = PipelineParallelGrid("data=2,model=2").device_mesh()
    weight = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0), Shard(1)])
    dcp.save({"weight": weight}, checkpoint_id=folder)


def _load(folder: str) -> None:
    mesh = PipelineParallelGrid("model=4").device_mesh()
    state = {"weight": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])}
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(state["weight"].full_tensor(), torch.arange(16.0).view(4, 4))


def test_a_checkpoint_of_one_layout_loads_into_another(tmp_path: Path) -> None:
    run_ranks(4, _save, str(tmp_path))
    run_ranks(4, _load, str(tmp_path))
