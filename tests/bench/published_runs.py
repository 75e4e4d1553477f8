"""Print how well the planner predicts published runs; with --fit, fit its constants to them.

    python -m tests.bench.published_runs [FILE.json ...] [--fit | --json]

The table has the published and the predicted value of each run, and the time of the published layout over that of the
planner's best one. ``--json`` prints the predictions with all digits.

``--fit`` fits one number per accelerator and precision: the share of the peak that large products reach. It prints the
best share, and predictions of each run, and of each source, by constants that were fitted to the others alone.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import log
from statistics import median

from rich.console import Console

from ds_topo.cli.shared import table_of
from ds_topo.plan.hardware import Accelerator, accelerator_of
from tests.plan.published_runs import FILES, Run, Verdict, judge, name_of, precision_of, read_runs

SHARES = [share / 200 for share in range(80, 186)]
WIDTH = 132
Group = tuple[str, str]


def print_table(verdicts: Sequence[Verdict]) -> None:
    """Print the predicted and the published value of every run."""
    console = Console(highlight=False, width=WIDTH)
    table = table_of("run", "metric", ">published", ">predicted", ">error", ">GB", ">of best")
    for number, verdict in enumerate(verdicts, start=1):
        table.add_row(
            f"{number} {verdict.name}",
            verdict.metric.replace("_per_", "/").replace("_", " "),
            f"{verdict.published:,.4g}",
            f"{verdict.predicted:,.4g}",
            f"{verdict.error:+.1%}",
            f"{verdict.plan.memory.total / 1e9:.0f}{'' if verdict.fits else ' !'}",
            f"{verdict.plan.seconds / verdict.best.seconds:.2f}" if verdict.best else "-",
        )
    console.print(table)
    for number, verdict in enumerate(verdicts, start=1):
        if not verdict.fits:
            console.print(f"run {number}: {verdict.plan.layout} does not fit")
        if verdict.note:
            console.print(f"run {number}: the best is {verdict.note}")
    errors = [abs(verdict.error) for verdict in verdicts]
    console.print(f"{len(verdicts)} runs: median error {median(errors):.1%}, largest {max(errors):.1%}")


def print_json(verdicts: Sequence[Verdict]) -> None:
    """Print every prediction, one a line."""
    for verdict in verdicts:
        terms = {"seconds": verdict.plan.time.parts(), "memory_bytes": verdict.plan.memory.parts()}
        metric = {verdict.metric: verdict.predicted}
        print(json.dumps({"run": verdict.name, "layout": str(verdict.plan.layout), **metric, **terms}))


def group_of(run: Run) -> Group:
    """Return the accelerator and the number format of products."""
    products = precision_of(run).products
    return accelerator_of(run["accelerator"]).name, "bf16" if products == "fp16" else products


def source_of(run: Run) -> str:
    """Return the first author or the product of a run's source."""
    return str(run["source"]).split(",")[0].split(" et al")[0]


def with_share(accelerator: Accelerator, number_format: str, share: float) -> Accelerator:
    """Return the accelerator with another share of its peak for products."""
    efficiency = accelerator.efficiency
    names = ("bf16", "fp16") if number_format == "bf16" else (number_format,)
    products = {**efficiency.products, **dict.fromkeys(names, share)}
    return replace(accelerator, efficiency=replace(efficiency, products=products))


def errors_by_share(run: Run) -> list[float]:
    """Return the run's error for every share."""
    name, number_format = group_of(run)
    accelerator = accelerator_of(name)
    return [
        judge(run, compare=False, accelerator=with_share(accelerator, number_format, share)).error for share in SHARES
    ]


def best_share(errors: Sequence[Sequence[float]]) -> int:
    """Return the index of the share with the smallest sum of squared log errors."""
    return min(range(len(SHARES)), key=lambda index: sum(log(1 + run[index]) ** 2 for run in errors))


def fit(runs: Sequence[Run]) -> None:
    """Fit the constants, and print the predictions."""
    groups: dict[Group, list[Run]] = defaultdict(list)
    for run in runs:
        groups[group_of(run)].append(run)
    left_out: list[float] = []
    for (name, number_format), members in groups.items():
        errors = {id(run): errors_by_share(run) for run in members}
        used = accelerator_of(name).efficiency.products[number_format]
        fitted = SHARES[best_share(list(errors.values()))]
        print(f"\n{name} {number_format}: in use {used:.3f}, fitted to all {len(members)} runs {fitted:.3f}")
        print(f"{'run':42} {'in use':>8} {'without run':>12} {'without source':>15}")
        for run in members:
            current = judge(run, compare=False).error
            others = [errors[id(other)] for other in members if other is not run]
            elsewhere = [errors[id(other)] for other in members if source_of(other) != source_of(run)]
            text = ""
            for kept, width in ((others, 12), (elsewhere, 15)):
                if kept:
                    error = errors[id(run)][best_share(kept)]
                    text += f"{error:>+{width}.1%}"
                    if kept is others:
                        left_out.append(abs(error))
                else:
                    text += f"{'-':>{width}}"
            print(f"{name_of(run)[:26]:26} {source_of(run)[:15]:15} {current:>+8.1%} {text}")
    if left_out:
        print(f"\neach run by the others' constants: median {median(left_out):.1%}, largest {max(left_out):.1%}")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES[:1])
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--fit", action="store_true")
    asked.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    runs = [run for file in arguments.files for run in read_runs(file)]
    if arguments.fit:
        fit(runs)
    else:
        (print_json if arguments.json else print_table)([judge(run) for run in runs])


if __name__ == "__main__":
    main()
