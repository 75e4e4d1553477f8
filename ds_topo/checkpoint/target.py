"""Plan the layout that a checkpoint is converted to, or explain why it cannot be reached.

:func:`target_of` plans the files of a topology's spec. The hard part is the optimizer: DeepSpeed's files hold its
states by position, so that the groups of the new layout must be known exactly. :func:`require_loadable` checks the
layout of a live engine, which has its own groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ds_topo.checkpoint.manifest import (
    BF16_OPTIMIZER,
    MOST_RANKS,
    Place,
    SavedExperts,
    SavedLayout,
    SavedOptions,
    SavedStructure,
)
from ds_topo.checkpoint.optimizer_groups import Hyperparameters, Origin, planned_groups
from ds_topo.checkpoint.saved_model import (
    RankTable,
    SavedModel,
    bounds_of,
    expert_of,
    experts_of_stages,
    names_of_stage,
    require_splits,
)
from ds_topo.errors import CheckpointLayoutError, TopologyError, abridged, listed
from ds_topo.topology.process_topology import ProcessTopology

_ZERO_STAGES = (0, 1, 2, 3)
_OPTIMIZERS = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
"""DeepSpeed's optimizers by ZeRO stage; without ZeRO it is the program's own."""
_HALF_OPTIMIZERS = ("FP16_Optimizer", "FP16_UnfusedOptimizer")
"""DeepSpeed's optimizers for half precision without ZeRO, fp16 and bf16."""


@dataclass(frozen=True)
class Target:
    """A layout, and the parameters of its stages."""

    model: SavedModel
    layout: SavedLayout
    structure: SavedStructure
    """The model's structure, with the groups and bounds of this layout."""
    slices: int
    names: tuple[tuple[str, ...], ...]
    """Names of each stage's parameters, in the module's order."""
    origins: tuple[tuple[tuple[Origin, ...], ...], ...]
    """The saved groups that each group of the optimizer of a stage comes from."""
    ranks: RankTable

    def pieces(self, name: str) -> int:
        """Return the number of slices of a parameter; of parts of the experts, if AutoEP stacks them."""
        return self.structure.experts[name] if self.model.parameters[name].is_stacked else self.slices

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a slice of a parameter, or of a part of its experts."""
        return self.model.parameters[name].shape_of_slice(self.pieces(name))

    def numel(self, name: str) -> int:
        """Return the number of elements of a slice of a parameter, or of a part of its experts."""
        return math.prod(self.shape(name))

    def piece(self, name: str, place: Place) -> int:
        """Return the number of the slice, or the part, that a rank holds."""
        if self.model.parameters[name].is_stacked:
            return self.ranks.parts[self.structure.experts[name]][place]
        return place.model_rank % self.slices

    @cached_property
    def experts_of_stages(self) -> dict[int, list[str]]:
        """The layers of experts of each stage that has some, in the order in which DeepSpeed numbers them."""
        stages = enumerate(self.names)
        return experts_of_stages(self.model.parameters, ((stage, name) for stage, names in stages for name in names))


def target_of(
    model: SavedModel,
    spec: str,
    zero: int | None = None,
    method: str | None = None,
    bounds: Sequence[int] = (),
    experts: int | None = None,
    options: Mapping[str, Any] | None = None,
    hyperparameters: Hyperparameters | None = None,
) -> Target:
    """Plan the layout of a topology.

    Args:
        model: model to convert.
        spec: spec of the topology, with all degrees.
        zero: ZeRO stage; by default the saved one.
        method: the pipeline's ``partition_method``; by default the saved one.
        bounds: first layer of every stage and the number of layers, instead of a method.
        experts: expert parallel size of every layer; by default the saved ones.
        options: options of ``zero_optimization`` that differ from the saved ones.
        hyperparameters: those of the saved groups of each stage, which say what groups of several stages belong
            together; None if they cannot be read.

    Raises:
        TopologyError, CheckpointLayoutError: the layout cannot be reached; the message says why.
    """
    if "-1" in spec:
        raise TopologyError(
            f"--topology {abridged(spec)}: a degree of -1 cannot be derived, because no job with a number of ranks is "
            "running: give all degrees as positive numbers"
        )
    topology = ProcessTopology.from_spec(spec)
    if topology.world_size() > MOST_RANKS:
        raise TopologyError(
            f"--topology {abridged(spec)} has {topology.world_size():,} ranks: a checkpoint can have up to "
            f"{MOST_RANKS:,}"
        )
    degrees = dict(zip(topology.axes, topology.dims, strict=True))
    slices, stages = degrees.get("model", 1), degrees.get("pipe", 1)
    saved, zero = model.layout, model.layout.zero_stage if zero is None else zero
    _require_convertible(model, zero, slices)
    require_splits(model, slices)
    parts = max(1, (len(model.structure.bounds) - 1) // (saved.model_ranks // model.slices))  # 2 with DualPipeV
    sizes, expert_groups = _sizes_of_experts(model, experts)
    structure = replace(
        model.structure,
        bounds=bounds_of(model, slices, stages * parts, method, bounds),
        method=method or model.structure.method,
        experts=sizes,
        options=_changed_options(model.structure.options or SavedOptions(), options or {}),
    )
    layout = SavedLayout(
        topology.spec,
        topology.world_size(),
        stages * slices,
        topology.world_size() // (stages * slices),
        zero,
        _optimizer_of(model, zero),
        saved.precision,
        saved.is_pipeline,
        expert_groups,
    )
    return _planned(model, layout, structure, slices, hyperparameters)


def _optimizer_of(model: SavedModel, zero: int) -> str | None:
    """Return DeepSpeed's optimizer at a stage: in half precision without ZeRO, the program's optimizer decides it."""
    saved, own = model.layout, model.structure.optimizer
    if zero == saved.zero_stage < 2:
        return saved.optimizer
    if zero or saved.precision == "fp32":
        return _OPTIMIZERS.get(zero, own)
    return _HALF_OPTIMIZERS[own != "FusedAdam"]


def _changed_options(saved: SavedOptions, given: Mapping[str, Any]) -> SavedOptions:
    """Return the options of ZeRO after checking those that the caller gives."""
    known = asdict(saved)
    for key, value in given.items():
        if key not in known:
            raise CheckpointLayoutError(
                f"zero_optimization.{key} does not change the files of a checkpoint: give some of {list(known)}"
            )
        if type(value) is not type(known[key]) or (key == "sub_group_size" and value < 1):
            kind = "true or false" if isinstance(known[key], bool) else "a number of elements >= 1"
            raise CheckpointLayoutError(f"zero_optimization.{key}={abridged(value)}: give {kind}, as in the config")
    return replace(saved, **given)


def require_loadable(
    model: SavedModel, layout: SavedLayout, structure: SavedStructure, slices: int, *, has_states: bool
) -> None:
    """Check that an engine's layout can be reached.

    Args:
        model: model of the checkpoint.
        layout: the engine's layout.
        structure: structure of the engine's model.
        slices: its degree of ``model``.
        has_states: whether the optimizer's states are to be loaded, too.

    Raises:
        CheckpointLayoutError: the message says why not, and what to do.
    """
    saved, kinds = model.layout, {True: "a PipelineModule", False: "a plain engine"}
    if layout.is_pipeline != saved.is_pipeline:
        raise CheckpointLayoutError(
            f"the checkpoint of {saved} cannot be converted: {kinds[saved.is_pipeline]} became "
            f"{kinds[layout.is_pipeline]}, whose parameters have other names. Save it by "
            "TorchState(engine, rename=...), and load it by load_torch"
        )
    if has_states and saved.optimizer is None:
        raise CheckpointLayoutError(
            "the checkpoint was saved without an optimizer: load its weights alone (load_optimizer_states=False)"
        )
    if saved.zero_stage == 3 and any(one.is_stacked for one in model.parameters.values()):
        raise CheckpointLayoutError(
            f"the checkpoint of {saved} has the experts of AutoEP in partitions of ZeRO 3, which only the topology "
            "that saved them can read. Save and load in torch's format (TorchState), or convert it by python -m "
            "deepspeed.checkpoint.ds_to_universal"
        )
    require_splits(model, slices)
    if has_states:
        _require_known_format(model)
        _require_by_element(model, layout, structure, slices)
    layers = len(structure.layers), len(model.structure.layers)
    if model.layout.is_pipeline and layers[0] != layers[1]:
        raise CheckpointLayoutError(
            f"the checkpoint is of a pipeline of {layers[1]} layers, but this one has {layers[0]}: only the same model "
            "can continue from it. Build the model with as many layers"
        )
    if structure.experts.keys() != model.structure.experts.keys():
        raise CheckpointLayoutError(
            f"the checkpoint has experts {listed(sorted(model.structure.experts), 2)}, and this job "
            f"{listed(sorted(structure.experts), 2)}: only the same model can continue from it"
        )
    _require_same_experts(model, layout)


def _require_by_element(model: SavedModel, layout: SavedLayout, structure: SavedStructure, slices: int) -> None:
    uses_partitions = layout.has_partitions or model.layout.has_partitions
    if not structure.is_by_element and (uses_partitions or slices != model.slices):
        own = structure.optimizer or "The program's optimizer"
        raise CheckpointLayoutError(
            f"{own} is not known to update each element by its own gradient and states alone. Its "
            "updates may depend on the partitions of ZeRO and on the shapes of slices, so that a job of another layout "
            "would train differently. Load the checkpoint in the layout that saved it, or write its weights as one "
            "plain file (--to torch). If it does update each element alone, set is_element_by_element = True on its "
            "class, and convert while loading (convert=True)"
        )


def _planned(
    model: SavedModel,
    layout: SavedLayout,
    structure: SavedStructure,
    slices: int,
    hyperparameters: Hyperparameters | None,
) -> Target:
    """Return the target, after checking that its ranks and its optimizer can hold the model."""
    _require_known_format(model)
    _require_by_element(model, layout, structure, slices)
    ranks, stages = _ranks(model, layout, structure), layout.model_ranks // slices
    names = tuple(tuple(names_of_stage(structure, list(model.parameters), stage, stages)) for stage in range(stages))
    groups, origins = planned_groups(
        model, structure, slices, names, hyperparameters, are_all_trained=layout.has_partitions
    )
    counts = [*map(len, groups)]
    if len({*counts}) > 1 and layout.optimizer == "FP16_UnfusedOptimizer":
        raise CheckpointLayoutError(
            f"the stages would have parameters in {counts} groups of the optimizer, with which {layout.optimizer} "
            "would hang in the first step. Use ZeRO 1, or other bounds of the stages"
        )
    return Target(model, layout, replace(structure, groups=groups), slices, names, origins, ranks)


def _require_convertible(model: SavedModel, zero: int, slices: int) -> None:
    """Refuse layouts that DeepSpeed does not support or saves in an unknown form."""
    if problem := next(_problems(model, zero, slices), ""):
        raise CheckpointLayoutError(f"the checkpoint of {model.layout} cannot be converted: {problem}")


def _problems(model: SavedModel, zero: int, slices: int) -> Iterator[str]:
    saved = model.layout
    if zero not in _ZERO_STAGES:
        yield f"ZeRO {abridged(zero)} is not a stage: give one of {list(_ZERO_STAGES)}"
    if saved.optimizer is None:
        yield "it was saved without an optimizer, and only training is converted; write its weights as one plain file"
    are_stacked = any(one.is_stacked for one in model.parameters.values())
    if are_stacked and saved.zero_stage == 3:
        yield (
            "the experts of AutoEP are in partitions of ZeRO 3, which only the topology that saved them can read. Save "
            "and load in torch's format (TorchState)"
        )
    if are_stacked and (slices > 1 or model.slices > 1):
        yield (
            "with AutoEP and AutoTP together, DeepSpeed's files have metadata of both that only live layers make. "
            "Convert while loading (convert=True), or save and load in torch's format (TorchState)"
        )
    if saved.experts and zero > 2:
        yield f"ZeRO {zero} with experts: DeepSpeed's MoE supports ZeRO 0, 1 and 2, and AutoEP is converted to these"
    if saved.is_pipeline and zero > 1:
        yield f"ZeRO {zero} with a PipelineModule: DeepSpeed's pipelines support ZeRO 0 and 1"
    if saved.precision == "bf16" and saved.is_pipeline and zero == 0:
        yield "ZeRO 0 in bf16 with a PipelineModule: use ZeRO 1, or convert while loading (convert=True)"


def _require_known_format(model: SavedModel) -> None:
    """Refuse files whose optimizer keeps its states in an unknown way, or without parameters that it has states of.

    Raises:
        CheckpointLayoutError: the message names them.
    """
    saved, own = model.layout, model.structure.optimizer
    known = [_OPTIMIZERS.get(saved.zero_stage, own), *([BF16_OPTIMIZER] if saved.zero_stage < 2 else [])]
    if saved.optimizer not in (*known, *(_HALF_OPTIMIZERS if not saved.zero_stage else ())):
        raise CheckpointLayoutError(
            f"the checkpoint of {saved} cannot be converted: the format of {saved.optimizer} at ZeRO "
            f"{saved.zero_stage} is not known; that of {' and '.join(map(str, known))} is"
        )
    names = set(map(_starred, model.parameters))
    if left_out := [name for name in _group_of(model) if _starred(name) not in names]:
        raise CheckpointLayoutError(
            f"{listed(left_out, 3)} are in the optimizer and were left out of the checkpoint "
            "(exclude_frozen_parameters): freeze parameters before deepspeed.initialize, or save them, too"
        )


def _sizes_of_experts(model: SavedModel, size: int | None) -> tuple[Mapping[str, int], tuple[SavedExperts, ...]]:
    """Return the expert parallel size of each layer, and all expert groups."""
    saved = model.layout.experts
    if size is not None and not saved:
        raise CheckpointLayoutError(f"experts={size}: the checkpoint has no experts. Leave the option out")
    if size is not None and len({groups.size for groups in saved}) > 1:
        raise CheckpointLayoutError(
            f"experts={size}: layers deal their experts to {sorted({groups.size for groups in saved})} ranks. It is "
            "unknown how the optimizer would group those of one size. Convert while loading, where the job says it"
        )
    by_size = {groups.size: replace(groups, size=size or groups.size) for groups in saved}
    return {head: size or own for head, own in model.structure.experts.items()}, tuple(by_size.values())


def _require_same_experts(model: SavedModel, layout: SavedLayout) -> None:
    """Refuse experts that slices split in one layout only."""
    kinds = [{groups.tensor_parallel for groups in one.experts} for one in (model.layout, layout)]
    if model.experts and kinds[0] != kinds[1]:
        raise CheckpointLayoutError(
            "experts are tensor parallel either in the checkpoint or in this job, and not in the other: both must "
            "agree. Set enable_expert_tensor_parallelism as it was when the checkpoint was saved"
        )


def _ranks(model: SavedModel, layout: SavedLayout, structure: SavedStructure) -> RankTable:
    """Return the ranks that hold each parameter, after checking that all experts can be dealt to them.

    Raises:
        ExpertSizeError: a size does not fit the topology.
        CheckpointLayoutError: a size does not divide the experts, or experts are split among slices in one layout only.
    """
    ranks, sizes = RankTable(model, layout, structure), structure.experts
    for head, count in model.experts.items():
        if count % sizes[head]:
            raise CheckpointLayoutError(
                f"{head!r} has {count} experts, which cannot be dealt to {sizes[head]} ranks: the number of ranks must "
                "divide the number of experts. Choose another size"
            )
    _require_same_experts(model, layout)
    if not layout.zero_stage and any(max(sizes.values()) % size for size in sizes.values()):
        raise CheckpointLayoutError(
            f"experts are dealt to {sorted(set(sizes.values()))} ranks: without ZeRO, sizes must divide each other. "
            "Use ZeRO 1 or 2, or other sizes"
        )
    return ranks


def _group_of(model: SavedModel) -> dict[str, int]:
    """Return the saved group of every parameter of the optimizer, by local names."""
    return {name: number for groups in model.structure.groups for number, names in enumerate(groups) for name in names}


def _starred(name: str) -> str:
    """Return a name that all experts of a layer have in common."""
    expert = expert_of(name)
    return name if expert is None else expert.numbered("*")
