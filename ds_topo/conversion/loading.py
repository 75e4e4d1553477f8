"""Load a checkpoint into an engine of other degrees: all ranks convert it first, each a share of it.

::

    all ranks   try to load it as it is
    rank 0      which checkpoint, and whether this job's layout can be reached
    all ranks   convert a share each, into a folder beside the checkpoint
    all ranks   load that one
    rank 0      remove it
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_topo.checkpoint_files.durable import discard
from ds_topo.checkpoint_files.folder import Checkpoint, candidates, look_at, why_passed_over
from ds_topo.checkpoint_files.manifest import SavedFile
from ds_topo.checkpoint_files.structure import SavedStructure, structure_from
from ds_topo.checkpoint_files.wholeness import told, wrong_digests
from ds_topo.conversion.converting import Conversion, readable
from ds_topo.conversion.model import SavedModel, model_of
from ds_topo.conversion.target import Target, target_like
from ds_topo.engine.checkpoints.facts import layout_of, parameters_of
from ds_topo.engine.checkpoints.loading import DIGESTS, SIZES
from ds_topo.engine.checkpoints.loading import load as load_as_it_is
from ds_topo.engine.checkpoints.meeting import Meeting, shared_out
from ds_topo.engine.checkpoints.structure import share_of_structure, whole_structure
from ds_topo.errors import (
    CheckpointLayoutError,
    CheckpointModelError,
    DamagedCheckpointError,
    MissingCheckpointError,
)

_CONVERTED = ".converted"


def load(
    engine: Any,
    folder: str | PathLike[str],
    tag: str | None = None,
    *,
    convert: bool = False,
    verify: str = SIZES,
    **options: Any,
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint into an engine, if wished one of any degrees; collective over all ranks of the job.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        folder: of all checkpoints.
        tag: of this one, and no other; by default the one that ``latest`` names, or the newest whole one.
        convert: if this layout cannot read its files, convert it first: all ranks write what they need into a folder
            beside it, which takes as much room as the checkpoint and is removed when it is loaded. What was saved
            stays as it is. Random states are restored where stages, slices and replicas are as many as they were.
        verify: ``"sizes"`` of its files; or their ``"digests"``, too.
        **options: all others of :func:`ds_topo.engine.checkpoints.loading.load`: ``trusted``,
            ``restore_random_states``, and those of ``engine.load_checkpoint``.

    Returns:
        The checkpoint's own folder, and the ``client_state`` that was saved.

    Raises:
        CheckpointLayoutError: this layout cannot read its files, and with ``convert`` cannot be reached; says why.
        CheckpointModelError: it is another model's; names the first parameter that differs.
        CheckpointSpaceError: too little room for a converted one.
        Exception: others as in :func:`ds_topo.engine.checkpoints.loading.load`.
    """
    try:
        return load_as_it_is(engine, folder, tag, verify=verify, **options)
    except CheckpointLayoutError:  # by rank 0, and so on all ranks
        if not convert:
            raise
    root = Path(folder)
    meeting = Meeting.begin(f"converting a checkpoint of {root}", f"tag {tag!r} {verify=} {sorted(options)}")
    found = look_at(root, meeting.decided("choice", lambda: _chosen(root, tag)))
    _require_whole(meeting, found, digests=verify == DIGESTS)
    conversion = Conversion(found, _target(engine, meeting, found), root / f".{found.tag}{_CONVERTED}", found.tag)
    _convert(conversion, meeting)
    try:
        _, state = load_as_it_is(engine, conversion.folder, found.tag, **options)
    except BaseException:
        if dist.get_rank() == 0:
            with suppress(OSError):
                discard(conversion.folder)
        raise
    meeting.decided("removed", lambda: discard(conversion.folder))
    return str(found.path), state


def _chosen(root: Path, tag: str | None) -> str:
    """On rank 0, the tag of the one that was too different to load.

    Raises:
        CheckpointError: it cannot be read.
    """
    if tag is not None:
        found = look_at(root, tag)
    else:
        damaged: list[Checkpoint] = []
        for found in candidates(root):
            if found.is_whole:
                break
            damaged.append(found)
        else:
            raise MissingCheckpointError(f"no checkpoint in {root} is whole")
        if said := why_passed_over(root, found, damaged):
            warnings.warn(said, RuntimeWarning, stacklevel=5)
    readable(found)
    return found.tag


def _require_whole(meeting: Meeting, found: Checkpoint, *, digests: bool) -> None:
    manifest = found.manifest
    problems = wrong_digests(found.path, shared_out(manifest.files)) if digests and manifest is not None else []
    if manifest is None:
        problems.append(f"{found.path} is not seen here")
    damaged = DamagedCheckpointError(f"the checkpoint {found.tag!r}: {told(problems)}") if problems else None
    meeting.all_or_none("the checkpoint is whole", damaged)


def _target(engine: Any, meeting: Meeting, found: Checkpoint) -> Target:
    """This job's layout, the same on all ranks.

    Raises:
        CheckpointLayoutError, CheckpointModelError: it cannot be reached.
    """
    meeting.post("structure", share_of_structure(engine))
    meeting.all_or_none("described", None)
    layout = layout_of(engine)
    assert found.manifest is not None
    manifest = found.manifest

    def plan() -> Mapping[str, Any]:
        structure = whole_structure(meeting.posted("structure"))
        if structure is None:
            raise CheckpointLayoutError("this job does not say how its model is put together")
        target_like(model_of(manifest, structure.splits), layout, structure)
        return asdict(structure)

    structure = structure_from(meeting.decided("structure", plan))
    assert isinstance(structure, SavedStructure)
    model = model_of(manifest, structure.splits)
    target = target_like(model, layout, structure)
    meeting.post("difference", _difference(engine, model, target.slices))
    meeting.all_or_none("compared", None)
    meeting.decided("same model", lambda: _require_same_model(found, meeting.posted("difference")))
    return target


def _difference(engine: Any, model: SavedModel, slices: int) -> str:
    """The first parameter of this rank's that the checkpoint does not have so; empty if it has all of them."""
    for row in parameters_of(engine):
        saved = model.parameters.get(row.name if row.experts is None else row.name.replace(".*.", ".0."))
        if saved is not None and saved.experts != (row.experts or 0):
            return f"{row.name!r} is there for {saved.experts} experts, and for {row.experts} in the model"
        if saved is None:
            return f"it has no parameter {row.name!r} {list(row.shape)}"
        if saved.shape_of_slice(slices) != row.shape:
            there = list(saved.shape_of_slice(slices))
            return f"parameter {row.name!r} is {there} there, in {slices} slices, and {list(row.shape)} in the model"
    return ""


def _require_same_model(found: Checkpoint, differences: list[str]) -> None:
    if difference := next((one for one in differences if one), None):
        raise CheckpointModelError(
            f"the checkpoint {found.tag!r} of {found.path.parent} is of another model: {difference}"
        )


def _convert(conversion: Conversion, meeting: Meeting) -> None:
    """All ranks, each a share of every step."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(done: str, work: Any) -> Any:
        failure: Exception | None = None
        result = None
        try:
            result = work()
        except Exception as error:  # whatever it is: the others hear of it
            failure = error
        meeting.all_or_none(done, failure)
        return result

    meeting.decided("begin", lambda: conversion.begin(size))
    step("room was made", lambda: conversion.make_room(rank, size))
    files: list[SavedFile] = step("files were written", lambda: conversion.fill(rank, size))
    meeting.post("files", [asdict(file) for file in files])
    meeting.all_or_none("files are known", None)

    def commit() -> None:
        conversion.commit(SavedFile(**row) for share in meeting.posted("files") for row in share)

    meeting.decided("commit", commit)
