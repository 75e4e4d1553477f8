"""Plans and judgements as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ds_topo.planner.costs import Costs
from ds_topo.planner.explain import (
    Term,
    bytes_text,
    differences,
    explain_axes,
    explain_memory,
    explain_time,
    reason,
    rejections,
)
from ds_topo.planner.layout import Job
from ds_topo.planner.runs import Judgement
from ds_topo.planner.search import Found, Plan, orders_of

SHOWN_ORDERS = 6
FILE_COLUMNS = 132
"""Width of tables that go into a file or a pipe."""


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_COLUMNS)


def print_found(
    found: Found, compared: Plan | str | None, favourite: str | None, *, explained: bool, advice: str | None
) -> None:
    """The table of plans, the reason for the first, and whatever else was asked for; ``compared`` is the plan of a
    ``favourite``, or why there is none."""
    console = _console()
    job = found.job
    console.print(_heading(job), soft_wrap=True)
    console.print(_plans_table(found))
    console.print(f"first because {reason(found)}", soft_wrap=True)
    if explained:
        _print_explained(console, found)
    if isinstance(compared, str):
        console.print(f"--compare {favourite!r}: {compared}", soft_wrap=True, markup=False)
    elif compared is not None:
        _print_compared(console, found.best, compared)
    if advice:
        console.print(advice, soft_wrap=True, markup=False)


def print_judgement(judgement: Judgement) -> None:
    """Predicted beside published, row by row."""
    console = _console()
    table = Table(box=None, pad_edge=False)
    for column in ("run", "metric"):
        table.add_column(column, overflow="fold")
    for column in ("published", "predicted", "error", "GB", "of best"):
        table.add_column(column, justify="right", no_wrap=True)
    for verdict in judgement.verdicts:
        beyond = abs(verdict.error) > judgement.within
        of_best = f"{verdict.plan.seconds / verdict.best.seconds:.2f}" if verdict.best else "-"
        memory = f"{verdict.plan.memory.total / 1e9:.0f}{'' if verdict.fits else ' !'}"
        table.add_row(
            f"{verdict.row.number} {verdict.row.name}",
            verdict.metric.key,
            f"{verdict.metric.value:,.4g}",
            f"{verdict.predicted:,.4g}",
            f"{verdict.error:+.1%}",
            memory,
            of_best,
            style="red" if beyond or not verdict.fits else None,
        )
    console.print(table)
    for verdict in judgement.verdicts:
        if not verdict.fits:
            console.print(f"row {verdict.row.number}: {verdict.plan.layout} does not fit", soft_wrap=True)
        if verdict.note:
            console.print(f"row {verdict.row.number}: the best is {verdict.note}", soft_wrap=True)
    largest = max(abs(verdict.error) for verdict in judgement.verdicts)
    console.print(
        f"{len(judgement.verdicts)} rows: median error {judgement.median_error:.1%}, largest {largest:.1%}; "
        f"{len(judgement.beyond)} beyond {judgement.within:.0%}",
        soft_wrap=True,
    )


def _heading(job: Job) -> str:
    model, cluster = job.model, job.cluster
    active = f", {model.active_parameters / 1e9:.2f} B at work" if model.expert_count else ""
    return (
        f"{model.name}: {model.parameters:,} parameters{active}; {cluster.hosts} x {cluster.slots} "
        f"{cluster.accelerator.name}, {cluster.memory_limit / 1e9:.1f} GB each for tensors; {job.batch} sequences of "
        f"{job.sequence} in {job.precision.name}, {job.software.name}"
    )


def _plans_table(found: Found) -> Table:
    job = found.job
    table = Table(box=None, pad_edge=False)
    table.add_column("topology, outermost first", no_wrap=True)
    for column in ("micro", "ZeRO"):
        table.add_column(column, justify="right")
    table.add_column("more", overflow="fold")
    for column in ("GB", "s/step", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("waits for", overflow="fold")
    for plan in found.plans:
        layout = plan.layout
        table.add_row(
            layout.topology.spec,
            str(layout.micro_batch),
            str(layout.zero),
            ", ".join(_more(plan)),
            _gigabytes(plan.memory.total),
            f"{plan.seconds:.4g}",
            f"{job.batch * job.sequence / plan.seconds:,.0f}",
            _waits(plan),
        )
    return table


def _more(plan: Plan) -> list[str]:
    layout = plan.layout
    more = []
    if layout.recompute.value != "none":
        more.append(f"recompute {layout.recompute.value}")
    if layout.virtual_stages > 1:
        more.append(f"{layout.virtual_stages} virtual stages")
    if layout.sequence_parallel:
        more.append("sequence parallel")
    if layout.expert_parallel > 1:
        more.append(f"experts over {layout.expert_parallel}")
    return more


def _waits(plan: Plan) -> str:
    """The two largest terms beside computing, as shares."""
    terms = [(seconds, name) for name, seconds in plan.time.parts().items() if name != "compute"]
    largest = sorted(terms, reverse=True)[:2]
    return ", ".join(
        f"{name} {seconds / plan.seconds:.0%}" for seconds, name in largest if seconds > 0.005 * plan.seconds
    )


def _print_explained(console: Console, found: Found) -> None:
    costs, best = Costs(found.job), found.best
    console.print(f"\n[bold]seconds of {best.layout}[/bold]", soft_wrap=True)
    console.print(_terms_table(explain_time(costs, best), best.seconds, "s", 1.0))
    console.print(f"\n[bold]bytes of the fullest rank[/bold], limit {found.job.cluster.memory_limit / 1e9:.1f} GB")
    console.print(_terms_table(explain_memory(costs, best), best.memory.total, "GB", 1e-9))
    console.print("\n[bold]axes on hosts[/bold]")
    table = Table(box=None, pad_edge=False)
    for column in ("axis", "ranks", "hosts", "link", "leave a host per step"):
        table.add_column(column, justify="left" if column in ("axis", "link") else "right")
    for use in explain_axes(costs, best.layout):
        sent = bytes_text(use.bytes_per_host) if use.bytes_per_host else "-"
        table.add_row(use.axis, str(use.ranks), str(use.hosts), use.link, sent)
    console.print(table)
    console.print("\n[bold]the same degrees in other orders[/bold]")
    for plan in orders_of(found.job, best)[:SHOWN_ORDERS]:
        console.print(f"  {plan.layout.topology.spec:40} {plan.seconds:.4g} s  {plan.seconds / best.seconds - 1:+.1%}")
    console.print("\n[bold]the rest[/bold]")
    for line in rejections(found.tally):
        console.print(f"  {line}", soft_wrap=True)


def _terms_table(terms: list[Term], whole: float, unit: str, scale: float) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("term", no_wrap=True)
    table.add_column(unit, justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
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
    for term in sorted(differences(best, compared), key=lambda term: -abs(term.value)):
        if abs(term.value) > 0.001 * best.seconds:
            console.print(f"  {term.name:12} {1e3 * term.value:+10.2f} ms  ({term.text})")


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g}" if size < 1e10 else f"{size / 1e9:.1f}"
