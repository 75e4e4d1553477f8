"""Compare the planner's predictions of published runs with the reported values.

A file of rows is a JSON list of objects with the fields of :class:`Row`. The planner chooses what a row leaves open
(null): the micro-batch, and without one the virtual stages too. A row that states its micro-batch and no virtual stages
had none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from ds_topo.errors import TopologyError, abridged
from ds_topo.planner import job as jobs
from ds_topo.planner import read_json, whole_number
from ds_topo.planner.hardware import TERA, Accelerator, accelerator_of, cluster_of_ranks
from ds_topo.planner.job import Job, Layout, Recompute, Software
from ds_topo.planner.model import Model, transformer
from ds_topo.planner.search import LARGEST_MICRO_BATCH, Plan, Wanted, search
from ds_topo.planner.stages import Costs, memory_use
from ds_topo.planner.step_time import step_time
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ, divisors
from ds_topo.topology.process_topology import ProcessTopology

MAY_BE_ZERO = ("tensor", "pipe", "context", "virtual_stages", "micro_batch", "experts", "top_k")
"""The fields of a row that may be 0."""
AVAILABLE = 1.10
"""A published layout needs no note if the best takes at least its time divided by this."""


@dataclass(frozen=True)
class Row:
    """One published run.

    Args:
        content: the fields ``source``, ``accelerator``, ``layers``, ``hidden``, ``heads``, ``kv_heads``, ``ffn``,
            ``vocabulary``, ``sequence``, ``tensor``, ``pipe``, ``context``, ``data``, ``virtual_stages``, ``gpus``,
            ``global_batch``, ``micro_batch``, ``precision``, ``recompute``, ``fully_sharded``, ``software``, ``gated``,
            ``experts``, ``top_k``, ``expert_parallel`` and one of the metrics of ``row_metric``.
        number: the number of the row in its file, from 1.
    """

    content: Mapping[str, Any]
    number: int = 1

    @property
    def name(self) -> str:
        """The name of the row in tables."""
        size = self.content.get("parameters_billion")
        sized = isinstance(size, (int, float)) and size
        model = self.content.get("model") or (f"{size:g}B" if sized else f"{self.content.get('layers')} layers")
        return f"{model} on {self.content.get('gpus')} {self.content.get('accelerator')}"

    def whole(self, field: str, default: int | None = None) -> int:
        """Return a whole number of the row.

        Raises:
            TopologyError: if it is missing and there is no default, or it is no such number.
        """
        return whole_number(self.content, field, least=0 if field in MAY_BE_ZERO else 1, default=default)

    def text(self, field: str, default: str = "") -> str:
        """Return a text field of the row."""
        return str(self.content.get(field) or default)


@dataclass(frozen=True)
class Verdict:
    """A row, the planner's prediction for its layout, and the best layout that it finds for the same job.

    Args:
        metric: the name of the reported value that is compared.
        published: the reported value.
        predicted: the same by the planner's prediction.
        error: the predicted throughput over the published one, minus one.
        note: what the best layout changes, if it is much faster.
    """

    row: Row
    metric: str
    published: float
    predicted: float
    error: float
    plan: Plan
    fits: bool
    best: Plan | None
    note: str

    def as_json(self) -> dict[str, Any]:
        """Return the verdict for ``--json``."""
        return {
            "row": self.row.number,
            "name": self.row.name,
            "source": self.row.text("source"),
            "metric": self.metric,
            "published": self.published,
            "predicted": self.predicted,
            "error": self.error,
            "layout": str(self.plan.layout),
            "seconds": self.plan.time.parts(),
            "memory_bytes": self.plan.memory.parts(),
            "fits": self.fits,
            "best_layout": str(self.best.layout) if self.best else None,
            "best_seconds": self.best.seconds if self.best else None,
            "note": self.note,
        }


def read_rows(path: str | Path) -> list[Row]:
    """Return the rows of a file.

    Raises:
        TopologyError: if the file cannot be read, is no JSON list of objects, or has no rows.
    """
    content = read_json(path, "runs")
    if not isinstance(content, list) or not content or not all(isinstance(row, Mapping) for row in content):
        raise TopologyError(f"runs {str(path)!r} must be a JSON list of objects, one for each run, at least one")
    return [Row(row, number) for number, row in enumerate(content, start=1)]


def judge(row: Row, *, compare: bool = True, accelerator: Accelerator | None = None) -> Verdict:
    """Predict one row, with another accelerator's numbers in place of the table's if given.

    With ``compare``, also look for a better layout of its job.

    Raises:
        TopologyError: if numbers are missing or do not go together. The message names the row.
    """
    try:
        job = row_job(row, accelerator)
        metric, published, per_second = row_metric(row, job)
        plan, fits = _planned(row, job)
        best, note = _better(row, job, plan) if compare and fits else (None, "")
    except TopologyError as error:
        raise TopologyError(f"row {row.number} ({row.name}): {error}") from error
    seconds, predicted = published, plan.seconds
    if per_second:
        seconds, predicted = per_second / published, per_second / plan.seconds
    return Verdict(row, metric, published, predicted, seconds / plan.seconds - 1, plan, fits, best, note)


def row_job(row: Row, accelerator: Accelerator | None = None) -> Job:
    """Return the model, cluster, batch, precision and software of a row.

    Raises:
        TopologyError: if names are unknown, or numbers are missing or do not go together.
    """
    sequence = row.whole("sequence")
    model = transformer(
        layers=row.whole("layers"),
        hidden=row.whole("hidden"),
        heads=row.whole("heads"),
        vocabulary=row.whole("vocabulary"),
        kv_heads=row.whole("kv_heads", row.whole("heads")),
        ffn=row.whole("ffn", 4 * row.whole("hidden")),
        sequence=sequence,
        experts=row.whole("experts", 0),
        top_k=row.whole("top_k", 0),
        gated=row.content.get("gated"),
        name=row.name,
    )
    cluster = cluster_of_ranks(accelerator or accelerator_of(row.text("accelerator")), row.whole("gpus"))
    precision = jobs.precision_of(row.text("precision", "bf16"))
    return Job(model, cluster, row.whole("global_batch"), sequence, precision, row_software(row))


def row_software(row: Row) -> Software:
    """Return the program that a row names; else one that it can have used, by the first year in its source.

    >>> row_software(Row({"source": "Narayanan et al., SC 2021, table 1"})).name
    'megatron-2021'
    >>> row_software(Row({"source": "container 25.11"})).name, row_software(Row({"software": "deepspeed"})).name
    ('megatron', 'deepspeed')

    Raises:
        TopologyError: if there is no such program.
    """
    name, years = row.text("software"), re.findall(r"\b20[12]\d\b", row.text("source"))
    if name:
        if name not in jobs.SOFTWARE:
            raise TopologyError(f"software {name!r} is not known: choose one of {list(jobs.SOFTWARE)}")
        return jobs.SOFTWARE[name]
    year = int(years[0]) if years else inf
    return jobs.MEGATRON_2021 if year <= 2021 else jobs.MEGATRON_2022 if year == 2022 else jobs.MEGATRON


def row_metric(row: Row, job: Job) -> tuple[str, float, float]:
    """Return the name and the value of the metric that a row is judged by, and what it counts in a step.

    Of the metrics that a row reports, it is the one that needs the fewest conventions. Its value is the count divided
    by the seconds of a step; where the count is 0, the value is these seconds.

    ``model_tflops_per_gpu`` counts a causal mask's half of attention, as Megatron-Bridge does (737 TFLOP/s at
    292 tokens/s for Llama 3.1 405B is exactly that). ``tflops_per_gpu`` and ``mfu`` count all of it, as Megatron-LM and
    Chowdhery et al. (arXiv:2204.02311, appendix B) do. With recomputation, forward counts twice (Narayanan et al.,
    equation 3).

    Raises:
        TopologyError: if there is no metric, or it is not positive.
    """
    ranks, tokens = job.cluster.ranks, job.batch * job.sequence
    causal = tokens * job.model.flops_per_token(job.sequence, causal=True) / ranks / TERA
    full = tokens * job.model.flops_per_token(job.sequence, causal=False) / ranks / TERA
    again = tokens * recomputed_flops_per_token(job.model, job.sequence) / ranks / TERA
    peak = job.cluster.accelerator.peak(job.precision.products) / TERA
    metrics = {
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
    key = next((key for key in metrics if row.content.get(key) is not None), None)
    if key is None:
        raise TopologyError(f"it reports nothing: give one of {list(metrics)}")
    value = row.content[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
        raise TopologyError(f"{key!r} is {abridged(value)}; it must be a positive number")
    if key in ("mfu", "hfu") and value > 1.5:
        value = value / 100  # given in percent
    return key, float(value), metrics[key]


def recomputed_flops_per_token(model: Model, sequence: int) -> float:
    """Return the FLOPs of forward, forward again and backward; the output layer is not computed again.

    For a GPT of l layers they are ``96 l h^2 (1 + s / 6h + V / 16 l h)`` (Narayanan et al., equation 3).
    """
    output = 6.0 * model.hidden * model.vocabulary
    return (model.flops_per_token(sequence, causal=False) - output) * 4 / 3 + output


def row_layouts(row: Row, job: Job) -> Iterator[Layout]:
    """Yield every layout that the row can mean, in Megatron's order of axes: ``pipe, data, context, tensor``.

    Raises:
        TopologyError: if degrees do not multiply to the number of GPUs.
    """
    ranks, software = job.cluster.ranks, job.software
    tensor, pipe, seq = (row.whole(field, 1) or 1 for field in ("tensor", "pipe", "context"))
    data = row.whole("data", max(1, ranks // (tensor * pipe * seq)))
    if tensor * pipe * seq * data != ranks:
        raise TopologyError(f"tensor={tensor} x pipe={pipe} x context={seq} x data={data} are not {ranks} GPUs")
    topology = ProcessTopology([PIPE, DATA, SEQ, MODEL], [pipe, data, seq, tensor])
    virtuals = [row.whole("virtual_stages", 1) or 1]
    micros = [row.whole("micro_batch", 0)]
    if not micros[0]:
        micros = [size for size in divisors(max(1, job.batch // data)) if size <= LARGEST_MICRO_BATCH]
        if not row.whole("virtual_stages", 0) and pipe > 1:
            virtuals = list(range(1, min(software.virtual_stages, -(-job.model.layers // pipe)) + 1))
    # shard states as the row says, else the optimizer's wherever the program can
    stages = software.zero_stages(pipe, job.precision)
    zero = 1 if 1 in stages and data * seq > 1 else min(stages)
    if row.content.get("fully_sharded"):
        zero = max(stages)
    # activations are split along the sequence wherever the program can, except in early rows with full recomputation
    spread = tensor > 1 and software.sequence_parallel and job.sequence % (tensor * seq) == 0
    spread = spread and (not row.text("recompute").lower().startswith("full") or software.overlaps_model)
    for micro, virtual, kind in product(micros, virtuals, row_recompute(row, software)):
        yield Layout(topology, micro, zero, kind, virtual, spread, row.whole("expert_parallel", 1))


def row_recompute(row: Row, software: Software) -> tuple[Recompute, ...]:
    """Return the kinds of recomputation that a row allows.

    ``"none"`` also allows recomputation of outputs of norms and activations (with flash attention). It costs no
    product, and authors need not mention it.
    """
    text = row.text("recompute", "none or selective").lower()
    kinds = [kind for kind in Recompute if kind.value in text]
    if Recompute.NONE in kinds and Recompute.SELECTIVE not in kinds and software.flash_attention:
        kinds.append(Recompute.SELECTIVE)
    return tuple(kinds or Recompute)


def _planned(row: Row, job: Job) -> tuple[Plan, bool]:
    """Return the fastest fitting plan of those that the row can mean, or the smallest; and True if it fits."""
    costs, problem = Costs(job), ""
    candidates: list[tuple[bool, float, Plan]] = []
    for layout in row_layouts(row, job):
        found = jobs.layout_problem(job, layout)
        if found:
            problem = problem or found
            continue
        plan = Plan(layout, step_time(costs, layout), memory_use(costs, layout))
        over = plan.memory.total > job.cluster.memory_limit
        candidates.append((over, plan.memory.total if over else plan.seconds, plan))
    if not candidates:
        raise TopologyError(problem)
    over, _, plan = min(candidates, key=lambda candidate: candidate[:2])
    return plan, not over


def _better(row: Row, job: Job, plan: Plan) -> tuple[Plan, str]:
    """Return the best plan of the row's job under its recomputation, and a note if it is much faster."""
    found = search(job, Wanted(recompute=row_recompute(row, job.software)), count=1).best
    best = found if found.seconds < plan.seconds else plan
    if plan.seconds <= AVAILABLE * best.seconds:
        return best, ""
    names = {
        "pipe": "pipe",
        "data": "data",
        "seq": "context",
        "model": "tensor",
        "micro_batch": "micro-batch",
        "virtual_stages": "virtual stages",
        "zero": "ZeRO",
        "sequence_parallel": "sequence parallelism",
    }
    values = ((name, getattr(plan.layout, key), getattr(best.layout, key)) for key, name in names.items())
    changes = ", ".join(f"{name} {old} -> {new}" for name, old, new in values if old != new)
    return best, f"{plan.seconds / best.seconds - 1:.0%} faster by {changes}: {job.software.choice}"
