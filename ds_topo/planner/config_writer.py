"""A plan as a DeepSpeed config whose ``"topology"`` section this package reads, and the command that trains with it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from ds_topo.errors import TopologyError
from ds_topo.planner.costs import Costs
from ds_topo.planner.group_spans import GRADIENTS, layout_spans
from ds_topo.planner.layout import Job, Layout
from ds_topo.planner.memory import BUCKET_PARAMETERS
from ds_topo.planner.model import transformer
from ds_topo.planner.replicas import two_level_pays
from ds_topo.planner.search import Plan
from ds_topo.planner.software import DEEPSPEED, DEEPSPEED_PIPELINE, Recompute
from ds_topo.topology.axes import DATA

LEARNING_RATE = 3e-3
EXAMPLE_VOCABULARY = 256
"""Of the examples, whose tokens are bytes."""


def deepspeed_config(job: Job, plan: Plan) -> dict[str, Any]:
    """The config of a plan: topology in placement order, micro-batches, ZeRO, precision, reducer.

    The learning rate and its kin are those of the examples: a plan knows nothing of them.

    Raises:
        TopologyError: software or a precision that such a config cannot ask for.
    """
    _check_can_be_said(job)
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


def how_to_train(job: Job, plan: Plan, path: str) -> str:
    """What to do with the written config: the command of the example that has this model, or what another program must
    bring."""
    problem = example_problem(job, plan.layout)
    if problem is None:
        return f"train with: {example_command(job, plan, path)}"
    beside = _beside_config(job, plan.layout)
    return f"{path} is for a program of your own ({problem})" + (f", which must bring {beside}" if beside else "")


def example_problem(job: Job, layout: Layout) -> str | None:
    """Why no example trains this model in this layout, None if one does.

    They are GPTs over bytes in a ``PipelineModule``; one has a mixture of experts in every block, of which a token goes
    through one.
    """
    model = job.model
    if layout.zero > 1:
        return f"the examples are pipelines, which have no ZeRO {layout.zero}"
    if layout.seq > 1:
        return "the examples do not split sequences"
    if model.expert_count and (layout.model > 1 or job.precision.name == "fp16"):
        return "the example with experts has no model axis and no fp16"
    if EXAMPLE_VOCABULARY % layout.model:
        return f"model={layout.model} does not divide the examples' {EXAMPLE_VOCABULARY} bytes"
    if model.is_measured or model.hidden % model.heads or not _is_example(job):
        return (
            f"the examples are GPTs (--no-gated) with a vocabulary of {EXAMPLE_VOCABULARY}, feed-forward layers of "
            "4 x hidden and as many heads of keys; their experts have top-k 1"
        )
    return None


def _is_example(job: Job) -> bool:
    """Whether the model is one that an example builds, whatever its name."""
    model = job.model
    built = transformer(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        vocabulary=EXAMPLE_VOCABULARY,
        sequence=job.sequence,
        experts=model.expert_count,
        top_k=min(1, model.expert_count),
        gated=False,
        name=model.name,
    )
    return replace(model, sequence=job.sequence) == built


def _beside_config(job: Job, layout: Layout) -> str:
    """Parts of a layout that no config says."""
    parts = [
        f"experts over {layout.expert_parallel} ranks" if job.model.expert_count else "",
        "sequence parallelism" if layout.sequence_parallel else "",
        "its own recomputation" if layout.recompute is Recompute.FULL else "",
    ]
    return ", ".join(part for part in parts if part)


def example_command(job: Job, plan: Plan, path: str) -> str:
    """How an example trains this plan's model and batch with the written config."""
    layout, model = plan.layout, job.model
    options = [
        f"--config {shlex.quote(path)}",
        f"--batch-size {job.batch}",
        f"--context {job.sequence}",
        f"--width {model.hidden}",
        f"--heads {model.heads}",
        f"--depth {model.layers}",
    ]
    if model.expert_count:
        options.append(f"--experts {model.expert_count} --expert-parallel {layout.expert_parallel}")
    if layout.sequence_parallel:
        options.append("--sequence-parallel")
    ranks = job.cluster.slots
    where = f"--nnodes {job.cluster.hosts} " if job.cluster.hosts > 1 else ""
    program = "train_moe.py" if model.expert_count else "train_gpt.py"
    return f"torchrun {where}--nproc-per-node {ranks} examples/{program} {' '.join(options)}"


def _check_can_be_said(job: Job) -> None:
    name, written = job.software.name, [DEEPSPEED.name, DEEPSPEED_PIPELINE.name]
    if name not in written:
        raise TopologyError(f"--software {name} does not read a DeepSpeed config: choose one of {written}")
    said = ["fp32", "bf16", "fp16"]
    if job.precision.name not in said:
        raise TopologyError(
            f"--precision {job.precision.name}: a DeepSpeed config cannot ask for it; choose one of {said}"
        )


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
