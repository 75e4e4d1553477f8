"""Name axes and give them degrees: the axes with a meaning, their synonyms, and specs such as ``pipe=2,data=-1``.

A spec is text, a list, a mapping or a config file that gives the degree of every axis. Errors suggest corrections of
misspelt names and the nearest degrees that fit.
"""

from __future__ import annotations

import difflib
import json
import keyword
import operator
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isqrt, prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from ds_topo.errors import MissingWorldSizeError, TopologyError, UnknownAxisError, WorldSizeError, abridged, warn

PIPE, DATA, MODEL, SEQ, EXPERT, SHARD = "pipe", "data", "model", "seq", "expert", "shard"
DEEPSPEED_AXES = (PIPE, DATA, MODEL)
"""The axes that DeepSpeed knows; a topology without one of them has degree 1 there."""
MAX_NAME = 64
MEANINGS = {
    PIPE: "pipeline stages",
    DATA: "replicas with other samples",
    MODEL: "slices of every layer (tensor parallel)",
    SEQ: "parts of every sequence",
    EXPERT: "replicas that hold different experts",
    SHARD: "replicas that share ZeRO's partitions",
}
"""The meaning of each axis: what differs between ranks along it."""
SYNONYMS = {"tensor": MODEL, **dict.fromkeys(("context", "cp", "sp"), SEQ)}
"""Other names of an axis, accepted wherever an axis is named."""
SPEC_SYNONYMS = SYNONYMS | {
    **{"pp": PIPE, "pipeline": PIPE, "dp": DATA, "tp": MODEL, "mp": MODEL},
    **{"sequence": SEQ, "ep": EXPERT, "experts": EXPERT, "dp_replicate": DATA, "dp_shard": SHARD},
}
"""The field's abbreviations, which specs and configs accept in upper and lower case."""
_ELSEWHERE = {
    **SPEC_SYNONYMS,
    **dict.fromkeys(("stage", "stages", "pipeline_stages"), PIPE),
    **dict.fromkeys(("ddp", "replica", "replicas", "replicate"), DATA),
    **dict.fromkeys(("autotp", "slices"), MODEL),
    **dict.fromkeys(("autosp", "ulysses", "ring"), SEQ),
    **dict.fromkeys(("moe", "autoep"), EXPERT),
    **dict.fromkeys(("fsdp", "hsdp", "hpz"), SHARD),
}
"""Names that other programs have for these axes, without words such as ``size``. Specs do not accept the new ones."""
_FILLERS = {"size", "degree", "parallel", "parallelism", "world", "num", "n", "dim"}
_BESIDE = {
    EXPERT: " Experts need no axis: groups.create_expert_groups(grid, N) forms their groups inside data.",
    SHARD: " With 'data' alone, ZeRO partitions over all replicas.",
}
"""What the answer to a name from elsewhere adds for an axis."""


def canonical_axis(name: str) -> str:
    """Return the canonical name of an axis: ``tensor`` is ``model``, ``context`` is ``seq``; others stay."""
    return SYNONYMS.get(name, name)


def axis_in_spec(name: str) -> str:
    """Return the canonical name of an axis that a spec names by any synonym or abbreviation.

    >>> [axis_in_spec(name) for name in ("pp", "DP", "Tensor", "cp", "rows")]
    ['pipe', 'data', 'model', 'seq', 'rows']
    """
    if not isinstance(name, str):
        return name
    lower = name.lower()
    return lower if lower in MEANINGS else SPEC_SYNONYMS.get(lower, name)


def axis_meant(name: object) -> str | None:
    """Return the axis that a name of another program means, or None.

    >>> [axis_meant(name) for name in ("tp_size", "tensor_model_parallel_size", "fsdp", "num_stages", "rows")]
    ['model', 'model', 'shard', 'pipe', None]
    """
    words = str(name)[:MAX_NAME].lower().replace("-", "_").removesuffix("size").split("_")
    words = [word for word in words if word and word not in _FILLERS]
    words = [word for word in words if word != MODEL] or words  # Megatron's pipeline_model_parallel_size
    meant = "_".join(words)
    return meant if meant in MEANINGS else _ELSEWHERE.get(meant)


def checked_name(name: object) -> str:
    """Check that a name is an identifier; return its canonical form, after NFKC normalisation, as Python does it."""
    normal = unicodedata.normalize("NFKC", name) if isinstance(name, str) else ""
    if not normal.isidentifier() or keyword.iskeyword(normal) or normal[0] == "_" or len(normal) > MAX_NAME:
        raise TopologyError(
            f"axis {abridged(name)}: a name must be a Python identifier of at most {MAX_NAME} letters that does not "
            "begin with an underscore"
        )
    return canonical_axis(normal)


def check_declared(axes: Collection[str], extra_axes: Iterable[str]) -> None:
    """Raise ``TopologyError`` if an extra axis is absent from the topology or already has a meaning."""
    for axis in sorted(extra_axes):
        if axis in MEANINGS:
            raise TopologyError(f"extra axis {axis!r}: it means {MEANINGS[axis]} and needs no declaration")
        if axis not in axes:
            raise TopologyError(f"extra axis {abridged(axis)} is not in the topology; its axes are {abridged(axes)}")


def check_meanings(axes: Iterable[str], extra_axes: Collection[str]) -> None:
    """Refuse axes without a meaning unless they are declared: a misspelt name would otherwise become replicas.

    >>> check_meanings(["pipe", "hosts", "data"], extra_axes=["hosts"])
    >>> check_meanings(["pip", "data"], extra_axes=[])
    Traceback (most recent call last):
    ds_topo.errors.UnknownAxisError: axis 'pip' has no meaning here: did you mean 'pipe'? Axes are pipe (pipeline
    stages), data (replicas with other samples), model (slices of every layer (tensor parallel)), seq (parts of every
    sequence), expert (replicas that hold different experts), shard (replicas that share ZeRO's partitions). Ranks along
    any other axis are replicas, which must be declared: extra_axes=['pip'], or '+pip=...' in a spec
    """
    for axis in axes:
        if axis in MEANINGS or axis in extra_axes:
            continue
        known = f" Axes are {', '.join(f'{name} ({meaning})' for name, meaning in MEANINGS.items())}."
        if meant := axis_meant(axis):
            known = f" It means {MEANINGS[meant]}.{_BESIDE.get(meant, '')}"
        else:
            words = [name for name in (*MEANINGS, *SPEC_SYNONYMS) if len(name) > 2]
            near = difflib.get_close_matches(axis.lower()[:20], words, n=1, cutoff=0.5)
            meant = axis_in_spec(near[0]) if near else None
        question = f": did you mean {meant!r}?" if meant else "."
        raise UnknownAxisError(
            f"axis {abridged(axis)} has no meaning here{question}{known} Ranks along any other axis are replicas, "
            f"which must be declared: extra_axes=[{abridged(axis)}], or '+{axis:.40}=...' in a spec"
        )


def axes_near(axis: object, axes: Iterable[str]) -> list[str]:
    """Return the one of ``axes`` that a name means or nearly spells, as a list of at most one."""
    axes, meant = list(axes), axis_meant(axis)
    return [meant] if meant in axes else difflib.get_close_matches(str(axis)[:MAX_NAME], axes, n=1, cutoff=0.6)


def warn_of_misspelling(axis: object, axes: Iterable[str]) -> None:
    """Warn if an absent axis is nearly one of ``axes``: the answer for an absent axis, DeepSpeed's, is not an error."""
    near = [] if axis in MEANINGS else axes_near(axis, axes)
    if near:
        warn(
            f"axis {abridged(axis)} is not in the topology, so the answer is that of an absent axis: did you mean "
            f"{near[0]!r}?"
        )


# -- specs -------------------------------------------------------------------------------------------------------------


Factors: TypeAlias = tuple[tuple[int, int], ...]
"""``((size, stride), ...)`` of one axis, outermost first."""
Spec: TypeAlias = "str | Mapping[str, int] | Iterable[tuple[str, int]]"
"""``"pipe=2,data=4"``, ``{"pipe": 2, "data": 4}`` or ``[("pipe", 2), ("data", 4)]``."""

MAX_AXES, MAX_DEGREE = 64, 2**31 - 1
EXTRA_MARK = "+"
"""The mark before an axis name in a spec that declares an axis of replicas without a meaning."""
_SPEC_EXAMPLE = 'expected "axis=degree,axis=degree,...", outermost axis first, such as "pipe=2,data=4,model=2"'
_STRIDED_EXAMPLE = (
    'once an axis has strides, every axis of a degree above 1 needs them, "axis=size:stride*size:stride", outermost '
    'first, such as "pipe=2:2,data=2:4*2:1"'
)


def whole_number(value: object) -> int | None:
    """Return the integer that a value of any numeric type (NumPy's, a 0-d tensor, ``2.0``) equals, or None.

    >>> whole_number(True), whole_number(2.0), whole_number(2.5), whole_number("2")
    (1, 2, None, None)
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return int(value) if isinstance(value, float) and value.is_integer() else None


def check_axes(
    axes: Sequence[str], degrees: Sequence[int], written: Sequence[str] | None = None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Validate axis names with their degrees; return both in canonical form, or raise ``TopologyError``.

    Errors show axes as they were ``written``, which may be with synonyms and marks.
    """
    axes, degrees = list(axes), list(degrees)
    if len(axes) != len(degrees):
        raise TopologyError(
            f"{len(axes)} axes {abridged(axes)} but {len(degrees)} degrees {abridged(degrees)}: give one per axis"
        )
    if not axes:
        raise TopologyError('a topology needs at least one axis, such as "data=1"')
    if len(axes) > MAX_AXES:
        raise TopologyError(f"{len(axes)} axes: a topology has at most {MAX_AXES}")
    names: list[str] = []
    sizes: list[int] = []
    written = axes if written is None else list(written)
    for axis, given, degree in zip(axes, written, degrees, strict=True):
        name = checked_name(axis)
        if name in names:
            other = next((text for text in (given, written[names.index(name)]) if text != name), None)
            synonym = "" if other is None else f" ({abridged(other)} is a synonym of {abridged(name)})"
            raise TopologyError(
                f"axis {abridged(name)} is given twice in {abridged(written)}{synonym}: name every axis once"
            )
        names.append(name)
        sizes.append(_checked_degree(given, degree))
    return tuple(names), tuple(sizes)


def _checked_degree(axis: str, degree: object) -> int:
    size = None if isinstance(degree, bool) else whole_number(degree)  # 2.0, too: programs divide, world_size / stages
    if size is None:
        raise TopologyError(
            f"axis {abridged(axis)}: degree {abridged(degree)} is not an integer; give a whole number >= 1"
        )
    if not 1 <= size <= MAX_DEGREE:
        shown = abridged(size) if abs(size) < 10**30 else "with so many digits"
        unknown = "must be >= 1, or -1 for one that follows from the number of ranks"
        rule = unknown if size < 1 else f"must be at most {MAX_DEGREE}"
        raise TopologyError(f"axis {abridged(axis)}: degree {shown} {rule}")
    return size


class ParsedSpec(NamedTuple):
    """The axes and degrees of a spec."""

    axes: list[str]
    degrees: list[int]
    extra_axes: frozenset[str]
    """The axes marked with ``+``."""
    factors: tuple[Factors, ...] | None = None
    """The factors of each axis, if the spec has strides."""


def parse_spec(spec: Spec, world_size: int | None = None) -> ParsedSpec:
    """Parse a spec; a degree of -1 is computed from the other degrees and ``world_size``.

    A degree may be written with strides, ``size:stride*size:stride``, outermost factor first.

    >>> parse_spec("PP=2, data=-1, tensor=2, +copy=2", world_size=16)[:3]
    (['pipe', 'data', 'model', 'copy'], [2, 2, 2, 2], frozenset({'copy'}))
    >>> parse_spec("pipe=2:2,data=2:4*2:1,model=1").factors
    (((2, 2),), ((2, 4), (2, 1)), ())

    Raises:
        TopologyError: the spec is malformed, has more than one degree of -1, or has -1 without a world size.
        UnknownAxisError: the degrees do not fit, and a name is that of another program, such as ``tp_size``.
        WorldSizeError: the product of the degrees is not ``world_size``. The message gives the nearest degrees.
    """
    given, degrees, factors = _split_spec(spec)
    left_out = [position for position, degree in enumerate(degrees) if degree == -1 and factors is None]
    marks = [isinstance(axis, str) and axis.startswith(EXTRA_MARK) for axis in given]
    plain = [axis.removeprefix(EXTRA_MARK).strip() if mark else axis for axis, mark in zip(given, marks, strict=True)]
    known_degrees = [1 if position in left_out else degree for position, degree in enumerate(degrees)]
    names, checked = check_axes([axis_in_spec(axis) for axis in plain], known_degrees, given)
    sizes = list(checked)
    extra_axes = frozenset(name for name, mark in zip(names, marks, strict=True) if mark)
    check_declared(names, extra_axes)
    if len(left_out) > 1:
        raise TopologyError(
            f"degrees of {abridged([given[i] for i in left_out])} are all left out (-1): at most one can be computed"
        )
    if left_out:
        [position] = left_out
        product = prod(sizes)  # of the other degrees: this one is 1 here
        if world_size is None:
            _refuse_names_from_elsewhere(names, extra_axes)
            raise MissingWorldSizeError(f"axis {given[position]!r}: degree -1 needs world_size=: pass it, or a degree")
        world_size = _checked_world_size(world_size)
        if world_size % product:
            _refuse_names_from_elsewhere(names, extra_axes)
            others = " x ".join(f"{axis}={size}" for axis, size in zip(names, sizes, strict=True) if size > 1)
            below = world_size // product * product
            raise WorldSizeError(
                f"axis {given[position]!r}: degree -1 cannot be computed, the other degrees ({others}) make {product}, "
                f"which does not divide the world size {world_size}. Start {f'{below} or ' if below else ''}"
                f"{below + product} ranks, or change the degrees. Nearest that does: "
                f"{_nearest_spec(names, sizes, world_size, extra_axes, names[position])!r}"
            )
        sizes[position] = world_size // product
    elif world_size is not None:
        check_world_size(names, sizes, world_size, extra_axes)
    return ParsedSpec(list(names), sizes, extra_axes, factors)


def leaves_out_a_degree(spec: Spec) -> bool:
    """Tell whether a degree of the spec is -1."""
    _, degrees, factors = _split_spec(spec)
    return factors is None and -1 in degrees


def spec_text(axes: Sequence[str], degrees: Iterable[object], extra_axes: Collection[str] = ()) -> str:
    """Write a spec that ``parse_spec`` parses; degrees are numbers, or texts with strides.

    >>> spec_text(["pipe", "copy"], [2, 4], extra_axes={"copy"})
    'pipe=2,+copy=4'
    """
    marks = [EXTRA_MARK if axis in extra_axes else "" for axis in axes]
    return ",".join(f"{mark}{axis}={degree}" for mark, axis, degree in zip(marks, axes, degrees, strict=True))


def check_world_size(
    axes: Sequence[str], degrees: Sequence[int], world_size: int, extra_axes: Collection[str] = ()
) -> None:
    """Raise ``WorldSizeError``, with the nearest valid degrees, unless the degrees' product is ``world_size``."""
    total, world_size = prod(degrees), _checked_world_size(world_size)
    if total == world_size:
        return
    _refuse_names_from_elsewhere(axes, extra_axes)
    raise WorldSizeError(
        f"topology {spec_text(axes, degrees, extra_axes)!r:.200} is for {total} ranks "
        f"({' x '.join(map(str, degrees)):.100}), but the job has {world_size}: the degrees must multiply to the world "
        f"size. Start {total} (per host: torchrun --nproc-per-node, deepspeed --num_gpus, srun --ntasks-per-node), or "
        "write -1 for one degree. Nearest that does: "
        f"{_nearest_spec(axes, degrees, world_size, extra_axes)!r:.200}"
    )


def _refuse_names_from_elsewhere(axes: Iterable[str], extra_axes: Collection[str]) -> None:
    """Name the axis that is meant by ``tp_size`` or the like before degrees that may not be meant."""
    check_meanings([axis for axis in axes if axis_meant(axis)], extra_axes)


def _checked_world_size(world_size: object) -> int:
    size = None if isinstance(world_size, bool) else whole_number(world_size)
    if size is None or not 1 <= size <= MAX_DEGREE:  # the search for the nearest degrees takes time of its square root
        raise WorldSizeError(
            f"world_size={abridged(world_size)}: give the number of ranks, a whole number from 1 to {MAX_DEGREE}"
        )
    return size


def read_json(path: str | Path, name: str) -> Any:
    """Return the content of a JSON file, which an error calls ``name``."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise TopologyError(f"{name} {abridged(str(path))} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # of UTF-8 and of numbers too; nested too deeply
        raise TopologyError(f"{name} {abridged(str(path))} is not JSON: {abridged(str(error))}") from error


def read_config(config: str | Path | Mapping[str, object]) -> Spec:
    """Return the ``topology`` section of a DeepSpeed config, given as a path or mapping: a spec in any form."""
    if not isinstance(config, (str, PathLike, Mapping)):
        raise TopologyError(f"config {abridged(config)}: give a path, or the loaded mapping")
    if isinstance(config, Mapping):
        source, content = "the config", config
    else:
        source, content = str(config), read_json(config, "config")
    if not isinstance(content, Mapping) or "topology" not in content:
        raise TopologyError(
            f'{source:.200} has no "topology" section; add one, such as '
            '"topology": {"pipe": 2, "data": 4, "model": 2}'
        )
    return cast("Spec", content["topology"])


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON file, and refuse a key that is given twice, as DeepSpeed does."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return content


def _split_spec(spec: Spec) -> tuple[list[str], list[int], tuple[Factors, ...] | None]:
    """Return the axes of a spec as they are written, their degrees, and their factors if it has strides."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(spec, str):
        is_strided = ":" in spec and "=" in spec
        factors: list[Factors] = []
        for part in spec.split(","):
            axis, equals, text = (word.strip() for word in part.partition("="))
            try:
                if is_strided:
                    written = [factor.split(":") for factor in text.split("*")] if text != "1" else []
                    factors.append(tuple((int(size), int(stride)) for size, stride in written))
                pairs.append((axis, prod(size for size, _ in factors[-1]) if is_strided else int(text)))
            except ValueError:
                equals = ""
            if not axis or not equals:
                expected = _STRIDED_EXAMPLE if is_strided else _SPEC_EXAMPLE
                raise TopologyError(f"malformed topology {abridged(spec)} at {abridged(part.strip())}: {expected}")
        return [axis for axis, _ in pairs], [degree for _, degree in pairs], tuple(factors) if is_strided else None
    if isinstance(spec, (set, frozenset)):
        raise TopologyError(
            f"malformed topology {abridged(spec)}: a set has no order, but the order of axes places ranks; give a list "
            "of pairs (axis, degree), or a mapping"
        )
    try:
        pairs = [(axis, degree) for axis, degree in (spec.items() if isinstance(spec, Mapping) else spec)]
    except (TypeError, ValueError) as error:
        raise TopologyError(
            f"malformed topology {abridged(spec)}: {_SPEC_EXAMPLE}, or pairs (axis, degree), or a mapping"
        ) from error
    return [axis for axis, _ in pairs], [degree for _, degree in pairs], None


def _nearest_spec(
    axes: Sequence[str],
    degrees: Sequence[int],
    world_size: int,
    extra_axes: Collection[str] = (),
    flexible: str | None = None,
) -> str:
    """Return a spec for ``world_size`` ranks on which a model made for the given degrees can be trained.

    One axis, ``data`` by default, gets the ranks that the others leave. The others are lowered where they do not fit:
    ``pipe`` to any degree, and those that split a model to a divisor of theirs, since its layers divide by that.

    >>> _nearest_spec(["pipe", "model"], [2, 8], 12), _nearest_spec(["model", "data"], [2, 2], 6)
    ('pipe=2,data=3,model=2', 'model=2,data=3')
    """
    names, sizes = list(axes), dict(zip(axes, degrees, strict=True))
    rest = flexible or next((axis for axis in (DATA, SHARD) if axis in names), DATA)
    if rest not in names:
        names.insert(names.index(MODEL) if MODEL in names else len(names), rest)
    remaining = world_size
    for axis in (axis for axis in names if axis != rest):
        may_be_any = axis in (PIPE, DATA, SHARD)
        sizes[axis] = max(
            size for size in divisors(remaining) if size <= sizes[axis] and (may_be_any or sizes[axis] % size == 0)
        )
        remaining //= sizes[axis]
    sizes[rest] = remaining
    named = [axis for axis in names if axis in axes or sizes[axis] > 1]
    return spec_text(named, [sizes[axis] for axis in named], extra_axes)


def divisors(number: int) -> list[int]:
    """Return divisors, ascending, in time of the number's square root.

    >>> divisors(12), divisors(9), divisors(1), len(divisors(2**40))
    ([1, 2, 3, 4, 6, 12], [1, 3, 9], [1], 41)
    """
    small = [candidate for candidate in range(1, isqrt(max(0, number)) + 1) if number % candidate == 0]
    return small + [number // candidate for candidate in reversed(small) if candidate * candidate != number]
