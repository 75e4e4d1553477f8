"""List what changes an engine on a grid, in one table: :data:`PARTS`.

A part is a mixin (:mod:`ds_topo.base.classes`) in a file of its own, which may also give the engine's optimizer mixins
of that file. An engine gets the parts that its config, its grid and its kind ask for, and no others are imported.
Deleting a part is deleting its file and its row. The order of the rows is the order of the methods: those of the last
row run first, and call those of the rows above it by ``super()``; DeepSpeed's own come last.
``python -m tests.step_order`` prints the parts of an engine and the order of its methods.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime import torch_autocast

from ds_topo.engine.config import Case, may_assume_ranks
from ds_topo.mpu import has_shard
from ds_topo.topology.axes import PIPE, SEQ


@dataclass(frozen=True)
class EnginePart:
    """A change of engines for some jobs."""

    file: str
    """The module, within this package."""
    mixin: str
    """The name of its mixin for engines."""
    wanted: Callable[[Case], object]
    """Tell from the case alone whether an engine gets it; equal on all ranks of an engine."""
    why: str
    """What is wrong without it, or what it adds."""

    @property
    def where(self) -> str:
        """The name of the module."""
        return f"ds_topo.engine.{self.file}"

    def load(self) -> Any:
        """Return the mixin, which derives from ``EngineOnGrid``; only the first call imports its module."""
        return getattr(importlib.import_module(self.where), self.mixin)


def _always(_: Case) -> bool:
    return True


def _is_plain(case: Case) -> bool:
    return not case.is_pipeline


def _is_pipeline(case: Case) -> bool:
    return case.is_pipeline


def _gathers_after_step(case: Case) -> bool:
    return case.stage in (1, 2) or (case.is_pipeline and case.is_bf16)  # BF16_Optimizer


def _keeps_gradients(case: Case) -> bool:
    return case.stage == 3 or (case.stage > 0 and case.config.zero_config.offload_optimizer is not None)


def _may_be_adagrad(case: Case) -> bool:
    given = case.optimizer
    is_one = "adagrad" in given.lower() if isinstance(given, str) else isinstance(given, torch.optim.Adagrad)
    is_unknown = callable(given) and not hasattr(given, "param_groups")  # a function builds it
    return case.stage > 0 and (is_one or is_unknown)


def _clips_in_fp32(case: Case) -> bool:
    return not case.has_master_weights and bool(case.config.gradient_clipping)


def _scales_losses(case: Case) -> bool:
    uses_autocast = case.config.torch_autocast_enabled or torch_autocast.TORCH_AUTOCAST_INITIALIZED
    return bool(case.is_fp16 or uses_autocast)


PARTS: tuple[EnginePart, ...] = (
    EnginePart("samples", "DealtSamples", _always, "Loaders of training_data read this rank's share of the samples."),
    EnginePart(
        "data_efficiency",
        "DataEfficiency",
        lambda case: "data_efficiency" in case.config._param_dict,
        "DeepSpeed's sampler sends samples to the data parallel group, which slices do not share.",
    ),
    EnginePart("shard", "ShardedEngine", lambda case: has_shard(case.grid), "ZeRO partitions over shard alone."),
    # Optimizers are built over shard inside of this. Another stage of a pipeline may have experts.
    EnginePart(
        "experts",
        "EngineWithExperts",
        lambda case: case.has_experts or case.is_pipeline,
        "Expert groups come from the grid, in one order on all ranks.",
    ),
    EnginePart("checks", "CheckedModel", _always, "Replicas that were built differently are refused, not broadcast."),
    # The layers that it replaces are compared afterwards.
    EnginePart(
        "autoparallel",
        "AutomaticParallelism",
        lambda case: case.splits_automatically,
        "AutoTP, AutoEP and AutoSP join neighboring ranks.",
    ),
    # They are checked when automatic parallelism has completed the config.
    EnginePart("config_options", "OptionsOfConfig", may_assume_ranks, "Some options assume neighboring ranks."),
    EnginePart("bf16", "EngineWithBF16", lambda case: case.is_bf16, "DeepSpeed refuses Muon in bf16 with any mpu."),
    EnginePart(
        "sequence_sums",
        "SummedOverSequence",
        lambda case: case.stage == 3 and case.degree(SEQ) > 1,
        "ZeRO 3 averages over seq where every other stage sums.",
    ),
    EnginePart(
        "repairs.linked_states",
        "LinkedStates",
        lambda case: case.stage in (1, 2),
        "ZeRO 1 and 2 link the states of the first group alone; all are linked.",
    ),
    EnginePart("repairs.kept_modules", "FreedModule", lambda case: case.stage == 3, "ZeRO 3 keeps destroyed modules."),
    EnginePart(
        "gathers",
        "GatheredPointToPoint",
        _gathers_after_step,
        "gloo's all_gather uses a link in one direction at a time.",
    ),
    # Comparisons are read before copies are summed.
    EnginePart(
        "reduction_order",
        "ComparedReduction",
        lambda case: case.stage > 0,
        "ZeRO adds gradients by their places in buckets.",
    ),
    # Gradients are handed over before they are summed over copies.
    EnginePart(
        "repairs.unused_parameters", "UnusedParameters", _keeps_gradients, "Gradients that are kept are never cleared."
    ),
    EnginePart(
        "repairs.adagrad_groups",
        "GroupsOfAdagrad",
        _may_be_adagrad,
        "ZeRO replaces an Adagrad by another one, of one group.",
    ),
    EnginePart(
        "repairs.step_of_zeros",
        "WithoutStepOfZeros",
        lambda case: case.has_master_weights and not case.stage,
        "Optimizers of fp16 and bf16 without ZeRO take a step of zeros before the first one, which is undone.",
    ),
    EnginePart(
        "norms",
        "ClippedByGrid",
        _clips_in_fp32,
        "DeepSpeed's norm in fp32 counts the first stage alone; clipping (by default at 1.0) uses that of the grid.",
    ),
    EnginePart(
        "optimizer_norms",
        "NormsOfOptimizer",
        lambda case: case.has_master_weights,
        "DeepSpeed's optimizers count experts and slices wrongly.",
    ),
    EnginePart(
        "repairs.bf16_infinities",
        "WithoutInfinities",
        lambda case: case.is_bf16,
        "BF16_Optimizer fails on gradients that are not finite before DeepSpeed 0.19.8.",
    ),
    # Before norms, because a step that is skipped has none.
    EnginePart(
        "repairs.loss_scales",
        "LossScales",
        _scales_losses,
        "Losses in fp16 are not scaled without ZeRO, and each rank decides alone with torch_autocast.",
    ),
    EnginePart(
        "pipelines.pipeline_engine",
        "PipelineOnGrid",
        _is_pipeline,
        "A step starts on all ranks or on none, and stages send what others expect.",
    ),
    EnginePart("repairs.pipeline_timers", "TimedOnce", _is_pipeline, "Two places start the timers of a backward pass."),
    # Before experts, which sort the groups.
    EnginePart(
        "pipelines.idle_stages",
        "EngineWithPlaceholders",
        lambda case: case.is_pipeline and case.degree(PIPE) > 1,
        "A stage without trainable parameters fails alone.",
    ),
    EnginePart(
        "written_weights",
        "NoticedWrites",
        lambda case: case.has_master_weights,
        "Optimizers with master weights overwrite what a program writes.",
    ),
    EnginePart(
        "samples",
        "ComparedSamplesOfPlain",
        _is_plain,
        "Slices that train on different samples raise no error, nor do replicas that train on the same ones.",
    ),
    # Outside of the pipeline, which reads samples.
    EnginePart(
        "samples", "ComparedSamplesOfPipeline", _is_pipeline, "Stages that train on different samples raise no error."
    ),
    EnginePart("unseen_changes", "NoticedSteps", _always, "A step that the program takes itself is not counted."),
    EnginePart("unseen_changes", "NoticedLoneChanges", _always, "What a program changes on one replica is no error."),
    # Before samples are read.
    EnginePart(
        "repairs.micro_batches",
        "CountedMicroBatchesOfPlain",
        _is_plain,
        "DeepSpeed does not notice that the number of micro-batches in a step changes.",
    ),
    EnginePart("repairs.micro_batches", "CountedMicroBatchesOfPipeline", _is_pipeline, "The same."),
    # Outside of what looks at inputs and losses.
    EnginePart(
        "repairs.backward_passes",
        "BackwardPassesOfProgram",
        _is_plain,
        "DeepSpeed prepares and divides once for each output.",
    ),
    # Outside of experts and shard, which choose files.
    EnginePart(
        "on_grid",
        "GuardedCallsOfPlain",
        _is_plain,
        "If one rank raises in a call, all raise; checkpoints are saved and loaded as a whole.",
    ),
    EnginePart("on_grid", "GuardedCallsOfPipeline", _is_pipeline, "The same."),
)
"""All parts of engines, from the innermost on. Where the order of two matters, a comment on the later one says why."""


def parts_of(case: Case) -> list[EnginePart]:
    """Return the parts that an engine gets, innermost first."""
    return [part for part in PARTS if part.wanted(case)]


ON_CALL = (
    "ds_topo.engine.gradient_reducer",  # the section "gradient_reducer", or GradientReducer.attach
    "ds_topo.engine.pipelines.pipeline_driver",  # the same, for a pipeline
    "ds_topo.engine.optimizer_gradients",  # the same, for ZeRO 1 and 2 or BF16_Optimizer
    "ds_topo.engine.quorum",  # the section "replicas"
    "ds_topo.engine.replica_comparison",  # an axis model, or check_replicas
)
"""Modules with more mixins, which the first call of a function imports."""


def load_all() -> None:
    """Import every module with mixins, for what looks at all of them."""
    for part in PARTS:
        part.load()
    for where in ON_CALL:
        importlib.import_module(where)
