"""Load checkpoints into other layouts, continue, and compare the losses with the job that saved them.

    python -m tests.checkpoint.conversions
    python -m tests.checkpoint.conversions --kinds pipeline --targets orders

Each takes about ten seconds on two cores. Jobs have at most eight ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from tests.checkpoint.conversions.layouts import TOLERANCE, go_on, greatest_difference, pairs, save
from tests.support.ranks import run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("pipeline", "plain"), default=["pipeline", "plain"])
    parser.add_argument("--targets", nargs="+", default=["orders", "degrees", "stages"])
    parser.add_argument("--seconds", type=float, default=1e9, help="time after which no further pair begins")
    arguments = parser.parse_args()
    begun, count, wrong = time.monotonic(), 0, 0
    print(f"{'from':36} {'to':36} {'difference of losses':>20} {'seconds':>8}")
    for source, targets in pairs(arguments.kinds, arguments.targets):
        with tempfile.TemporaryDirectory() as folder:
            expected = run_ranks(source.ranks, save, source, Path(folder, "from"))[0]
            for target in targets:
                if time.monotonic() - begun > arguments.seconds:
                    break
                start = time.monotonic()
                try:
                    losses = run_ranks(target.ranks, go_on, target, Path(folder, "from"), {})[0]
                    difference = greatest_difference(losses, expected)
                except AssertionError as error:
                    print(error, flush=True)
                    difference = float("nan")
                seconds = time.monotonic() - start
                count, wrong = count + 1, wrong + (not difference < TOLERANCE)
                mark = "" if difference < TOLERANCE else "  DIFFERENT"
                print(f"{source!s:36} {target!s:36} {difference:20.1e} {seconds:8.2f}{mark}", flush=True)
    print(f"{count - wrong} of {count} continue within {TOLERANCE:.0e}")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
