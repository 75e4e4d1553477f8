"""Load the checkpoint that is meant, or the newest whole one in its place; the same on all ranks, or an error on all.

::

    all ranks   agree on tag and options
    rank 0      the next candidate that is whole by the sizes of its files, and that this layout can read
    all ranks   look at their share of the files (digests if wanted, types to be built), and at their parameters
    rank 0      load it, try the next one, or give up
    all ranks   DeepSpeed loads
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.checkpoint_files.folder import (
    Checkpoint,
    candidates,
    is_checkpoint,
    look_at,
    manifest_of,
    tags_in,
    take_back_replaced,
    why_passed_over,
)
from ds_topo.checkpoint_files.manifest import SavedLayout
from ds_topo.checkpoint_files.reach import Wanted, why_unreachable
from ds_topo.checkpoint_files.wholeness import Places, told, wrong_digests
from ds_topo.engine import changes
from ds_topo.engine.checkpoints.facts import difference_of_models, layout_of, places_of, replica_of
from ds_topo.engine.checkpoints.meeting import Meeting, shared_out
from ds_topo.engine.checkpoints.random_states import name_of_states, restore
from ds_topo.engine.checkpoints.safe_reading import only_allowed_types, refused_types
from ds_topo.engine.checkpoints.saving import deepspeeds_part, finish_what_is_unfinished
from ds_topo.engine.checkpoints.structure import difference_of_orders
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
)
from ds_topo.ledger import Make, ledger

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

    Any order of the axes reads what any other order of the same degrees has saved. Without a tag it is the checkpoint
    that ``latest`` names; if that one is damaged or gone, the newest whole one, with a warning of rank 0 that says what
    is wrong. In checkpoints that DeepSpeed alone saved, without a manifest, missing and cut off files are found.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        folder: of all checkpoints.
        tag: of this one, and no other.
        verify: how to tell a whole checkpoint: ``"sizes"`` of its files; or their ``"digests"``, for which every rank
            reads its share of them once more: that finds changed bytes, too.
        trusted: let the files build any type, which runs whatever code they bring.
        restore_random_states: if they were saved.
        load_module_strict: and all others as in ``engine.load_checkpoint``.
        load_optimizer_states: as there.
        load_lr_scheduler_states: as there.
        load_module_only: as there.
        custom_load_fn: as there.

    Returns:
        The checkpoint's own folder, and the ``client_state`` that was saved.

    Raises:
        TypeError, ValueError: an engine, a tag or a value of ``verify`` that cannot be.
        DisagreementError: ranks load different things, or did not come.
        MissingCheckpointError: there is none, or none of that tag.
        DamagedCheckpointError: the one of that tag is damaged, or all are.
        CheckpointVersionError: it was saved by a later ds_topo.
        CheckpointLayoutError: this layout cannot read its files.
        CheckpointModelError: it is another model's; names the first parameter that differs.
        UnsafeCheckpointError: it holds types that are not allowed.
        CheckpointError: a rank failed while it loaded; the engine cannot be used then.
    """
    failure = _problem_of(engine, tag, verify)
    finish_what_is_unfinished()
    root, wanted = Path(folder), Wanted(load_optimizer_states and not load_module_only)
    name = None if tag is None else str(tag)
    options = f"{load_module_strict=} {load_optimizer_states=} {load_module_only=} {load_lr_scheduler_states=}"
    plan = f"tag {name!r} {verify=} {trusted=} {restore_random_states=} {options}"
    what = f"the checkpoint {name!r}" if name else "the newest checkpoint"
    meeting = Meeting.begin(f"loading {what} of {root}", plan, failure)
    is_strict = load_module_strict and custom_load_fn is None
    choice = _Choice(root, name, layout_of(engine), places_of(engine), wanted)
    for number in range(1, 1 << 20):
        chosen = meeting.decided(f"choice {number}", choice.next)
        share = _look(engine, root / chosen, wanted, digests=verify == DIGESTS, trusted=trusted, is_strict=is_strict)
        meeting.post(f"found {number}", share)
        meeting.all_or_none("all files were looked at", None)
        if meeting.decided(f"verdict {number}", partial(_judge, choice, meeting, number)):
            break
    choice.warn()
    state: dict[str, Any] = {}
    error: Exception | None = None
    try:
        path, state = _read(
            engine,
            root,
            chosen,
            trusted,
            restore_random_states,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
    except Exception as raised:  # whatever it is: the others hear of it
        error = raised
    meeting.all_or_none("loaded", error, is_alone=error is not None)
    return path, state


def _problem_of(engine: Any, tag: object, verify: object) -> Exception | None:
    if not isinstance(engine, DeepSpeedEngine):
        return TypeError(f"engine: {type(engine).__name__} is not what deepspeed.initialize returns")
    if verify not in (SIZES, DIGESTS):
        return ValueError(f"verify={abridged(verify)}: give {SIZES!r} or {DIGESTS!r}")
    if tag is not None and not str(tag).strip():
        return ValueError(f"tag={abridged(tag)}: give the name of a checkpoint, or None for the newest one")
    return None


def _read(
    engine: DeepSpeedEngine,
    root: Path,
    tag: str,
    trusted: bool,
    restore_random_states: bool,
    **options: Any,
) -> tuple[str, dict[str, Any]]:
    """DeepSpeed's part, and our own file."""
    with ExitStack() as during:
        if not trusted:
            during.enter_context(only_allowed_types())
        during.enter_context(ledger.bound(changes.WEIGHTS_OF_LATEST, _of_tag(tag)))
        during.enter_context(deepspeeds_part(engine))
        path, state = engine.load_checkpoint(str(root), tag=tag, **options)
        if path is None:
            raise CheckpointError(f"DeepSpeed found nothing to load in {root / tag}")
        states = root / tag / name_of_states(engine)
        if restore_random_states and states.exists():
            restore(engine, torch.load(states, map_location="cpu"))
    return str(root / tag), state


def _of_tag(tag: str) -> Make:
    return lambda read: lambda folder, *arguments, **options: read(folder, tag, *arguments, **options)


# -- rank 0 chooses ----------------------------------------------------------------------------------------------------


@dataclass
class _Choice:
    """Which checkpoint to load, as rank 0 goes through those that there are."""

    root: Path
    tag: str | None
    """The one that is wanted; None for any."""
    layout: SavedLayout
    places: Places
    wanted: Wanted
    damaged: list[Checkpoint] = field(default_factory=list)
    """Those that would have come first."""
    chosen: Checkpoint | None = None
    _left: Iterator[Checkpoint] | None = None

    def next(self) -> str:
        """The tag of the next one that is whole by the sizes of its files.

        Raises:
            MissingCheckpointError, DamagedCheckpointError, CheckpointVersionError, CheckpointLayoutError: none is, or
                the first one that is cannot be read.
        """
        if self._left is None:
            take_back_replaced(self.root)
            self._left = self._those_to_try()
        for checkpoint in self._left:
            if checkpoint.needs:
                raise CheckpointVersionError(f"the checkpoint {checkpoint.tag!r}: {checkpoint.needs}")
            if checkpoint.is_whole:
                self._require_reach(checkpoint)
                self.chosen = checkpoint
                return checkpoint.tag
            self.damaged.append(checkpoint)
        raise self._nothing()

    def reject(self, problems: list[str]) -> None:
        """The one that was chosen last is not whole after all."""
        assert self.chosen is not None
        chosen = self.chosen
        self.damaged.append(Checkpoint(chosen.tag, chosen.path, chosen.manifest, tuple(problems)))
        self.chosen = None

    def warn(self) -> None:
        """Say once, on rank 0, that it is not the one that was meant."""
        if self.tag is not None or self.chosen is None:  # on another rank
            return
        if said := why_passed_over(self.root, self.chosen, self.damaged):
            warnings.warn(said, RuntimeWarning, stacklevel=3)

    def _those_to_try(self) -> Iterator[Checkpoint]:
        if self.tag is None:
            return candidates(self.root, self._expected())
        return iter([look_at(self.root, self.tag, expected=self._expected())])

    def _expected(self) -> Places | None:
        """What names of files must count, where the optimizer's states are wanted: else other degrees will do."""
        return self.places if self.wanted.optimizer_states and self.layout.zero_stage else None

    def _require_reach(self, checkpoint: Checkpoint) -> None:
        if checkpoint.manifest is None:
            return
        saved = checkpoint.manifest.layout
        if reason := why_unreachable(saved, self.layout, self.wanted):
            module_only = why_unreachable(saved, self.layout, Wanted(optimizer_states=False)) == ""
            also = ", or load its parameters alone (load_module_only=True)" if module_only else ""
            raise CheckpointLayoutError(
                f"the checkpoint {checkpoint.tag!r} of {self.root} is of {saved}; this job is {self.layout}: {reason}. "
                f"Start the job with the degrees and the ZeRO stage that it was saved with, in any order of axes{also}"
            )

    def _nothing(self) -> CheckpointError:
        if is_checkpoint(self.root):
            return MissingCheckpointError(
                f"{self.root} is one checkpoint: give the folder around it, {str(self.root.parent)!r}, and "
                f"tag={self.root.name!r}"
            )
        if self.tag is not None:
            known = tags_in(self.root)
            if self.tag not in known:
                return MissingCheckpointError(
                    f"no checkpoint {self.tag!r} in {self.root}: there are {listed(known) if known else 'none'}"
                )
            whole = next((one.tag for one in candidates(self.root) if one.is_whole), None)
            newest = f"the newest whole one is {whole!r}" if whole else "no other one is whole"
            return DamagedCheckpointError(
                f"the checkpoint {self.tag!r} of {self.root} is damaged: {told(self.damaged[-1].problems)}; {newest}"
            )
        found = [one for one in self.damaged if one.path.is_dir()]
        if not found:
            return MissingCheckpointError(f"no checkpoint in {self.root}")
        problems = "; ".join(f"{one.tag!r}: {told(one.problems)}" for one in found[:4])
        more = f"; and {len(found) - 4} further" if len(found) > 4 else ""
        return DamagedCheckpointError(f"no checkpoint in {self.root} is whole: {problems}{more}")


def _judge(choice: _Choice, meeting: Meeting, number: int) -> bool:
    """Whether to load the one that was looked at.

    Raises:
        CheckpointModelError, UnsafeCheckpointError, DamagedCheckpointError: it cannot be loaded, nor another one in its
            place.
    """
    posted: list[Mapping[str, Any]] = meeting.posted(f"found {number}")
    assert choice.chosen is not None
    where = f"the checkpoint {choice.chosen.tag!r} of {choice.root}"
    damaged = [problem for share in posted for problem in share["damaged"]]
    if damaged:
        choice.reject(damaged)
        return False
    models = [f"{share['model']} (model rank {share['model_rank']})" for share in posted if share["model"]]
    if models:
        raise CheckpointModelError(f"{where} is of another model: {models[0]}")
    orders = [share["order"] for share in posted if share["order"]]
    if orders:
        raise CheckpointLayoutError(
            f"{where} has the optimizer's states by place, and {orders[0]}: give the optimizer its parameters in the "
            "order in which they were saved, or load with ds_topo.checkpoint.load(..., convert=True), which goes by "
            "their names, or load parameters alone (load_module_only=True)"
        )
    refused = [problem for share in posted for problem in share["refused"]]
    if refused:
        raise UnsafeCheckpointError(f"{where}: {refused[0]}")
    return True


# -- every rank looks --------------------------------------------------------------------------------------------------


def _look(
    engine: DeepSpeedEngine, path: Path, wanted: Wanted, *, digests: bool, trusted: bool, is_strict: bool
) -> dict[str, Any]:
    """What this rank sees: damaged files and other types among its share, and whether the model is this one."""
    damaged: list[str] = []
    refused: list[str] = []
    model = order = ""
    try:
        manifest = manifest_of(path)
        if manifest is not None and digests:
            damaged += wrong_digests(path, shared_out(manifest.files))
        if manifest is not None and is_strict and replica_of(engine) == 0:
            model = difference_of_models(engine, manifest)
        if manifest is not None and wanted.optimizer_states and not model and replica_of(engine) == 0:
            order = difference_of_orders(engine, manifest)
        if not trusted and not damaged:
            names = [file.path for file in manifest.files] if manifest else sorted(one.name for one in path.iterdir())
            refused += refused_types([path / name for name in shared_out(names) if name.endswith(".pt")])
    except OSError as error:
        damaged.append(f"{error.filename or path}: {error.strerror or error}")
    except CheckpointError as error:
        damaged.append(str(error))
    rank = int(engine.checkpoint_mp_rank)
    return {"damaged": damaged, "refused": refused, "model": model, "order": order, "model_rank": rank}
