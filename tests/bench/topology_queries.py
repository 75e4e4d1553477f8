"""Time a topology of 1,048,576 ranks and 1,000 random queries of it, and DeepSpeed's in the same process.

    python -m tests.bench.topology_queries

Each of the 1,000 draws calls ``get_coord``, ``get_rank``, ``get_rank_repr`` and ``filter_match`` (of the complete
coordinate) for one rank. DeepSpeed's ``get_coord`` and ``filter_match`` search its table, so it runs only a few draws,
and its time is scaled to 1,000. Time and memory are measured in separate runs, because ``tracemalloc`` slows Python
down.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.pipe.topology import ProcessTopology as DeepSpeedTopology

from ds_topo import ProcessTopology

AXES, DEGREES = ["pipe", "data", "model"], [32, 2048, 16]
RANKS, DRAWS, DEEPSPEED_DRAWS, REPEATS = 1_048_576, 1000, 5, 3


def answers(topology: Any, ranks: list[int]) -> list[Any]:
    """Return all answers for these ranks."""
    found = []
    for rank in ranks:
        coordinate = topology.get_coord(rank)
        by_name = coordinate._asdict()
        found += [
            coordinate,
            topology.get_rank(**by_name),
            topology.get_rank_repr(rank),
            topology.filter_match(**by_name),
        ]
    return found


def seconds(kind: Callable[..., Any], ranks: list[int]) -> tuple[float, float]:
    """Return the seconds to build a topology and to answer the queries."""
    gc.collect()
    start = time.perf_counter()
    topology = kind(axes=AXES, dims=DEGREES)
    built = time.perf_counter()
    answers(topology, ranks)
    return built - start, time.perf_counter() - built


def peak_bytes(kind: Callable[..., Any], ranks: list[int]) -> int:
    """Return the peak memory of building and answering, including the answers."""
    gc.collect()
    tracemalloc.start()
    try:
        answers(kind(axes=AXES, dims=DEGREES), ranks)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    draws = random.Random(0).choices(range(RANKS), k=DRAWS)
    few = draws[:DEEPSPEED_DRAWS]
    ours, theirs = [], []
    for _ in range(REPEATS):
        ours.append(sum(seconds(ProcessTopology, draws)))
        build, ask = seconds(DeepSpeedTopology, few)
        theirs.append(build + ask * DRAWS / len(few))
    our_median, their_median = statistics.median(ours), statistics.median(theirs)
    our_bytes, their_bytes = peak_bytes(ProcessTopology, draws), peak_bytes(DeepSpeedTopology, few[:1])
    print(f"{RANKS:,} ranks, {DRAWS:,} x (get_coord, get_rank, get_rank_repr, filter_match), build included")
    rows = [("ds_topo", ours, our_median, our_bytes), ("DeepSpeed", theirs, their_median, their_bytes)]
    for name, times, median, peak in rows:
        spread = f"({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
        print(f"{name:10}{median * 1e3:12.1f} ms  {spread}  {peak / 1e6:8.2f} MB")
    print(f"(DeepSpeed's time is scaled from {len(few)} draws, its memory is with 1 draw)")
    print(f"ratio      {their_median / our_median:12,.0f} x  {their_bytes / our_bytes:,.0f} x less memory")
    print("targets    50 ms and 1 MB:", "met" if our_median < 0.05 and our_bytes < 1e6 else "MISSED")


if __name__ == "__main__":
    main()
