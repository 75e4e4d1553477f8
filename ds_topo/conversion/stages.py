"""Which layers of a pipeline each stage has, and which parameters: arithmetic, as DeepSpeed does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ds_topo.checkpoint_files.structure import SavedStructure
from ds_topo.conversion.model import TIED, SavedModel
from ds_topo.engine.checkpoints.saved_types import stage_bounds
from ds_topo.errors import CheckpointLayoutError, TopologyError


def bounds_of(model: SavedModel, slices: int, stages: int, method: str | None, given: Sequence[int]) -> tuple[int, ...]:
    """The first layer of every stage, and the number of layers; empty where there are no layers.

    Raises:
        CheckpointLayoutError, TopologyError: so many stages cannot be.
    """
    layers = model.structure.layers
    if not model.layout.is_pipeline:
        if stages > 1:
            raise CheckpointLayoutError(
                f"pipe={stages}: the checkpoint is of a plain engine, whose model has no layers to share out; pipe=1 "
                "would do, or a checkpoint of a PipelineModule"
            )
        return ()
    if stages > len(layers):
        raise CheckpointLayoutError(f"pipe={stages}: the pipeline has {len(layers)} layers, and each stage needs one")
    if given:
        return _checked_bounds(given, stages, len(layers))
    saved = model.structure
    if method is None and stages == len(saved.bounds) - 1 and slices == model.slices:
        return saved.bounds
    kinds = [layer.kind for layer in layers]
    weights = _weights(model, slices)
    for name in [method or saved.method] if method or saved.method else ["parameters", "uniform"]:
        try:
            own = stage_bounds(name, _weights(model, model.slices), kinds, len(saved.bounds) - 1)
            if method is None and own != saved.bounds:
                continue
            return stage_bounds(name, weights, kinds, stages)
        except ValueError as error:
            raise CheckpointLayoutError(f"partition_method={error}") from None
    raise CheckpointLayoutError(
        f"the pipeline's stages begin with layers {list(saved.bounds[:-1])}, which is not what "
        f"partition_method={saved.method or 'parameters'!r} gives: say where the {stages} stages are to begin"
    )


def _checked_bounds(given: Sequence[int], stages: int, layers: int) -> tuple[int, ...]:
    bounds = tuple(given)
    rising = all(one < other for one, other in pairwise(bounds))
    if len(bounds) != stages + 1 or bounds[0] != 0 or bounds[-1] != layers or not rising:
        raise TopologyError(
            f"stages={list(bounds)}: give {stages + 1} rising numbers of layers, from 0 to {layers}: where each of the "
            f"{stages} stages begins, and the end"
        )
    return bounds


def _weights(model: SavedModel, slices: int) -> list[int]:
    """Elements that are trained, of each layer; what is tied counts in each of its layers."""
    return [
        sum(
            one.numel_of_slice(slices)
            for name in names_of_layer(model.structure, number, list(model.parameters))
            if (one := model.parameters[name]).is_trained
        )
        for number in range(len(model.structure.layers))
    ]


def names_of_layer(structure: SavedStructure, number: int, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that a layer of a pipeline holds, in their order."""
    prefix = prefix_of_layer(structure, number)
    return [name for name in names if name.startswith(prefix)]


def prefix_of_layer(structure: SavedStructure, number: int) -> str:
    """How the names of a layer's parameters begin in the whole pipeline."""
    tied = structure.layers[number].tied
    return f"{TIED}{tied}." if tied else f"{number}."


def names_of_stage(structure: SavedStructure, names: Sequence[str], stage: int) -> Iterator[str]:
    """A stage's parameters in its module's order: first what is tied, as DeepSpeed registers it."""
    if not structure.layers:
        yield from names
        return
    own = range(structure.bounds[stage], structure.bounds[stage + 1])
    tied = [number for number in own if structure.layers[number].tied]
    rest = [number for number in own if not structure.layers[number].tied]
    for prefix in dict.fromkeys(prefix_of_layer(structure, number) for number in (*tied, *rest)):
        yield from (name for name in names if name.startswith(prefix))
