"""Load checkpoints of jobs drawn at random into others, and compare every value.

python -m tests.checkpoint.matrix --seed 0 --pairs 300
python -m tests.checkpoint.matrix --seed 0 --only 17
python -m tests.checkpoint.matrix --seed 0 --first 1000 --pairs 90
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.checkpoint.matrix.pairs import draw_pair, run
from tests.support.world import Worlds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=300, help="the number of pairs")
    parser.add_argument("--first", type=int, default=0, help="the first number; from 1000 on, special pipelines")
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of single pairs")
    arguments = parser.parse_args()
    begun = time.monotonic()
    pairs = [
        draw_pair(arguments.seed, number)
        for number in arguments.only or range(arguments.first, arguments.first + arguments.pairs)
    ]
    with tempfile.TemporaryDirectory() as folder, Worlds() as worlds:
        report = run(worlds, pairs, Path(folder), show=True)
    print()
    for reason, count in report.reasons.most_common():
        print(f"{count:4} {reason}")
    for (route, kind), count in sorted(report.counts.items()):
        print(f"{route:10} {kind:8} {count}")
    print(f"{len(pairs)} pairs in {time.monotonic() - begun:.0f} s, {len(report.wrong)} wrong")
    raise SystemExit(bool(report.wrong))


if __name__ == "__main__":
    main()
