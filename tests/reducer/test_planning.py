"""Plans of buckets, the memory that they get, and how gradients get into it; all of it on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_topo.reducer import layout as layout_module
from ds_topo.reducer.buckets import CommHookBucket, GradientBucket
from ds_topo.reducer.copy_in import (
    accumulate,
    copy_in,
    copy_in_at_once,
    is_copied_at_once,
    is_replaced,
    late_gradient,
)
from ds_topo.reducer.layout import BucketLayout
from ds_topo.reducer.parameter_state import COPIED_IN, PENDING, READY, ParameterState
from ds_topo.reducer.planning import BucketSizes, ParameterPlan, plan_buckets

KINDS = ("float32", "bfloat16", "expert")
CAPACITIES = st.integers(1, 40)


@st.composite
def parameters_in_order(draw: st.DrawFn) -> tuple[list[tuple[int, str]], list[int]]:
    """Bytes and kind of some parameters, and an order of them."""
    parameters = draw(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(KINDS)), min_size=1, max_size=30))
    return parameters, list(draw(st.permutations(range(len(parameters)))))


@settings(deadline=None)
@given(
    parameters_in_order(),
    st.builds(BucketSizes, CAPACITIES, CAPACITIES, CAPACITIES),
    st.dictionaries(st.just("expert"), CAPACITIES),
)
def test_a_plan_cuts_each_kinds_order_where_capacities_are_reached(
    given: tuple[list[tuple[int, str]], list[int]], sizes: BucketSizes, own: dict[str, int]
) -> None:
    parameters, order = given
    nbytes, kinds = [size for size, _ in parameters], [kind for _, kind in parameters]
    plan = plan_buckets(nbytes, kinds, order, sizes, own)
    has_small_last = kinds[order[-1]] not in own
    assert all(plan), "no bucket is empty"
    assert all(order.index(a[-1]) < order.index(b[-1]) for a, b in pairwise(plan)), "in the order in which they fill"
    for kind in set(kinds):
        buckets = [members for members in plan if kinds[members[0]] == kind]
        assert [index for members in buckets for index in members] == [index for index in order if kinds[index] == kind]
        full = buckets[:-1] if has_small_last and kind == kinds[order[-1]] else buckets
        for members in full:
            largest = own.get(kind, max(sizes.bucket_bytes, sizes.first_bytes))
            assert sum(nbytes[index] for index in members[:-1]) < largest, "closed by what reaches the capacity"
        for members in full[:-1]:
            smallest = own.get(kind, min(sizes.bucket_bytes, sizes.first_bytes))
            assert sum(nbytes[index] for index in members) >= smallest, "one of a kind alone may stay open"


# -- plans of parameters -------------------------------------------------------------------------------------------

GREAT = BucketSizes(10**9, 10**9, 10**9)
SMALL = BucketSizes(bucket_bytes=1000, first_bytes=1, last_bytes=1)


def _state(
    index: int, shape: Sequence[int] = (4,), dtype: torch.dtype = torch.float32, is_sparse: bool = False, **more: Any
) -> ParameterState:
    marks = {name: more.pop(name) for name in ("allreduce", "group_name") if name in more}
    parameter = nn.Parameter(torch.ones(tuple(shape)))
    for name, mark in marks.items():
        setattr(parameter, name, mark)
    return ParameterState(index, f"p{index}", parameter, dtype, is_sparse, **more)


def _route(bucket_bytes: int = 10**9, two_level: Any = None) -> Any:
    return SimpleNamespace(bucket_bytes=bucket_bytes, two_level=two_level)


def _buckets(
    states: Sequence[ParameterState], sizes: BucketSizes = GREAT, order: Sequence[int] | None = None, route: Any = None
) -> list[tuple[int, ...]]:
    plan = ParameterPlan(states, [route or _route()] * len(states), sizes)
    return plan.buckets(range(len(states)) if order is None else order)


@pytest.mark.parametrize("name", ["bucket_bytes", "first_bytes", "last_bytes"])
def test_a_capacity_is_at_least_one_byte(name: str) -> None:
    enough = {"bucket_bytes": 1, "first_bytes": 1, "last_bytes": 1}
    BucketSizes(**enough)
    with pytest.raises(ValueError, match=f"^{name}=0: a capacity in bytes, at least 1"):
        BucketSizes(**enough | {name: 0})


def test_parameters_share_a_bucket_where_type_and_route_are_the_same() -> None:
    assert _buckets([]) == []
    assert _buckets([_state(0), _state(1), _state(2)], order=[2, 0, 1]) == [(2, 0, 1)]
    assert sorted(_buckets([_state(0), _state(1, dtype=torch.bfloat16), _state(2)])) == [(0, 2), (1,)]
    states, one, other = [_state(index) for index in range(4)], _route(), _route()
    assert sorted(ParameterPlan(states, [one, other, one, other], GREAT).buckets(range(4))) == [(0, 2), (1, 3)]


def test_each_sparse_gradient_has_a_bucket_of_its_own() -> None:
    states = [_state(0), _state(1, is_sparse=True), _state(2, is_sparse=True), _state(3)]
    assert sorted(_buckets(states)) == [(0, 3), (1,), (2,)]


def test_experts_go_downwards_into_buckets_of_their_links_size_alone() -> None:
    states = [_state(index, allreduce=False, group_name="e") for index in range(5)]
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        assert _buckets(states, SMALL, order, _route(32)) == [(4, 3), (2, 1), (0,)]
    assert _buckets([_state(index) for index in range(5)], SMALL, [3, 0, 4, 2, 1], _route(32)) == [
        (3,),
        (0, 4, 2),
        (1,),
    ]


def test_a_bucket_over_the_users_memory_has_no_gaps() -> None:
    memory, apart = torch.zeros(40), torch.zeros(8)
    places = [memory[8:12], memory[4:8], memory[12:16], memory[20:24], apart[:4], memory[0:4], apart[4:]]
    states = [_state(index, grad_buffer=place) for index, place in enumerate(places)]
    buckets = _buckets([*states, _state(7)])
    assert sorted(map(sorted, buckets)) == [[0, 1, 2, 5], [3], [4, 6], [7]]
    assert (2, 0, 1, 5) in buckets, "downwards"
    assert _buckets([*states[:2], _state(2, grad_buffer=memory[12:16])], SMALL, [1, 2, 0], _route(32)) == [(2, 0), (1,)]
    whole = torch.zeros(8, dtype=torch.bfloat16)
    other_type = whole.view(torch.float32)[2:]
    states = [_state(0, grad_buffer=whole[:4], dtype=torch.bfloat16), _state(1, (2,), grad_buffer=other_type)]
    assert sorted(_buckets(states)) == [(0,), (1,)], "of another type"


# -- the memory of a bucket ----------------------------------------------------------------------------------------


def _bucket(*states: ParameterState, multiple_of: int = 1) -> GradientBucket:
    bucket = GradientBucket(7, states, multiple_of)
    bucket.install()
    return bucket


def test_gradients_lie_one_after_the_other_in_their_parameters_strides() -> None:
    plain, last, sliced = _state(0, (2, 3)), _state(1, (2, 2, 3, 1)), _state(2, (3, 4))
    last.parameter.data = last.parameter.data.to(memory_format=torch.channels_last)
    sliced.parameter.data = torch.ones(3, 9)[:, ::2][:, :4]
    bucket = _bucket(plain, last, sliced, multiple_of=5)
    assert (bucket.index, bucket.numel, bucket.nbytes, bucket.pending) == (7, 30, 120, 3)
    assert len(bucket.flat) == 30
    bucket.flat.copy_(torch.arange(30.0))
    assert plain.view.flatten().tolist() == list(range(6))
    assert last.view.stride() == last.parameter.stride()
    assert sorted(last.view.flatten().tolist()) == list(range(6, 18))
    assert sliced.view.flatten().tolist() == list(range(18, 30))
    assert all(state.view.shape == state.parameter.shape and state.bucket is bucket for state in (plain, last, sliced))


@pytest.mark.parametrize(("multiple", "length"), [(1, 10), (2, 10), (3, 12), (4, 12), (16, 16)])
def test_padding_is_zeros(multiple: int, length: int) -> None:
    with mock.patch.object(torch, "empty", lambda *size, **kind: torch.full(size, torch.nan, **kind)):
        bucket = GradientBucket(0, [_state(0), _state(1, (6,))], multiple)
    assert len(bucket.flat) == length
    assert bucket.flat[10:].tolist() == [0.0] * (length - 10)
    assert bucket.flat[:10].isnan().all(), "nothing else is written"


def test_a_bucket_of_the_users_memory_is_that_memory() -> None:
    memory = torch.arange(12.0)
    upper, lower = _state(0, (2, 3), grad_buffer=memory[6:]), _state(1, (2, 2), grad_buffer=memory[2:6])
    upper.parameter.data = upper.parameter.data.t().contiguous().t()
    bucket = _bucket(upper, lower, multiple_of=100)
    assert bucket.members == [lower, upper]
    assert bucket.flat.data_ptr() == memory[2:].data_ptr()
    assert bucket.flat.tolist() == list(range(2, 12))
    assert upper.view.tolist() == [[6, 7, 8], [9, 10, 11]], "plain memory"
    assert lower.view.tolist() == [[2, 3], [4, 5]]


def test_gradients_that_are_still_needed_move_to_the_next_bucket() -> None:
    live, replaced, none = (_state(index) for index in range(3))
    summed, unsummed = (_state(index, dtype=torch.float64) for index in range(3, 5))
    first = [_bucket(live, replaced, none), _bucket(summed, unsummed)]
    for state in (live, summed, unsummed):
        state.view.fill_(5.0)
    live.parameter.grad, summed.holds_sum = live.view, True
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


def test_a_sparse_bucket_has_no_memory_and_a_reset_expects_everything_anew() -> None:
    sparse = _bucket(_state(0, is_sparse=True))
    assert sparse.is_sparse
    assert len(sparse.flat) == 0
    states = [_state(0), _state(1)]
    bucket = _bucket(*states)
    assert not bucket.is_sparse
    bucket.pending = 0
    for state in states:
        state.contribution, state.holds_sum, state.arrived = COPIED_IN, True, 3
    bucket.reset()
    assert bucket.pending == 2
    assert all((state.contribution, state.holds_sum, state.arrived) == (PENDING, False, 0) for state in states)


def test_a_communication_hook_sees_gradients_parameters_and_place() -> None:
    states = [_state(0, (2, 3)), _state(1, (2, 2, 1, 2))]
    states[1].parameter.data = states[1].parameter.data.to(memory_format=torch.channels_last)
    bucket = _bucket(*states, multiple_of=8)
    seen = CommHookBucket(bucket, True)
    assert (seen.index(), seen.is_last(), CommHookBucket(bucket, False).is_last()) == (7, True, False)
    assert len(seen.buffer()) == 14
    for gradient, parameter, state in zip(seen.gradients(), seen.parameters(), states, strict=True):
        assert parameter is state.parameter
        assert gradient.data_ptr() == state.view.data_ptr()
        assert (gradient.shape, gradient.stride()) == (state.view.shape, state.view.stride())
    other = torch.arange(14.0)
    seen.set_buffer(other)
    assert seen.buffer() is other
    assert seen.gradients()[0].tolist() == [[0, 1, 2], [3, 4, 5]]


# -- layouts that learn --------------------------------------------------------------------------------------------


def _layout(count: int = 4, **route: Any) -> BucketLayout:
    """A bucket for each parameter."""
    states = [_state(index) for index in range(count)]
    return BucketLayout(states, [_route(**route)] * count, BucketSizes(1, 1, 1))


def _members(layout: BucketLayout) -> list[list[int]]:
    return [[state.index for state in bucket.members] for bucket in layout.buckets]


def test_a_layout_follows_the_order_in_which_gradients_last_arrived() -> None:
    layout = _layout()
    states = [bucket.members[0] for bucket in reversed(layout.buckets)]
    assert _members(layout) == [[3], [2], [1], [0]], "at first the parameters backwards"
    assert [bucket.index for bucket in layout.buckets] == [0, 1, 2, 3]
    assert layout.arrivals == []
    layout.arrivals += [1, 0, 1]
    states[0].expected, states[0].arrived, states[1].expected, states[1].arrived, states[2].expected = 1, 5, 0, 2, 0
    with mock.patch.object(layout_module, "broadcast") as told:
        layout.learn("group")  # type: ignore[arg-type]
        assert _members(layout) == [[3], [2], [1], [0]], "from the next step on"
        layout.renew()
        assert _members(layout) == [[0], [1], [3], [2]], "those that did not arrive come last, backwards"
        assert [state.expected for state in states[:3]] == [1, 2, 1]
        assert layout.arrivals is None
        buckets = list(layout.buckets)
        layout.renew()
        layout.learn("group")  # type: ignore[arg-type]
        assert layout.buckets == buckets
        assert told.call_count == 1
        assert told.call_args.args[1] == "group"


def test_a_layout_follows_the_first_ranks_order_and_one_that_is_right_stays() -> None:
    def of_first_rank(tensors: list[torch.Tensor], group: object) -> None:
        tensors[0].copy_(torch.tensor(order))

    for order in ([2, 0, 3, 1], [3, 2, 1, 0]):
        layout = _layout()
        assert layout.arrivals is not None
        layout.arrivals += [0, 1, 2, 3]
        before = list(layout.buckets)
        with mock.patch.object(layout_module, "broadcast", of_first_rank):
            layout.learn(None)  # type: ignore[arg-type]
        layout.renew()
        assert _members(layout) == [[index] for index in order]
        assert (layout.buckets == before) is (order == [3, 2, 1, 0])
        assert all(len(bucket.flat) == 0 for bucket in before) or layout.buckets == before
    empty = BucketLayout([], [], GREAT)
    empty.learn(None)  # type: ignore[arg-type]
    assert empty.buckets == []


def test_buckets_that_are_reduced_in_two_levels_can_be_split() -> None:
    assert [len(bucket.flat) for bucket in _layout(two_level=SimpleNamespace(inner_size=3)).buckets] == [6] * 4
    assert [len(bucket.flat) for bucket in _layout().buckets] == [4] * 4


# -- gradients on their way into buckets ---------------------------------------------------------------------------

VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0])
SPARSE = torch.sparse_coo_tensor([[1, 1]], torch.tensor([2.0, 3.0]), (4,), check_invariants=True)
PLACES: dict[str, dict[str, Any]] = {
    "in the bucket": {},
    "of another type": {"dtype": torch.float64},
    "in the user's memory": {"grad_buffer": True},
}


def _installed(place: str = "in the bucket", gradient: object = None, **more: Any) -> ParameterState:
    """A parameter whose view holds nan, with a gradient of its own, in place or without one."""
    given = PLACES[place] | more
    if "grad_buffer" in given:
        given["grad_buffer"] = torch.zeros(4)
    state = _state(0, **given)
    state.scale = 0.5
    if not state.is_sparse:
        _bucket(state)
        state.view.fill_(torch.nan)
    if gradient == "in place":
        state.view.copy_(VALUES)
        state.parameter.grad = state.view
    elif isinstance(gradient, torch.Tensor):
        state.parameter.grad = gradient.clone()
    return state


def test_large_gradients_that_become_views_are_copied_at_once() -> None:
    assert is_copied_at_once(_state(0, (1 << 14,)))
    assert not is_copied_at_once(_state(0, ((1 << 14) - 1,)))
    assert not is_copied_at_once(_state(0, (1 << 14,), is_sparse=True))
    assert not is_copied_at_once(_state(0, (1 << 14,), dtype=torch.float64))


@pytest.mark.parametrize("copy", [copy_in_at_once, lambda state: copy_in([state])], ids=["large", "small"])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("gradient", [VALUES, "in place", None], ids=["its own", "in place", "none"])
def test_a_view_becomes_the_scaled_gradient(copy: Any, repeats: bool, scale: float, gradient: object) -> None:
    state = _installed(gradient=gradient, repeats=repeats)
    state.scale = scale
    copy(state)
    assert state.contribution is COPIED_IN
    assert torch.equal(state.view, torch.zeros(4) if gradient is None else VALUES * scale)
    if repeats:
        assert state.parameter.grad is None, "a further one must not be added to what is in flight"
    elif gradient is not None or copy is copy_in_at_once:
        assert state.parameter.grad is state.view


@pytest.mark.parametrize("place", list(PLACES))
def test_micro_batches_add_up(place: str) -> None:
    state = _installed(place)
    accumulate(state)
    assert state.view.isnan().all(), "nothing came"
    for count in (1, 2, 3):
        state.parameter.grad = VALUES.clone() if state.parameter.grad is None else state.parameter.grad.add_(VALUES)
        accumulate(state)
        assert torch.equal(state.view, VALUES.to(state.dtype) * count)
        assert state.holds_sum is state.is_apart
        assert state.parameter.grad is (None if state.is_apart else state.view)
    assert copy_in([state]) == []
    assert torch.equal(state.view, VALUES.to(state.dtype) * 1.5)


@pytest.mark.parametrize("place", ["of another type", "in the user's memory"])
def test_a_view_apart_without_gradient_is_zero(place: str) -> None:
    state = _installed(place)
    copy_in([state])
    assert torch.equal(state.view, torch.zeros(4, dtype=state.dtype))


def test_a_bucket_is_filled_by_members_of_every_kind_and_those_without_gradient_are_told() -> None:
    own, in_place, none, done = (_state(index) for index in range(4))
    bucket = _bucket(own, in_place, none, done)
    bucket.flat.fill_(torch.nan)
    for state in (own, in_place, none, done):
        state.scale = 0.5
    own.parameter.grad, done.contribution = VALUES.clone().requires_grad_(), COPIED_IN
    in_place.view.copy_(VALUES)
    in_place.parameter.grad = in_place.view
    done.view.fill_(9.0)
    own.contribution = READY
    assert copy_in(bucket.members) == [none]
    assert bucket.flat.tolist() == [*(VALUES / 2).tolist() * 2, *[0.0] * 4, *[9.0] * 4]
    assert not own.view.requires_grad
    assert copy_in(bucket.members) == []


def test_gradients_of_sparse_embeddings_stay_sparse() -> None:
    state, repeated, none = (
        _installed(is_sparse=True),
        _installed(is_sparse=True, repeats=True),
        _installed(is_sparse=True),
    )
    for one in (state, repeated):
        one.parameter.grad = SPARSE.clone()
        accumulate(one)
        assert one.parameter.grad is not None
    for one in (state, repeated, none):
        assert copy_in([one]) == []
        assert one.view.is_sparse
    assert state.view.to_dense().tolist() == repeated.view.to_dense().tolist() == [0, 2.5, 0, 0]
    assert none.view.to_dense().tolist() == [0] * 4
    assert (none.view._nnz(), none.view.shape) == (0, (4,))
    assert state.parameter.grad is not None
    assert repeated.parameter.grad is None


@pytest.mark.parametrize("fill", [copy_in_at_once, accumulate, lambda state: copy_in([state]), late_gradient])
def test_gradients_of_another_layout_are_named(fill: Any) -> None:
    with pytest.raises(ValueError, match=r"parameter 'p0' got a sparse gradient, but no nn\.Embedding"):
        fill(_installed(gradient=SPARSE))
    if fill not in (copy_in_at_once, accumulate):
        with pytest.raises(ValueError, match=r"parameter 'p0' is the weight of an nn\.Embedding\(sparse=True\)"):
            fill(_installed(gradient=VALUES, is_sparse=True))


def test_what_came_late_has_the_views_type() -> None:
    for place in PLACES:
        state = _installed(place)
        assert torch.equal(late_gradient(state), torch.zeros_like(state.view))
        state.parameter.grad = VALUES.clone()
        late = late_gradient(state)
        assert torch.equal(late, VALUES.to(state.dtype))
        assert late.data_ptr() != state.view.data_ptr()
    sparse = _installed(is_sparse=True)
    assert late_gradient(sparse).to_dense().tolist() == [0] * 4
    sparse.parameter.grad = SPARSE.clone()
    assert late_gradient(sparse).to_dense().tolist() == [0, 5, 0, 0]


def test_gradients_that_were_put_elsewhere_after_the_copy_are_noticed() -> None:
    for gradient in (None, VALUES):
        state = _installed(gradient="in place")
        copy_in([state])
        assert not is_replaced(state)
        state.parameter.grad = gradient
        assert is_replaced(state)
    apart = _installed("of another type", gradient=VALUES)
    copy_in([apart])
    assert not is_replaced(apart), "it never was in the parameter"
    apart.parameter.grad = VALUES
    assert is_replaced(apart)
    sparse = _installed(is_sparse=True, gradient=SPARSE)
    copy_in([sparse])
    assert not is_replaced(sparse)
    sparse.parameter.grad = None
    assert is_replaced(sparse)
    repeated = _installed(gradient=VALUES, repeats=True)
    copy_in([repeated])
    assert not is_replaced(repeated)
    repeated.parameter.grad, repeated.arrived, repeated.expected = VALUES, 1, 1
    assert is_replaced(repeated)
    repeated.arrived = 2
    assert not is_replaced(repeated), "a late one"
