"""Names of axes: those that have a meaning, their synonyms, and those that a person most likely meant."""

from __future__ import annotations

import difflib
import keyword
import unicodedata
from collections.abc import Collection, Iterable

from ds_topo.errors import TopologyError, UnknownAxisError, abridged

PIPE, DATA, MODEL, SEQ, EXPERT = "pipe", "data", "model", "seq", "expert"
DEEPSPEED_AXES = (PIPE, DATA, MODEL)
"""The axes that DeepSpeed knows; a topology without one of them has degree 1 there."""
MAX_NAME = 64
MEANINGS = {
    PIPE: "pipeline stages",
    DATA: "replicas with other samples",
    MODEL: "slices of every layer (tensor parallel)",
    SEQ: "parts of every sequence",
    EXPERT: "replicas that hold different experts",
}
"""What the ranks along an axis of this name differ in."""
SYNONYMS = {"tensor": MODEL, **dict.fromkeys(("context", "cp", "sp"), SEQ)}
"""Other names of an axis, understood wherever an axis is named."""
SPEC_SYNONYMS = {
    **SYNONYMS,
    **dict.fromkeys(("pp", "pipeline"), PIPE),
    **{"dp": DATA},
    **dict.fromkeys(("tp", "mp"), MODEL),
    **{"sequence": SEQ},
    **dict.fromkeys(("ep", "experts"), EXPERT),
}
"""What specs and configs understand besides, in upper and lower case: the field's abbreviations."""


def canonical_axis(name: str) -> str:
    """The one name of an axis: ``tensor`` is ``model``, ``context`` is ``seq``, every other name is itself."""
    return SYNONYMS.get(name, name)


def axis_in_spec(name: str) -> str:
    """The one name of an axis that a spec gives in any of the ways that people write it.

    >>> [axis_in_spec(name) for name in ("pp", "DP", "Tensor", "cp", "rows")]
    ['pipe', 'data', 'model', 'seq', 'rows']
    """
    if not isinstance(name, str):
        return name
    lower = name.lower()
    return lower if lower in MEANINGS else SPEC_SYNONYMS.get(lower, name)


def checked_name(name: object) -> str:
    """The canonical form of a well-formed name: Python takes identifiers that are equal after NFKC for one.

    Raises:
        TopologyError: the name is not an identifier, or one that Python reserves.
    """
    normal = unicodedata.normalize("NFKC", name) if isinstance(name, str) else ""
    if not normal.isidentifier() or keyword.iskeyword(normal) or normal[0] == "_" or len(normal) > MAX_NAME:
        raise TopologyError(
            f"axis {abridged(name)}: a name must be a Python identifier of at most {MAX_NAME} letters that does not "
            "begin with an underscore"
        )
    return canonical_axis(normal)


def check_declared(axes: Collection[str], extra_axes: Iterable[str]) -> None:
    """Refuse declarations of axes that are absent, or have a meaning.

    Raises:
        TopologyError: such a declaration.
    """
    for axis in sorted(extra_axes):
        if axis in MEANINGS:
            raise TopologyError(f"extra axis {axis!r}: it means {MEANINGS[axis]} and needs no declaration")
        if axis not in axes:
            raise TopologyError(f"extra axis {abridged(axis)} is not in the topology; its axes are {abridged(axes)}")


def check_meanings(axes: Iterable[str], extra_axes: Iterable[str]) -> None:
    """Refuse axes that no part of training knows, unless they are declared: a typing mistake would become replicas.

    >>> check_meanings(["pipe", "hosts", "data"], extra_axes=["hosts"])
    >>> check_meanings(["pip", "data"], extra_axes=[])
    Traceback (most recent call last):
    ds_topo.errors.UnknownAxisError: axis 'pip' has no meaning here: did you mean 'pipe'? Axes are pipe (pipeline
    stages), data (replicas with other samples), model (slices of every layer (tensor parallel)), seq (parts of every
    sequence), expert (replicas that hold different experts); ranks along any other are replicas, which must be
    declared: extra_axes=['pip'], or '+pip=...' in a spec

    Raises:
        UnknownAxisError: such an axis.
        TopologyError: a declared axis that is absent, or has a meaning.
    """
    axes, declared = list(axes), {checked_name(axis) for axis in extra_axes}
    check_declared(axes, declared)
    for axis in axes:
        if axis not in MEANINGS and axis not in declared:
            known = ", ".join(f"{name} ({meaning})" for name, meaning in MEANINGS.items())
            raise UnknownAxisError(
                f"axis {abridged(axis)} has no meaning here{_meant(axis)} Axes are {known}; ranks along any other are "
                f"replicas, which must be declared: extra_axes=[{abridged(axis)}], or '+{axis:.40}=...' in a spec"
            )


def _meant(axis: str) -> str:
    """A question where a name is near one that has a meaning."""
    near = difflib.get_close_matches(axis.lower()[:20], [*MEANINGS, *SPEC_SYNONYMS], n=1, cutoff=0.5)
    return f": did you mean {axis_in_spec(near[0])!r}?" if near else "."
