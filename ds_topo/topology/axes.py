"""Define the names of axes with a meaning and their synonyms, and suggest corrections of misspelt names."""

from __future__ import annotations

import difflib
import keyword
import unicodedata
import warnings
from collections.abc import Collection, Iterable

from ds_topo.errors import TopologyError, UnknownAxisError, abridged

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
SPEC_SYNONYMS = {
    **SYNONYMS,
    **dict.fromkeys(("pp", "pipeline"), PIPE),
    **{"dp": DATA},
    **dict.fromkeys(("tp", "mp"), MODEL),
    **{"sequence": SEQ},
    **dict.fromkeys(("ep", "experts"), EXPERT),
}
"""The field's abbreviations, which specs and configs accept in upper and lower case."""


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


def checked_name(name: object) -> str:
    """Check a name and return its canonical form, after NFKC normalisation, as Python normalises identifiers.

    Raises:
        TopologyError: the name is not an identifier, or Python reserves it.
    """
    normal = unicodedata.normalize("NFKC", name) if isinstance(name, str) else ""
    if not normal.isidentifier() or keyword.iskeyword(normal) or normal[0] == "_" or len(normal) > MAX_NAME:
        raise TopologyError(
            f"axis {abridged(name)}: a name must be a Python identifier of at most {MAX_NAME} letters that does not "
            "begin with an underscore"
        )
    return canonical_axis(normal)


def check_declared(axes: Collection[str], extra_axes: Iterable[str]) -> None:
    """Refuse extra axes that are absent from the topology or already have a meaning.

    Raises:
        TopologyError: an axis is declared that is absent or has a meaning.
    """
    for axis in sorted(extra_axes):
        if axis in MEANINGS:
            raise TopologyError(f"extra axis {axis!r}: it means {MEANINGS[axis]} and needs no declaration")
        if axis not in axes:
            raise TopologyError(f"extra axis {abridged(axis)} is not in the topology; its axes are {abridged(axes)}")


def check_meanings(axes: Iterable[str], extra_axes: Iterable[str]) -> None:
    """Refuse axes without a meaning unless they are declared: a misspelt name would otherwise become replicas.

    >>> check_meanings(["pipe", "hosts", "data"], extra_axes=["hosts"])
    >>> check_meanings(["pip", "data"], extra_axes=[])
    Traceback (most recent call last):
    ds_topo.errors.UnknownAxisError: axis 'pip' has no meaning here: did you mean 'pipe'? Axes are pipe (pipeline
    stages), data (replicas with other samples), model (slices of every layer (tensor parallel)), seq (parts of every
    sequence), expert (replicas that hold different experts), shard (replicas that share ZeRO's partitions); ranks along
    any other are replicas, which must be declared: extra_axes=['pip'], or '+pip=...' in a spec

    Raises:
        UnknownAxisError: an axis has no meaning and is not declared.
        TopologyError: a declared axis is absent or has a meaning.
    """
    axes, declared = list(axes), {checked_name(axis) for axis in extra_axes}
    check_declared(axes, declared)
    for axis in axes:
        if axis not in MEANINGS and axis not in declared:
            known = ", ".join(f"{name} ({meaning})" for name, meaning in MEANINGS.items())
            near = difflib.get_close_matches(axis.lower()[:20], [*MEANINGS, *SPEC_SYNONYMS], n=1, cutoff=0.5)
            meant = f": did you mean {axis_in_spec(near[0])!r}?" if near else "."
            raise UnknownAxisError(
                f"axis {abridged(axis)} has no meaning here{meant} Axes are {known}; ranks along any other are "
                f"replicas, which must be declared: extra_axes=[{abridged(axis)}], or '+{axis:.40}=...' in a spec"
            )


def warn_of_misspelling(axis: object, axes: Iterable[str]) -> None:
    """Warn if an absent axis is nearly one of ``axes``: the answer for an absent axis, DeepSpeed's, is not an error."""
    near = difflib.get_close_matches(str(axis)[:MAX_NAME], list(axes), n=1, cutoff=0.6) if axis not in MEANINGS else []
    if near:
        warnings.warn(
            f"axis {abridged(axis)} is not in the topology, so the answer is that of an absent axis: did you mean "
            f"{near[0]!r}?",
            RuntimeWarning,
            stacklevel=3,
        )
