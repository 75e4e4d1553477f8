"""Time the reduction of 42 MB of gradients over 2 hosts x 4 ranks: two levels and one flat all_reduce per bucket.

    OMP_NUM_THREADS=1 python -m tests.bench.two_level [--rate 400mbit] [--rounds 8]

Both sides run alternately in the same eight processes; the output has medians and quartiles of the slowest rank, and
the bytes that each host sent. A flat ring sends 2 (n - 1) / n of the gradients through each host's link; two levels
send 2 (h - 1) / h of them.
"""

from __future__ import annotations

import argparse
import socket

import torch
import torch.distributed as dist

from ds_topo.process_groups.creation import gathered
from ds_topo.reduction.exchange import Exchange, two_level_exchange
from tests.bench.sides import Times, alternate, ratios, table
from tests.cluster import Cluster

BUCKETS, BUCKET_BYTES = 10, 4 << 20


def _reduce_flat(buckets: list[torch.Tensor]) -> None:
    works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
    for work in works:
        work.wait()


def _reduce_in_two_levels(buckets: list[torch.Tensor], levels: Exchange) -> None:
    pending = [levels.all_reduce(bucket) for bucket in buckets]
    for reduction in pending:
        reduction.wait()


def _setting() -> tuple[list[torch.Tensor], Exchange]:
    group = dist.group.WORLD
    assert group is not None
    buckets = [torch.ones(BUCKET_BYTES // 4) for _ in range(BUCKETS)]
    hosts = dict(enumerate(gathered(socket.gethostname(), group)))
    return buckets, two_level_exchange(group, hosts, buckets[0].device)


def measure(rounds: int) -> Times:
    """Return the times of both sides."""
    buckets, levels = _setting()
    sides = {
        "flat": lambda: _reduce_flat(buckets),
        "two levels": lambda: _reduce_in_two_levels(buckets, levels),
    }
    times = alternate(sides, rounds, lambda: [bucket.fill_(1.0) for bucket in buckets], warmup=1)
    assert float(buckets[0][0]) == dist.get_world_size() ** 2, "each side has summed once"
    return times


def reduce_once(in_two_levels: bool) -> None:
    """Run one round of one side, for the byte counters."""
    buckets, levels = _setting()
    if in_two_levels:
        _reduce_in_two_levels(buckets, levels)
    else:
        _reduce_flat(buckets)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="400mbit", help="of each host's link")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    with Cluster(hosts=2, rate=arguments.rate) as cluster:
        times = cluster.run_ranks(measure, arguments.rounds, ranks_per_host=4, timeout=600)[0]
        print(f"link {arguments.rate}, {BUCKETS} buckets of {BUCKET_BYTES >> 20} MiB, {arguments.rounds} rounds")
        print(table(times))
        print(ratios(times, [("flat", "two levels")]))
        for name, in_two_levels in (("flat", False), ("two levels", True)):
            before = cluster.bytes_sent()
            cluster.run_ranks(reduce_once, in_two_levels, ranks_per_host=4)
            sent = [after - start for start, after in zip(before, cluster.bytes_sent(), strict=True)]
            print(f"{name}: each host sent {[f'{count / 1e6:.1f} MB' for count in sent]}, start-up included")


if __name__ == "__main__":
    main()
