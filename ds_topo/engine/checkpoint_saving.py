"""Save a checkpoint that is there as a whole or not at all, whoever is killed and whenever.

::

    all ranks   agree on tag and options
    rank 0      tidy up what a killed save has left; is there room on the disk?
    all ranks   DeepSpeed writes into .<tag>.saving/<tag>; each rank flushes and digests what it has written
    all ranks   agree that all files are written
    rank 0      manifest, flush, rename to <tag>, flush, replace latest, remove old ones
    all ranks   hear of it, and go on
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.checkpoint_files import manifest as manifests
from ds_topo.checkpoint_files.durable import discard, flush, replace_text
from ds_topo.checkpoint_files.folder import (
    LATEST,
    candidates,
    check_tag,
    draft_of,
    put_in_place,
    remove_old,
    tidy,
)
from ds_topo.checkpoint_files.manifest import Manifest, SavedFile, SavedParameter, merged
from ds_topo.checkpoint_files.wholeness import sizes_in, told, wrong_sizes
from ds_topo.engine.checkpoint_facts import (
    bytes_of_checkpoint,
    layout_of,
    parameters_of,
    replica_of,
    versions,
)
from ds_topo.engine.checkpoint_meeting import Meeting
from ds_topo.engine.random_states import name_of_states, random_states
from ds_topo.engine.written_files import WrittenFiles, finished, free_bytes
from ds_topo.errors import CheckpointError, CheckpointSpaceError, abridged

at_work: WeakSet[DeepSpeedEngine] = WeakSet()
"""Engines that are being saved or loaded: what they are asked to save or load meanwhile is DeepSpeed's own part."""
_MARGIN = 1.02
"""Of room on the disk."""


def save(
    engine: DeepSpeedEngine,
    folder: str | PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    *,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    keep_random_states: bool = True,
) -> Path:
    """Save an engine so that a whole checkpoint is there at every moment; collective over all ranks of the job.

    The files are DeepSpeed's own, under its names, and ``latest`` is; beside them a manifest has every file with its
    size, digest and writer, the layout, the parameters, and the releases. When this returns, on any rank, the
    checkpoint is in place on the disk. If a rank fails or is killed before, the folder is as it was.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        folder: of all checkpoints, on a file system that all hosts share.
        tag: the name of this one; ``global_step<N>`` by default. One that is there already is replaced.
        client_state: what else the program needs to go on, which :func:`load` returns.
        keep_last: remove older checkpoints so that so many whole ones stay; all by default.
        save_latest: whether this becomes the checkpoint that is loaded by default.
        exclude_frozen_parameters: as in ``engine.save_checkpoint``.
        keep_random_states: save every rank's random states, too.

    Returns:
        The checkpoint's own folder.

    Raises:
        TypeError, ValueError: an engine, a tag or a number that cannot be.
        DisagreementError: ranks save different things, or did not come.
        CheckpointSpaceError: too little room on the disk; nothing was written.
        CheckpointError: a rank could not write its files; the same on every rank, with ranks, hosts and paths. The
            checkpoints before are as they were.
    """
    problem = _problem_of(engine, tag, keep_last)
    name = "" if problem else check_tag(f"global_step{engine.global_steps}" if tag is None else tag)
    options = f"{save_latest=} {exclude_frozen_parameters=} {keep_last=} {keep_random_states=}"
    root = Path(folder)
    meeting = Meeting.begin(f"saving the checkpoint {name!r} in {root}", f"tag {name!r} {options}", problem)
    draft = draft_of(root, name)
    meeting.decided("room", lambda: _make_room(engine, root, name))
    files = _write(engine, draft, name, client_state, exclude_frozen_parameters, keep_random_states, meeting)
    try:
        meeting.all_or_none("all files are written", files.failure)
    except CheckpointError:
        if dist.get_rank() == 0:
            with suppress(OSError):
                discard(draft)
        raise

    def commit() -> None:
        manifest = _manifest_of(engine, name, meeting, draft / name)
        replace_text(draft / name / manifests.NAME, manifests.to_text(manifest))
        for script in (path for path in draft.iterdir() if path.is_file()):  # DeepSpeed's, for the folder of all
            flush(script)
            script.replace(root / script.name)
        put_in_place(draft / name, root, name)
        if save_latest:
            replace_text(root / LATEST, name)
        discard(draft)
        if keep_last is not None:
            remove_old(root, keep_last, name)

    def commit_or_take_back() -> None:
        try:
            commit()
        except Exception:
            with suppress(OSError):
                discard(draft)
            raise

    meeting.decided("in place", commit_or_take_back)
    return root / name


def _problem_of(engine: Any, tag: object, keep_last: object) -> Exception | None:
    """What is wrong with the arguments of this rank."""
    if not isinstance(engine, DeepSpeedEngine):
        return TypeError(f"engine: {type(engine).__name__} is not what deepspeed.initialize returns")
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
        return ValueError(f"keep_last={abridged(keep_last)}: give a number of checkpoints from 1 on, or None for all")
    if (reason := why_not_ours(engine)) != "":
        return CheckpointError(f"{reason}: engine.save_checkpoint() is DeepSpeed's own then")
    try:
        check_tag("default" if tag is None else tag)
    except ValueError as error:
        return error
    return None


def why_not_ours(engine: DeepSpeedEngine) -> str:
    """Why an engine's checkpoints cannot be put in place by one rank when all files are written; empty if they can."""
    if engine.use_node_local_storage():
        return 'the config has "use_node_local_storage": each host keeps its files for itself'
    if engine.checkpoint_engine.is_decoupled():
        return f"{type(engine.checkpoint_engine).__name__} goes on writing after the call"
    return ""


@contextmanager
def deepspeeds_part(engine: DeepSpeedEngine) -> Iterator[None]:
    """What the engine is asked to save or load meanwhile, it saves or loads as DeepSpeed does."""
    at_work.add(engine)
    try:
        yield
    finally:
        at_work.discard(engine)


# -- rank 0, before ----------------------------------------------------------------------------------------------------


def _make_room(engine: DeepSpeedEngine, root: Path, tag: str) -> None:
    """Prepare the folder.

    Raises:
        CheckpointSpaceError: the disk has too little room; nothing has changed, but drafts of killed saves are gone.
    """
    root.mkdir(parents=True, exist_ok=True)
    tidy(root)
    needed, free = _bytes_needed(engine, root), free_bytes(root)
    if free < needed * _MARGIN:
        raise CheckpointSpaceError(
            f"the checkpoint {tag!r} takes about {needed:,} bytes, and the disk of {root} has {free:,}: make room, "
            "save fewer (keep_last=N), or save elsewhere. Nothing was written"
        )
    (draft_of(root, tag) / tag).mkdir(parents=True)
    flush(root)


def _bytes_needed(engine: DeepSpeedEngine, root: Path) -> int:
    """As many as the last one of this layout, or as this rank's part lets expect."""
    layout = layout_of(engine)
    last = next((found.manifest for found in candidates(root) if found.is_whole and found.manifest), None)
    expected = bytes_of_checkpoint(engine)
    return max(last.bytes, expected) if last is not None and last.layout == layout else expected


# -- every rank --------------------------------------------------------------------------------------------------------


def _write(
    engine: DeepSpeedEngine,
    draft: Path,
    tag: str,
    client_state: Mapping[str, Any] | None,
    exclude_frozen_parameters: bool,
    keep_random_states: bool,
    meeting: Meeting,
) -> WrittenFiles:
    """Write this rank's files, and tell rank 0 of them; a failure is kept in what is returned."""
    files = WrittenFiles(draft / tag)
    try:
        with deepspeeds_part(engine), files.of(engine):
            engine.save_checkpoint(
                str(draft),
                tag=tag,
                client_state=dict(client_state or {}),
                save_latest=False,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
        if keep_random_states:
            files.write(random_states(engine), draft / tag / name_of_states(engine))
        rows = parameters_of(engine) if replica_of(engine) == 0 else []
        written = [asdict(file) for file in files.finish()]
        meeting.post("written", {"files": written, "parameters": [asdict(row) for row in rows]})
    except Exception as error:
        files.failure = files.failure or error
    finally:
        files.close()
    return files


# -- rank 0, after -----------------------------------------------------------------------------------------------------


def _manifest_of(engine: DeepSpeedEngine, tag: str, meeting: Meeting, path: Path) -> Manifest:
    """What all ranks have written.

    Raises:
        CheckpointError: rank 0 does not see all of it: the folder is not one and the same on all hosts.
    """
    posted = meeting.posted("written")
    files = [SavedFile(**row) for one in posted for row in one["files"]]
    rows = [
        SavedParameter(**{**row, "shape": tuple(row["shape"]), "model_ranks": tuple(row["model_ranks"])})
        for one in posted
        for row in one["parameters"]
    ]
    known = {file.path for file in files}
    unknown = [name for name in sorted(sizes_in(path)) if name not in known]
    files += [finished(path / name, path, 0) for name in unknown]  # DeepSpeed copies swapped states by itself
    manifest = Manifest(
        tag,
        int(engine.global_steps),
        datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        layout_of(engine),
        tuple(sorted(files, key=lambda file: file.path)),
        merged(rows),
        versions(),
    )
    if problems := wrong_sizes(path, manifest):
        ranks = sorted({file.rank for file in files if any(problem.startswith(file.path) for problem in problems)})
        raise CheckpointError(
            f"rank 0 does not see what ranks {ranks[:8]} have written ({told(problems)}): {path.parent.parent} must be "
            "one folder of a file system that all hosts share"
        )
    return manifest
