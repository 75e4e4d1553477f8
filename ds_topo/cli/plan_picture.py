"""A picture of the best plans: a step's seconds as stacked bars, and memory against the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_topo.errors import TopologyError
from ds_topo.planner.search import Found, Plan

COLORS = {
    "compute": "#4c78a8",
    "recompute": "#9ecae9",
    "model": "#f58518",
    "seq": "#ffbf79",
    "expert": "#b279a2",
    "pipe": "#54a24b",
    "bubble": "#d9d9d9",
    "gradients": "#e45756",
    "parameters": "#ff9da6",
    "optimizer": "#72b7b2",
    "agreement": "#9d755d",
    "program": "#eeca3b",
    "sharing": "#bab0ac",
    "weights": "#4c78a8",
    "activations": "#f58518",
    "working": "#ffbf79",
    "buffers": "#bab0ac",
}
MEMORY_COLORS = {**COLORS, "gradients": "#e45756", "optimizer": "#72b7b2"}


def save_picture(found: Found, path: str | Path) -> None:
    """Write a PNG, SVG or PDF of the plans, by the ending of its name.

    Raises:
        TopologyError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TopologyError("a picture needs matplotlib: pip install matplotlib") from error
    plans = found.plans
    figure = Figure(figsize=(13, 1.9 + 0.42 * len(plans)), layout="constrained")
    seconds, memory = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    labels = [_label(plan) for plan in plans]
    unit, name = (1.0, "s") if plans[0].seconds >= 1 else (1e3, "ms")
    _bars(seconds, [dict(plan.time.parts()) for plan in plans], labels, COLORS, unit, legend_columns=6)
    for row, plan in enumerate(plans):
        seconds.text(plan.seconds * unit, row, f" {_three_digits(plan.seconds * unit)}", va="center", fontsize=8)
    seconds.set_xlim(0, 1.1 * unit * max(plan.seconds for plan in plans))
    seconds.set_xlabel(f"{name} per step")
    _bars(memory, [dict(plan.memory.parts()) for plan in plans], labels, MEMORY_COLORS, 1e-9, legend_columns=3)
    limit = found.job.cluster.memory_limit / 1e9
    largest = max(plan.memory.total for plan in plans) / 1e9
    if limit < 4 * largest:
        memory.axvline(limit, color="black", linestyle="--", linewidth=1)
        memory.text(limit, -0.75, f"limit {limit:.3g} GB ", ha="right", va="center", fontsize=8)
    memory.set_xlabel("GB per rank at its peak")
    job = found.job
    figure.suptitle(
        f"{job.model.name} on {job.cluster.hosts} x {job.cluster.slots} {job.cluster.accelerator.name}, "
        f"{job.batch} sequences of {job.sequence}, {job.precision.name}",
        fontsize=10,
    )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise TopologyError(f"picture {str(path)!r} cannot be written: {error}") from error


def _label(plan: Plan) -> str:
    layout = plan.layout
    details = [f"micro {layout.micro_batch}", f"ZeRO {layout.zero}"]
    if layout.recompute.value != "none":
        details.append(layout.recompute.value)
    if layout.virtual_stages > 1:
        details.append(f"{layout.virtual_stages} virtual")
    return f"{layout.topology.spec}\n{', '.join(details)}"


def _three_digits(value: float) -> str:
    """The same number of digits behind the point for values of one kind: 17.5 and 19.0."""
    return f"{value:.1f}" if 10 <= value < 100 else f"{value:.3g}"


def _bars(
    axes: Any,
    rows: list[dict[str, float]],
    labels: list[str],
    colors: dict[str, str],
    unit: float,
    legend_columns: int,
) -> None:
    """Stacked horizontal bars, one per row, the first on top."""
    left = [0.0] * len(rows)
    whole = max(sum(row.values()) for row in rows)
    for part in rows[0]:
        widths = [row.get(part, 0.0) * unit for row in rows]
        if max(widths) > 0.002 * whole * unit:
            axes.barh(range(len(rows)), widths, left=left, color=colors[part], label=part, height=0.7)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -1.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, ncols=legend_columns, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False)
