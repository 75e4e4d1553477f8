"""A plan as a DeepSpeed config whose ``"topology"`` section this package reads, and the command that trains with it."""

from __future__ import annotations

from typing import Any

from ds_topo.planner.costs import Costs
from ds_topo.planner.group_spans import GRADIENTS, layout_spans
from ds_topo.planner.layout import Job, Layout
from ds_topo.planner.memory import BUCKET_PARAMETERS
from ds_topo.planner.replicas import two_level_pays
from ds_topo.planner.search import Plan
from ds_topo.planner.software import Recompute
from ds_topo.topology.axes import DATA

LEARNING_RATE = 3e-3


def deepspeed_config(job: Job, plan: Plan) -> dict[str, Any]:
    """The config of a plan: topology in placement order, micro-batches, ZeRO, precision, reducer.

    The learning rate and its kin are those of the examples: a plan knows nothing of them.
    """
    layout = plan.layout
    micro_batches = layout.micro_batches(job.batch)
    config: dict[str, Any] = {
        "topology": _topology(layout),
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": _on_cpu(job)},
        },
        "zero_optimization": _zero(job, layout),
        "gradient_reducer": _reducer(job, layout),
        "steps_per_print": 1_000_000_000,
    }
    if job.precision.name in ("bf16", "fp16"):
        config[job.precision.name] = {"enabled": True}
    if layout.recompute is Recompute.FULL:
        # the reentrant kind loses the gradients of a first layer whose inputs are token ids
        config["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": False}
    return config


def example_command(job: Job, plan: Plan, path: str) -> str:
    """How ``examples/train_gpt.py`` trains this plan's model and batch with the written config."""
    layout, model = plan.layout, job.model
    options = [
        f"--config {path}",
        f"--batch-size {job.batch}",
        f"--context {job.sequence}",
        f"--width {model.hidden}",
        f"--heads {model.heads}",
        f"--depth {model.layers}",
    ]
    if layout.sequence_parallel:
        options.append("--sequence-parallel")
    ranks = job.cluster.slots
    where = f"--nnodes {job.cluster.hosts} " if job.cluster.hosts > 1 else ""
    return f"torchrun {where}--nproc-per-node {ranks} examples/train_gpt.py {' '.join(options)}"


def _topology(layout: Layout) -> dict[str, int]:
    """Axes of more than one rank, outermost first."""
    axes = dict(zip(layout.topology.axes, layout.topology.dims, strict=True))
    return {axis: degree for axis, degree in axes.items() if degree > 1} or {DATA: 1}


def _zero(job: Job, layout: Layout) -> dict[str, Any]:
    """The stage, and buckets no larger than what a rank has: DeepSpeed allocates them whole."""
    costs = Costs(job)
    held = [costs.parameters(kind, layout) for kind in costs.stage_kinds(layout)]
    bucket = min(BUCKET_PARAMETERS, max(parameters.dense + parameters.experts for parameters in held))
    return {"stage": layout.zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}


def _reducer(job: Job, layout: Layout) -> dict[str, Any] | bool:
    """This package's reducer where it serves (stages 0 and 1) and there is something to reduce, in as many levels as
    were planned for: by itself it would measure which way is faster."""
    if layout.zero > 1 or layout.replicas == 1:
        return False
    costs = Costs(job)
    spans = layout_spans(costs, layout)
    has_two_levels = 1 < spans[GRADIENTS].hosts < spans[GRADIENTS].size
    return {"two_level": two_level_pays(costs, layout, spans)} if has_two_levels else {"enabled": True}


def _on_cpu(job: Job) -> bool:
    """Whether torch's own AdamW is to be used in place of DeepSpeed's fused one."""
    return job.cluster.accelerator.transport == "gloo"
