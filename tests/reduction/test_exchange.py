"""Reduce-scatter, gather and the move between layouts, in real processes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.process_grid import ProcessGrid
from ds_topo.reduction.exchange import (
    CollectiveExchange,
    Exchange,
    ExchangeMember,
    PartitionHolders,
    PeerExchange,
    exchange_of,
)
from ds_topo.reduction.partitions import PartitionLayout, moved
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks
from tests.support.world import Worlds, names_threads

CPU = torch.device("cpu")
Make = Callable[[ProcessGroup], Exchange]
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)


def _group() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@cache
def _remainders(numel: int) -> torch.Tensor:
    return torch.arange(numel) % 13


def _numbers(numel: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (_remainders(numel * dist.get_world_size()) + rank).to(dtype)


def _exchanges(make: Make, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    exchange, rank, size = make(_group()), dist.get_rank(), dist.get_world_size()
    for numel in (1, 7, 300_000):
        for dtype in dtypes:
            flats = [_numbers(numel, rank + place, dtype) for place in range(5)]
            under_way = [exchange.reduce_scatter(flat) for flat in flats]
            for place, (flat, pending) in enumerate(zip(flats, under_way, strict=True)):
                assert pending.wait() > 0
                total = torch.stack([_numbers(numel, other + place, dtype) for other in range(size)]).sum(0)
                assert torch.equal(flat.view(size, -1)[rank], total.view(size, -1)[rank])
            for gather in (lambda flat: exchange.gather(flat).wait(), exchange.gather_now):
                flat = torch.full((numel * size,), -1).to(dtype)
                flat.view(size, -1)[rank] = rank
                gather(flat)
                assert torch.equal(flat.view(size, -1), torch.arange(size).to(dtype)[:, None].expand(size, numel))
    if isinstance(exchange, PeerExchange):
        _all_reduces(exchange)
    assert exchange.gather(torch.empty(0)).wait() > 0
    for _ in range(2):
        exchange.rest()
    assert not any("slices" in thread.name for thread in threading.enumerate())


def _all_reduces(exchange: PeerExchange) -> None:
    """Sum tensors among other exchanges. Some ranks know further ones before others do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        under_way = []
        for numel in (1, 300_000, 7, 60_000):
            flat, other = _numbers(numel, rank, dtype), _numbers(numel, rank, dtype)
            under_way += [(flat, exchange.all_reduce(flat)), (flat, exchange.reduce_scatter(other))]
            if rank in (0, size - 1):  # they know the next tensors only after the end of these
                under_way[-1][1].wait()
        for flat, pending in under_way:
            pending.wait()
            total = torch.stack([_numbers(len(flat) // size, other, dtype) for other in range(size)]).sum(0)
            assert torch.equal(flat, total)


def _on_hosts(hosts: str) -> list[ExchangeMember]:
    """Return the places of ranks without copies, on hosts with names of one letter."""
    return [ExchangeMember(host, rank) for rank, host in enumerate(hosts)]


WAYS: dict[str, Make] = {
    "peers": lambda group: PeerExchange(group, _on_hosts("aaaa")),
    "peers_on_two_hosts": lambda group: PeerExchange(group, _on_hosts("aabb")),
    "peers_on_hosts_in_turn": lambda group: PeerExchange(group, _on_hosts("abab")),
    "collectives": lambda group: CollectiveExchange(group, None, torch.device("cpu")),
}


def _exchange_by(way: str) -> None:
    gloo_sums_all = Version(torch.__version__) >= Version("2.13")
    _exchanges(WAYS[way], DTYPES if way != "collectives" or gloo_sums_all else DTYPES[:1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", mark_exhaustive(WAYS, lambda _, way: way != "peers_on_two_hosts"))
def test_reduce_scatter_sums_owned_slice_and_gather_fills_all_slices(world: Worlds, way: str) -> None:
    world(4).run(_exchange_by, way)


def _over_copies(order: Sequence[str]) -> None:
    """Sum over partitions and copies. Some ranks know further tensors before others do."""
    with ProcessGrid(",".join(f"{axis}=2" for axis in order)) as grid:
        group = grid.get_group("shard")
        copies = PartitionHolders(grid.get_group("data"), grid.get_data_parallel_group())
        own, partners = dist.get_rank(group), sum(grid.get_ranks("shard"))
        for exchange in (exchange_of(group, torch.device("cpu"), copies), CollectiveExchange(group, copies.group, CPU)):
            for over_copies, expected in ((True, 6), (False, partners)):
                flats = [torch.full((2, numel), float(dist.get_rank())) for numel in (2, 200_000, 6)]
                under_way = []
                for flat in flats:
                    under_way.append(exchange.reduce_scatter(flat.view(-1), over_copies=over_copies))
                    if dist.get_rank() in (0, 3):  # they know the next tensor only after the end of this one
                        under_way[-1].wait()
                for flat, pending in zip(flats, under_way, strict=True):
                    pending.wait()
                    if over_copies:  # gloo does not say that a single reduce_scatter has ended
                        assert pending.is_done()
                    assert set(flat[own].tolist()) == {expected}
            flat = torch.full((2, 6), -1.0)
            flat[own] = own
            exchange.gather(flat.view(-1)).wait()
            assert flat.tolist() == [[0.0] * 6, [1.0] * 6]
            exchange.rest()


def _alone_in_shard() -> None:
    with ProcessGrid("data=2,shard=1") as grid:
        exchange = exchange_of(
            grid.get_group("shard"), CPU, PartitionHolders(grid.get_group("data"), grid.get_group("data"))
        )
        flat = torch.ones(4)
        exchange.gather(flat).wait()
        exchange.reduce_scatter(flat, over_copies=False).wait()
        assert flat.tolist() == [1.0] * 4
        exchange.reduce_scatter(flat).wait()
        assert flat.tolist() == [2.0] * 4
        exchange.rest()


def test_a_partition_of_one_rank_has_nothing_to_gather(world: Worlds) -> None:
    world(2).run(_alone_in_shard)


@pytest.mark.parametrize("order", [("data", "shard"), ("shard", "data")])
def test_slices_are_summed_over_their_copies(world: Worlds, order: Sequence[str]) -> None:
    world(4).run(_over_copies, order)


def _policies() -> dict[int, int]:
    """Return the scheduling policy of every gloo thread of this process, by Linux thread id."""
    policies: dict[int, int] = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # another thread has just ended
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                policies[int(task.name)] = os.sched_getscheduler(int(task.name))
    assert policies, "gloo has renamed its threads"
    return policies


def _yielding() -> None:
    assert set(_policies().values()) == {os.SCHED_OTHER}
    first, second = (PeerExchange(_group(), _on_hosts("aa")) for _ in range(2))
    first.gather_now(torch.zeros(2))
    assert set(_policies().values()) == {os.SCHED_OTHER}, "the caller waits, so no computation is interrupted"
    for exchange in (first, second):
        exchange.gather(torch.zeros(2)).wait()
        assert set(_policies().values()) == {os.SCHED_BATCH}
    first.rest()
    assert set(_policies().values()) == {os.SCHED_BATCH}, "the second exchange is still at work"
    del exchange, second  # without rest()
    gc.collect()
    assert set(_policies().values()) == {os.SCHED_OTHER}
    first.gather(torch.zeros(2)).wait()
    assert set(_policies().values()) == {os.SCHED_BATCH}
    first.rest()
    with mock.patch("os.sched_setscheduler", side_effect=PermissionError):  # as in some sandboxes
        first.gather(torch.zeros(2)).wait()
        first.rest()
    assert set(_policies().values()) == {os.SCHED_OTHER}
    for thread in _policies():
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    first.gather(torch.zeros(2)).wait()
    first.rest()
    assert set(_policies().values()) == {os.SCHED_BATCH}, "the user's own policy stays"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this policy")
@names_threads
def test_gloo_threads_yield_while_an_exchange_is_at_work() -> None:
    run_ranks(2, _yielding)


def _one_exchange() -> None:
    group, cpu = _group(), torch.device("cpu")
    assert exchange_of(group, cpu) is exchange_of(group, cpu), "the ranks number the messages of a group alike"


def test_exchange_of_returns_one_object_per_group(world: Worlds) -> None:
    world(2).run(_one_exchange)


def _fails() -> None:
    exchange = PeerExchange(_group(), _on_hosts("aa"))
    sent = mock.patch.object(dist, "isend", side_effect=RuntimeError("connection closed"))
    with sent:
        under_way = [exchange.gather(torch.zeros(4)), exchange.reduce_scatter(torch.zeros(4))]
        for pending in under_way:
            with pytest.raises(RuntimeError, match="connection closed"):
                pending.wait()
    with pytest.raises(RuntimeError, match="connection closed"):
        exchange.gather(torch.zeros(4)).wait()
    exchange.rest()


def test_every_wait_after_an_error_raises_that_error() -> None:
    run_ranks(2, _fails, deadline=60)


def _move(case: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(case)
    numels = torch.randint(0, 40, (6,), generator=generator).tolist()
    offsets = [sum(numels[:place]) for place in range(6)]
    flat = PartitionLayout.flat(numels, offsets, -(-sum(numels) // size), size)
    balanced = PartitionLayout.balanced(numels, [(4, 5), (0, 1, 2), (3,)], size)
    values = [torch.rand(numel, generator=generator) for numel in numels]

    def partition(layout: PartitionLayout) -> torch.Tensor:
        result = torch.zeros(layout.partition_numel)
        for part in layout.fragments(rank):
            result[part.address : part.address + part.numel] = values[part.parameter][part.start :][: part.numel]
        return result

    for source, target in ((flat, balanced), (balanced, flat), (flat, flat)):
        assert torch.equal(moved(partition(source), source, target, _group()), partition(target))


@pytest.mark.parametrize("case", range(4))
def test_moved_returns_the_partition_of_the_other_layout(world: Worlds, case: int) -> None:
    world(4 if case else 1).run(_move, case)
