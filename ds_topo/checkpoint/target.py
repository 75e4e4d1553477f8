"""Plan the layout that a checkpoint is converted to, or explain why it cannot be reached.

:func:`target_of` plans the files of a topology's spec. :func:`require_reachable` also checks the layout of a live
engine, which has its own groups of the optimizer.

The hard part of a plan is :func:`planned_groups`. DeepSpeed's files have optimizer states by position, so the groups of
each stage must be known exactly. DeepSpeed leaves out the groups of which a stage has no parameter, and splits off the
experts of each expert parallel size behind the other groups. So stages may differ in their groups. What they have in
common is found by the hyperparameters: groups of several stages with the same ones are one *kind*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from ds_topo.checkpoint.deepspeed_reader import differing
from ds_topo.checkpoint.manifest import (
    BF16_OPTIMIZER,
    MOST_RANKS,
    SavedExperts,
    SavedLayout,
    SavedOptions,
    SavedStructure,
)
from ds_topo.checkpoint.saved_model import WholeModel, bounds_of, has_placeholders, head_of, require_splits, starred
from ds_topo.checkpoint.shards import FLAT_OPTIMIZER
from ds_topo.errors import CheckpointLayoutError, TopologyError, abridged, listed
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import ExpertPlan

_HALF_OPTIMIZERS = (FLAT_OPTIMIZER, "FP16_UnfusedOptimizer")
"""DeepSpeed's optimizers for half precision without ZeRO, fp16 and bf16."""
_OPTIMIZERS = {
    0: (BF16_OPTIMIZER, *_HALF_OPTIMIZERS),
    1: ("DeepSpeedZeroOptimizer", BF16_OPTIMIZER),
    2: ("DeepSpeedZeroOptimizer",),
    3: ("DeepSpeedZeroOptimizer_Stage3",),
}
"""DeepSpeed's optimizers by ZeRO stage; without ZeRO in fp32 it is the program's own."""
_LARGEST_EXPERT_GROUP = 178_956_971
"""Elements of a group of experts: DeepSpeed's ``split_params_into_different_moe_groups_for_optimizer``."""
NAME_BESIDE_EXPERTS = "dense-params"
"""The name of a group of an engine with experts to which the program gives none. Source: ``_configure_optimizer``."""
_REMEDY = "convert while loading (convert=True), where the job says it"

Groups = tuple[tuple[str, ...], ...]
"""Names of the parameters in each group of the optimizer, on one stage."""
Hyperparameters = Callable[[int], Sequence[Mapping[str, Any]]]
"""Returns the hyperparameters of each group of a stage that was saved."""


class _Group(NamedTuple):
    """A group of a stage: DeepSpeed's parts of one that was too large are one again."""

    names: tuple[str, ...]
    stage: int
    number: int
    """Its number among the groups of the stage, before they were joined."""
    is_of_experts: bool
    kind: tuple[int, int] = (0, 0)
    """The number of its hyperparameters, and its place among the groups of the stage that have the same ones."""


def target_of(
    model: WholeModel,
    spec: str,
    zero: int | None = None,
    method: str | None = None,
    bounds: Sequence[int] = (),
    experts: int | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    hyperparameters: Hyperparameters,
) -> WholeModel:
    """Plan the layout of a topology; return the model in it.

    Args:
        model: model to convert.
        spec: spec of the topology, with all degrees.
        zero: ZeRO stage; by default the saved one.
        method: the pipeline's ``partition_method``; by default the saved one.
        bounds: first layer of every stage and the number of layers, instead of a method.
        experts: expert parallel size of every layer; by default the saved ones.
        options: options of ``zero_optimization`` that differ from the saved ones.
        hyperparameters: those of the saved groups of each stage, which say what groups of several stages belong
            together.

    Raises:
        TopologyError, ExpertSizeError, CheckpointLayoutError: the layout cannot be reached; the message says why.
    """
    topology = ProcessTopology.from_spec(spec)
    if topology.world_size() > MOST_RANKS:
        raise TopologyError(
            f"--topology {abridged(spec)} has {topology.world_size():,} ranks: a checkpoint can have up to "
            f"{MOST_RANKS:,}"
        )
    degrees = dict(zip(topology.axes, topology.dims, strict=True))
    slices, stages = degrees.get("model", 1), degrees.get("pipe", 1)
    saved, zero = model.layout, model.layout.zero_stage if zero is None else zero
    if zero not in _OPTIMIZERS:
        raise CheckpointLayoutError(f"ZeRO {abridged(zero)} is not a stage: give one of {list(_OPTIMIZERS)}")
    sizes, expert_groups = _sizes_of_experts(model, experts)
    for one in expert_groups:  # refuses a size that does not fit
        ExpertPlan(topology, one.size, one.tensor_parallel, one.data_first)
    parts = max(1, (len(model.structure.bounds) - 1) // (saved.model_ranks // model.slices))  # 2 with DualPipeV
    structure = replace(
        model.structure,
        bounds=bounds_of(model, slices, stages * parts, method, bounds),
        method=method or model.structure.method,
        experts=sizes,
        options=_changed_options(model.structure.options, options or {}),
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
    require_reachable(model, layout, structure, has_states=True, has_files=True)
    target = replace(model, layout=layout, structure=structure)
    groups = planned_groups(model, target, hyperparameters)
    counts = [*map(len, groups)]
    if len({*counts}) > 1 and layout.optimizer == "FP16_UnfusedOptimizer":
        raise CheckpointLayoutError(
            f"the stages would have parameters in {counts} groups of the optimizer, with which {layout.optimizer} "
            "would hang in the first step. Use ZeRO 1, or other bounds of the stages"
        )
    return replace(target, structure=replace(structure, groups=groups))


def _optimizer_of(model: WholeModel, zero: int) -> str | None:
    """Return DeepSpeed's optimizer at a stage: in half precision without ZeRO, the program's optimizer decides it."""
    saved, own = model.layout, model.structure.optimizer
    if zero == saved.zero_stage < 2:
        return saved.optimizer
    if zero:
        return _OPTIMIZERS[zero][0]
    return own if saved.precision == "fp32" else _HALF_OPTIMIZERS[own != "FusedAdam"]


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


def _sizes_of_experts(model: WholeModel, size: int | None) -> tuple[Mapping[str, int], tuple[SavedExperts, ...]]:
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


def require_reachable(
    model: WholeModel, layout: SavedLayout, structure: SavedStructure, *, has_states: bool, has_files: bool = False
) -> None:
    """Check that a layout can be reached.

    Args:
        model: model of the checkpoint.
        layout: the new layout.
        structure: structure of the model there.
        has_states: whether the optimizer's states are converted, too.
        has_files: whether DeepSpeed's files are made for it.

    Raises:
        CheckpointLayoutError: the message says why not, and what to do.
    """
    if problem := next(_problems(model, layout, structure, has_states, has_files), ""):
        raise CheckpointLayoutError(f"the checkpoint of {model.layout} cannot be converted: {problem}")
    require_splits(model, layout.degrees().get("model", 1))


def _problems(
    model: WholeModel, layout: SavedLayout, structure: SavedStructure, has_states: bool, has_files: bool
) -> Iterator[str]:
    """Yield why a layout cannot be reached."""
    saved, was = model.layout, model.structure
    kinds = {True: "a PipelineModule", False: "a plain engine"}
    if any(has_placeholders(groups) for groups in structure.groups):
        yield (
            "a stage here has no trainable parameter in a group of the optimizer. Give each stage one, or load the "
            "checkpoint in the layout that saved it"
        )
    if layout.is_pipeline != saved.is_pipeline:
        yield (
            f"{kinds[saved.is_pipeline]} became {kinds[layout.is_pipeline]}, whose parameters have other names. Save "
            "it by TorchState(engine, rename=...), and load it by load_torch"
        )
    if len(structure.layers) != len(was.layers):
        yield (
            f"its pipeline has {len(was.layers)} layers, and this one has {len(structure.layers)}: only the same model "
            "can continue from it. Build the model with as many layers"
        )
    if structure.experts.keys() != was.experts.keys():
        yield (
            f"it has experts {listed(sorted(was.experts), 2)}, and this job {listed(sorted(structure.experts), 2)}: "
            "only the same model can continue from it"
        )
    if saved.zero_stage == 3 and any(one.is_stacked for one in model.parameters.values()):
        yield (
            "the experts of AutoEP are in partitions of ZeRO 3, which only the topology that saved them can read. Save "
            "and load in torch's format (TorchState), or convert it by python -m deepspeed.checkpoint.ds_to_universal"
        )
    are_split = [{groups.tensor_parallel for groups in one.experts} for one in (saved, layout)]
    if model.experts and are_split[0] != are_split[1]:
        yield (
            "experts are tensor parallel either in the checkpoint or in this job, and not in the other: both must "
            "agree. Set enable_expert_tensor_parallelism as it was when the checkpoint was saved"
        )
    if has_states:
        yield from _problems_of_states(model, layout, structure)
    if has_files:
        yield from _problems_of_files(model, layout, structure)


def _problems_of_states(model: WholeModel, layout: SavedLayout, structure: SavedStructure) -> Iterator[str]:
    """Yield why the saved states of the optimizer are unknown, or meaningless in a layout."""
    saved, was = model.layout, model.structure
    known = [*([was.optimizer] if not saved.zero_stage else []), *_OPTIMIZERS[saved.zero_stage]]
    if saved.optimizer is None:
        yield (
            "it was saved without an optimizer. Load its weights alone (load_optimizer_states=False), or write them as "
            "one plain file (--to torch)"
        )
    elif saved.optimizer not in known:
        yield (
            f"the format of {saved.optimizer} at ZeRO {saved.zero_stage} is not known; that of "
            f"{' and '.join(map(str, known))} is"
        )
    names = set(map(starred, model.parameters))
    in_optimizer = dict.fromkeys(name for stage in was.groups for group in stage for name in group)
    if left_out := [name for name in in_optimizer if starred(name) not in names]:
        yield (
            f"{listed(left_out, 3)} are in the optimizer and were left out of the checkpoint "
            "(exclude_frozen_parameters): freeze parameters before deepspeed.initialize, or save them, too"
        )
    uses_partitions = layout.has_partitions or saved.has_partitions
    if not structure.is_by_element and (uses_partitions or layout.degrees().get("model", 1) != model.slices):
        own = structure.optimizer or "the program's optimizer"
        yield (
            f"{own} is not known to update each element by its own gradient and states alone. Its updates may depend "
            "on the partitions of ZeRO and on the shapes of slices, so that a job of another layout would train "
            "differently. Load the checkpoint in the layout that saved it, or write its weights as one plain file "
            "(--to torch). If it does update each element alone, set is_element_by_element = True on its class, and "
            "convert while loading (convert=True)"
        )


def _problems_of_files(model: WholeModel, layout: SavedLayout, structure: SavedStructure) -> Iterator[str]:
    """Yield why DeepSpeed has no files for a layout, or not of a known form."""
    saved, zero, sizes = model.layout, layout.zero_stage, structure.experts
    has_slices = max(layout.degrees().get("model", 1), model.slices) > 1
    if has_slices and any(one.is_stacked for one in model.parameters.values()):
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
    for head, count in model.experts.items():
        if count % sizes[head]:
            yield (
                f"{head!r} has {count} experts, which cannot be dealt to {sizes[head]} ranks: the number of ranks must "
                "divide the number of experts. Choose another size"
            )
    if not zero and any(max(sizes.values()) % size for size in sizes.values()):
        yield (
            f"experts are dealt to {sorted(set(sizes.values()))} ranks: without ZeRO, sizes must divide each other. "
            "Use ZeRO 1 or 2, or other sizes"
        )


# -- groups of the optimizer -------------------------------------------------------------------------------------------


def planned_groups(before: WholeModel, after: WholeModel, hyperparameters: Hyperparameters) -> tuple[Groups, ...]:
    """Return the groups of every stage, with local names.

    Args:
        before: the saved model.
        after: the model in the new layout, whose groups are not known.
        hyperparameters: those of the saved groups.

    Raises:
        CheckpointLayoutError: the groups are not clear.
    """
    saved = _kinds(_joined(before), hyperparameters)
    is_same = len(after.names) == len(before.names) and after.structure.bounds == before.structure.bounds
    planned: list[Groups] = []
    for stage, names in enumerate(after.names):
        groups = [group for group in saved if group.stage == stage or not is_same]
        kind_of = {starred(name): group.kind for group in groups for name in group.names}
        members: dict[tuple[int, int], list[str]] = {}
        for name in dict.fromkeys(map(after.local_name, names)):
            if (kind := kind_of.get(starred(name))) is not None:
                members.setdefault(kind, []).append(name)
        parts: list[tuple[str, ...]] = []
        for kind in _in_order(members.keys(), groups):
            ordered = _in_saved_order(members[kind], [group for group in groups if group.kind == kind], before)
            trained = tuple(
                name for name in ordered if after.parameters[name].is_trained or not after.layout.has_partitions
            )
            if not trained:
                raise CheckpointLayoutError(
                    f"a group of the optimizer would have frozen parameters alone on stage {stage} of "
                    f"{len(after.names)}, which ZeRO does not support. Use fewer stages, or other bounds of the stages"
                )
            parts += _split(trained, after)
        if not parts:
            raise CheckpointLayoutError(
                f"stage {stage} of {len(after.names)} would have no trained parameter, which DeepSpeed does not "
                "support. Use fewer stages, or other bounds of the stages"
            )
        planned.append(tuple(parts))
    return tuple(planned)


def _kinds(groups: Sequence[_Group], hyperparameters: Hyperparameters) -> list[_Group]:
    """Return groups with their kinds.

    Raises:
        CheckpointLayoutError: a stage has several groups of equal hyperparameters, and another one has fewer.
    """
    known: list[Mapping[str, Any]] = []
    counts: dict[int, dict[int, int]] = {}
    """The number of groups with the same hyperparameters, by the number of those and by stage."""
    found = []
    for group in groups:
        own = dict(hyperparameters(group.stage)[group.number])
        if own.get("name") == NAME_BESIDE_EXPERTS:  # DeepSpeed names dense groups beside experts only
            del own["name"]
        alike = next((number for number, one in enumerate(known) if not differing(one, own)), len(known))
        known += [own] if alike == len(known) else []
        of_stages = counts.setdefault(alike, {})
        place = of_stages.get(group.stage, 0)
        of_stages[group.stage] = place + 1
        found.append(group._replace(kind=(alike, place)))
    for of_stages in counts.values():
        for (earlier, there), (stage, count) in pairwise(of_stages.items()):
            if there != count:
                raise CheckpointLayoutError(
                    f"stages {earlier} and {stage} have {there} and {count} groups of the optimizer with the same "
                    "hyperparameters, so that it is unknown which of them belong together. Give each group of the "
                    f"optimizer a name of its own ('name'), or {_REMEDY}"
                )
    return found


def _in_order(present: Set[tuple[int, int]], groups: Sequence[_Group]) -> list[tuple[int, int]]:
    """Return the order of the kinds of groups of a stage, as on the stages that were saved.

    Raises:
        CheckpointLayoutError: no stage had two of them, or two stages had them in different orders.
    """
    before = {(one.kind, other.kind) for one, other in combinations(groups, 2) if one.stage == other.stage}
    experts = {group.kind for group in groups if group.is_of_experts}
    before |= {(one, other) for one in present - experts for other in present & experts}
    first = sorted(present, key=lambda kind: sum((other, kind) in before for other in present))
    for one, other in pairwise(first):
        if (one, other) not in before or (other, one) in before:
            raise CheckpointLayoutError(
                "a stage would have groups of the optimizer that no stage of the checkpoint has in this order, so that "
                f"it is unknown which of them comes first. Keep the stages as they are, or {_REMEDY}"
            )
    return first


def _in_saved_order(names: list[str], groups: Sequence[_Group], model: WholeModel) -> Sequence[str]:
    """Return the names of a new group, which are in the module's order, in the order of the saved groups of its kind.

    Raises:
        CheckpointLayoutError: the saved groups have other names, and not in the module's order.
    """
    for group in groups:
        if set(group.names) == set(names):
            return group.names
    for group in groups:
        order = {name: place for place, name in enumerate(model.names[group.stage])}
        for one, other in pairwise(group.names):
            if order[one] > order[other]:
                raise CheckpointLayoutError(
                    f"group {group.number} of the optimizer has {one!r} before {other!r}, in another order than the "
                    "module's: it is unknown how a group of other stages or experts would be ordered. Give the "
                    f"optimizer its parameters in the module's order, or {_REMEDY}"
                )
    return names


def _joined(model: WholeModel) -> list[_Group]:
    """Return the groups of all stages. Join those of experts that DeepSpeed has split because they are too large."""
    found: list[_Group] = []
    for stage, groups in enumerate(model.structure.groups):
        for number, names in enumerate(groups):
            before = groups[number - 1] if number else ()
            is_of_experts = _are_experts(names, model)
            are_parts = is_of_experts and _are_experts(before, model)
            if are_parts and sum(map(model.numel, before)) + model.numel(names[0]) > _LARGEST_EXPERT_GROUP:
                found[-1] = found[-1]._replace(names=found[-1].names + names)
            else:
                found.append(_Group(names, stage, number, is_of_experts))
    return found


def _split(names: tuple[str, ...], model: WholeModel) -> Iterator[tuple[str, ...]]:
    """Split a group of experts that is too large as DeepSpeed does."""
    start, held = 0, 0
    for place, name in enumerate(names if _are_experts(names, model) else ()):
        if place > start and held + model.numel(name) > _LARGEST_EXPERT_GROUP:
            yield names[start:place]
            start, held = place, 0
        held += model.numel(name)
    yield names[start:]


def _are_experts(names: Sequence[str], model: WholeModel) -> bool:
    return bool(names) and all(head_of(name) or model.is_stacked(name) for name in names)
