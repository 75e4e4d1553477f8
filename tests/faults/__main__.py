"""Run the whole matrix of faults or parts of it, and print a table."""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool

from tests.faults.matrix import ENGINES, FAULTS, PHASES, Case, Outcome, Rig


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield the requested cases; with ``--in-turn`` one phase and victim for every engine and fault."""
    phases, victims = itertools.cycle(arguments.phases), itertools.cycle(arguments.victims)
    for fault in arguments.faults:
        limit = max(arguments.limit, 8.0) if fault == "flap" else arguments.limit
        has_phases = not fault.startswith("skip")  # a skipped call has no phase
        for engine in arguments.engines:
            if arguments.in_turn:
                yield Case(engine, fault, next(phases) if has_phases else "forward", next(victims), limit)
            else:
                for phase in arguments.phases if has_phases else ("forward",):
                    yield from (Case(engine, fault, phase, victim, limit) for victim in arguments.victims)
        if arguments.in_turn and len(arguments.engines) % len(arguments.phases) == 0:
            next(phases)


def main() -> int:
    """Run the requested cases and print the results."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--victims", nargs="+", type=int, default=[3, 0, 1])
    parser.add_argument("--in-turn", action="store_true", help="one phase and victim for every engine and fault")
    parser.add_argument("--jobs", type=int, default=1, help="so many cases at a time, each on hosts of its own")
    parser.add_argument("--limit", type=float, default=4.0, help="seconds, of the watch")
    parser.add_argument(
        "--show", action="store_true", help="what every rank has written, where it is not as it should be"
    )
    arguments = parser.parse_args()
    failed = total = 0
    with ThreadPool(arguments.jobs, _start_rig) as pool:
        for outcome in pool.imap(_run, cases(arguments)):
            problems = outcome.problems()
            failed, total = failed + bool(problems), total + 1
            print(_row(outcome, problems), flush=True)
            if arguments.show and problems:
                for rank, output in outcome.outputs.items():
                    print(f"--- rank {rank}, exit code {outcome.codes[rank]}\n{output}", flush=True)
    print(f"{total - failed} of {total} cases are as they should be")
    return min(failed, 1)


def _row(outcome: Outcome, problems: list[str]) -> str:
    case = outcome.case
    survivors = [seconds for rank, seconds in outcome.seconds.items() if rank not in case.broken]
    took = f"{min(survivors):.1f}-{max(survivors):.1f} s" if survivors else "-"
    return f"{case!s:50} {took:12} {'; '.join(problems) or 'as it should be'}"


_of_thread = threading.local()
"""The virtual hosts of each thread of the pool; they end with the thread."""


def _start_rig() -> None:
    _of_thread.rig = Rig().__enter__()


def _run(case: Case) -> Outcome:
    outcome: Outcome = _of_thread.rig.run(case)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
