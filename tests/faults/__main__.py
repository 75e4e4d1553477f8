"""The whole matrix, or parts of it; prints a table."""

from __future__ import annotations

import argparse
import sys

from tests.faults.matrix import ENGINES, FAULTS, PHASES, Case, run


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--victims", nargs="+", type=int, default=[3, 0])
    parser.add_argument("--limit", type=float, default=4.0, help="seconds, of the watch")
    parser.add_argument("--show", action="store_true", help="what every rank has written")
    arguments = parser.parse_args()
    failed = 0
    for fault in arguments.faults:
        phases = arguments.phases if not fault.startswith("skip") else ("forward",)  # a skip is between phases
        limit = max(arguments.limit, 8.0) if fault == "flap" else arguments.limit
        for case in (
            Case(engine, fault, phase, victim, limit)
            for engine in arguments.engines
            for phase in phases
            for victim in arguments.victims
        ):
            outcome = run(case)
            problems = outcome.problems()
            failed += bool(problems)
            survivors = [seconds for rank, seconds in outcome.seconds.items() if rank not in case.broken]
            took = f"{min(survivors):.1f}-{max(survivors):.1f} s" if survivors else "-"
            print(f"{case!s:50} {took:12} {'; '.join(problems) or 'as it should be'}", flush=True)
            if arguments.show:
                for rank, output in outcome.outputs.items():
                    print(f"--- rank {rank}, exit code {outcome.codes[rank]}\n{output}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
