"""Layers that are split over a group compute what torch's do; the cases of torchshard's own tests are among them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo import ProcessGrid, collectives, distributed
from ds_topo.layers import Parallel, ParallelCrossEntropyLoss, ParallelEmbedding, ParallelLinear, parallel_cross_entropy
from tests.support.fake_world import fake_world
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

HYBRID = (0, 0, 1, None, -1, 0, 0, -1, None, -1, 1, 0, None, 0, -1)
"""The splits of torchshard's longest stack of layers."""


def close(found: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    assert found is not None
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def own(whole: torch.Tensor | None, group: Any, dim: int) -> torch.Tensor:
    assert whole is not None
    return whole.chunk(group.size(), dim)[group.rank()]


def _linear_layers(group: Any) -> None:
    for dim in (None, 0, 1, -1):
        torch.manual_seed(1)
        full = nn.Linear(26, 34)
        torch.manual_seed(1)
        layer = ParallelLinear(26, 34, dim=dim)
        made = ParallelLinear.from_linear(full, dim, group=group)
        assert all(torch.equal(*pair) for pair in zip(layer.parameters(), made.parameters(), strict=True))
        inputs = torch.randn(7, 26, requires_grad=True)
        output = layer(inputs)
        if dim in (1, -1):
            assert output.shape == (7, 17)
            output = collectives.gather(output, group)
        factors = torch.randn(7, 34)
        (output * factors).sum().backward()
        found, inputs.grad = inputs.grad, None
        wanted = full(inputs)
        close(output, wanted)
        (wanted * factors).sum().backward()
        close(found, inputs.grad)
        weight, bias = full.weight.grad, full.bias.grad
        assert layer.bias is not None
        assert getattr(layer.bias, "tensor_model_parallel", None) is {None: None, 0: False}.get(dim, True)
        close(layer.weight.grad, weight if dim is None else own(weight, group, 1 if dim == 0 else 0))
        close(layer.bias.grad, own(bias, group, 0) if dim in (1, -1) else bias)
        close(made(inputs), ParallelLinear.from_linear(full, dim)(inputs))


def _embeddings(group: Any) -> None:
    tokens, factors = torch.randint(0, 48, (17, 24)), torch.randn(17, 24, 16)
    for dim in (None, 0, 1, -1):
        for padding in (None, 5, -1):
            torch.manual_seed(7)
            full = nn.Embedding(48, 16, padding)
            torch.manual_seed(7)
            layer = ParallelEmbedding(48, 16, padding, dim=dim)
            assert torch.equal(
                layer.weight, full.weight if dim is None else own(full.weight, group, 0 if dim == 0 else 1)
            )
            close(layer(tokens), full(tokens))
            (full(tokens) * factors).sum().backward()
            (layer(tokens) * factors).sum().backward()
            grad = full.weight.grad
            close(layer.weight.grad, grad if dim is None else own(grad, group, 0 if dim == 0 else 1))
            if dim is not None:
                torch.manual_seed(7)
                split = ParallelEmbedding(48, 16, padding, dim=dim, group=Parallel(group, sequence=True))
                close(split(tokens), own(full(tokens), group, 1))
                (split(tokens) * own(factors, group, 1)).sum().backward()
                close(split.weight.grad, layer.weight.grad)


def _a_stack_of_layers(group: Any) -> None:
    torch.manual_seed(2)
    sizes = [8, 16] * len(HYBRID)
    whole = [nn.Linear(sizes[index], sizes[index + 1]) for index in range(len(HYBRID))]
    split = [ParallelLinear.from_linear(layer, dim) for layer, dim in zip(whole, HYBRID, strict=True)]
    inputs = torch.randn(3, 8)
    wanted = found = inputs
    for mine, theirs in zip(split, whole, strict=True):
        wanted, found = theirs(wanted), mine(found)
        if mine.dim in (1, -1):
            found = collectives.gather(found, group)
    close(found, wanted)
    wanted.sum().backward()
    found.sum().backward()
    for mine, theirs in zip(split, whole, strict=True):
        grad = theirs.weight.grad
        close(mine.weight.grad, grad if mine.dim is None else own(grad, group, 1 if mine.dim == 0 else 0))


def _sequence_parallel(group: Any) -> None:
    parallel = Parallel(group, sequence=True)
    torch.manual_seed(3)
    first, second = nn.Linear(8, 12), nn.Linear(12, 8)
    split = [ParallelLinear.from_linear(layer, dim, group=parallel) for layer, dim in ((first, -1), (second, 0))]
    inputs = torch.randn(2, 6, 8)
    wanted = second(first(inputs).relu())
    found = split[1](split[0](own(inputs, group, 1)).relu())
    close(found, own(wanted, group, 1))
    wanted.square().sum().backward()
    found.square().sum().backward()
    close(split[0].weight.grad, own(first.weight.grad, group, 0))
    close(split[1].weight.grad, own(second.weight.grad, group, 1))
    assert split[1].bias is not None
    close(split[1].bias.grad, second.bias.grad)


def _losses(group: Any) -> None:
    torch.manual_seed(4)
    target = torch.randint(0, 22, (13, 17))
    target[0, :5] = -100
    weight = torch.rand(22) + 0.1
    for scale in (1.0, 1000.0):
        logits = (scale * torch.randn(13, 17, 22)).requires_grad_()
        for reduction in ("none", "mean", "sum"):
            for factors in (None, weight):
                wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten(), factors, reduction=reduction)
                (expected,) = torch.autograd.grad(wanted.sum(), logits)
                part = collectives.scatter(logits, group)
                for loss in (
                    ParallelCrossEntropyLoss(factors, reduction=reduction)(part, target),
                    ParallelCrossEntropyLoss(factors, reduction=reduction, dim=None)(logits, target),
                ):
                    torch.testing.assert_close(loss.flatten(), wanted.flatten(), rtol=1e-5, atol=1e-4)
                    close(torch.autograd.grad(loss.sum(), logits)[0], expected)
    ones = torch.zeros(3, dtype=torch.long)
    half = own(torch.randn(3, 8, dtype=torch.bfloat16), group, 1)
    assert parallel_cross_entropy(half, ones).dtype == torch.float32
    kept = parallel_cross_entropy(own(torch.randn(3, 8), group, 1), ones + 7, ignore_index=7)
    assert kept.isnan(), "as torch's: the mean of nothing"


def _whole_logits(group: Any) -> None:
    torch.manual_seed(4)
    target = torch.randint(0, 22, (5,))
    whole, hidden = torch.randn(5, 22), torch.zeros(5, 22)
    with pytest.raises(
        ValueError, match=r"^input \[5, 22\]: all 2 ranks of the group have the same logits, .* dim=None"
    ):
        parallel_cross_entropy(whole, target, group=group)
    hidden[:, 0] = whole[:, 0] * (1 + dist.get_rank(group))
    for parts in (torch.zeros(5, 11), hidden, whole[:1]):  # constants, other values, and a single token
        parallel_cross_entropy(parts, target[: len(parts)], group=group)


class Convolution(nn.Module):
    """A convolution, and a linear layer that is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Conv2d(8, 16, 1), nn.Sequential(nn.Linear(16, 16))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rest(self.first(images).flatten(1))
        return found


def _converted(group: Any) -> None:
    torch.manual_seed(5)
    images, target = torch.randn(3, 8, 1, 1), torch.randint(16, (3,))  # the same samples on all ranks of the group
    for dim in (None, 0, -1):
        torch.manual_seed(6)
        whole, split = Convolution(), Convolution()
        split.load_state_dict(whole.state_dict())
        ParallelLinear.convert_parallel_linear(split, dim)
        assert isinstance(split.rest[0], ParallelLinear)
        ignored = [] if dim is None else ["rest.0.weight", *(["rest.0.bias"] if dim else [])]
        assert split._ddp_params_and_buffers_to_ignore == ignored
        copies = DistributedDataParallel(split, process_group=group)
        loss = parallel_cross_entropy(copies(images), target, dim=None if dim == 0 else dim)
        wanted = F.cross_entropy(whole(images), target)
        close(loss, wanted)
        loss.backward()
        wanted.backward()
        close(split.first.weight.grad, whole.first.weight.grad)
        grad = whole.rest[0].weight.grad
        close(split.rest[0].weight.grad, grad if dim is None else own(grad, group, 1 if dim == 0 else 0))


CASES: tuple[Callable[[Any], None], ...] = (
    _linear_layers,
    _embeddings,
    _a_stack_of_layers,
    _sequence_parallel,
    _losses,
    _whole_logits,
    _converted,
)


def _over_each_group(topology: str) -> None:
    with ProcessGrid(topology) as grid:
        distributed.init_process_group(grid=grid)
        for case in CASES:
            case(grid.get_group("model"))
        distributed.destroy_process_group()


@pytest.mark.parametrize("topology", ["model=2,data=2", pytest.param("data=2,model=2", marks=pytest.mark.exhaustive)])
def test_split_layers_equal_whole_ones(world: Worlds, topology: str) -> None:
    world(4).run(_over_each_group, topology)


def test_layers_are_built_on_the_cpu_for_a_group_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "devices_of", lambda _: ["cuda"])
    with fake_world(1, 2):
        layer = ParallelLinear(4, 6, dim=-1, group=dist.group.WORLD)
        embedding = ParallelEmbedding(8, 4, dim=0, group=dist.group.WORLD)
    assert (layer.weight.shape, embedding.weight.shape) == ((3, 4), (4, 4))


@pytest.mark.parametrize("sequence", [False, True])
def test_copies_share_the_group_and_keep_the_marks_of_parameters(sequence: bool) -> None:
    with fake_world(1, 2):
        parallel = Parallel(dist.group.WORLD, sequence)
        layers: list[nn.Module] = [ParallelLinear(4, 8, dim=dim, group=parallel) for dim in (None, 0, 1)]
        layers += [
            ParallelLinear(4, 8, dim=1, group=parallel, pieces=2),
            ParallelLinear(4, 8, False, 0, group=parallel),
        ]
        layers += [ParallelEmbedding(4, 8, dim=dim, group=dist.group.WORLD) for dim in (None, 0, 1)]
        model = nn.Sequential(*layers, ParallelCrossEntropyLoss(group=dist.group.WORLD))
        twin = copy.deepcopy(model)
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, its)
            assert mine.data_ptr() != its.data_ptr()
            assert vars(mine) == vars(its)
        for layer, other in zip(model, twin, strict=True):
            assert getattr(layer, "parallel", None) == getattr(other, "parallel", None)
        assert twin[-1].group.group is dist.group.WORLD
        with pytest.raises(TypeError, match=r"ranks \[0, 1\] cannot be pickled.* save model\.state_dict\(\)"):
            torch.save(model, io.BytesIO())
        assert [vars(each) for each in copy.copy(model[1]).parameters()] == [
            vars(each) for each in model[1].parameters()
        ]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^dim=2: give one of None, 0, 1, -1"):
        ParallelLinear(4, 4, dim=2)
    with pytest.raises(ValueError, match=r"^dim=0: give one of None, 1, -1"):
        parallel_cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), dim=0)
    with pytest.raises(ValueError, match=r"^reduction='median': give"):
        parallel_cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), reduction="median")
    with pytest.raises(ValueError, match=r"^input \[2, 4\] and target \[3\]: give"):
        parallel_cross_entropy(torch.zeros(2, 4), torch.zeros(3, dtype=torch.long))
    with pytest.raises(RuntimeError, match="init_process_group"):
        ParallelLinear(4, 4, dim=0)
    with fake_world(0, 3), ProcessGrid("model=3") as grid, pytest.raises(ValueError, match="3 ranks do not divide"):
        ParallelLinear(4, 4, dim=-1, group=grid.get_group("model"))


def test_indices_that_no_rank_holds_are_refused() -> None:
    with fake_world(0, 2), ProcessGrid("model=2") as grid:
        group = grid.get_group("model")
        embedding = ParallelEmbedding(10, 4, dim=0, group=group)
        for token in (10, -1):
            with pytest.raises(IndexError, match=rf"^a token is {token}: give 0 to 9"):
                embedding(torch.tensor([3, token]))
        with pytest.raises(IndexError, match=r"^a target is 8: give 0 to 7"):
            parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([-100, 8]), group=group)
        parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([-100, 7]), group=group)
