"""Load the requested checkpoint, or else the newest complete one: the same on all ranks, or an error on all.

::

    all ranks   agree on tag and options
    rank 0      finds the next candidate that is complete by the sizes of its files, and readable in this layout
    all ranks   check their share of the files (digests if requested, types to build), and their parameters
    rank 0      decides: load it, try the next one, or raise
    all ranks   DeepSpeed loads
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.deepspeed_reader import Source, name_of_model_states, opened
from ds_topo.checkpoint.disk import check_folder, reason_of
from ds_topo.checkpoint.folder import Checkpoint
from ds_topo.checkpoint.manifest import why_unreachable
from ds_topo.checkpoint.rank_zero import Meeting, shared_out
from ds_topo.checkpoint.safe_reading import (
    how_to_verify,
    reading_checkpoint,
    refused_types,
    removed_meanwhile,
    unreadable,
)
from ds_topo.checkpoint.saved_model import model_of
from ds_topo.checkpoint.saving import deepspeeds_part, finish_what_is_unfinished, is_ours, options_of
from ds_topo.errors import (
    CheckpointError,
    CheckpointLayoutError,
    CheckpointModelError,
    CheckpointVersionError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsafeCheckpointError,
    abridged,
    listed,
    printable,
)
from ds_topo.ledger import ledger
from ds_topo.mpu import patches

SIZES, DIGESTS = "sizes", "digests"


def load(
    engine: DeepSpeedEngine,
    folder: str | PathLike[str],
    tag: str | None = None,
    *,
    verify: str = SIZES,
    trusted: bool = False,
    restore_random_states: bool = True,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., None] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint into an engine; collective over all ranks of the job.

    Any order of the axes reads what any other order of the same degrees has saved. Without a tag, the checkpoint that
    ``latest`` names is loaded. If that one is damaged or missing, the newest complete one is loaded, and rank 0 warns
    with the reason. In checkpoints that DeepSpeed alone saved, without a manifest, only missing and truncated files
    are found.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        folder: the folder of all checkpoints.
        tag: the only checkpoint to load. By default see above.
        verify: how to check that a checkpoint is complete: by the ``"sizes"`` of its files, or by their ``"digests"``,
            which also finds changed bytes. For digests every rank reads its share of the files once more.
        trusted: allow all types in the files, which may run any code that they contain.
        restore_random_states: whether to restore random states if they were saved.
        load_module_strict: as in ``engine.load_checkpoint``, like all following arguments.
        load_optimizer_states: see there.
        load_lr_scheduler_states: see there.
        load_module_only: see there.
        custom_load_fn: see there.

    Returns:
        The checkpoint's own folder, and the ``client_state`` that was saved.

    Raises:
        TypeError, ValueError: the engine, the tag or ``verify`` is invalid.
        DisagreementError: ranks pass different arguments, or a rank does not call the function.
        MissingCheckpointError: there is no checkpoint, or none with that tag.
        DamagedCheckpointError: the checkpoint with that tag is damaged, or all checkpoints are.
        CheckpointVersionError: a later ds_topo saved it.
        CheckpointLayoutError: this layout cannot read its files.
        CheckpointModelError: it is of another model; the message names the first parameter that differs.
        UnsafeCheckpointError: it holds types that are not allowed.
        CheckpointError: a rank failed while it loaded; the engine cannot be used then.
    """
    failure: Exception | None = None
    root, name = Path(), None
    try:
        root, name = _checked(engine, folder, tag, verify)
    except (TypeError, ValueError) as problem:
        failure = problem
    finish_what_is_unfinished()
    options = {
        "load_module_strict": load_module_strict,
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
    }
    plan = f"tag {name!r} {verify=} {trusted=} {restore_random_states=} {options}"
    what = f"the checkpoint {name!r}" if name else "the newest checkpoint"
    meeting = Meeting.begin(f"loading {what} of {root}", plan, failure)
    if load_module_only and int(engine.zero_optimization_stage()) == 3:  # otherwise DeepSpeed loads nothing
        options["load_optimizer_states"] = False
    has_scheduler = load_lr_scheduler_states and not load_module_only and engine.lr_scheduler is not None
    choice = _Choice(engine, root, name, load_optimizer_states and not load_module_only, has_scheduler)
    is_strict = load_module_strict and custom_load_fn is None
    for attempt in count(1):
        chosen = meeting.decided(f"choice {attempt}", choice.next)
        share = choice.check(root / chosen, digests=verify == DIGESTS, trusted=trusted, is_strict=is_strict)
        if meeting.decided_from(f"check {attempt}", share, choice.accepts):
            break
    newest = choice.chosen if name is None else None  # on rank 0
    if newest is not None and (reason := folders.why_passed_over(root, newest, choice.damaged)):
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
    if choice.chosen is not None and choice.chosen.manifest is None:
        warnings.warn(_without_manifest(root / chosen), RuntimeWarning, stacklevel=2)
    state: dict[str, Any] = {}
    error: Exception | None = None
    try:
        with (
            reading_checkpoint(root / chosen, trusted=trusted),
            ledger.bound(patches.WEIGHTS_OF_LATEST, partial(_of_checkpoint, engine, root / chosen)),
            deepspeeds_part(engine),
        ):
            path, state = engine.load_checkpoint(str(root), tag=chosen, custom_load_fn=custom_load_fn, **options)
            if path is None:
                raise CheckpointError(f"DeepSpeed found no files to load in {root / chosen}")
            states = root / chosen / facts.name_of_states(engine)
            if restore_random_states and states.exists():
                facts.restore_random_states(engine, torch.load(states, map_location="cpu"))
    except CheckpointError as raised:
        error = raised
    except Exception as raised:  # of any class: the other ranks must receive it
        error = CheckpointError(
            f"DeepSpeed could not load {root / chosen}: {type(raised).__name__}: {raised}. If its files may have been "
            f"changed, find out by {how_to_verify(root / chosen)}"
            if (root / chosen).exists()
            else removed_meanwhile(root / chosen)
        )
        error.__cause__ = raised
    meeting.all_or_none("loaded", error, is_alone=error is not None)
    return str(root / chosen), state


def _of_checkpoint(engine: DeepSpeedEngine, path: Path, read: Callable[..., Any]) -> Callable[..., Any]:
    """Let the function with which ZeRO 3 reads weights alone read this checkpoint, and only this rank's slice."""

    def weights(folder: Any, *arguments: Any, **options: Any) -> Any:
        _, place, slices = facts.stage_and_slice(engine)
        if slices > 1 and (manifest := folders.manifest_of(path)) is not None:
            return Source(model_of(manifest), path).state_dict_of(place)
        return read(folder, path.name, *arguments, **options)

    return weights


def _checked(engine: Any, folder: object, tag: object, verify: object) -> tuple[Path, str | None]:
    """Check the arguments; return the folder and the tag."""
    facts.require_engine(engine)
    root, name = check_folder(folder), None if tag is None else folders.text_of_tag(tag)
    if verify not in (SIZES, DIGESTS):
        raise ValueError(f"verify={abridged(verify)}: give {SIZES!r} or {DIGESTS!r}")
    return root, name


def _without_manifest(path: Path) -> str:
    return printable(
        f"{path} has no {manifests.NAME}: DeepSpeed alone saved it, or the file is lost. Its layout, its model and its "
        "digests were not compared, only missing and truncated files are found. The next save writes a manifest"
    )


class _Choice:
    """The choice of a checkpoint: rank 0 proposes candidates one after the other, and all ranks check them.

    Args:
        engine: the engine that will load it.
        root: the folder of all checkpoints.
        tag: the requested checkpoint; None for any.
        optimizer_states: whether the optimizer's states are to be loaded.
        has_scheduler: whether the learning-rate scheduler's state is to be loaded.
    """

    def __init__(
        self, engine: DeepSpeedEngine, root: Path, tag: str | None, optimizer_states: bool, has_scheduler: bool
    ) -> None:
        self._engine, self._root, self._tag, self._optimizer_states = engine, root, tag, optimizer_states
        self._has_scheduler = has_scheduler
        self._layout = facts.layout_of(engine)
        self._left = self._to_try()
        self.damaged: list[Checkpoint] = []
        """The candidates that were rejected; used on rank 0 only."""
        self.chosen: Checkpoint | None = None
        """The last proposal; used on rank 0 only."""

    def next(self) -> str:
        """Return, on rank 0, the tag of the next candidate that is complete by the sizes of its files.

        Raises:
            MissingCheckpointError, DamagedCheckpointError: there is none.
            CheckpointVersionError, CheckpointLayoutError: the next one cannot be read.
        """
        for checkpoint in self._left:
            if checkpoint.needs:
                raise CheckpointVersionError(f"the checkpoint {checkpoint.tag!r}: {checkpoint.needs}")
            if checkpoint.is_whole:
                self._require_reach(checkpoint)
                self.chosen = checkpoint
                return checkpoint.tag
            self.damaged.append(checkpoint)
        raise self._nothing()

    def check(self, path: Path, *, digests: bool, trusted: bool, is_strict: bool) -> dict[str, Any]:
        """Check a share of the files, and this rank's parameters; on every rank. Return the problems found."""
        found: dict[str, Any] = {"damaged": [], "refused": "", "model": "", "order": "", "scheduler": ""}
        try:
            manifest = folders.manifest_of(path)
            if manifest is not None and digests:
                found["damaged"] = folders.wrong_digests(path, shared_out(manifest.files))
            if manifest is not None and facts.replica_of(self._engine) == 0:
                if is_strict and (model := facts.difference_of_models(self._engine, manifest)):
                    found["model"] = f"{model} (model rank {int(self._engine.checkpoint_mp_rank)})"
                elif self._optimizer_states:
                    found["order"] = facts.difference_of_orders(self._engine, manifest)
            if not trusted and not found["damaged"]:
                names = [file.path for file in manifest.files] if manifest else sorted(os.listdir(path))
                share = [path / name for name in shared_out(names) if name.endswith(".pt")]
                found["damaged"] = unreadable(share)
                refused = refused_types(share) if not found["damaged"] else []
                found["refused"] = refused[0] if refused else ""
            if manifest is not None and self._has_scheduler and dist.get_rank() == 0 and not trusted:
                found["scheduler"] = self._missing_scheduler(path / name_of_model_states(manifest.layout, 0))
        except OSError as error:
            found["damaged"].append(f"{error.filename or path}: {reason_of(error)}")
        except CheckpointError as error:
            found["damaged"].append(str(error))
        return found

    def _missing_scheduler(self, file: Path) -> str:
        """Say that the learning-rate scheduler has no state in a checkpoint; empty if it has one, or if unknown."""
        with suppress(CheckpointError, UnpicklingError):  # of which another check informs
            if opened(file).get("lr_scheduler") is None:
                return (
                    f"has no state of a learning-rate scheduler, and this job has a "
                    f"{type(self._engine.lr_scheduler).__name__}: load it with load_lr_scheduler_states=False, and set "
                    "the scheduler's step in the program"
                )
        return ""

    def accepts(self, posted: list[dict[str, Any]]) -> bool:
        """Decide on rank 0 whether to load the proposal, from all ranks' problems. False tries the next candidate.

        Raises:
            CheckpointModelError, CheckpointLayoutError, UnsafeCheckpointError: no other may replace it.
        """
        assert self.chosen is not None
        if damaged := [problem for share in posted for problem in share["damaged"]]:
            self.damaged.append(replace(self.chosen, problems=tuple(damaged)))
            self.chosen = None
            return False
        where = f"the checkpoint {self.chosen.tag!r} of {self._root}"
        model, order, refused, scheduler = (
            next((share[kind] for share in posted if share[kind]), "")
            for kind in ("model", "order", "refused", "scheduler")
        )
        if model:
            raise CheckpointModelError(f"{where} is of another model: {model}")
        if order:
            raise CheckpointLayoutError(
                f"{where} has the optimizer's states by position, and {order}, or load by their names with "
                "ds_topo.checkpoint.load(..., convert=True), or load parameters alone (load_module_only=True)"
            )
        if refused:
            raise UnsafeCheckpointError(f"{where}: {refused}")
        if scheduler:
            raise CheckpointError(f"{where} {scheduler}")
        return True

    def _to_try(self) -> Iterator[Checkpoint]:
        with suppress(OSError):  # without permission to write, no job was saving there
            folders.take_back_replaced(self._root)
        must_match = self._optimizer_states and self._layout.zero_stage  # otherwise other degrees can be read
        expected = self._layout if must_match else None
        if self._tag is None:
            yield from folders.candidates(self._root, expected)
        else:
            yield folders.look_at(self._root, self._tag, expected=expected)

    def _require_reach(self, checkpoint: Checkpoint) -> None:
        if checkpoint.manifest is None:
            return
        saved = checkpoint.manifest.layout
        if reason := why_unreachable(saved, self._layout, optimizer_states=self._optimizer_states):
            module_only = why_unreachable(saved, self._layout, optimizer_states=False) == ""
            also = ", or load its parameters alone (load_module_only=True)" if module_only else ""
            if saved.zero_stage == 3 and saved.experts:
                raise CheckpointLayoutError(
                    f"the checkpoint {checkpoint.tag!r} of {self._root} is of {saved}; this job is {self._layout}: "
                    f"{reason}. Start the job with the topology of the checkpoint, or save and load in torch's format "
                    "(ds_topo.checkpoint.TorchState), or convert it once by the command: python -m "
                    "deepspeed.checkpoint.ds_to_universal"
                )
            raise CheckpointLayoutError(
                f"the checkpoint {checkpoint.tag!r} of {self._root} is of {saved}; this job is {self._layout}: "
                f"{reason}. Start the job with the degrees and the ZeRO stage of the checkpoint, in any order of axes, "
                f"or convert it, by ds_topo.checkpoint.load(engine, folder, convert=True) in this job{also}, or once "
                f"by the command: {self._command(checkpoint)}"
            )

    def _command(self, checkpoint: Checkpoint) -> str:
        """Return the command that converts a checkpoint to this job's layout."""
        layout = self._layout
        options = ["ds-topo", "convert", str(checkpoint.path), f"{self._root}-converted"]
        options += ["--topology", layout.topology or "..."]
        if checkpoint.manifest is not None and checkpoint.manifest.layout.zero_stage != layout.zero_stage:
            options += ["--zero", str(layout.zero_stage)]
        return shlex.join(options)

    def _nothing(self) -> CheckpointError:
        """Return the error that there is nothing to load."""
        root, tag = self._root, self._tag
        if _is_checkpoint(root):
            return MissingCheckpointError(
                f"{root} is one checkpoint: give the folder around it, {str(root.parent)!r}, and tag={root.name!r}"
            )
        known, kind = folders.tags_in(root), folders.other_kind(root)
        if root.exists() and not root.is_dir():
            return MissingCheckpointError(f"{root} is a file: {kind or 'give the folder of all checkpoints'}")
        if kind and not known:
            return MissingCheckpointError(f"no checkpoint in {root}: {kind}")
        if tag is not None and tag not in known:
            hint = "; without a tag, the one that 'latest' names is loaded" if tag == folders.LATEST else ""
            return MissingCheckpointError(f"no checkpoint {tag!r} in {root}: there are {listed(known)}{hint}")
        if tag is not None:
            whole = next((one.tag for one in folders.candidates(root) if one.is_whole), None)
            newest = f"the newest complete one is {whole!r}" if whole else "no other one is complete"
            return DamagedCheckpointError(
                f"the checkpoint {tag!r} of {root} is damaged: {folders.told(self.damaged[-1].problems)}; {newest}"
            )
        problems = [f"{one.tag!r}: {folders.told(one.problems)}" for one in self.damaged if os.path.lexists(one.path)]
        if not problems:
            return MissingCheckpointError(f"no checkpoint in {root}")
        return DamagedCheckpointError(f"no checkpoint in {root} is complete: {folders.told(problems)}")


def _is_checkpoint(path: Path) -> bool:
    with suppress(OSError):
        return folders.is_checkpoint(path)
    return False


# -- DeepSpeed's method ------------------------------------------------------------------------------------------------


def loaded_whole(load_checkpoint: Any) -> Any:
    """Replace ``DeepSpeedEngine.load_checkpoint`` on engines of a grid, with DeepSpeed's arguments and results.

    Without a tag and without any checkpoint it warns and returns nothing, as DeepSpeed's own method does.
    """

    @wraps(load_checkpoint)
    def load_whole_checkpoint(engine: DeepSpeedEngine, load_dir: Any, *arguments: Any, **options: Any) -> Any:
        given = options_of(load_checkpoint, engine, load_dir, *arguments, **options)
        if not is_ours(engine) or engine.use_node_local_storage():
            return load_checkpoint(engine, load_dir, **given)
        if engine.load_universal_checkpoint():
            with reading_checkpoint(check_folder(load_dir, "load_dir")):
                return load_checkpoint(engine, load_dir, **given)
        try:
            path, state = load(engine, load_dir, restore_random_states=False, **given)
        except MissingCheckpointError:
            if given.get("tag") is not None:
                raise
            return load_checkpoint(engine, load_dir, **given)
        folder = Path(path)
        return engine._get_ckpt_name(str(folder.parent), folder.name), state

    return load_whole_checkpoint
