"""Fit the planner's constants to published runs, and print how well they predict the runs.

    python -m tests.bench.planner_constants tests/plan/published_runs.json [more.json ...]

One number is fitted per accelerator and precision: the share of the peak that large products reach. The output has its
best value, and predictions of each row, and of each source, by constants that were fitted to the others alone.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import log
from statistics import median

from ds_topo.plan.hardware import Accelerator, accelerator_of
from ds_topo.plan.job import precision_of
from ds_topo.plan.published_runs import Row, judge, read_rows

SHARES = [share / 200 for share in range(80, 186)]
Group = tuple[str, str]


def group_of(row: Row) -> Group:
    """Return the accelerator and the number format of products."""
    accelerator = accelerator_of(row.text("accelerator"))
    products = precision_of(row.text("precision", "bf16")).products
    return accelerator.name, "bf16" if products == "fp16" else products


def source_of(row: Row) -> str:
    """Return the first author or the product of a row's source."""
    return row.text("source").split(",")[0].split(" et al")[0]


def with_share(accelerator: Accelerator, number_format: str, share: float) -> Accelerator:
    """Return the accelerator with another share of its peak for products."""
    efficiency = accelerator.efficiency
    names = ("bf16", "fp16") if number_format == "bf16" else (number_format,)
    products = {**efficiency.products, **dict.fromkeys(names, share)}
    return replace(accelerator, efficiency=replace(efficiency, products=products))


def errors_by_share(row: Row) -> list[float]:
    """Return the row's error for every share."""
    name, number_format = group_of(row)
    accelerator = accelerator_of(name)
    return [
        judge(row, compare=False, accelerator=with_share(accelerator, number_format, share)).error for share in SHARES
    ]


def best_share(errors: Sequence[Sequence[float]]) -> int:
    """Return the index of the share with the smallest sum of squared log errors."""
    return min(range(len(SHARES)), key=lambda index: sum(log(1 + row[index]) ** 2 for row in errors))


def main() -> None:
    """Fit the constants and print the predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    rows = [row for file in parser.parse_args().files for row in read_rows(file)]
    groups: dict[Group, list[Row]] = defaultdict(list)
    for row in rows:
        groups[group_of(row)].append(row)
    left_out: list[float] = []
    for (name, number_format), members in groups.items():
        errors = {id(row): errors_by_share(row) for row in members}
        used = accelerator_of(name).efficiency.products[number_format]
        fitted = SHARES[best_share(list(errors.values()))]
        print(f"\n{name} {number_format}: in use {used:.3f}, fitted to all {len(members)} rows {fitted:.3f}")
        print(f"{'row':42} {'in use':>8} {'without row':>12} {'without source':>15}")
        for row in members:
            current = judge(row, compare=False).error
            others = [errors[id(other)] for other in members if other is not row]
            elsewhere = [errors[id(other)] for other in members if source_of(other) != source_of(row)]
            text = ""
            for kept, width in ((others, 12), (elsewhere, 15)):
                if kept:
                    error = errors[id(row)][best_share(kept)]
                    text += f"{error:>+{width}.1%}"
                    if kept is others:
                        left_out.append(abs(error))
                else:
                    text += f"{'-':>{width}}"
            print(f"{row.name[:26]:26} {source_of(row)[:15]:15} {current:>+8.1%} {text}")
    if left_out:
        print(f"\neach row by the others' constants: median {median(left_out):.1%}, largest {max(left_out):.1%}")


if __name__ == "__main__":
    main()
