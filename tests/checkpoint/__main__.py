"""Interrupt saves at any moment, and check that every job continues as if nothing had happened.

    python -m tests.checkpoint --kills 200

The faults are kills of all ranks, of one and of rank 0, a full disk, truncated files and changed bytes. They run in
turn for ZeRO 1 and 3, a pipeline, a mixture of experts, and a job that converts the checkpoint of another model. Each
takes about four seconds on two cores.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from pathlib import Path

from tests.checkpoint.kills import FAULTS, INTERRUPTED, Rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=24, help="the number of saves to interrupt")
    parser.add_argument("--kinds", nargs="+", choices=INTERRUPTED, default=list(INTERRUPTED))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    counts: Counter[tuple[str, int]] = Counter()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        rounds = {name: Rounds(name, Path(folder, name), draw) for name in arguments.kinds}
        cases = [(name, fault) for fault in arguments.faults for name in arguments.kinds]
        for number in range(arguments.kills):
            name, fault = cases[number % len(cases)]
            try:
                played = rounds[name].play(fault)
            except AssertionError as error:
                failed += 1
                print(f"{number + 1:4}  {name} {fault} FAILED: {error}", flush=True)
                continue
            counts[fault, played.loaded] += 1
            print(f"{number + 1:4}  {played}  ({played.seconds:.1f} s)", flush=True)
    for fault in arguments.faults:
        print(f"{fault:8} continued from step 2: {counts[fault, 2]}, from step 4: {counts[fault, 4]}")
    print(f"{arguments.kills - failed} of {arguments.kills} continued bit for bit from a complete checkpoint")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
