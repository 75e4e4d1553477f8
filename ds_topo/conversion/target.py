"""The layout that is wanted, and what each of its stages holds; or why it cannot be reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ds_topo.checkpoint_files.manifest import BF16_OPTIMIZER, SavedExperts, SavedLayout
from ds_topo.checkpoint_files.structure import SavedStructure
from ds_topo.conversion.experts import ExpertPlaces, Place, are_experts, dealt_anew, head_of, origins_of, places_in
from ds_topo.conversion.model import SavedModel, require_splits, slices_of
from ds_topo.conversion.stages import bounds_of, names_of_stage
from ds_topo.errors import CheckpointLayoutError, TopologyError, abridged, listed
from ds_topo.topology.process_topology import ProcessTopology

STAGES_OF_ZERO = (0, 1, 2, 3)
_OPTIMIZERS = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
"""DeepSpeed's, by the stage of ZeRO; without ZeRO it is the program's own."""


@dataclass(frozen=True)
class Target:
    """A layout, and what its stages hold."""

    layout: SavedLayout
    structure: SavedStructure
    """With the groups and bounds of this layout."""
    slices: int
    names: tuple[tuple[str, ...], ...]
    """Of each stage, its parameters in the module's order."""
    origins: tuple[tuple[int, ...], ...]
    """Of each group of the optimizer, the groups of the saved one that it comes from: several only of experts."""

    @cached_property
    def experts(self) -> dict[int, ExpertPlaces]:
        """Where experts are, by the size of their groups."""
        return {experts.size: places_in(self.layout, experts) for experts in self.layout.experts}

    def whole_names(self, model: SavedModel, local: Sequence[str], place: Place) -> list[str]:
        """The names in the whole model of what a rank calls by local names."""
        sizes = self.structure.experts
        if not sizes:
            return list(local)
        parts = {head: self.experts[size].part_of[place] for head, size in sizes.items()}
        return [model.whole_name(name, self.structure, parts.get(head_of(name), 0)) for name in local]

    @property
    def stages(self) -> int:
        """The degree of ``pipe``."""
        return self.layout.model_ranks // self.slices


def target_of(
    model: SavedModel,
    spec: str,
    zero: int | None = None,
    method: str | None = None,
    bounds: Sequence[int] = (),
    experts: int | None = None,
) -> Target:
    """The layout of a topology.

    Args:
        model: what is to be converted.
        spec: of the topology, with all degrees.
        zero: the stage of ZeRO; as it was saved by default.
        method: the pipeline's ``partition_method``; as it was saved by default.
        bounds: the first layer of every stage and the number of layers, instead of a method.
        experts: ranks among which each layer deals its experts; as they were saved by default.

    Raises:
        TopologyError, CheckpointLayoutError: it cannot be reached; says why.
    """
    if "-1" in spec:
        raise TopologyError(
            f"--topology {abridged(spec)}: give all degrees; there is no job whose ranks could fill in -1"
        )
    topology = ProcessTopology.from_spec(spec)
    degrees = dict(zip(topology.axes, topology.dims, strict=True))
    slices, stages = degrees.get("model", 1), degrees.get("pipe", 1)
    stage = model.layout.zero_stage if zero is None else zero
    _require_reachable(model, stage)
    require_splits(model, slices)
    sizes, groups_of_experts = _sizes_of_experts(model, experts)
    structure = replace(
        model.structure,
        bounds=bounds_of(model, slices, stages, method, bounds),
        method=method or model.structure.method,
        experts=sizes,
    )
    layout = SavedLayout(
        topology.spec,
        topology.world_size(),
        stages * slices,
        topology.world_size() // (stages * slices),
        stage,
        _optimizer_of(model, stage),
        model.layout.precision,
        model.layout.is_pipeline,
        groups_of_experts,
    )
    _require_experts(model, layout, structure)
    names = tuple(tuple(names_of_stage(structure, list(model.parameters), place)) for place in range(stages))
    structure = replace(structure, groups=_groups(model, structure, slices, names))
    return _checked(model, Target(layout, structure, slices, names, ()))


def target_like(model: SavedModel, layout: SavedLayout, structure: SavedStructure) -> Target:
    """The layout of an engine that is there, with its own groups and stages.

    Raises:
        CheckpointLayoutError: it cannot be reached; says why.
    """
    slices = slices_of(layout)
    _require_reachable(model, layout.zero_stage, layout)
    require_splits(model, slices)
    if model.layout.is_pipeline and len(structure.layers) != len(model.structure.layers):
        raise CheckpointLayoutError(
            f"the checkpoint is of a pipeline of {len(model.structure.layers)} layers, and this one has "
            f"{len(structure.layers)}"
        )
    stages = layout.model_ranks // slices
    names = tuple(tuple(names_of_stage(structure, list(model.parameters), place)) for place in range(stages))
    if structure.experts.keys() != model.structure.experts.keys():
        raise CheckpointLayoutError(
            f"the checkpoint has experts {listed(sorted(model.structure.experts), 2)}, and this job "
            f"{listed(sorted(structure.experts), 2)}"
        )
    _require_experts(model, layout, structure)
    return _checked(model, Target(replace(layout, has_reducer=False), structure, slices, names, ()))


def _require_reachable(model: SavedModel, zero: int, wanted: SavedLayout | None = None) -> None:
    saved = model.layout
    for problem in _problems(model, saved, zero, wanted):
        raise CheckpointLayoutError(f"the checkpoint of {saved} cannot be converted: {problem}")


def _optimizer_of(model: SavedModel, stage: int) -> str | None:
    """The class of DeepSpeed's optimizer at a stage of ZeRO, with the data types that gradients are summed in."""
    if stage == model.layout.zero_stage == 1:
        return model.layout.optimizer
    return _OPTIMIZERS.get(stage, model.structure.optimizer)


def _problems(model: SavedModel, saved: SavedLayout, zero: int, wanted: SavedLayout | None) -> Iterator[str]:
    own = model.structure.optimizer
    if zero not in STAGES_OF_ZERO:
        yield f"ZeRO {abridged(zero)} is none of {list(STAGES_OF_ZERO)}"
    if saved.optimizer is None:
        yield "it was saved without an optimizer, and only training is converted; take its weights as one plain file"
    if saved.experts and zero > 2:
        yield f"ZeRO {zero} with experts: DeepSpeed's MoE goes with ZeRO 0, 1 and 2"
    if saved.is_pipeline and zero > 1:
        yield f"ZeRO {zero} with a PipelineModule: DeepSpeed's pipelines go with ZeRO 0 and 1"
    if saved.precision != "fp32" and (zero == 0 or not saved.has_partitions):
        yield f"ZeRO 0 in {saved.precision}, where DeepSpeed keeps the states of {saved.optimizer}; use ZeRO 1, 2 or 3"
    known = _OPTIMIZERS.get(saved.zero_stage, own)
    if saved.optimizer != known and not (saved.optimizer == BF16_OPTIMIZER and saved.zero_stage < 2):
        yield f"{saved.optimizer} at ZeRO {saved.zero_stage} saves in a way that is not known; {known} is"
    if wanted is None:
        return
    if wanted.is_pipeline != saved.is_pipeline:
        kinds = {True: "a PipelineModule", False: "a plain engine"}
        yield f"{kinds[saved.is_pipeline]} became {kinds[wanted.is_pipeline]}, whose parameters have other names"
    if wanted.precision != saved.precision:
        yield f"{saved.precision} became {wanted.precision}"
    expected = [_OPTIMIZERS.get(zero, own), *([BF16_OPTIMIZER] if zero == 1 and saved.precision == "bf16" else [])]
    if wanted.optimizer not in expected:
        yield f"{' or '.join(map(str, expected))} is expected at ZeRO {zero}, and this job has {wanted.optimizer}"


# -- experts -----------------------------------------------------------------------------------------------------------


def _sizes_of_experts(model: SavedModel, experts: int | None) -> tuple[Mapping[str, int], tuple[SavedExperts, ...]]:
    """By layer, and of all groups of experts."""
    saved = {groups.size: groups for groups in model.layout.experts}
    if experts is not None and not saved:
        raise CheckpointLayoutError(f"experts={experts}: the checkpoint has no experts")
    if experts is not None and len(saved) > 1:
        raise CheckpointLayoutError(
            f"experts={experts}: layers deal their experts to {sorted(saved)} ranks. How the optimizer would group "
            "those of one size is not known; convert while loading, where the job says it"
        )
    kinds = (replace(groups, size=experts or groups.size) for groups in saved.values())
    return {head: experts or size for head, size in model.structure.experts.items()}, tuple(kinds)


def _require_experts(model: SavedModel, layout: SavedLayout, structure: SavedStructure) -> None:
    """Check that every layer's experts can be dealt so.

    Raises:
        ExpertSizeError: not in this topology.
        CheckpointLayoutError: not evenly, or experts would be split among slices that were not.
    """
    for groups in layout.experts:
        places_in(layout, groups)
    for head, count in model.experts.items():
        if count % structure.experts[head]:
            raise CheckpointLayoutError(
                f"{head!r} has {count} experts, which cannot be dealt to {structure.experts[head]} ranks"
            )
    kinds = [{groups.tensor_parallel for groups in one.experts} for one in (model.layout, layout)]
    if kinds[0] != kinds[1]:
        raise CheckpointLayoutError(
            "experts are tensor parallel either in the checkpoint or in this job, and not in the other"
        )
    if not layout.zero_stage and any(max(structure.experts.values()) % size for size in structure.experts.values()):
        raise CheckpointLayoutError(
            f"experts are dealt to {sorted(set(structure.experts.values()))} ranks: without ZeRO, sizes must divide "
            "each other"
        )


# -- groups of the optimizer ------------------------------------------------------------------------------------------


def _groups(
    model: SavedModel, structure: SavedStructure, slices: int, names: Sequence[Sequence[str]]
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    saved = model.structure
    if saved.experts:
        local = model.local_experts(saved), model.local_experts(structure)
        numels = model.numels(model.slices), model.numels(slices)
        return tuple(dealt_anew(groups, *local, numels) for groups in saved.groups)
    if not structure.layers or structure.bounds == saved.bounds:
        return saved.groups
    for stage, groups in enumerate(saved.groups):
        order = {name: place for place, name in enumerate(names_of_stage(saved, list(model.parameters), stage))}
        for number, group in enumerate(groups):
            if (found := next(_out_of_order(group, order), None)) is not None:
                raise CheckpointLayoutError(
                    f"group {number} of the optimizer has {found[0]!r} before {found[1]!r}, which is not the module's "
                    "order: how other stages would order it is not known. Give the optimizer parameters in the "
                    "module's order, or convert while loading, where the job says it"
                )
    group_of = model.group_of()
    count = max(map(len, saved.groups))
    return tuple(
        tuple(tuple(name for name in stage if group_of.get(name) == number) for number in range(count))
        for stage in names
    )


def _out_of_order(group: Sequence[str], order: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for one, other in pairwise(group):
        if order[one] > order[other]:
            yield one, other


def _checked(model: SavedModel, target: Target) -> Target:
    """Refuse what the optimizer of the target could not hold."""
    saved, wanted = model.group_of(), {}
    origins = _origins(model, target)
    for stage, groups in enumerate(target.structure.groups):
        for number, group in enumerate(groups):
            wanted.update(dict.fromkeys(group, origins[number]))
            if not group:
                raise CheckpointLayoutError(
                    f"group {number} of the optimizer would have no parameter on stage {stage} of {target.stages}: "
                    "DeepSpeed cannot hold that"
                )
    if differing := [name for name in wanted if name in saved and saved[name] not in wanted[name]]:
        raise CheckpointLayoutError(
            f"{listed(differing, 3)} are in another group of the optimizer than they were saved in"
        )
    held = {name for names in target.names for name in names}
    if missing := [name for name in model.parameters if name not in held]:
        raise CheckpointLayoutError(f"no stage of the target has {listed(missing, 3)}")
    frozen = [name for name in saved if not model.parameters[name].is_trained]
    resting = [name for name, one in model.parameters.items() if not one.is_trained]
    if resting and target.layout.has_partitions != model.layout.has_partitions:
        raise CheckpointLayoutError(
            f"{listed(frozen or resting, 3)} are not trained, and ZeRO leaves such parameters out of the groups that "
            f"optimizers have without it: ZeRO {model.layout.zero_stage} cannot become ZeRO {target.layout.zero_stage}"
        )
    return replace(target, origins=origins)


def _origins(model: SavedModel, target: Target) -> tuple[tuple[int, ...], ...]:
    """Of each group, the saved ones that it comes from.

    Raises:
        CheckpointLayoutError: that is not known.
    """
    if not model.experts:
        count = {len(groups) for groups in (*model.structure.groups, *target.structure.groups)}
        if len(count) != 1:
            raise CheckpointLayoutError(
                f"the optimizer has {min(count)} groups of parameters on one stage and {max(count)} on another, here "
                "or there: which of them belong together is not known"
            )
        return tuple((number,) for number in range(count.pop()))
    saved, groups = model.structure.groups[0], target.structure.groups[0]
    found = origins_of(groups, saved)
    for names, numbers in zip(groups, found, strict=True):
        are_all = all(are_experts(saved[number]) for number in numbers)
        if are_all != are_experts(names) or (len(numbers) > 1 and not are_all):
            raise CheckpointLayoutError(
                f"{listed(names, 3)} are one group of the optimizer, and were saved in groups {list(numbers)}, of "
                "which not all are of experts: what belongs together is not known"
            )
    return tuple(found)
