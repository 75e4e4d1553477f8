"""What a manifest says of a model beside its parameters: enough to write its files for other layouts without code.

*Slices* split a parameter along the dimension that it declares by Megatron's attributes: ``partition_dim``, and
``partition_stride`` where each slice holds several pieces, such as a part of the queries, of the keys and of the
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class SavedSplit:
    """How slices hold a parameter: of its ``stride * slices`` equal pieces along ``dim``, slice i has every
    ``slices``-th, from the i-th on."""

    dim: int
    stride: int = 1


@dataclass(frozen=True)
class SavedLayer:
    """A layer of a pipeline."""

    kind: str
    """The name of its class or function, which ``partition_method="type:..."`` asks for."""
    tied: str = ""
    """The key of the module that it shares with others; empty for its own."""


@dataclass(frozen=True)
class SavedStructure:
    """How a model and its optimizer are put together."""

    optimizer: str | None
    """The class of the innermost optimizer, whatever DeepSpeed wraps around it."""
    groups: tuple[tuple[tuple[str, ...], ...], ...]
    """Of each stage, the names of the parameters in each group of the optimizer, in its order."""
    splits: Mapping[str, SavedSplit] = field(default_factory=dict)
    """By parameter."""
    undeclared: tuple[str, ...] = ()
    """Parameters that are marked as slices and do not say along which dimension."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names under which parameters appear a second time, and their first names."""
    layers: tuple[SavedLayer, ...] = ()
    """Of a pipeline, all stages."""
    bounds: tuple[int, ...] = ()
    """The first layer of every stage, and the number of layers."""
    method: str = ""
    """The pipeline's ``partition_method``, where it is known."""
    experts: Mapping[str, int] = field(default_factory=dict)
    """Among how many ranks each layer deals its experts, by how their names begin (``...deepspeed_experts``)."""


def structure_from(content: Mapping[str, Any] | None) -> SavedStructure | None:
    """What JSON holds of one.

    >>> from dataclasses import asdict
    >>> structure = SavedStructure("AdamW", ((("0.weight",),),), {"0.weight": SavedSplit(0)}, bounds=(0, 1))
    >>> structure_from(asdict(structure)) == structure
    True
    """
    if content is None:
        return None
    return SavedStructure(
        content["optimizer"],
        tuple(tuple(tuple(names) for names in stage) for stage in content["groups"]),
        {name: SavedSplit(**split) for name, split in content["splits"].items()},
        tuple(content["undeclared"]),
        dict(content["aliases"]),
        tuple(SavedLayer(**layer) for layer in content["layers"]),
        tuple(content["bounds"]),
        content["method"],
        {head: int(size) for head, size in content.get("experts", {}).items()},
    )


def merged_structures(stages: Iterable[SavedStructure]) -> SavedStructure:
    """The structure of a whole model from those that its stages see, first to last.

    A copy of a tied parameter on a later stage adds nothing to what the first stage says of it.
    """
    found = list(stages)
    splits: dict[str, SavedSplit] = {}
    for one in found:
        splits.update((name, split) for name, split in one.splits.items() if name not in splits)
    undeclared = {name: None for one in found for name in one.undeclared if name not in splits}
    aliases = {alias: name for one in found for alias, name in one.aliases.items()}
    return replace(
        found[0],
        groups=tuple(stage for one in found for stage in one.groups),
        splits=splits,
        undeclared=tuple(undeclared),
        aliases=aliases,
        experts={head: size for one in found for head, size in one.experts.items()},
    )
