"""Turn a plan into a DeepSpeed config, whose ``"topology"`` section this package reads, and a training command."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from ds_topo.errors import TopologyError
from ds_topo.planner.job import DEEPSPEED, DEEPSPEED_PIPELINE, DUALPIPEV, Job, Layout, Recompute
from ds_topo.planner.model import transformer
from ds_topo.planner.search import Plan
from ds_topo.planner.stages import BUCKET_PARAMETERS, Costs
from ds_topo.planner.step_time import GRADIENTS, layout_spans, two_level_pays
from ds_topo.topology.axes import DATA, SHARD

CONFIGURED = (DEEPSPEED.name, DEEPSPEED_PIPELINE.name, DUALPIPEV.name)
"""The training programs that read a DeepSpeed config."""
LEARNING_RATE = 3e-3
EXAMPLE_VOCABULARY = 256
"""The examples' tokens are bytes."""


def deepspeed_config(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the config of a plan: topology in placement order, micro-batches, ZeRO, precision, reducer.

    The learning rate and other hyperparameters are those of the examples: a plan does not decide them.

    Raises:
        TopologyError: if a DeepSpeed config cannot ask for the software or the precision.
    """
    precisions = ["fp32", "bf16", "fp16"]
    if job.software.name not in CONFIGURED:
        raise TopologyError(
            f"--software {job.software.name} does not read a DeepSpeed config: choose one of {list(CONFIGURED)}"
        )
    if job.precision.name not in precisions:
        raise TopologyError(
            f"--precision {job.precision.name}: a DeepSpeed config cannot ask for it; choose one of {precisions}"
        )
    layout, costs = plan.layout, Costs(job)
    degrees = dict(zip(layout.topology.axes, layout.topology.dims, strict=True))
    # DeepSpeed allocates whole buckets: they should not be larger than what a rank has
    bucket = min(BUCKET_PARAMETERS, max(held.total for held in costs.all_parameters(layout)))
    # DeepSpeed's own Adam for CPUs has to be compiled first
    adam = {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": job.cluster.is_cpu}
    config: dict[str, Any] = {
        "topology": {axis: degree for axis, degree in degrees.items() if degree > 1} or {DATA: 1},
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches(job.batch),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": layout.zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
        "gradient_reducer": _reducer(costs, layout),
        "steps_per_print": 1_000_000_000,
    }
    if job.precision.name in ("bf16", "fp16"):
        config[job.precision.name] = {"enabled": True}
    if layout.recompute is Recompute.FULL:
        # the reentrant kind loses the gradients of a first layer whose inputs are token ids
        config["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": False}
    if job.software.mirrors:  # its schedule cannot send parts of activations
        config.setdefault("pipeline", {}).update(pipe_partitioned=False, grad_partitioned=False)
    return config


def _reducer(costs: Costs, layout: Layout) -> dict[str, Any] | bool:
    """Return the section of this package's reducer; False in stages that it does not handle, and without replicas.

    The section fixes the planned number of levels. Without it the reducer would measure which one is faster.
    """
    if layout.zero > 1 or layout.replicas == 1:
        return False
    spans = layout_spans(costs, layout)
    if 1 < spans[GRADIENTS].hosts < spans[GRADIENTS].size and SHARD not in layout.topology.axes:
        return {"two_level": two_level_pays(costs, layout, spans)}
    return {"enabled": True}


def how_to_train(job: Job, plan: Plan, path: str) -> str:
    """Return the command that trains with the written config, or what a program of one's own must add to it."""
    layout = plan.layout
    problem = _example_problem(job, layout)
    if problem is None:
        return f"train with: {_example_command(job, layout, path)}"
    parts = {
        f"experts over {layout.expert_parallel} ranks": job.model.expert_count > 0,
        "sequence parallelism": layout.sequence_parallel,
        "its own recomputation": layout.recompute is Recompute.FULL,
    }
    beside = ", ".join(part for part, is_needed in parts.items() if is_needed)
    return f"{path} is for a program of your own ({problem})" + (f", which must bring {beside}" if beside else "")


def _example_problem(job: Job, layout: Layout) -> str | None:
    """Return why no example trains this model in this layout, or None.

    The examples are GPTs over bytes in a ``PipelineModule``. One has a mixture of experts in every block, and each
    token goes through one expert.
    """
    if job.software.mirrors:
        return "the examples have no DualPipeVModule"
    model, for_them = job.model, f"--software {DEEPSPEED_PIPELINE.name} plans for them"
    if layout.zero > 1:
        return f"the examples are pipelines, which have no ZeRO {layout.zero}; {for_them}"
    if layout.seq > 1:
        return f"the examples do not split sequences; {for_them}"
    if model.expert_count and (layout.model > 1 or job.precision.name == "fp16"):
        return "the example with experts has no model axis and no fp16"
    if EXAMPLE_VOCABULARY % layout.model:
        return f"model={layout.model} does not divide the examples' {EXAMPLE_VOCABULARY} bytes"
    built = None
    if not model.is_measured and model.hidden % model.heads == 0:
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
    if replace(model, sequence=job.sequence) != built:
        return (
            f"the examples are GPTs (--no-gated) with a vocabulary of {EXAMPLE_VOCABULARY}, feed-forward layers of "
            "4 x hidden and as many heads of keys; their experts have top-k 1"
        )
    return None


def _example_command(job: Job, layout: Layout, path: str) -> str:
    model, cluster = job.model, job.cluster
    options = (
        f"--config {shlex.quote(path)} --batch-size {job.batch} --context {job.sequence} --width {model.hidden} "
        f"--heads {model.heads} --depth {model.layers}"
    )
    if model.expert_count:
        options += f" --experts {model.expert_count} --expert-parallel {layout.expert_parallel}"
    if layout.sequence_parallel:
        options += " --sequence-parallel"
    nodes = f"--nnodes {cluster.hosts} " if cluster.hosts > 1 else ""
    program = "train_moe.py" if model.expert_count else "train_gpt.py"
    return f"torchrun {nodes}--nproc-per-node {cluster.slots} examples/{program} {options}"
