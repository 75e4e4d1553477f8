"""Print plans as tables, draw them, and turn them into DeepSpeed configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ds_topo.cli.shared import aligned, new_console, new_figure, save_figure, table_of
from ds_topo.errors import TopologyError
from ds_topo.plan import explain
from ds_topo.plan.job import SOFTWARE, Job, JobLayout, Recompute
from ds_topo.plan.memory import BUCKET_PARAMETERS
from ds_topo.plan.search import Found, Plan, orders_of
from ds_topo.plan.stages import Costs
from ds_topo.plan.step_time import GRADIENTS, layout_spans, two_level_pays
from ds_topo.topology.axes import DATA, SHARD

SHOWN_ORDERS = 6


def print_found(found: Found, compared: Plan | str | None, spec: str | None, *, explained: bool) -> None:
    """Print plans, and the comparison with the topology ``spec``: its plan, or why there is none."""
    console, job = new_console(), found.job
    model, cluster = job.model, job.cluster
    active = f", {model.active_parameters / 1e9:.2f} B at work" if model.expert_count else ""
    title = f"{model.name}: {model.parameters:,} parameters{active}, trained by {job.software.name}"
    console.print(title, markup=False, style="bold")
    console.print(
        f"{cluster.hosts} x {cluster.slots} {cluster.accelerator.name}, {cluster.memory_limit / 1e9:.1f} GB each for "
        f"tensors; {job.batch} sequences of {job.sequence} in {job.precision.name}\n"
    )
    for number, line in enumerate(_plan_lines(found, console.width)):  # the header, and the best plan
        console.print(line, style="bold" if number < 2 else None, markup=False, soft_wrap=True)
    speed, products = job.tokens / found.best.seconds, job.precision.products
    peak = f"{cluster.accelerator.peak(products) / 1e12:.4g} TFLOP/s in {products}"
    text = f"The first: {speed:,.0f} tokens/s, {speed / cluster.ranks:,.0f} per GPU"
    console.print(f"\n{text}, MFU {job.mfu(found.best.seconds):.0%} of {peak}.", markup=False)
    console.print(explain.reason(found), markup=False)
    if needed := explain.needs(found):
        console.print("; ".join(needed), markup=False)
    if explained:
        _print_explained(console, found)
    if isinstance(compared, str):
        console.print(f"--compare {spec!r}: {compared}", soft_wrap=True, markup=False)
    elif compared is not None:
        _print_compared(console, found.best, compared)


def _plan_lines(found: Found, width: int) -> list[str]:
    """Return a header and the plans, the fastest first, as lines of at most ``width`` characters if possible.

    What does not fit into a column moves to a line of its own below the plan; tokens per second are left out.
    """
    job = found.job
    header = ["topology", "s/step", "GB", "ZeRO", "micro", "waits for", "tokens/s", "with"]
    rows = []
    for plan in found.plans:
        layout = plan.layout
        # the two largest terms beside computing, as shares
        terms = [(seconds, name) for name, seconds in plan.time.parts().items() if name != "compute"]
        largest = [(seconds / plan.seconds, name) for seconds, name in sorted(terms, reverse=True)[:2]]
        rows.append(
            [
                layout.topology.spec,
                f"{plan.seconds:.4g}",
                _gigabytes(plan.memory.total),
                str(layout.zero),
                str(layout.micro_batch),
                ", ".join(f"{name} {share:.0%}" for share, name in largest if share > 0.005),
                f"{job.tokens / plan.seconds:,.0f}",
                ", ".join(layout.details()),
            ]
        )
    most = 8 if any(row[-1] for row in rows) else 7
    for shown in (*range(most, 5, -1), 6):
        lines = aligned([row[:shown] for row in (header, *rows)], right={1, 2, 3, 4, 6})
        if max(map(len, lines)) <= width:
            break
        if shown == 6:  # name the largest term alone
            for row in rows:
                row[5] = row[5].split(", ")[0]
    if shown < 8:
        below = [f"  with {row[-1]}" if row[-1] else "" for row in rows]
        lines = [lines[0], *(line for pair in zip(lines[1:], below, strict=True) for line in pair if line)]
    return lines


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g}" if size < 1e10 else f"{size / 1e9:.1f}"


def _print_explained(console: Console, found: Found) -> None:
    costs, best = Costs(found.job), found.best
    console.print(f"\n[bold]seconds of {best.layout}[/bold]", soft_wrap=True)
    console.print(_terms_table(explain.explain_time(costs, best), best.seconds, "s", 1.0))
    console.print(f"\n[bold]bytes of the fullest rank[/bold], limit {found.job.cluster.memory_limit / 1e9:.1f} GB")
    console.print(_terms_table(explain.explain_memory(costs, best), best.memory.total, "GB", 1e-9))
    console.print("\n[bold]axes on hosts[/bold]")
    table = table_of("axis", ">ranks", ">hosts", "link")
    for use in explain.explain_axes(costs, best.layout):
        table.add_row(use["axis"], str(use["ranks"]), str(use["hosts"]), use["link"])
    console.print(table)
    console.print("\n[bold]the same degrees in other orders[/bold]")
    for plan in orders_of(found.job, best)[:SHOWN_ORDERS]:
        console.print(f"  {plan.layout.topology.spec:40} {plan.seconds:.4g} s  {plan.seconds / best.seconds - 1:+.1%}")
    console.print("\n[bold]the rest[/bold]")
    for line in explain.rejections(found.tally):
        console.print(Padding(line, (0, 0, 0, 2), expand=False))


def _terms_table(terms: list[explain.Term], whole: float, unit: str, scale: float) -> Table:
    table = table_of("term", f">{unit}", ">share", "")
    for term in terms:
        table.add_row(term.name, f"{term.value * scale:.4g}", f"{term.value / whole:.1%}", term.text)
    table.add_row("all", f"{whole * scale:.4g}", "", "")
    return table


def _print_compared(console: Console, best: Plan, compared: Plan) -> None:
    console.print(f"\n[bold]{compared.layout}[/bold]", soft_wrap=True)
    lost = compared.seconds / best.seconds - 1
    console.print(
        f"{compared.seconds:.4g} s per step, {lost:+.1%}; {_gigabytes(compared.memory.total)} GB against "
        f"{_gigabytes(best.memory.total)}"
    )
    for term in sorted(explain.differences(best, compared), key=lambda term: -abs(term.value)):
        if abs(term.value) > 0.001 * best.seconds:
            console.print(f"  {term.name:12} {1e3 * term.value:+10.2f} ms  ({term.text})")


def save_picture(found: Found, path: str | Path) -> None:
    """Write a PNG, SVG or PDF of the plans: a step's seconds as stacked bars, and memory against the limit."""
    job, plans = found.job, found.plans
    figure = new_figure(figsize=(13, 1.9 + 0.42 * len(plans)), layout="constrained")
    seconds, memory = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    layouts = [plan.layout for plan in plans]
    labels = [
        f"{one.topology.spec}\n{', '.join([f'micro {one.micro_batch}', f'ZeRO {one.zero}', *one.details()])}"
        for one in layouts
    ]
    labels[0] = f"best: {labels[0]}"
    unit, name = (1.0, "s") if plans[0].seconds >= 1 else (1e3, "ms")
    _bars(seconds, [plan.time.parts() for plan in plans], labels, unit, legend_columns=6)
    digits = 2 if plans[0].seconds * unit < 10 else 1 if plans[0].seconds * unit < 100 else 0
    for row, plan in enumerate(plans):
        seconds.text(plan.seconds * unit, row, f" {plan.seconds * unit:.{digits}f}", va="center", fontsize=8)
    seconds.set_xlim(0, 1.1 * unit * max(plan.seconds for plan in plans))
    seconds.set_xlabel(f"{name} per step")
    _bars(memory, [plan.memory.parts() for plan in plans], labels, 1e-9, legend_columns=3)
    limit = job.cluster.memory_limit / 1e9
    fullest = max(plan.memory.total for plan in plans) / 1e9
    if limit < 4 * fullest:
        memory.set_xlim(0, 1.05 * max(limit, fullest))
        memory.axvline(limit, color="black", linestyle="--", linewidth=1)
        memory.text(limit, -0.75, f"limit {limit:.3g} GB ", ha="right", va="center", fontsize=8)
    memory.set_xlabel("GB per rank at its peak")
    for axes in (seconds, memory):
        axes.axhspan(-0.45, 0.45, color="gold", alpha=0.25, zorder=0, linewidth=0)
    seconds.get_yticklabels()[0].set_fontweight("bold")
    figure.suptitle(
        f"{job.model.name} on {job.cluster.hosts} x {job.cluster.slots} {job.cluster.accelerator.name}, "
        f"{job.batch} sequences of {job.sequence}, {job.precision.name}",
        fontsize=10,
    )
    save_figure(figure, path, dpi=120)


def _bars(axes: Any, rows: list[dict[str, float]], labels: list[str], unit: float, legend_columns: int) -> None:
    """Draw stacked horizontal bars, one per row, the first on top."""
    from matplotlib import colormaps

    left = [0.0] * len(rows)
    whole = max(sum(row.values()) for row in rows)
    for number, part in enumerate(rows[0]):
        widths = [row[part] * unit for row in rows]
        if max(widths) > 0.002 * whole * unit:
            color = colormaps["tab20"](number)
            axes.barh(range(len(rows)), widths, left=left, color=color, label=part, height=0.7)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -1.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, ncols=legend_columns, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False)


# -- configs -----------------------------------------------------------------------------------------------------------


def deepspeed_config(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the config of a plan: topology in placement order, micro-batches, ZeRO, precision, reducer.

    It has no optimizer and no learning rate: a plan does not decide them.
    """
    precisions = ["fp32", "bf16", "fp16"]
    if not job.software.eager:
        others = [software.name for software in SOFTWARE.values() if software.eager]
        raise TopologyError(f"--software {job.software.name} does not read a DeepSpeed config: choose one of {others}")
    if job.precision.name not in precisions:
        raise TopologyError(
            f"--precision {job.precision.name}: a DeepSpeed config cannot ask for it; choose one of {precisions}"
        )
    layout, costs = plan.layout, Costs(job)
    degrees = dict(zip(layout.topology.axes, layout.topology.dims, strict=True))
    # DeepSpeed allocates whole buckets: they should not be larger than what a rank has
    bucket = min(BUCKET_PARAMETERS, max(held.total for held in costs.all_parameters(layout)))
    config: dict[str, Any] = {
        "topology": {axis: degree for axis, degree in degrees.items() if degree > 1} or {DATA: 1},
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches(job.batch),
        "zero_optimization": {"stage": layout.zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
        "gradient_reducer": _reducer(costs, layout),
    }
    if job.precision.name in ("bf16", "fp16"):
        config[job.precision.name] = {"enabled": True}
    if layout.recompute is Recompute.FULL:
        # the reentrant kind loses the gradients of a first layer whose inputs are token ids
        config["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": False}
    if job.software.mirrors:  # its schedule cannot send parts of activations
        config.setdefault("pipeline", {}).update(pipe_partitioned=False, grad_partitioned=False)
    return config


def _reducer(costs: Costs, layout: JobLayout) -> dict[str, Any] | bool:
    """Return the section of this package's reducer; False in stages that it does not handle, and without replicas.

    The section fixes the planned number of levels. Without it the reducer would measure which one is faster.
    """
    if layout.zero > 1 or layout.replicas == 1:
        return False
    spans = layout_spans(costs, layout)
    if 1 < spans[GRADIENTS].hosts < spans[GRADIENTS].size and SHARD not in layout.topology.axes:
        return {"two_level": two_level_pays(costs, layout, spans)}
    return {"enabled": True}


def print_config(job: Job, plan: Plan, path: str, config: str) -> None:
    """Print the written config, and what a program that trains with it must bring."""
    print(f"\n{path}:\n{config}\n")
    layout = plan.layout
    parts = {
        f"experts over {layout.expert_parallel} ranks": job.model.expert_count > 0,
        "sequence parallelism": layout.sequence_parallel,
        "its own recomputation": layout.recompute is Recompute.FULL,
        "an optimizer with its learning rate": True,
    }
    beside = ", ".join(part for part, is_needed in parts.items() if is_needed)
    new_console().print(f"A program that trains with it must bring {beside}.", markup=False)
