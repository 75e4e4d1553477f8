"""Names of axes, and specs: text, lists, mappings or config files that give every axis its degree."""

from __future__ import annotations

import json
import keyword
import operator
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeAlias, cast

from ds_topo.errors import TopologyError, WorldSizeError
from ds_topo.topology.layout import Factors

SYNONYMS = {"tensor": "model"}
"""Other names of an axis, understood wherever an axis is named."""

Spec: TypeAlias = "str | Mapping[str, int] | Iterable[tuple[str, int]]"
"""``"pipe=2,data=4"``, ``{"pipe": 2, "data": 4}`` or ``[("pipe", 2), ("data", 4)]``."""

_SPEC_EXAMPLE = 'expected "axis=degree,axis=degree,...", outermost axis first, such as "pipe=2,data=4,model=2"'


def canonical_axis(name: str) -> str:
    """The one name of an axis: ``tensor`` is ``model``, every other name is itself."""
    return SYNONYMS.get(name, name)


def whole_number(value: object) -> int | None:
    """The integer that a value of any numeric type (NumPy's, a 0-d tensor, ``2.0``) equals, if it does.

    >>> whole_number(True), whole_number(2.0), whole_number(2.5), whole_number("2")
    (1, 2, None, None)
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return int(value) if isinstance(value, float) and value.is_integer() else None


def check_axes(axes: Sequence[str], degrees: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Validate axis names with their degrees; return both in canonical form.

    Raises:
        TopologyError: names and degrees differ in number, a name is not an identifier or stands twice, a degree is
            not a positive integer.
    """
    axes, degrees = list(axes), list(degrees)
    if len(axes) != len(degrees):
        raise TopologyError(f"{len(axes)} axes {axes} but {len(degrees)} degrees {degrees}: give one degree per axis")
    if not axes:
        raise TopologyError('a topology needs at least one axis, such as "data=1"')
    names: list[str] = []
    sizes: list[int] = []
    for given, degree in zip(axes, degrees, strict=True):
        if not isinstance(given, str) or not given.isidentifier() or keyword.iskeyword(given) or given[0] == "_":
            raise TopologyError(
                f"axis {given!r}: a name must be a Python identifier that does not begin with an underscore"
            )
        name = canonical_axis(given)
        if name in names:
            synonym = "" if given == name else f" ({given!r} is a synonym of {name!r})"
            raise TopologyError(f"axis {name!r} is given twice in {axes}{synonym}: name every axis once")
        size = None if isinstance(degree, (bool, float)) else whole_number(degree)
        if size is None:
            raise TopologyError(f"axis {given!r}: degree {degree!r} is not an integer; give a whole number >= 1")
        if size < 1:
            raise TopologyError(f"axis {given!r}: degree {size} must be >= 1")
        names.append(name)
        sizes.append(size)
    return tuple(names), tuple(sizes)


def parse_spec(spec: Spec, world_size: int | None = None) -> tuple[list[str], list[int]]:
    """Axes and degrees of a spec; one degree may be -1, "whatever is left of ``world_size``".

    >>> parse_spec("pipe=2, data=-1, tensor=2", world_size=16)
    (['pipe', 'data', 'tensor'], [2, 4, 2])

    Raises:
        TopologyError: a malformed spec, more than one degree of -1, or -1 without a world size.
        WorldSizeError: the degrees do not make ``world_size``; the message names the nearest that do.
    """
    axes, degrees = _split_spec(spec)
    left_out = [axis for axis, degree in zip(axes, degrees, strict=True) if degree == -1]
    if len(left_out) > 1:
        raise TopologyError(f"degrees of {left_out} are all left out (-1): at most one can be computed")
    known = [degree for degree in degrees if degree != -1]
    check_axes(axes, [1 if degree == -1 else degree for degree in degrees])
    if left_out:
        if world_size is None:
            raise TopologyError(f"axis {left_out[0]!r}: degree -1 needs world_size= to be computed from")
        if world_size % prod(known):
            raise WorldSizeError(
                f"axis {left_out[0]!r}: degree -1 cannot be computed, the other degrees {known} make {prod(known)}, "
                f"which does not divide the world size {world_size}"
            )
        degrees[degrees.index(-1)] = world_size // prod(known)
    elif world_size is not None:
        check_world_size(axes, degrees, world_size)
    return axes, degrees


def is_strided(spec: Spec) -> bool:
    """Whether a spec gives strides, as a topology whose axes are interleaved writes itself."""
    return isinstance(spec, str) and ":" in spec


def parse_strided_spec(spec: str) -> tuple[list[str], tuple[Factors, ...]]:
    """Axes and their factors, ``axis=size:stride*size:stride,...``, outermost factor first.

    >>> parse_strided_spec("pipe=2:2,data=2:4*2:1,model=1")
    (['pipe', 'data', 'model'], (((2, 2),), ((2, 4), (2, 1)), ()))

    Raises:
        TopologyError: a malformed spec.
    """
    axes: list[str] = []
    layouts: list[Factors] = []
    for part in spec.split(","):
        axis, _, text = (word.strip() for word in part.partition("="))
        try:
            pairs = [factor.split(":") for factor in text.split("*")] if text != "1" else []
            factors = tuple((int(size), int(stride)) for size, stride in pairs)
        except ValueError:
            raise TopologyError(
                f"malformed topology {spec!r} at {part.strip()!r}: once an axis has strides, every axis of a degree "
                'above 1 needs them, "axis=size:stride*size:stride", outermost first, such as "pipe=2:2,data=2:4*2:1"'
            ) from None
        axes.append(axis)
        layouts.append(factors)
    check_axes(axes, [prod(size for size, _ in factors) for factors in layouts])
    return axes, tuple(layouts)


def strided_text(axes: Sequence[str], layouts: Sequence[Factors]) -> str:
    """The inverse of ``parse_strided_spec``."""
    texts = ["*".join(f"{size}:{stride}" for size, stride in factors) or "1" for factors in layouts]
    return ",".join(f"{axis}={text}" for axis, text in zip(axes, texts, strict=True))


def check_world_size(axes: Sequence[str], degrees: Sequence[int], world_size: int) -> None:
    """Raise ``WorldSizeError`` unless the product of the degrees is ``world_size``; name the nearest that is."""
    total = prod(degrees)
    if total == world_size:
        return
    nearest = _nearest_degrees(axes, degrees, world_size)
    raise WorldSizeError(
        f"topology {_spec_text(axes, degrees)} is for {total} ranks ({' x '.join(map(str, degrees))}), but the job has "
        f"{world_size}: the degrees must multiply to the world size. Nearest that does: {_spec_text(axes, nearest)}"
    )


def read_config(config: str | Path | Mapping[str, object]) -> Spec:
    """The ``topology`` section of a DeepSpeed config (a path or the loaded mapping): a spec in any form."""
    if isinstance(config, Mapping):
        source, content = "the config", config
    else:
        source = str(config)
        try:
            content = json.loads(Path(config).read_text(encoding="utf-8"))
        except OSError as error:
            raise TopologyError(f"config {source!r} cannot be read: {error}") from error
        except json.JSONDecodeError as error:
            raise TopologyError(f"config {source!r} is not JSON: {error}") from error
    if not isinstance(content, Mapping) or "topology" not in content:
        raise TopologyError(
            f'{source} has no "topology" section; add one, such as "topology": {{"pipe": 2, "data": 4, "model": 2}}'
        )
    return cast("Spec", content["topology"])


def _split_spec(spec: Spec) -> tuple[list[str], list[int]]:
    if isinstance(spec, str):
        pairs: list[tuple[Any, Any]] = []
        for part in spec.split(","):
            axis, equals, degree = (word.strip() for word in part.partition("="))
            try:
                pairs.append((axis, int(degree)))
            except ValueError:
                equals = ""
            if not axis or not equals:
                raise TopologyError(f"malformed topology {spec!r} at {part.strip()!r}: {_SPEC_EXAMPLE}")
    else:
        try:
            pairs = [(axis, degree) for axis, degree in (spec.items() if isinstance(spec, Mapping) else spec)]
        except (TypeError, ValueError) as error:
            raise TopologyError(
                f"malformed topology {spec!r}: {_SPEC_EXAMPLE}, or pairs (axis, degree), or a mapping"
            ) from error
    return [axis for axis, _ in pairs], [degree for _, degree in pairs]


def _spec_text(axes: Sequence[str], degrees: Sequence[int]) -> str:
    return repr(",".join(f"{axis}={degree}" for axis, degree in zip(axes, degrees, strict=True)))


def _nearest_degrees(axes: Sequence[str], degrees: Sequence[int], world_size: int) -> list[int]:
    """Degrees that make ``world_size``: one changed if that is enough (``data`` first), or rounded down."""
    order = sorted(range(len(axes)), key=lambda axis: (axes[axis] != "data", axis))
    nearest = list(degrees)
    for axis in order:
        others = prod(degrees) // degrees[axis]
        if world_size % others == 0:
            nearest[axis] = world_size // others
            return nearest
    remaining = world_size
    for axis in order[1:]:
        nearest[axis] = max(size for size in range(1, degrees[axis] + 1) if remaining % size == 0)
        remaining //= nearest[axis]
    nearest[order[0]] = remaining
    return nearest
