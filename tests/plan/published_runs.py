"""Predict published training runs, and compare the predictions with the reported values.

A file is a JSON list of runs. The planner chooses what a run leaves open (null): the micro-batch, and without one the
virtual stages too. A run that states its micro-batch and no virtual stages had none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from ds_topo.plan.hardware import TERA, Accelerator, Cluster, accelerator_of, cluster_of
from ds_topo.plan.job import (
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_2022,
    PRECISIONS,
    Job,
    JobLayout,
    Precision,
    Recompute,
    Software,
    layout_problem,
)
from ds_topo.plan.memory import memory_use
from ds_topo.plan.model import Model, transformer
from ds_topo.plan.search import LARGEST_MICRO_BATCH, Plan, Wanted, search
from ds_topo.plan.stages import Costs
from ds_topo.plan.step_time import step_time
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ, divisors
from ds_topo.topology.process_topology import ProcessTopology

FILES = [Path(__file__).with_name(name) for name in ("published_runs.json", "more_published_runs.json")]
"""The runs to which constants were fitted, and others."""
AVAILABLE = 1.10
"""A published layout needs no note if the best takes at least its time divided by this."""
CHOICES = {
    MEGATRON_2021: "its authors did not search; they took tensor parallelism up to a host's size by rule (section 3)",
    MEGATRON_2022: "its authors compared recomputation at a layout that they did not vary (the paper's table 3)",
    MEGATRON: "the source does not say how degrees were chosen",
}
"""How the degrees of the runs of each program were chosen."""

Run: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A run, the planner's prediction for its layout, and the best layout that it finds for the same job.

    Args:
        name: the model and the GPUs.
        metric: the name of the reported value that is compared.
        published: the reported value.
        predicted: the same by the planner's prediction.
        error: the predicted throughput over the published one, minus one.
        note: what the best layout changes, if it is much faster.
    """

    name: str
    metric: str
    published: float
    predicted: float
    error: float
    plan: Plan
    fits: bool
    best: Plan | None
    note: str


def read_runs(path: str | Path) -> list[Run]:
    """Return the runs of a file."""
    runs: list[Run] = json.loads(Path(path).read_text())
    return runs


def judge(run: Run, *, compare: bool = True, accelerator: Accelerator | None = None) -> Verdict:
    """Predict one run, with another accelerator's numbers in place of the table's if given.

    With ``compare``, also look for a better layout of its job.
    """
    job = job_of(run, accelerator)
    metric, per_second = metric_of(run, job)
    published = float(run[metric])
    plan, fits = _planned(run, job)
    best, note = _better(run, job, plan) if compare and fits else (None, "")
    seconds, predicted = published, plan.seconds
    if per_second:
        seconds, predicted = per_second / published, per_second / plan.seconds
    return Verdict(name_of(run), metric, published, predicted, seconds / plan.seconds - 1, plan, fits, best, note)


def name_of(run: Run) -> str:
    """Return the name of a run in tables."""
    model = run.get("model") or f"{run['parameters_billion']:g}B"
    return f"{model} on {run['gpus']} {run['accelerator']}"


def job_of(run: Run, accelerator: Accelerator | None = None) -> Job:
    """Return the model, cluster, batch, precision and software of a run."""
    model = transformer(
        **{name: run[name] for name in ("layers", "hidden", "heads", "vocabulary", "kv_heads", "ffn", "sequence")},
        experts=run.get("experts", 0),
        top_k=run.get("top_k", 0),
        gated=run.get("gated"),
        name=name_of(run),
    )
    cluster = cluster_of_ranks(accelerator or accelerator_of(run["accelerator"]), run["gpus"])
    return Job(model, cluster, run["global_batch"], run["sequence"], precision_of(run), software_of(run))


def cluster_of_ranks(accelerator: Accelerator, ranks: int) -> Cluster:
    """Return the smallest cluster with so many ranks: full hosts, or hosts on which fewer slots are used.

    >>> clusters = cluster_of_ranks(accelerator_of("A100"), 280), cluster_of_ranks(accelerator_of("GB200"), 256)
    >>> [(cluster.hosts, cluster.slots) for cluster in clusters]
    [(35, 8), (4, 64)]
    """
    slots = next(slots for slots in range(min(ranks, accelerator.slots), 0, -1) if ranks % slots == 0)
    return cluster_of(accelerator, ranks // slots, slots)


def precision_of(run: Run) -> Precision:
    """Return the precision of a run: the first word, as in ``fp8 (per-tensor scaling)``."""
    return PRECISIONS[run["precision"].split()[0]]


def software_of(run: Run) -> Software:
    """Return the program that a run can have used, by the first year in its source.

    >>> software_of({"source": "Narayanan et al., SC 2021, table 1"}).name, software_of({"source": "25.11"}).name
    ('megatron-2021', 'megatron')
    """
    years = re.findall(r"\b20[12]\d\b", run["source"])
    year = int(years[0]) if years else inf
    return MEGATRON_2021 if year <= 2021 else MEGATRON_2022 if year == 2022 else MEGATRON


def metric_of(run: Run, job: Job) -> tuple[str, float]:
    """Return the metric that a run is judged by, and what it counts in a step.

    Of the metrics that a run reports, it is the one that needs the fewest conventions. Its value is the count divided
    by the seconds of a step; where the count is 0, the value is these seconds.

    ``model_tflops_per_gpu`` counts a causal mask's half of attention, as Megatron-Bridge does (737 TFLOP/s at
    292 tokens/s for Llama 3.1 405B is exactly that). ``tflops_per_gpu`` counts all of it, as Megatron-LM does. With
    recomputation, forward counts twice (Narayanan et al., equation 3).
    """
    tokens, ranks, sequence = job.batch * job.sequence, job.cluster.ranks, job.sequence
    metrics = {
        "seconds_per_step": 0.0,
        "tokens_per_second_per_gpu": tokens / ranks,
        "model_tflops_per_gpu": tokens * job.model.flops_per_token(sequence, causal=True) / ranks / TERA,
        "tflops_per_gpu": tokens * job.model.flops_per_token(sequence, causal=False) / ranks / TERA,
        "tflops_per_gpu_with_recomputation": tokens * recomputed_flops_per_token(job.model, sequence) / ranks / TERA,
    }
    return next((metric, count) for metric, count in metrics.items() if metric in run)


def recomputed_flops_per_token(model: Model, sequence: int) -> float:
    """Return the FLOPs of forward, forward again and backward; the output layer is not computed again.

    For a GPT of l layers they are ``96 l h^2 (1 + s / 6h + V / 16 l h)`` (Narayanan et al., equation 3).
    """
    output = 6.0 * model.hidden * model.vocabulary
    return (model.flops_per_token(sequence, causal=False) - output) * 4 / 3 + output


def layouts_of(run: Run, job: Job) -> Iterator[JobLayout]:
    """Yield every layout that the run can mean, in Megatron's order of axes: ``pipe, data, context, tensor``."""
    ranks, software = job.cluster.ranks, job.software
    tensor, pipe, seq = (run.get(field) or 1 for field in ("tensor", "pipe", "context"))
    data = ranks // (tensor * pipe * seq)
    topology = ProcessTopology([PIPE, DATA, SEQ, MODEL], [pipe, data, seq, tensor])
    virtuals, micros = [run["virtual_stages"] or 1], [run["micro_batch"]]
    if not micros[0]:
        micros = [size for size in divisors(max(1, job.batch // data)) if size <= LARGEST_MICRO_BATCH]
        if not run["virtual_stages"] and pipe > 1:
            virtuals = list(range(1, min(software.virtual_stages, -(-job.model.layers // pipe)) + 1))
    # shard states as the run says, else the optimizer's wherever the program can
    stages = software.zero_stages(pipe, job.precision)
    zero = 1 if 1 in stages and data * seq > 1 else min(stages)
    if run.get("fully_sharded"):
        zero = max(stages)
    # activations are split along the sequence wherever the program can, except in early runs with full recomputation
    spread = tensor > 1 and software.sequence_parallel and job.sequence % (tensor * seq) == 0
    spread = spread and (not recompute_text(run).startswith("full") or software.overlaps_model)
    for micro, virtual, kind in product(micros, virtuals, recompute_of(run, software)):
        yield JobLayout(topology, micro, zero, kind, virtual, spread, run.get("expert_parallel", 1))


def recompute_text(run: Run) -> str:
    """Return what a run says about recomputation."""
    return str(run.get("recompute") or "none or selective").lower()


def recompute_of(run: Run, software: Software) -> tuple[Recompute, ...]:
    """Return the kinds of recomputation that a run allows.

    ``"none"`` also allows recomputation of outputs of norms and activations (with flash attention). It costs no
    product, and authors need not mention it.
    """
    kinds = [kind for kind in Recompute if kind.value in recompute_text(run)]
    if Recompute.NONE in kinds and Recompute.SELECTIVE not in kinds and software.flash_attention:
        kinds.append(Recompute.SELECTIVE)
    return tuple(kinds)


def _planned(run: Run, job: Job) -> tuple[Plan, bool]:
    """Return the fastest fitting plan of those that the run can mean, or the smallest; and True if it fits."""
    costs = Costs(job)
    plans = [
        Plan(layout, step_time(costs, layout), memory_use(costs, layout))
        for layout in layouts_of(run, job)
        if layout_problem(job, layout) is None
    ]
    fitting = [plan for plan in plans if plan.memory.total <= job.cluster.memory_limit]
    if fitting:
        return min(fitting, key=lambda plan: plan.seconds), True
    return min(plans, key=lambda plan: plan.memory.total), False


def _better(run: Run, job: Job, plan: Plan) -> tuple[Plan, str]:
    """Return the best plan of the run's job under its recomputation, and a note if it is much faster."""
    found = search(job, Wanted(recompute=recompute_of(run, job.software)), count=1).best
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
    return best, f"{plan.seconds / best.seconds - 1:.0%} faster by {changes}: {CHOICES[job.software]}"
