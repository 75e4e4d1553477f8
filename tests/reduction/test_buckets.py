"""Plans of buckets, their memory, and the copies of gradients into it, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_topo.reduction import buckets as buckets_module
from ds_topo.reduction.buckets import (
    BucketLayout,
    GradientBucket,
    is_copied_at_once,
    plan_buckets,
    plan_parameters,
)
from ds_topo.reduction.options import BucketSizes
from ds_topo.reduction.parameters import COPIED, GRAD, NOT_YET, SUMMED, ParameterState
from ds_topo.reduction.partitions import PartitionedGradients, PartitionLayout
from tests.support.fake_world import fake_world

KINDS = ("float32", "bfloat16", "expert")
CAPACITIES = st.integers(1, 40)


@st.composite
def parameters_in_order(draw: st.DrawFn) -> tuple[list[tuple[int, str]], list[int]]:
    """Draw the bytes and kinds of some parameters, and an order of them."""
    parameters = draw(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(KINDS)), min_size=1, max_size=30))
    return parameters, list(draw(st.permutations(range(len(parameters)))))


@settings(deadline=None)
@given(
    parameters_in_order(),
    st.builds(BucketSizes, CAPACITIES, CAPACITIES, CAPACITIES),
    st.dictionaries(st.just("expert"), CAPACITIES),
)
def test_plan_closes_buckets_of_each_kind_at_their_capacity(
    given: tuple[list[tuple[int, str]], list[int]], sizes: BucketSizes, own: dict[str, int]
) -> None:
    parameters, order = given
    nbytes, kinds = [size for size, _ in parameters], [kind for _, kind in parameters]
    plan = plan_buckets(nbytes, kinds, order, sizes, own)
    has_small_last = kinds[order[-1]] not in own
    assert all(plan), "no bucket is empty"
    assert all(order.index(a[-1]) < order.index(b[-1]) for a, b in pairwise(plan)), (
        "buckets are in the order in which they fill"
    )
    for kind in set(kinds):
        buckets = [members for members in plan if kinds[members[0]] == kind]
        assert [index for members in buckets for index in members] == [index for index in order if kinds[index] == kind]
        full = buckets[:-1] if has_small_last and kind == kinds[order[-1]] else buckets
        for members in full:
            largest = own.get(kind, max(sizes.bucket_bytes, sizes.first_bytes))
            assert sum(nbytes[index] for index in members[:-1]) < largest, (
                "the member that reaches the capacity closes the bucket"
            )
        for members in full[:-1]:
            smallest = own.get(kind, min(sizes.bucket_bytes, sizes.first_bytes))
            assert sum(nbytes[index] for index in members) >= smallest, "only one bucket of a kind may stay open"


def test_last_bucket_holds_only_parameters_that_fit() -> None:
    sizes = BucketSizes(bucket_bytes=1000, first_bytes=10, last_bytes=30)
    assert plan_buckets([10, 10, 10, 10, 10, 10], ["kind"] * 6, range(6), sizes) == [(0,), (1, 2), (3, 4, 5)]
    assert plan_buckets([10, 10, 10, 15, 10], ["kind"] * 5, range(5), sizes) == [(0,), (1, 2), (3, 4)]
    assert plan_buckets([10, 10, 40], ["kind"] * 3, range(3), sizes) == [(0,), (1,), (2,)], (
        "the last bucket has at least one member"
    )


def test_first_bucket_is_closed_by_the_parameter_that_reaches_its_capacity() -> None:
    sizes = BucketSizes(bucket_bytes=100, first_bytes=30, last_bytes=1)
    assert plan_buckets([20, 20, 60, 60, 10], ["kind"] * 5, range(5), sizes) == [(0, 1), (2, 3), (4,)]


# -- plans of parameters -------------------------------------------------------------------------------------------

GREAT = BucketSizes(10**9, 10**9, 10**9)
SMALL = BucketSizes(bucket_bytes=1000, first_bytes=1, last_bytes=1)


def _state(
    index: int,
    shape: Sequence[int] = (4,),
    dtype: torch.dtype = torch.float32,
    route: Any = None,
    **more: Any,
) -> ParameterState:
    marks = {name: more.pop(name) for name in ("allreduce", "group_name") if name in more}
    parameter = nn.Parameter(torch.ones(tuple(shape)))
    for name, mark in marks.items():
        setattr(parameter, name, mark)
    state = ParameterState(index, f"p{index}", parameter, dtype, **more)
    state.route = route or ROUTE
    return state


def _route(bucket_bytes: int = 10**9, exchange: Any = None) -> Any:
    return SimpleNamespace(bucket_bytes=bucket_bytes, exchange=exchange, before=1.0)


ROUTE = _route()


def _buckets(
    states: Sequence[ParameterState], sizes: BucketSizes = GREAT, order: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    return plan_parameters(states, sizes, range(len(states)) if order is None else order)


@pytest.mark.parametrize("name", ["bucket_bytes", "first_bytes", "last_bytes"])
def test_bucket_sizes_refuse_capacities_below_one(name: str) -> None:
    enough = {"bucket_bytes": 1, "first_bytes": 1, "last_bytes": 1}
    BucketSizes(**enough)
    with pytest.raises(ValueError, match=f"^{name}=0: a capacity is in bytes and at least 1"):
        BucketSizes(**enough | {name: 0})


def test_parameters_share_a_bucket_if_type_and_route_are_equal() -> None:
    assert _buckets([]) == []
    assert _buckets([_state(0), _state(1), _state(2)], order=[2, 0, 1]) == [(2, 0, 1)]
    assert sorted(_buckets([_state(0), _state(1, dtype=torch.bfloat16), _state(2)])) == [(0, 2), (1,)]
    routes = [_route(), _route()]
    assert sorted(_buckets([_state(index, route=routes[index % 2]) for index in range(4)])) == [(0, 2), (1, 3)]


def test_experts_fill_buckets_of_their_routes_size_by_falling_index() -> None:
    route, order = _route(32), [3, 0, 4, 2, 1]
    experts = [_state(index, route=route, allreduce=False, group_name="e") for index in range(5)]
    for expected in (range(5), order):
        assert _buckets(experts, SMALL, expected) == [(4, 3), (2, 1), (0,)]
    assert _buckets([_state(index, route=route) for index in range(5)], SMALL, order) == [(3,), (0, 4, 2), (1,)]


# -- the memory of a bucket ----------------------------------------------------------------------------------------


def _bucket(*states: ParameterState, multiple: int = 1) -> GradientBucket:
    route = _route(exchange=SimpleNamespace(slices=multiple))
    for state in states:
        state.route = route
    partition = states[0].partition
    bucket: GradientBucket = GradientBucket(7, states) if partition is None else partition.bucket(7, states)
    bucket.install()
    return bucket


def test_views_are_consecutive_and_have_the_strides_of_parameters() -> None:
    plain, last, sliced = _state(0, (2, 3)), _state(1, (2, 2, 3, 1)), _state(2, (3, 4))
    last.parameter.data = last.parameter.data.to(memory_format=torch.channels_last)
    sliced.parameter.data = torch.ones(3, 9)[:, ::2][:, :4]
    bucket = _bucket(plain, last, sliced, multiple=5)
    assert (bucket.index, bucket.numel, bucket.nbytes, len(bucket.pending)) == (7, 30, 120, 3)
    assert len(bucket.flat) == 30
    bucket.flat.copy_(torch.arange(30.0))
    assert plain.view.flatten().tolist() == list(range(6))
    assert last.view.stride() == last.parameter.stride()
    assert sorted(last.view.flatten().tolist()) == list(range(6, 18))
    assert sliced.view.flatten().tolist() == list(range(18, 30))
    assert all(state.view.shape == state.parameter.shape and state.bucket is bucket for state in (plain, last, sliced))


@pytest.mark.parametrize(("multiple", "length"), [(1, 10), (2, 10), (3, 12), (4, 12), (16, 16)])
def test_padding_is_zero(multiple: int, length: int) -> None:
    with mock.patch.object(torch, "empty", lambda *size, **kind: torch.full(size, torch.nan, **kind)):
        bucket = _bucket(_state(0), _state(1, (6,)), multiple=multiple)
    assert len(bucket.flat) == length
    assert bucket.flat[10:].tolist() == [0.0] * (length - 10)
    assert bucket.flat[:10].isnan().all(), "only the padding is written"


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("always", [False, True])
def test_region_has_gradients_and_zeros_in_its_gaps_while_memory_is_lent(always: bool, frozen: int) -> None:
    layout = PartitionLayout.balanced([3, 2, 4], [(0, 1, 2)], 2)
    with fake_world(0, 2):
        parameters = [nn.Parameter(torch.zeros(numel)) for numel in layout.numels]
        gradients = PartitionedGradients(parameters, layout, dist.group.WORLD, torch.float32, reduces_always=always)
        served = [one for number, one in enumerate(parameters) if number != frozen]
        bucket = _bucket(*(_region_state(number, each, gradients) for number, each in enumerate(served)))
        assert len(bucket.flat) == 0
        for parameter in served:
            parameter.grad = torch.ones_like(parameter)
        with mock.patch.object(gradients, "place", lambda region: torch.full((region.numel,), torch.nan)):
            assert bucket.complete() == []
            assert len(bucket.flat) == (0 if always else layout.numel)
            bucket.prepare()
        values = [float(number != frozen) for number, numel in enumerate(layout.numels) for _ in range(numel)]
        assert bucket.flat.tolist() == values + [0.0] * (layout.numel - 9)
        bucket.take_sum(1.0)
        assert len(bucket.flat) == 0
        assert not any(len(state.view) for state in bucket.members)


def _region_state(index: int, parameter: nn.Parameter, gradients: PartitionedGradients) -> ParameterState:
    return ParameterState(index, "p", parameter, torch.float32, partition=gradients)


def test_live_gradients_move_to_the_new_bucket() -> None:
    live, replaced, none = (_state(index) for index in range(3))
    summed, unsummed = (_state(index, dtype=torch.float64) for index in range(3, 5))
    first = [_bucket(live, replaced, none), _bucket(summed, unsummed)]
    for state in (live, summed, unsummed):
        state.view.fill_(5.0)
    live.parameter.grad, summed.contribution = live.view, SUMMED
    replaced.parameter.grad = own = torch.full((4,), 6.0)
    summed.parameter.grad = small = torch.ones(4)
    for bucket in first:
        bucket.release()
        assert len(bucket.flat) == 0
    assert [hasattr(state, "view") for state in (live, replaced, none, summed, unsummed)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    second = [_bucket(none, live, replaced), _bucket(unsummed, summed)]
    assert second[0].flat[4:8].tolist() == [5.0] * 4
    assert live.parameter.grad is live.view
    assert replaced.parameter.grad is own
    assert none.parameter.grad is None
    assert second[1].flat[4:].tolist() == [5.0] * 4
    assert summed.parameter.grad is small


def test_reset_restores_pending_state() -> None:
    states = [_state(0), _state(1)]
    bucket = _bucket(*states)
    bucket.pending.clear()
    for state, contribution in zip(states, (SUMMED, COPIED), strict=True):
        state.contribution, state.arrived = contribution, 3
    bucket.reset()
    assert bucket.pending == set(states)
    assert all((state.contribution, state.arrived) == (NOT_YET, 0) for state in states)


# -- layouts ---------------------------------------------------------------------------------------------------------


def _layout(count: int = 4, **route: Any) -> BucketLayout:
    """Build a layout with one bucket for each parameter."""
    shared = _route(**route)
    return BucketLayout([_state(index, route=shared) for index in range(count)], BucketSizes(1, 1, 1))


def _members(layout: BucketLayout) -> list[list[int]]:
    return [[state.index for state in bucket.members] for bucket in layout.buckets]


def test_layout_follows_the_order_in_which_gradients_last_arrived() -> None:
    layout = _layout()
    states = [bucket.members[0] for bucket in reversed(layout.buckets)]
    assert _members(layout) == [[3], [2], [1], [0]], "at first in the reverse order of parameters"
    assert [bucket.index for bucket in layout.buckets] == [0, 1, 2, 3]
    assert layout.arrivals == []
    layout.arrivals += [1, 0, 1]
    states[0].expected, states[0].arrived = 1, 5
    states[1].expected, states[1].arrived = None, 2
    states[2].expected = None
    with mock.patch.object(buckets_module.dist, "broadcast") as told:
        layout.learn("group", keeps_order=False)  # type: ignore[arg-type]
        assert _members(layout) == [[3], [2], [1], [0]], "the new order applies from the next step on"
        layout.renew()
        assert _members(layout) == [[0], [1], [3], [2]], "parameters that did not arrive come last, in reverse order"
        assert [state.expected for state in states[:3]] == [1, 2, 1]
        assert layout.arrivals is None
        buckets = list(layout.buckets)
        layout.renew()
        layout.learn("group", keeps_order=False)  # type: ignore[arg-type]
        assert layout.buckets == buckets
        assert told.call_count == 1
        assert told.call_args.kwargs == {"group_src": 0, "group": "group"}


def test_layout_follows_the_order_of_the_first_rank_and_stays_if_it_is_equal() -> None:
    def of_first_rank(tensor: torch.Tensor, **_: object) -> None:
        tensor.copy_(torch.tensor(order))

    for order in ([2, 0, 3, 1], [3, 2, 1, 0]):
        layout = _layout()
        assert layout.arrivals is not None
        layout.arrivals += [0, 1, 2, 3]
        before = list(layout.buckets)
        with mock.patch.object(buckets_module.dist, "broadcast", of_first_rank):
            layout.learn(None, keeps_order=False)  # type: ignore[arg-type]
        layout.renew()
        assert _members(layout) == [[index] for index in order]
        assert (layout.buckets == before) is (order == [3, 2, 1, 0])
        assert all(len(bucket.flat) == 0 for bucket in before) or layout.buckets == before
    empty = BucketLayout([], GREAT)
    empty.learn(None, keeps_order=False)  # type: ignore[arg-type]
    assert empty.buckets == []


def test_layout_keeps_the_order_of_the_first_step_if_others_must_have_it() -> None:
    layout = _layout()
    before = [bucket.members for bucket in layout.buckets]
    layout.arrivals = [0, 1, 2, 3]
    layout.learn(None, keeps_order=True)  # type: ignore[arg-type]
    layout.renew()
    assert [bucket.members for bucket in layout.buckets] == before
    assert layout.arrivals is None


def test_two_level_buckets_are_padded() -> None:
    assert [len(bucket.flat) for bucket in _layout(exchange=SimpleNamespace(slices=3)).buckets] == [6] * 4
    assert [len(bucket.flat) for bucket in _layout().buckets] == [4] * 4


# -- copies into buckets --------------------------------------------------------------------------------------------

VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0])
SPARSE = torch.sparse_coo_tensor([[1, 1]], torch.tensor([2.0, 3.0]), (4,), check_invariants=True)
PLACES: dict[str, dict[str, Any]] = {
    "in the bucket": {},
    "of another type": {"dtype": torch.float64},
}


def _installed(place: str = "in the bucket", gradient: object = None, **more: Any) -> ParameterState:
    """Return a parameter whose view holds nan, with its own gradient, one in place, or none."""
    given = PLACES[place] | more
    state = _state(0, **given)
    _bucket(state)
    state.route.before = 0.5
    state.view.fill_(torch.nan)
    if gradient == "in place":
        state.view.copy_(VALUES)
        state.parameter.grad = state.view
    elif isinstance(gradient, torch.Tensor):
        state.parameter.grad = gradient.clone()
    return state


def test_only_large_dense_gradients_are_copied_at_once() -> None:
    assert is_copied_at_once(_state(0, (1 << 14,)))
    assert not is_copied_at_once(_state(0, ((1 << 14) - 1,)))
    assert not is_copied_at_once(_state(0, (1 << 14,), dtype=torch.float64))


@pytest.mark.parametrize("in_one_pass", [True, False])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("gradient", [VALUES, "in place", None], ids=["its own", "in place", "none"])
def test_copy_in_writes_the_scaled_gradient_to_the_view(
    in_one_pass: bool, repeats: bool, scale: float, gradient: object
) -> None:
    state = _installed(gradient=gradient, repeats=repeats)
    state.route.before = scale
    without = state.bucket.copy_in([state], in_one_pass)
    assert without == ([state] if gradient is None else [])
    assert state.contribution is COPIED
    assert torch.equal(state.view, torch.zeros(4) if gradient is None else VALUES * scale)
    if repeats:
        assert state.parameter.grad is None, "a further gradient must not be added to a bucket in flight"
    elif gradient is not None:
        assert state.parameter.grad is state.view


@pytest.mark.parametrize("place", list(PLACES))
def test_accumulate_gradient_sums_micro_batches(place: str) -> None:
    state = _installed(place)
    state.bucket.accumulate(state)
    assert state.view.isnan().all(), "there was no gradient"
    for count in (1, 2, 3):
        state.parameter.grad = VALUES.clone() if state.parameter.grad is None else state.parameter.grad.add_(VALUES)
        state.bucket.accumulate(state)
        assert torch.equal(state.view, VALUES.to(state.dtype) * count)
        assert state.contribution is (SUMMED if state.home is not GRAD else NOT_YET)
        assert state.parameter.grad is (None if state.home is not GRAD else state.view)
    assert state.bucket.copy_in([state]) == []
    assert torch.equal(state.view, VALUES.to(state.dtype) * 1.5)


@pytest.mark.parametrize("in_one_pass", [True, False])
def test_copy_in_moves_a_gradient_to_a_view_of_another_type(in_one_pass: bool) -> None:
    state = _installed("of another type", gradient=VALUES)
    state.route.before = 1 / 3
    state.bucket.copy_in([state], in_one_pass)
    assert torch.equal(state.view, VALUES.to(state.dtype) * (1 / 3)), "it is scaled in the type of the view"
    assert state.contribution is COPIED
    assert state.parameter.grad is None


def test_view_of_another_type_is_zero_without_a_gradient() -> None:
    state = _installed("of another type")
    state.bucket.copy_in([state])
    assert torch.equal(state.view, torch.zeros(4, dtype=state.dtype))


def test_copy_in_fills_a_bucket_and_returns_members_without_a_gradient() -> None:
    own, in_place, none, done = (_state(index) for index in range(4))
    bucket = _bucket(own, in_place, none, done)
    bucket.flat.fill_(torch.nan)
    bucket.route.before = 0.5
    own.parameter.grad, done.contribution = VALUES.clone().requires_grad_(), COPIED
    in_place.view.copy_(VALUES)
    in_place.parameter.grad = in_place.view
    done.view.fill_(9.0)
    assert bucket.copy_in(bucket.members) == [none]
    assert bucket.flat.tolist() == [*(VALUES / 2).tolist() * 2, *[0.0] * 4, *[9.0] * 4]
    assert not own.view.requires_grad
    assert bucket.copy_in(bucket.members) == []


FILLS: list[Callable[[ParameterState], object]] = [
    lambda state: state.bucket.accumulate(state),
    lambda state: state.bucket.copy_in([state], in_one_pass=True),
    lambda state: state.bucket.copy_in([state]),
    lambda state: state.bucket.late_gradient(state),
]


@pytest.mark.parametrize("fill", FILLS)
def test_sparse_gradient_is_refused(fill: Any) -> None:
    with pytest.raises(ValueError, match=r"parameter 'p0' has a sparse gradient.* sparse=False"):
        fill(_installed(gradient=SPARSE))


def test_late_gradient_has_the_type_of_the_view() -> None:
    for place in PLACES:
        state = _installed(place)
        assert torch.equal(state.bucket.late_gradient(state), torch.zeros_like(state.view))
        state.parameter.grad = VALUES.clone()
        late = state.bucket.late_gradient(state)
        assert torch.equal(late, VALUES.to(state.dtype))
        assert late.data_ptr() != state.view.data_ptr()


def test_is_replaced_detects_gradients_replaced_after_the_copy() -> None:
    for gradient in (None, VALUES):
        state = _installed(gradient="in place")
        state.bucket.copy_in([state])
        assert not state.is_replaced
        state.parameter.grad = gradient
        assert state.is_replaced
    apart = _installed("of another type", gradient=VALUES)
    apart.bucket.copy_in([apart])
    assert not apart.is_replaced, "the view never was the parameter's gradient"
    apart.parameter.grad = VALUES
    assert apart.is_replaced
    repeated = _installed(gradient=VALUES, repeats=True)
    repeated.bucket.copy_in([repeated])
    assert not repeated.is_replaced
    repeated.parameter.grad, repeated.arrived, repeated.expected = VALUES, 1, 1
    assert repeated.is_replaced
    repeated.arrived = 2
    assert not repeated.is_replaced, "a late gradient is not a replacement"
