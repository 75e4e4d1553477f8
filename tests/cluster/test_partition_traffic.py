"""A reduce-scatter and an all-gather of partitions send no more bytes between hosts than necessary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ds_topo.reduction.exchange import Exchange, exchange_of
from tests.bench.sides import bytes_sent
from tests.cluster.virtual_hosts import Cluster

StartCluster = Callable[..., Cluster]
NUMEL = 3 << 19
TURNS = 3


def _exchange() -> list[tuple[set[float], int]]:
    """Reduce-scatter, then gather. Return the values of this rank's slice and the bytes that its host sent.

    The bytes are the minimum of a few turns, because TCP sends some packets more than once.
    """
    group = dist.group.WORLD
    assert group is not None
    exchange = exchange_of(group, torch.device("cpu"))
    found = []
    for gathers in (False, True):
        turns = [_exchange_once(exchange, gathers) for _ in range(TURNS)]
        found.append(({number for number, _ in turns}, min(sent for _, sent in turns)))
    exchange.rest()
    return found


def _exchange_once(exchange: Exchange, gathers: bool) -> tuple[float, int]:
    flat = torch.ones(NUMEL)
    dist.barrier()
    before = bytes_sent()
    dist.barrier()  # ranks of a host share its interface: none sends before all have read the counter
    (exchange.gather(flat) if gathers else exchange.reduce_scatter(flat)).wait()
    dist.barrier()
    sent = bytes_sent() - before
    return float(flat.view(dist.get_world_size(), -1)[dist.get_rank()].mean()), sent


@pytest.mark.exhaustive
@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (3, 1)])
def test_each_slice_crosses_the_link_once(start_cluster: StartCluster, hosts: int, ranks_per_host: int) -> None:
    """A host sends ``(hosts - 1) / hosts`` of the tensor, and packet headers, for any number of ranks on it."""
    cluster = start_cluster(hosts=hosts)
    ranks = hosts * ranks_per_host
    expected = 4 * NUMEL * (hosts - 1) / hosts
    found = cluster.run_ranks(_exchange, ranks_per_host=ranks_per_host)
    for value, results in zip((float(ranks), 1.0), zip(*found, strict=True), strict=True):
        assert [values for values, _ in results] == [{value}] * ranks
        assert all(expected < sent < 1.08 * expected + 50_000 for _, sent in results), results
