"""Mistakes raise on every rank, with errors that name the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from ds_topo import GradientReducer
from ds_topo.errors import DisagreementError
from ds_topo.reduction.options import ReductionOptions
from tests.support.fake_world import fake_world
from tests.support.reduced_model import (
    SMALL,
    Model,
    backward,
    model,
)
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


@pytest.mark.parametrize(("option", "valid"), [("static_graph", "True or False"), ("expert_groups", "a mapping")])
def test_option_of_a_wrong_type_is_refused(option: str, valid: str) -> None:
    wrong: Any = {option: "false"}
    with pytest.raises(TypeError, match=f"{option}='false': give {valid}"):
        ReductionOptions(**wrong)


def _finish_missing(module: Model, reducer: GradientReducer) -> None:
    backward(module)
    backward(module)


def _no_sync_before_finish(module: Model, reducer: GradientReducer) -> None:
    backward(module)
    with reducer.no_sync():
        pass


def _finish_twice(module: Model, reducer: GradientReducer) -> None:
    backward(module)
    reducer.finish()
    reducer.finish()


def _finish_inside_no_sync(module: Model, reducer: GradientReducer) -> None:
    with reducer.no_sync():
        backward(module)
        reducer.finish()


def _second_reducer(module: Model, reducer: GradientReducer) -> None:
    GradientReducer(module)


def _added(module: Model, reducer: GradientReducer) -> None:
    if dist.get_rank() == 0:
        module.extra = nn.Linear(2, 2)
    backward(module)
    reducer.finish()


def _frozen(module: Model, reducer: GradientReducer) -> None:
    if dist.get_rank() == 0:
        module.hidden[1].weight.requires_grad_(False)
    backward(module)
    reducer.finish()


def _unfrozen(module: Model, reducer: GradientReducer) -> None:
    module.hidden[0].bias.requires_grad_(True)
    backward(module)
    reducer.finish()


def _replaced(module: Model, reducer: GradientReducer) -> None:
    backward(module)
    if dist.get_rank() == 0:
        module.hidden[1].weight.grad = module.hidden[1].weight.grad * 2
    reducer.finish()


def _detached(module: Model, reducer: GradientReducer) -> None:
    reducer.detach()
    reducer.detach()
    backward(module)
    reducer.finish()


MISTAKES = [
    (_finish_missing, r"got a second gradient before finish\(\).*Call reset\(\)", None),
    (_no_sync_before_finish, r"no_sync\(\) while REDUCING: call finish\(\)", None),
    (_finish_twice, r"finish\(\) while IDLE: no gradient arrived since the last", None),
    (_finish_inside_no_sync, r"finish\(\) while ACCUMULATING: leave no_sync\(\) first", None),
    (_second_reducer, "already have a GradientReducer", None),
    (_added, r"\['extra.weight', 'extra.bias'\] were added", "1 of 2 ranks failed"),
    (_frozen, r"\['hidden.1.weight'\] were frozen", "1 of 2 ranks failed"),
    (_unfrozen, r"\['hidden.0.bias'\] were unfrozen", None),
    (_replaced, r"\['hidden.1.weight'\] were replaced", "1 of 2 ranks failed"),
    (_detached, "it was detached", None),
]


def _make_every_mistake() -> None:
    for mistake, first_ranks, other_ranks in MISTAKES:
        module = model()
        reducer = GradientReducer(module, **SMALL)
        expected = first_ranks if dist.get_rank() == 0 or other_ranks is None else other_ranks
        with pytest.raises(RuntimeError, match=expected):
            mistake(module, reducer)
        dist.barrier()


def test_mistakes_raise_on_every_rank(world: Worlds) -> None:
    world(2).run(_make_every_mistake)


def _different_models() -> None:
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(2, 2 + rank), nn.Linear(2 + rank, 1))
    with pytest.raises(
        DisagreementError, match=r"only rank 0: \['0.weight \[2, 2\].*only rank 1: \['0.weight \[3, 2\]"
    ):
        GradientReducer(module)
    with pytest.raises(DisagreementError, match=r"bucket_bytes=1000.*bucket_bytes=1001"):
        GradientReducer(model(), bucket_bytes=1000 + rank)
    kind, text = ((ValueError, "op='mean'"), (DisagreementError, r"ranks \[0\] on .* failed: ValueError: op='mean'"))[
        rank
    ]
    with pytest.raises(kind, match=text):
        GradientReducer(model(), op="mean" if rank == 0 else "average")


def test_construction_names_ranks_with_different_parameters_or_options(world: Worlds) -> None:
    world(2).run(_different_models)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embedding_is_refused_unless_it_is_frozen(kind: type[nn.Embedding]) -> None:
    with fake_world(0, 1):
        module = nn.ModuleDict({"table": kind(7, 4, sparse=True), "head": nn.Linear(4, 7)})
        with pytest.raises(ValueError, match=r"parameter 'table\.weight' has a sparse gradient.*sparse=False"):
            GradientReducer(module)
        module["table"].requires_grad_(False)
        GradientReducer(module).detach()
