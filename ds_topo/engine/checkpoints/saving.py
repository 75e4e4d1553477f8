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

import warnings
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
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.checkpoint_files import manifest as manifests
from ds_topo.checkpoint_files.durable import discard, flush, replace_text
from ds_topo.checkpoint_files.folder import (
    LATEST,
    candidates,
    check_tag,
    draft_of,
    put_in_place,
    remove_old,
    require_free,
    tidy,
)
from ds_topo.checkpoint_files.manifest import Manifest, SavedFile, SavedLayout, SavedParameter, merged
from ds_topo.checkpoint_files.wholeness import sizes_in, told, wrong_sizes
from ds_topo.engine.checkpoints.facts import (
    bytes_of_checkpoint,
    layout_of,
    parameters_of,
    replica_of,
    versions,
)
from ds_topo.engine.checkpoints.host_copies import memory_of
from ds_topo.engine.checkpoints.meeting import Meeting
from ds_topo.engine.checkpoints.random_states import name_of_states, random_states
from ds_topo.engine.checkpoints.structure import share_of_structure, whole_structure
from ds_topo.engine.checkpoints.written_files import WrittenFiles, finished, free_bytes
from ds_topo.errors import CheckpointError, CheckpointSpaceError, abridged

at_work: WeakSet[DeepSpeedEngine] = WeakSet()
"""Engines that are being saved or loaded: what they are asked to save or load meanwhile is DeepSpeed's own part."""
unfinished: list[BackgroundSave] = []
"""What is being written in the background, in the one order of all ranks."""
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
    begun = _Save(engine, Path(folder), tag, keep_last, save_latest, exclude_frozen_parameters, keep_random_states)
    begun.write(engine, client_state)
    return begun.finish()


def save_in_background(
    engine: DeepSpeedEngine,
    folder: str | PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    *,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    keep_random_states: bool = True,
) -> BackgroundSave:
    """As :func:`save`, but it returns when this rank's part is copied to host memory, and threads write it.

    The checkpoint is put in place by ``finish()`` of what this returns: some steps later, or at the end. The next call
    that saves or loads finishes it, too. A program that ends before has the checkpoints that it had.

    Args:
        engine: and all others, as in :func:`save`.
        folder: as there.
        tag: as there.
        client_state: as there.
        keep_last: as there.
        save_latest: as there.
        exclude_frozen_parameters: as there.
        keep_random_states: as there.

    Raises:
        CheckpointError: as :func:`save`; what goes wrong while files are written, ``finish()`` raises.
    """
    begun = _Save(engine, Path(folder), tag, keep_last, save_latest, exclude_frozen_parameters, keep_random_states)
    begun.write(engine, client_state, copies=True)
    unfinished.append(started := BackgroundSave(begun))
    return started


class BackgroundSave:
    """A checkpoint that is being written."""

    def __init__(self, begun: _Save) -> None:
        self._begun = begun
        self._path: Path | None = None

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its files, so that ``finish()`` need not wait for it."""
        return self._begun.files.is_done

    def finish(self) -> Path:
        """Wait for the files of all ranks, and put the checkpoint in place; collective, once. Returns its folder.

        Raises:
            CheckpointError: a rank could not write its files; the same on every rank.
        """
        if self in unfinished:
            unfinished.remove(self)
            self._path = self._begun.finish()
        if self._path is None:
            raise CheckpointError("this checkpoint was not saved: finish() has said why before")
        return self._path


class _Save:
    """One checkpoint from the agreement on it until it is in place."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        root: Path,
        tag: str | None,
        keep_last: int | None,
        save_latest: bool,
        exclude_frozen_parameters: bool,
        keep_random_states: bool,
    ) -> None:
        problem = _problem_of(engine, tag, keep_last)
        finish_what_is_unfinished()
        self._root, self._keep_last, self._save_latest = root, keep_last, save_latest
        self._exclude_frozen_parameters, self._keep_random_states = exclude_frozen_parameters, keep_random_states
        self._tag = "" if problem else check_tag(f"global_step{engine.global_steps}" if tag is None else tag)
        options = f"{save_latest=} {exclude_frozen_parameters=} {keep_last=} {keep_random_states=}"
        subject = f"saving the checkpoint {self._tag!r} in {root}"
        self._meeting = Meeting.begin(subject, f"tag {self._tag!r} {options}", problem)
        self._draft = draft_of(root, self._tag)
        self._meeting.decided("room", lambda: _make_room(engine, root, self._tag))
        self._step, self._layout = int(engine.global_steps), layout_of(engine)
        _warn_of_gathered_gradients(engine)
        self._parameters: list[SavedParameter] = []
        self._left_early = False
        self._structure: dict[str, Any] | None = None

    def write(self, engine: DeepSpeedEngine, client_state: Mapping[str, Any] | None, *, copies: bool = False) -> None:
        """Let DeepSpeed write this rank's files, or copy them; a failure is kept until :meth:`finish`."""
        files = self.files = WrittenFiles(self._draft / self._tag, memory_of(engine) if copies else None)
        try:
            with deepspeeds_part(engine), files.of(engine):
                engine.save_checkpoint(
                    str(self._draft),
                    tag=self._tag,
                    client_state=dict(client_state or {}),
                    save_latest=False,
                    exclude_frozen_parameters=self._exclude_frozen_parameters,
                )
            if self._keep_random_states:
                files.write(random_states(engine), self._draft / self._tag / name_of_states(engine))
            rows = parameters_of(engine) if replica_of(engine) == 0 else []
            self._parameters = [row for row in rows if row.is_trained or not self._exclude_frozen_parameters]
            self._structure = share_of_structure(engine)
            files.write_copies()
        except Exception as error:  # what a rank could not write is kept by the files
            self._left_early = True
            files.failure = files.failure or error

    def finish(self) -> Path:
        """Put it in place when all ranks have written their files."""
        files = self.files
        try:
            written = [asdict(file) for file in files.finish()]
            rows = [asdict(row) for row in self._parameters]
            self._meeting.post("written", {"files": written, "parameters": rows, "structure": self._structure})
        except Exception as error:
            files.failure = files.failure or error
        try:
            self._meeting.all_or_none("all files are written", files.failure, is_alone=self._left_early)
        except CheckpointError:
            self._take_back()
            raise
        self._meeting.decided("in place", self._commit_or_take_back)
        return self._root / self._tag

    # -- on rank 0

    def _take_back(self) -> None:
        if dist.get_rank() == 0:
            with suppress(OSError):
                discard(self._draft)

    def _commit_or_take_back(self) -> None:
        try:
            self._commit()
        except Exception:
            self._take_back()
            raise

    def _commit(self) -> None:
        draft, root, tag = self._draft, self._root, self._tag
        manifest = _manifest_of(tag, self._step, self._layout, self._meeting, draft / tag)
        replace_text(draft / tag / manifests.NAME, manifests.to_text(manifest))
        for script in (path for path in draft.iterdir() if path.is_file()):  # DeepSpeed's, for the folder of all
            flush(script)
            script.replace(root / script.name)
        put_in_place(draft / tag, root, tag)
        if self._save_latest:
            replace_text(root / LATEST, tag)
        discard(draft)
        if self._keep_last is not None:
            try:
                remove_old(root, self._keep_last, tag)
            except OSError as error:  # what was to be saved is
                warnings.warn(
                    f"an older checkpoint in {root} could not be removed: {error}", RuntimeWarning, stacklevel=2
                )


def finish_what_is_unfinished() -> None:
    """Before anything else is saved or loaded."""
    while unfinished:
        unfinished[0].finish()


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


def _warn_of_gathered_gradients(engine: DeepSpeedEngine) -> None:
    """Say on rank 0 that DeepSpeed saves no gradients of a step that is not over."""
    done = 0 if isinstance(engine, PipelineEngine) else engine.micro_steps % engine.gradient_accumulation_steps()
    if done and dist.get_rank() == 0:
        warnings.warn(
            f"saving after {done} of {engine.gradient_accumulation_steps()} micro-batches of a step: DeepSpeed does "
            "not save their gradients, so the step begins anew when this is loaded; save at the end of a step",
            RuntimeWarning,
            stacklevel=5,
        )


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
    require_free(root, tag)
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


# -- rank 0, after -----------------------------------------------------------------------------------------------------


def _manifest_of(tag: str, step: int, layout: SavedLayout, meeting: Meeting, path: Path) -> Manifest:
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
        step,
        datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        layout,
        tuple(sorted(files, key=lambda file: file.path)),
        merged(rows),
        versions(),
        whole_structure(one["structure"] for one in posted),
    )
    if problems := wrong_sizes(path, manifest):
        ranks = sorted({file.rank for file in files if any(problem.startswith(file.path) for problem in problems)})
        raise CheckpointError(
            f"rank 0 does not see what ranks {ranks[:8]} have written ({told(problems)}): {path.parent.parent} must be "
            "one folder of a file system that all hosts share"
        )
    return manifest
