"""With an axis ``shard`` inside hosts, a host sends the sums of gradients once per step, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.bench import hybrid_sharding as bench
from tests.bench.sides import bytes_sent
from tests.cluster.virtual_hosts import Cluster

StartCluster = Callable[..., Cluster]
CASES = [(stage, micro_batches) for stage in (1, 2, 3) for micro_batches in (1, 4)]


def _sent(cases: list[tuple[int, int]]) -> list[dict[str, float]]:
    """Return the bytes that this rank's host sends in a step, over the bytes of the gradients, for each case."""
    bench.deepspeed.init_distributed(verbose=False)
    return [
        {name: _sent_by(*side) / bench.GRADIENT_BYTES for name, side in bench.sides_of(*case).items()} for case in cases
    ]


def _sent_by(step: Callable[[], object], end: Callable[[], object]) -> int:
    step()  # the first step lays buckets out
    counts = []
    for _ in range(3):  # the minimum: TCP sends some packets more than once
        dist.barrier()
        before = bytes_sent()
        dist.barrier()
        step()
        dist.barrier()
        counts.append(bytes_sent() - before)
    end()
    return min(counts)


@pytest.mark.exhaustive
def test_a_host_sends_each_gradient_once_and_less_than_plain_zero(start_cluster: StartCluster) -> None:
    results = start_cluster(hosts=2).run_ranks(_sent, CASES, ranks_per_host=4, timeout=300)[0]
    for case, found in zip(CASES, results, strict=True):
        print(case, {side: round(times, 2) for side, times in found.items()})
    assert all(0.95 < found["ours"] < 1.1 for found in results), results
    assert results[-1]["ours"] < results[-1]["deepspeed"] / 9
