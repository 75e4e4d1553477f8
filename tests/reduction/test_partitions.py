"""Properties of partition layouts and of the rounds of an exchange, over many shapes."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_topo.reduction.exchange import PartitionHolders, rounds_of
from ds_topo.reduction.partitions import (
    ALIGNMENT,
    PartitionedGradients,
    PartitionLayout,
    moved,
)
from tests.support.fake_world import fake_world

NUMELS = st.lists(st.integers(0, 50), min_size=1, max_size=12)
SIZES = st.integers(1, 9)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[PartitionLayout, int]:
    """Draw balanced layouts with any groups, and flat ones with gaps."""
    numels, size = draw(NUMELS), draw(SIZES)
    order = draw(st.permutations(range(len(numels))))
    if draw(st.booleans()):
        cuts = sorted(draw(st.sets(st.integers(1, len(numels)))) | {len(numels)})
        groups = [order[start:end] for start, end in zip([0, *cuts], cuts, strict=False) if start < end]
        return PartitionLayout.balanced(numels, groups, size), size
    offsets, end = [0] * len(numels), 0
    for member in order:
        offsets[member] = end
        end += numels[member] + draw(st.integers(0, 3))
    return PartitionLayout.flat(numels, offsets, max(1, -(-end // size)), size), size


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_every_element_has_one_owner_and_one_address(drawn: tuple[PartitionLayout, int]) -> None:
    layout, size = drawn
    owners: Counter[tuple[int, int]] = Counter()
    for rank in range(size):
        taken: set[int] = set()
        for part in layout.fragments(rank):
            owners.update((part.parameter, element) for element in range(part.start, part.start + part.numel))
            addresses = set(range(part.address, part.address + part.numel))
            assert not addresses & taken
            assert max(addresses) < layout.partition_numel
            taken |= addresses
    assert owners == Counter((index, element) for index, n in enumerate(layout.numels) for element in range(n))


@given(layouts(), st.data())
@settings(max_examples=200, deadline=None)
def test_owners_agree_with_fragments(drawn: tuple[PartitionLayout, int], data: st.DataObject) -> None:
    layout, size = drawn
    address = {
        (part.parameter, part.start + place): (rank, part.address + place)
        for rank in range(size)
        for part in layout.fragments(rank)
        for place in range(part.numel)
    }
    parameter = data.draw(st.sampled_from(range(len(layout.numels))))
    start = data.draw(st.integers(0, layout.numels[parameter]))
    numel = data.draw(st.integers(0, layout.numels[parameter] - start))
    found = [
        ((parameter, owner.start + place), (owner.rank, owner.address + place))
        for owner in layout.owners(parameter, start, numel)
        for place in range(owner.numel)
    ]
    assert found == [((parameter, element), address[parameter, element]) for element in range(start, start + numel)]


@given(NUMELS, SIZES)
def test_regions_are_even_and_adjacent(numels: list[int], size: int) -> None:
    layout = PartitionLayout.balanced(numels, [(index,) for index in range(len(numels))], size)
    end = 0
    for region, numel in zip(layout.regions, numels, strict=True):
        assert region.start == end
        assert region.address == end // size
        assert region.slice_numel % ALIGNMENT == 0
        assert 0 <= region.numel - numel < ALIGNMENT * size
        end += region.numel
    assert (layout.numel, layout.partition_numel) == (end, end // size)


@given(layouts(), st.data())
@settings(max_examples=50, deadline=None)
def test_moved_sends_each_element_from_its_old_place_to_its_new_one(
    drawn: tuple[PartitionLayout, int], data: st.DataObject
) -> None:
    source, size = drawn
    numels = source.numels
    groups = [[index] for index in data.draw(st.permutations(range(len(numels))))]
    target = PartitionLayout.balanced(numels, groups, size)
    sums, sent = [_random(numel, index) for index, numel in enumerate(numels)], {}

    def exchange(incoming: torch.Tensor, outgoing: torch.Tensor, arriving: Any, leaving: Any, group: object) -> None:
        sent[rank] = outgoing.split(leaving)
        if len(sent) == size:  # the other ranks have sent theirs
            incoming.copy_(torch.cat([sent[other][rank] for other in range(size)]))

    for rank in [*range(size), data.draw(st.integers(0, size - 1))]:  # one rank goes on after all have sent
        partition = torch.nan_to_num(_own_part(source, rank, sums))
        with fake_world(rank, size), mock.patch.object(dist, "all_to_all_single", exchange):
            found = moved(partition, source, target, dist.group.WORLD)
    assert torch.equal(found, torch.nan_to_num(_own_part(target, rank, sums)))


def _random(numel: int, seed: int) -> torch.Tensor:
    return torch.randint(-9, 9, (numel,), generator=torch.Generator().manual_seed(seed)).float()


def _own_part(layout: PartitionLayout, rank: int, sums: list[torch.Tensor]) -> torch.Tensor:
    """Return a rank's partition of the parameters' gradients, without what no parameter fills."""
    partition = torch.full((layout.partition_numel,), torch.nan)
    for part in layout.fragments(rank):
        partition[part.address : part.address + part.numel] = sums[part.parameter][part.start : part.start + part.numel]
    return partition


@given(layouts(), st.data())
@settings(max_examples=100, deadline=None)
def test_partition_has_the_sums_of_micro_batches_and_late_gradients(
    drawn: tuple[PartitionLayout, int], data: st.DataObject
) -> None:
    layout, size = drawn
    rank, lasts = data.draw(st.integers(0, size - 1)), data.draw(st.booleans())
    indices = [region.index for region in layout.regions]
    whole = data.draw(st.sets(st.sampled_from(indices)))
    late = data.draw(st.sets(st.sampled_from(range(len(layout.numels)))))
    with fake_world(rank, size):
        parameters = [nn.Parameter(torch.zeros(numel)) for numel in layout.numels]
        gradients = PartitionedGradients(
            parameters,
            layout,
            dist.group.WORLD,
            torch.float32,
            memory=torch.zeros(layout.numel) if lasts else None,
            whole=whole,
        )
        for step in range(2):
            sums = [torch.zeros(numel) for numel in layout.numels]
            reduced = data.draw(st.sets(st.sampled_from(indices)))
            for micro_batch in range(1 if lasts or reduced & whole else 2):
                for region in layout.regions:
                    place = gradients.place(region).zero_()
                    for member in region.members if region.index in reduced else ():
                        gradient = _random(layout.numels[member], 100 * step + 10 * micro_batch + member)
                        start = layout.offsets[member] - region.start
                        place[start : start + len(gradient)] = gradient
                        sums[member] += gradient
                    if region.index in reduced:
                        gradients.collect(region, place)
            for member in late:
                region = gradients.regions[parameters[member]]
                if region.index in reduced:
                    gradient = _random(layout.numels[member], 1000 + member)
                    gradients.add(parameters[member], gradient)
                    sums[member] += gradient
                    if region.index in whole or lasts:
                        assert torch.equal(gradients.place_of(parameters[member]), sums[member])
            assert gradients.is_lent is not lasts
            assert gradients.holds_sums == bool(reduced - whole and not lasts)
            expected = _own_part(layout, rank, sums)
            found = gradients.take()
            assert torch.equal(found[expected.isfinite()], expected[expected.isfinite()])
            assert not gradients.holds_sums


@pytest.mark.parametrize("always", [False, True])
def test_few_regions_are_lent_at_a_time_unless_gradients_are_kept(always: bool) -> None:
    layout = PartitionLayout.balanced([4] * 6, [(index,) for index in range(6)], 2)
    with fake_world(0, 2):
        parameters = [nn.Parameter(torch.zeros(4)) for _ in range(6)]
        gradients = PartitionedGradients(parameters, layout, dist.group.WORLD, torch.float32, reduces_always=always)
        under_way: list[Any] = []
        for number, region in enumerate(layout.regions):
            assert len(gradients.place(region)) == region.numel
            waits = max(0, number - 2) if always else 0
            assert [each.wait.call_count for each in under_way] == [1] * waits + [0] * (number - waits)
            under_way.append(mock.Mock(**{"is_done.return_value": False}))
            gradients.note(under_way[-1])


@pytest.mark.parametrize(
    ("always", "ends_step", "expected"),
    [(True, False, 0.5), (True, True, 1.0), (False, False, 1.0), (False, True, 1.0)],
)
def test_late_gradient_is_divided_by_the_copies_that_the_last_exchange_adds(
    always: bool, ends_step: bool, expected: float
) -> None:
    layout = PartitionLayout.balanced([4], [(0,)], 2)
    with fake_world(0, 2):
        parameter, world = nn.Parameter(torch.zeros(4)), dist.group.WORLD
        gradients = PartitionedGradients(
            [parameter],
            layout,
            world,
            torch.float32,
            reduces_always=always,
            copies=PartitionHolders(world, world),
            ends_step=lambda: ends_step,
        )
        (region,) = layout.regions
        gradients.collect(region, torch.zeros(region.numel))
        gradients.add(parameter, torch.ones(4))
        assert gradients.take()[: min(4, region.slice_numel)].unique().tolist() == [expected]


HOSTS = [["a"] * 3, ["a", "b"], ["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", "a", "b"], ["a", "b", "c"] * 4]


@pytest.mark.parametrize("hosts", HOSTS, ids="-".join)
def test_rounds_deliver_every_contribution_to_its_owner_once(hosts: list[str]) -> None:
    ranks = range(len(hosts))
    rounds = [rounds_of(rank, hosts) for rank in ranks]
    held = {(rank, index): Counter([rank]) for rank in ranks for index in ranks}
    for number in range(len(rounds[0])):
        before = {key: value.copy() for key, value in held.items()}
        for rank in ranks:
            for peer in rounds[rank][number]:
                back = next(found for found in rounds[peer.rank][number] if found.rank == rank)
                assert (peer.mine, peer.theirs) == (back.theirs, back.mine), "both sides know the same"
                for index in peer.mine:
                    held[rank, index] += before[peer.rank, index]
    assert all(held[rank, rank] == Counter(ranks) for rank in ranks)


def test_two_rounds_send_every_slice_between_hosts_once() -> None:
    hosts = ["a", "b"] * 4
    sent = sum(
        len(peer.theirs)
        for rank in range(8)
        for peers in rounds_of(rank, hosts)
        for peer in peers
        if hosts[peer.rank] != hosts[rank]
    )
    assert sent == 8, "of 8 slices one copy goes either way; directly it would be 32"
