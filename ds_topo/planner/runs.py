"""Published runs: what the planner predicts for them, beside what was reported.

A file of rows is a JSON list of objects with the fields of :class:`Row`. What a row leaves open (null) the planner
chooses: the micro-batch, and in a row without one the virtual stages too; a row that states its micro-batch and no
virtual stages had none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from ds_topo.errors import TopologyError, abridged
from ds_topo.planner.accelerators import TERA, Accelerator, accelerator_of
from ds_topo.planner.candidates import LARGEST_MICRO_BATCH, Wanted
from ds_topo.planner.cluster import cluster_of_ranks
from ds_topo.planner.costs import Costs
from ds_topo.planner.layout import Job, Layout, layout_problem
from ds_topo.planner.memory import memory_use
from ds_topo.planner.model import Model, transformer
from ds_topo.planner.precision import precision_of
from ds_topo.planner.search import Plan, search
from ds_topo.planner.software import Recompute, Software, software_of, software_of_year
from ds_topo.planner.step_time import step_time
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.topology.expert_tables import divisors
from ds_topo.topology.process_topology import ProcessTopology

METRICS = (
    "seconds_per_step",
    "tokens_per_second_per_gpu",
    "tokens_per_second",
    "samples_per_second",
    "model_tflops_per_gpu",
    "tflops_per_gpu",
    "tflops_per_gpu_with_recomputation",
    "mfu",
    "hfu",
)
"""What a row may report, the one that needs the fewest conventions first; a row is judged by the first that it has."""

MAY_BE_ZERO = ("tensor", "pipe", "context", "virtual_stages", "micro_batch", "experts", "top_k")
"""Fields of a row that may be 0."""

AVAILABLE = 1.10
"""A published layout is explained if the best takes at least its time divided by this."""


@dataclass(frozen=True)
class Row:
    """One published run.

    Args:
        content: of the file: ``source``, ``accelerator``, ``layers``, ``hidden``, ``heads``, ``kv_heads``, ``ffn``,
            ``vocabulary``, ``sequence``, ``tensor``, ``pipe``, ``context``, ``data``, ``virtual_stages``, ``gpus``,
            ``global_batch``, ``micro_batch``, ``precision``, ``recompute``, ``fully_sharded``, ``software``, ``gated``,
            ``experts``, ``top_k`` and one of ``METRICS``.
        number: of the row in its file, from 1.
    """

    content: Mapping[str, Any]
    number: int = 1

    @property
    def name(self) -> str:
        """How a table calls it."""
        size = self.content.get("parameters_billion")
        sized = isinstance(size, (int, float)) and size
        model = self.content.get("model") or (f"{size:g}B" if sized else f"{self.content.get('layers')} layers")
        return f"{model} on {self.content.get('gpus')} {self.content.get('accelerator')}"

    def whole(self, field: str, default: int | None = None) -> int:
        """A whole number of the row; 0 where that says the same as leaving it out.

        Raises:
            RowError: it is missing and there is no default, or it is no such number.
        """
        value = self.content.get(field)
        if value is None and default is not None:
            return default
        least = 0 if field in MAY_BE_ZERO else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise RowError(self, f"{field!r} is {abridged(value)}; it must be a whole number from {least} on")
        return value

    def text(self, field: str, default: str = "") -> str:
        """A word of the row."""
        return str(self.content.get(field) or default)


class RowError(TopologyError):
    """A row that cannot be judged: the message names it."""

    def __init__(self, row: Row, problem: str) -> None:
        super().__init__(f"row {row.number} ({row.name}): {problem}")


@dataclass(frozen=True)
class Metric:
    """What a row reports: ``per_second / seconds of a step``, or those seconds themselves (``per_second`` 0)."""

    key: str
    value: float
    per_second: float

    def of(self, seconds: float) -> float:
        """The metric of a step that takes so long; its own inverse."""
        return self.per_second / seconds if self.per_second else seconds


@dataclass(frozen=True)
class Verdict:
    """A row, what the planner predicts for its layout, and the best that it finds for the same job."""

    row: Row
    metric: Metric
    plan: Plan
    fits: bool
    best: Plan | None
    note: str

    @property
    def predicted(self) -> float:
        """The row's metric as the planner predicts it."""
        return self.metric.of(self.plan.seconds)

    @property
    def error(self) -> float:
        """Predicted throughput over the published one, minus one."""
        return self.metric.of(self.metric.value) / self.plan.seconds - 1

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "row": self.row.number,
            "name": self.row.name,
            "source": self.row.text("source"),
            "metric": self.metric.key,
            "published": self.metric.value,
            "predicted": self.predicted,
            "error": self.error,
            "layout": str(self.plan.layout),
            "seconds": dict(self.plan.time.parts()),
            "memory_bytes": dict(self.plan.memory.parts()),
            "fits": self.fits,
            "best_layout": str(self.best.layout) if self.best else None,
            "best_seconds": self.best.seconds if self.best else None,
            "note": self.note,
        }


@dataclass(frozen=True)
class Judgement:
    """All rows of a file against a bound."""

    verdicts: tuple[Verdict, ...]
    within: float

    @property
    def median_error(self) -> float:
        """The median of the errors' sizes."""
        return median(abs(verdict.error) for verdict in self.verdicts)

    @property
    def beyond(self) -> tuple[Verdict, ...]:
        """Rows beyond the bound, or judged not to fit."""
        return tuple(verdict for verdict in self.verdicts if abs(verdict.error) > self.within or not verdict.fits)


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file.

    Raises:
        TopologyError: no such file, no JSON list of objects, no rows.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"runs {str(path)!r} cannot be read: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TopologyError(f"runs {str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, list) or not content or not all(isinstance(row, Mapping) for row in content):
        raise TopologyError(f"runs {str(path)!r} must be a JSON list of objects, one for each run")
    return [Row(row, number) for number, row in enumerate(content, start=1)]


def judge_rows(rows: Sequence[Row], within: float, *, compare: bool = True) -> Judgement:
    """Predict every row; with ``compare`` also look for a better layout of its job."""
    return Judgement(tuple(judge(row, compare=compare) for row in rows), within)


def judge(row: Row, *, compare: bool = True, accelerator: Accelerator | None = None) -> Verdict:
    """Predict one row, with another accelerator's numbers in place of the table's if given.

    Raises:
        RowError: numbers that are missing or do not go together.
    """
    try:
        job = row_job(row, accelerator)
        metric = row_metric(row, job)
        plan, fits = _planned(row, job)
        best, note = _better(row, job, plan) if compare and fits else (None, "")
    except RowError:
        raise
    except TopologyError as error:
        raise RowError(row, str(error)) from error
    return Verdict(row, metric, plan, fits, best, note)


def row_job(row: Row, accelerator: Accelerator | None = None) -> Job:
    """Model, cluster, batch, precision and software of a row.

    Raises:
        TopologyError: unknown names, numbers that are missing or do not go together.
    """
    sequence = row.whole("sequence")
    model = transformer(
        layers=row.whole("layers"),
        hidden=row.whole("hidden"),
        heads=row.whole("heads"),
        kv_heads=row.whole("kv_heads", row.whole("heads")),
        ffn=row.whole("ffn", 4 * row.whole("hidden")),
        vocabulary=row.whole("vocabulary"),
        sequence=sequence,
        experts=row.whole("experts", 0),
        top_k=row.whole("top_k", 0),
        gated=row.content.get("gated"),
        name=row.name,
    )
    software = software_of(row.text("software")) if row.text("software") else software_of_year(row.text("source"))
    cluster = cluster_of_ranks(accelerator or accelerator_of(row.text("accelerator")), row.whole("gpus"))
    precision = precision_of(row.text("precision", "bf16"))
    return Job(model, cluster, row.whole("global_batch"), sequence, precision, software)


def row_metric(row: Row, job: Job) -> Metric:
    """What a row is judged by.

    Conventions: ``model_tflops_per_gpu`` counts a causal mask's half of attention, as Megatron-Bridge does
    (737 TFLOP/s at 292 tokens/s for Llama 3.1 405B is exactly that); ``tflops_per_gpu`` and ``mfu`` count all of it, as
    Megatron-LM and Chowdhery et al. (arXiv:2204.02311, appendix B) do; with recomputation, forward twice
    (Narayanan et al., equation 3).

    Raises:
        TopologyError: no metric, or one that is not positive.
    """
    ranks, tokens = job.cluster.ranks, job.batch * job.sequence
    causal = tokens * job.model.flops_per_token(job.sequence, causal=True) / ranks / TERA
    full = tokens * job.model.flops_per_token(job.sequence, causal=False) / ranks / TERA
    again = tokens * recomputed_flops_per_token(job.model, job.sequence) / ranks / TERA
    peak = job.cluster.accelerator.peak(job.precision.products) / TERA
    per_second = {
        "seconds_per_step": 0.0,
        "tokens_per_second_per_gpu": tokens / ranks,
        "tokens_per_second": float(tokens),
        "samples_per_second": float(job.batch),
        "model_tflops_per_gpu": causal,
        "tflops_per_gpu": full,
        "tflops_per_gpu_with_recomputation": again,
        "mfu": full / peak,
        "hfu": again / peak,
    }
    key = next((key for key in METRICS if row.content.get(key) is not None), None)
    if key is None:
        raise RowError(row, f"it reports nothing: give one of {list(METRICS)}")
    value = row.content[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
        raise RowError(row, f"{key!r} is {abridged(value)}; it must be a positive number")
    if key in ("mfu", "hfu") and value > 1.5:
        value = value / 100  # given in percent
    return Metric(key, float(value), per_second[key])


def recomputed_flops_per_token(model: Model, sequence: int) -> float:
    """Of forward, forward again and backward: ``96 l h^2 (1 + s / 6h + V / 16 l h)`` for a GPT of l layers, whose
    output layer is not computed again (Narayanan et al., equation 3)."""
    output = 6.0 * model.hidden * model.vocabulary
    return (model.flops_per_token(sequence, causal=False) - output) * 4 / 3 + output


def row_layouts(row: Row, job: Job) -> Iterator[Layout]:
    """Every layout that the row can mean, in Megatron's order of axes: ``pipe, data, context, tensor``.

    Raises:
        TopologyError: degrees that do not make the number of GPUs.
    """
    ranks, software = job.cluster.ranks, job.software
    tensor, pipe, seq = (row.whole(field, 1) or 1 for field in ("tensor", "pipe", "context"))
    data = row.whole("data", max(1, ranks // (tensor * pipe * seq)))
    if tensor * pipe * seq * data != ranks:
        raise RowError(row, f"tensor={tensor} x pipe={pipe} x context={seq} x data={data} are not {ranks} GPUs")
    topology = ProcessTopology([PIPE, DATA, SEQ, MODEL], [pipe, data, seq, tensor])
    experts = row.whole("expert_parallel", 1)
    virtuals = [row.whole("virtual_stages", 1) or 1]
    micros = [row.whole("micro_batch", 0)]
    if not micros[0]:
        micros = [size for size in divisors(max(1, job.batch // data)) if size <= LARGEST_MICRO_BATCH]
        if not row.whole("virtual_stages", 0) and pipe > 1:
            most = min(software.virtual_stages, -(-job.model.layers // pipe))
            virtuals = list(range(1, most + 1))
    for micro in micros:
        for virtual in virtuals:
            for kind in row_recompute(row, software):
                layout = Layout(topology, micro, 0, kind, virtual, _spread(row, job, tensor, seq), experts)
                for zero in _zero(row, job, layout):
                    yield Layout(topology, micro, zero, kind, virtual, layout.sequence_parallel, experts)


def row_recompute(row: Row, software: Software) -> tuple[Recompute, ...]:
    """The kinds of recomputation that a row allows: ``"none"`` allows what costs no product (with flash attention,
    outputs of norms and activations), which its authors need not mention."""
    text = row.text("recompute", "none or selective").lower()
    kinds = [kind for kind in Recompute if kind.value in text]
    if Recompute.NONE in kinds and Recompute.SELECTIVE not in kinds and software.flash_attention:
        kinds.append(Recompute.SELECTIVE)
    return tuple(kinds or Recompute)


def _spread(row: Row, job: Job, tensor: int, seq: int) -> bool:
    """Whether activations are split along the sequence: always since it exists, but where a row of then says no."""
    if tensor == 1 or not job.software.sequence_parallel or job.sequence % (tensor * seq):
        return False
    return not row.text("recompute").lower().startswith("full") or job.software.overlaps_model


def _zero(row: Row, job: Job, layout: Layout) -> list[int]:
    """Sharded states: what the row says, else the optimizer's wherever the program can."""
    stages = job.software.zero_stages(layout.pipe, mixed=bool(job.precision.master_bytes))
    if row.content.get("fully_sharded"):
        return [max(stages)]
    return [1 if 1 in stages and layout.replicas > 1 else min(stages)]


def _planned(row: Row, job: Job) -> tuple[Plan, bool]:
    """The fastest that fits of what the row can mean, or the smallest."""
    costs, problem = Costs(job), ""
    candidates: list[tuple[bool, float, Plan]] = []
    for layout in row_layouts(row, job):
        found = layout_problem(job, layout)
        if found:
            problem = problem or found
            continue
        plan = Plan(layout, step_time(costs, layout), memory_use(costs, layout))
        over = plan.memory.total > job.cluster.memory_limit
        candidates.append((over, plan.memory.total if over else plan.seconds, plan))
    if not candidates:
        raise RowError(row, problem)
    over, _, plan = min(candidates, key=lambda candidate: candidate[:2])
    return plan, not over


def _better(row: Row, job: Job, plan: Plan) -> tuple[Plan, str]:
    """The best layout of the row's job under its recomputation, and why it was not taken if it is much faster."""
    found = search(job, Wanted(recompute=row_recompute(row, job.software)), count=1).best
    best = found if found.seconds < plan.seconds else plan
    if plan.seconds <= AVAILABLE * best.seconds:
        return best, ""
    ours, theirs = best.layout, plan.layout
    changes = [
        f"{name} {old} -> {new}"
        for name, old, new in (
            ("pipe", theirs.pipe, ours.pipe),
            ("data", theirs.data, ours.data),
            ("context", theirs.seq, ours.seq),
            ("tensor", theirs.model, ours.model),
            ("micro-batch", theirs.micro_batch, ours.micro_batch),
            ("virtual stages", theirs.virtual_stages, ours.virtual_stages),
            ("ZeRO", theirs.zero, ours.zero),
            ("sequence parallelism", theirs.sequence_parallel, ours.sequence_parallel),
        )
        if old != new
    ]
    faster = plan.seconds / best.seconds - 1
    return best, f"{faster:.0%} faster by {', '.join(changes)}: {job.software.choice}"
