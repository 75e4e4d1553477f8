"""What sums to owners, and gathers from them, send between hosts: no more than theory asks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ds_topo.partition import Exchange, exchange_of
from tests.bench.sides import bytes_sent
from tests.cluster.virtual_hosts import Cluster

StartCluster = Callable[..., Cluster]
NUMEL = 3 << 19
TURNS = 3


def _exchange(gathers: bool) -> tuple[set[float], int]:
    """Numbers of this rank's slice, and the bytes that its host has sent, without packets that TCP sent once more."""
    group = dist.group.WORLD
    assert group is not None
    exchange = exchange_of(group, torch.device("cpu"))
    turns = [_exchange_once(exchange, gathers) for _ in range(TURNS)]
    exchange.rest()
    return {number for number, _ in turns}, min(sent for _, sent in turns)


def _exchange_once(exchange: Exchange, gathers: bool) -> tuple[float, int]:
    flat = torch.ones(NUMEL)
    dist.barrier()
    before = bytes_sent()
    dist.barrier()  # the interface is the host's: no rank of it sends before all have read its counter
    (exchange.gather(flat) if gathers else exchange.reduce_scatter(flat)).wait()
    dist.barrier()
    sent = bytes_sent() - before
    return float(flat.view(dist.get_world_size(), -1)[dist.get_rank()].mean()), sent


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (3, 1)])
def test_every_slice_crosses_once(start_cluster: StartCluster, hosts: int, ranks_per_host: int) -> None:
    """``(hosts - 1) / hosts`` of the tensor leave a host, whatever its number of ranks, and headers of packets."""
    cluster = start_cluster(hosts=hosts)
    ranks = hosts * ranks_per_host
    expected = 4 * NUMEL * (hosts - 1) / hosts
    for gathers in (False, True):
        results = cluster.run_ranks(_exchange, gathers, ranks_per_host=ranks_per_host)
        assert [numbers for numbers, _ in results] == [{1.0 if gathers else ranks}] * ranks
        assert all(expected < sent < 1.08 * expected + 50_000 for _, sent in results), results
