"""``ds_topo.distributed`` behaves as the documentation of torchshard says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ds_topo import PipelineParallelGrid, distributed
from ds_topo.errors import DisagreementError
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


def _documented_examples() -> None:
    assert not distributed.is_initialized()
    distributed.init_process_group(group_size=2)
    assert distributed.is_initialized()
    assert distributed.get_group_size() == distributed.get_world_size() == 2
    me = distributed.get_rank()
    assert me == dist.get_rank() % 2
    assert dist.get_process_group_ranks(distributed.get_group()) == [dist.get_rank() - me, dist.get_rank() - me + 1]

    x = torch.arange(48.0).view(6, 8)
    assert torch.equal(distributed.scatter(x, dim=0), x[3 * me : 3 * me + 3])
    assert torch.equal(distributed.scatter(x, dim=1), x[:, 4 * me : 4 * me + 4])
    assert distributed.scatter(x, dim=None) is x
    assert distributed.gather(x, dim=0).shape == (12, 8)
    assert distributed.gather(x, dim=1).shape == (6, 16)

    tensor = torch.arange(2, dtype=torch.int64) + 1 + 2 * me
    assert distributed.reduce(tensor) is tensor
    assert tensor.tolist() == [4, 6]
    turned = torch.tensor([1 + 1j]) * (me + 1)
    assert torch.equal(distributed.reduce(turned), torch.tensor([3 + 3j]))

    leaf = torch.ones(3, requires_grad=True)
    (distributed.copy(leaf) * (me + 1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0] * 3
    leaf.grad = None
    distributed.reduce(leaf).sum().backward()
    assert leaf.detach().tolist() == [2.0] * 3
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0] * 3

    root = torch.ones(3, requires_grad=True)
    inner = root * (me + 1)
    assert distributed.reduce(inner) is inner
    (inner * inner).sum().backward()
    assert inner.tolist() == [3.0] * 3
    assert root.grad is not None
    assert root.grad.tolist() == [6.0 * (me + 1)] * 3

    distributed.destroy_process_group()
    assert not distributed.is_initialized()


def test_documented_examples(world: Worlds) -> None:
    world(4).run(_documented_examples)


def _over_a_grid() -> None:
    with PipelineParallelGrid("model=2,data=2") as grid:
        distributed.init_process_group(grid=grid)
        assert distributed.get_group() is grid.get_group("model")
        assert distributed.gather(torch.tensor([dist.get_rank()])).tolist() == grid.get_ranks("model")
        distributed.destroy_process_group()
        assert grid.get_axis_size("model") == dist.get_world_size(grid.get_group("model"))


def test_init_process_group_uses_the_groups_of_a_grid(world: Worlds) -> None:
    world(4).run(_over_a_grid)


def _mistakes() -> None:
    distributed.destroy_process_group()  # of nothing, as programs do at their end
    for function in (distributed.get_group, distributed.get_rank, distributed.get_group_size):
        with pytest.raises(RuntimeError, match="init_process_group"):
            function()
    with pytest.raises(ValueError, match="valid are -1 \\(all\\) and 1, 2, 4"):
        distributed.init_process_group(group_size=3)
    with pytest.raises(DisagreementError, match=r"(?s)ranks \[0\].*ranks \[1, 2, 3\]"):
        distributed.init_process_group(group_size=2 if dist.get_rank() else 4)
    with pytest.raises((ValueError, DisagreementError), match="valid are"):  # only one of the ranks is wrong
        distributed.init_process_group(group_size=2 if dist.get_rank() else 3)
    distributed.init_process_group(group_size=2)
    with pytest.raises(RuntimeError, match="already initialised"):
        distributed.init_process_group(group_size=2)
    with pytest.raises(ValueError, match="None, 0, 1 and -1"):
        distributed.scatter(torch.zeros(2, 2, 2), dim=2)
    distributed.destroy_process_group()


def test_mistakes_raise_on_every_rank(world: Worlds) -> None:
    world(4).run(_mistakes)


def test_init_process_group_requires_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed"):
        distributed.init_process_group()
