"""Plans of buckets: what holds for any sizes, kinds, order and capacities."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo.reducer.planning import BucketSizes, plan_buckets

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
