"""Load the requested checkpoint, or else the newest complete one: the same on all ranks, or an error on all.

::

    all ranks   agree on tag and options
    rank 0      finds the next candidate that is complete by the sizes of its files, and readable in this layout
    all ranks   check their share of the files (digests if requested, types to build), and their parameters
    rank 0      decides: load it as it is, load it by name, try the next one, or raise
    all ranks   DeepSpeed loads the files; or each rank copies its elements out of them, by name (``by_name``),
                which it also does with plain weights
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.base import patches
from ds_topo.base.ledger import ledger
from ds_topo.base.marks import inner_optimizer
from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint import stock_checkpoints as stock
from ds_topo.checkpoint.by_name import load_into
from ds_topo.checkpoint.deepspeed_reader import (
    DeepSpeedFiles,
    batch_size_of_files,
    name_of_model_states,
    opened,
    options_of_files,
)
from ds_topo.checkpoint.engine_state import SCHEDULER, Named, NamedBuffer, Rename, restore_progress, with_same_groups
from ds_topo.checkpoint.folder import Checkpoint, check_folder, reason_of, unreadable, wrong_in_stock_checkpoint
from ds_topo.checkpoint.manifest import BF16_OPTIMIZER, SavedLayout, SavedPlace, SavedStructure, why_unreachable
from ds_topo.checkpoint.meeting import Meeting, shared_out
from ds_topo.checkpoint.plain_weights import WeightFiles, files_of_weights
from ds_topo.checkpoint.safe_reading import (
    REPLICAS,
    entries_of_program,
    how_to_verify,
    reading_checkpoint,
    refused_types,
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
    warn,
)
from ds_topo.health import guard

SIZES, DIGESTS = "sizes", "digests"
_UNSCALED = ("fp16", 0)
"""The precision and the ZeRO stage of engines whose losses DeepSpeed itself does not multiply by the loss scale."""


@dataclass(frozen=True)
class LoadOptions:
    """The options of a load, which all ranks must share."""

    convert: bool
    verify: str
    trusted: bool
    restore_random_states: bool
    load_module_strict: bool
    load_optimizer_states: bool
    load_lr_scheduler_states: bool
    load_module_only: bool
    has_custom_function: bool

    @property
    def has_states(self) -> bool:
        """True if the optimizer's states are to be loaded."""
        return self.load_optimizer_states and not self.load_module_only

    @property
    def has_scheduler(self) -> bool:
        """True if the state of a learning-rate scheduler is to be loaded."""
        return self.load_lr_scheduler_states and not self.load_module_only


@guard.over("load")
def load(
    engine: DeepSpeedEngine,
    folder: str | PathLike[str],
    tag: str | None = None,
    *,
    convert: bool = True,
    verify: str = SIZES,
    trusted: bool = False,
    restore_random_states: bool = True,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., None] | None = None,
    rename: Rename = None,
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint of any layout into an engine; collective over all ranks.

    Without a tag, the checkpoint that ``latest`` names is loaded. If that one is damaged or missing, the newest
    complete one is loaded, and rank 0 warns with the reason. In checkpoints that DeepSpeed alone saved, without a
    manifest, only missing and truncated files are found.

    DeepSpeed loads files that fit the engine's layout: those of any order of the same degrees. Otherwise every rank
    reads its own elements out of them, by the names of parameters. Nothing is written to the disk.

    It may also be plain weights: Hugging Face's folder of a model, or a file of safetensors or of torch. Then weights
    and buffers are loaded, and nothing else changes.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        folder: the folder of all checkpoints; or plain weights.
        tag: the only checkpoint to load. By default see above.
        convert: whether a checkpoint whose files do not fit is read by name: other degrees, stages of a pipeline,
            stages of ZeRO, precision, groups of the optimizer, or frozen parameters. Random states are restored if the
            numbers of stages, slices and replicas are the same. If it is False, such a checkpoint is refused, and so
            are plain weights.
        verify: how to check that a checkpoint is complete: by the ``"sizes"`` of its files, or by their ``"digests"``,
            which also finds changed bytes. For digests every rank reads its share of the files once more.
        trusted: allow all types in the files, which may run any code that they contain. Reading by name refuses such
            types.
        restore_random_states: whether to restore random states if they were saved.
        load_module_strict: as in ``engine.load_checkpoint``, like all following arguments. If it is False, reading by
            name leaves parameters that the checkpoint does not have as they are, and a warning names them.
        load_optimizer_states: see there.
        load_lr_scheduler_states: see there.
        load_module_only: see there.
        custom_load_fn: see there; not possible if the files do not fit.
        rename: from the module's names of parameters to those of plain weights: a function, or a mapping that may omit
            names that stay. A pipeline's are ``"3.weight"``, and ``"tied_modules.<key>.weight"`` if tied.

    Returns:
        The checkpoint's own folder, and the ``client_state`` that was saved; of plain weights their path, and nothing.

    Raises:
        TypeError, ValueError: the engine, the tag or ``verify`` is invalid.
        DisagreementError: ranks pass different arguments, or a rank does not call the function.
        MissingCheckpointError: there is no checkpoint, or none with that tag.
        DamagedCheckpointError: the checkpoint with that tag is damaged, or all checkpoints are.
        CheckpointVersionError: a later ds_topo saved it.
        CheckpointLayoutError: its states cannot be those of this layout, or its files do not fit (``convert=False``).
        CheckpointModelError: it is of another model; the message names the first parameter that differs.
        UnsafeCheckpointError: it holds types that are not allowed.
        CheckpointError: a rank failed while it loaded; the engine cannot be used then.
    """
    failure: Exception | None = None
    root, name = Path(), None
    try:
        facts.require_engine(engine)
        root, name = check_folder(folder), None if tag is None else folders.text_of_tag(tag)
        if verify not in (SIZES, DIGESTS):
            raise ValueError(f"verify={abridged(verify)}: give {SIZES!r} or {DIGESTS!r}")
    except (TypeError, ValueError) as problem:
        failure = problem
    finish_what_is_unfinished()
    options = LoadOptions(
        convert=convert,
        verify=verify,
        trusted=trusted,
        restore_random_states=restore_random_states,
        load_module_strict=load_module_strict,
        load_optimizer_states=load_optimizer_states,
        load_lr_scheduler_states=load_lr_scheduler_states,
        load_module_only=load_module_only,
        has_custom_function=custom_load_fn is not None,
    )
    what = f"the checkpoint {name!r}" if name else "the newest checkpoint"
    meeting = Meeting.begin(f"loading {what} of {root}", f"tag {name!r} {options}", failure)
    choice = _Choice(engine, root, name, options)
    chosen, is_fitting = choice.agreed(meeting)
    for concern in choice.concerns():
        warn(concern)
    if is_fitting:
        state = meeting.step("loaded", lambda: _load_files(engine, root / chosen, options, custom_load_fn))
    else:
        state = _load_by_name(engine, meeting, root / chosen, options, rename, is_plain=not chosen)
    meeting.end()
    if (of_replicas := state.get(REPLICAS)) is not None and hasattr(engine, "replicas"):
        engine.replicas.manager.load_state_dict(of_replicas)
    return str(root / chosen), entries_of_program(state)


def _load_files(engine: DeepSpeedEngine, path: Path, options: LoadOptions, custom_load_fn: Any) -> dict[str, Any]:
    """Let DeepSpeed load files; return the ``client_state``. Whatever it raises becomes a CheckpointError."""
    has_no_states = options.load_module_only and int(engine.zero_optimization_stage()) == 3
    try:
        with (
            reading_checkpoint(path, trusted=options.trusted),
            ledger.bound(patches.WEIGHTS_OF_LATEST, partial(_of_checkpoint, engine, path)),
            deepspeeds_part(engine),
            with_same_groups(inner_optimizer(engine)),
        ):
            found, state = engine.load_checkpoint(
                str(path.parent),
                tag=path.name,
                load_module_strict=options.load_module_strict,
                load_optimizer_states=options.load_optimizer_states and not has_no_states,  # else it loads nothing
                load_lr_scheduler_states=options.load_lr_scheduler_states,
                load_module_only=options.load_module_only,
                custom_load_fn=custom_load_fn,
            )
            if found is None:
                raise CheckpointError(f"DeepSpeed found no files to load in {path}")
            states = path / facts.name_of_states(engine)
            if options.restore_random_states and states.exists():
                facts.restore_random_states(engine, torch.load(states, map_location="cpu"))
    except CheckpointError:
        raise
    except Exception as raised:  # of any class: the other ranks must receive it
        raise CheckpointError(
            f"DeepSpeed could not load {path}: {type(raised).__name__}: {raised}. If its files may have been "
            f"changed, find out by {how_to_verify(path)}"
        ) from raised
    return dict(state)


def _load_by_name(
    engine: DeepSpeedEngine, meeting: Meeting, path: Path, options: LoadOptions, rename: Rename, *, is_plain: bool
) -> dict[str, Any]:
    """Copy the elements of a checkpoint of any layout, or plain weights, into the engine; return the ``client_state``.

    If it cannot be loaded, CheckpointLayoutError or CheckpointModelError is raised before anything changes.
    """
    has_states, new_names = options.has_states and not is_plain, rename if is_plain else None

    def open_source(structure: SavedStructure, named: list[Named], buffers: dict[str, NamedBuffer]) -> DeepSpeedFiles:
        if not path.exists():
            raise CheckpointError(f"{path} is not visible here, but all ranks must share its file system")
        if is_plain:
            return WeightFiles(path, named, buffers)
        if (manifest := folders.manifest_of(path)) is None:
            saved = stock.layout_of_files(path, facts.name_of_optimizer(engine))
            manifest = stock.manifest_of_files(path, saved, structure)
        return DeepSpeedFiles(model_of(manifest, structure.splits), path)

    source, loader = load_into(
        engine, meeting, open_source, rename=new_names, has_states=has_states, is_strict=options.load_module_strict
    )
    is_like = not is_plain and source.is_like(facts.layout_of(engine))
    saved = {} if is_plain else source.model_states(int(engine.checkpoint_mp_rank) if is_like else 0)

    def copy() -> None:
        loader.copy()
        if not (options.load_module_only or is_plain):
            both_fp16 = facts.layout_of(engine).precision == source.layout.precision == "fp16"
            progress = {**saved, **(source.loss_scale() if both_fp16 else {})}
            left_out = () if options.has_scheduler else (SCHEDULER,)
            restore_progress(engine, {key: value for key, value in progress.items() if key not in left_out})
        states = path / facts.name_of_states(engine)
        if options.restore_random_states and is_like and states.exists():
            facts.restore_random_states(engine, opened(states))

    meeting.step("copied", copy)
    meeting.step("weights updated", loader.finish)
    return saved


def _of_checkpoint(engine: DeepSpeedEngine, path: Path, read: Callable[..., Any]) -> Callable[..., Any]:
    """Let the function with which ZeRO 3 reads weights alone read this checkpoint, and only this rank's slice."""

    def weights(folder: Any, *arguments: Any, **options: Any) -> Any:
        _, place, slices = facts.stage_and_slice(engine)
        if slices > 1 and (manifest := folders.manifest_of(path)) is not None:
            return DeepSpeedFiles(model_of(manifest), path).state_dict_of(place)
        return read(folder, path.name, *arguments, **options)

    return weights


@dataclass
class Problems:
    """The problems that a rank finds in a checkpoint. Texts are empty where there is none."""

    order: str
    """Why DeepSpeed cannot load the files as they are."""
    damaged: list[str] = field(default_factory=list)
    """The files that are damaged."""
    model: str = ""
    """The first parameter that is another one here."""
    refused: str = ""
    """The types that are not allowed."""
    scheduler: str = ""
    """Why the state of the learning-rate scheduler does not fit."""


class _Choice:
    """The choice of a checkpoint: rank 0 proposes candidates one after the other, and all ranks check them.

    Only one with the given tag is proposed, unless that is None.
    """

    def __init__(self, engine: DeepSpeedEngine, root: Path, tag: str | None, options: LoadOptions) -> None:
        self._engine, self._root, self._tag, self._options = engine, root, tag, options
        self._layout = facts.layout_of(engine)
        self._left = self._to_try()
        self.damaged: list[Checkpoint] = []
        """The candidates that were rejected; used on rank 0 only."""
        self.chosen: Checkpoint | None = None
        """The last proposal; used on rank 0 only."""
        self._saved: SavedLayout | None = None
        """Its layout, if it is known; used on rank 0 only."""

    def agreed(self, meeting: Meeting) -> tuple[str, bool]:
        """Return the tag of the checkpoint that all ranks load, and whether its files fit; an empty tag: plain weights.

        Collective over all ranks.
        """
        for attempt in count(1):
            tag, reason = meeting.decide(f"choice {attempt}", None, lambda _: self.next(), posting=())
            if not tag:
                break
            share = self.check(self._root / tag, reason)
            is_fitting = meeting.decided_from(f"check {attempt}", share, self.accepts)
            if is_fitting is not None:
                return tag, is_fitting
        return "", False

    def next(self) -> tuple[str, str]:
        """Return, on rank 0, the tag of the next candidate that is complete by the sizes of its files.

        The second text is why its files do not fit this layout, or empty. An empty tag stands for plain weights. If
        nothing can be loaded, the CheckpointError says why.
        """
        for checkpoint in self._left:
            if checkpoint.needs:
                raise CheckpointVersionError(f"the checkpoint {checkpoint.tag!r}: {checkpoint.needs}")
            self._saved = checkpoint.manifest.layout if checkpoint.manifest is not None else None
            if checkpoint.is_whole and self._saved is None:
                with suppress(CheckpointError):  # another check names the file
                    self._saved = stock.layout_of_files(checkpoint.path, facts.name_of_optimizer(self._engine))
                if self._saved is not None and (missing := wrong_in_stock_checkpoint(checkpoint.path, self._saved)):
                    checkpoint = replace(checkpoint, problems=tuple(missing))
            if checkpoint.is_whole:
                self.chosen = checkpoint
                return checkpoint.tag, self._why_unreachable(checkpoint)
            self.damaged.append(checkpoint)
        error, options = self._nothing(), self._options
        may_be_plain = options.convert and self._tag is None and not options.has_custom_function
        if may_be_plain and isinstance(error, MissingCheckpointError) and files_of_weights(self._root):
            return "", ""
        raise error

    def concerns(self) -> Iterator[str]:
        """Yield, on rank 0, what the user should know about the chosen checkpoint."""
        chosen = self.chosen
        if chosen is None:
            return
        if self._tag is None and (reason := folders.why_passed_over(self._root, chosen, self.damaged)):
            yield reason
        if chosen.manifest is None:
            yield printable(
                f"{chosen.path} has no {manifests.NAME}: DeepSpeed alone saved it, or the file is lost. Its model and "
                "its digests were not compared, only missing and damaged files are found. The next save writes a "
                "manifest"
            )
            saved, mine = self._saved, self._layout
            is_unscaled = saved is not None and (saved.precision, saved.zero_stage) == _UNSCALED
            scales = (mine.precision, mine.zero_stage) != _UNSCALED or getattr(self._engine.mpu, "correct_norms", False)
            if is_unscaled and scales and self._options.has_states:
                yield printable(
                    f"{chosen.path} was saved by DeepSpeed alone in fp16 without ZeRO. That divides gradients by the "
                    "loss scale, but does not multiply losses by it, and this engine does: with the saved optimizer "
                    "states its first updates are too large. Load without them (load_optimizer_states=False), or "
                    "continue without ZeRO and with grid.correct_norms = False"
                )

        size, own = None, int(self._engine.train_batch_size())
        if self._saved is not None:
            with suppress(CheckpointError):  # another check names the file
                size = batch_size_of_files(opened(chosen.path / name_of_model_states(self._saved, 0)), self._saved)
        if self._options.has_states and size not in (None, own):
            micro = int(self._engine.train_micro_batch_size_per_gpu())
            yield printable(
                f"the checkpoint {chosen.tag!r} of {self._root} was saved with a train_batch_size of {size}, but this "
                f"engine's is {own}, so its steps have other samples than the learning rate and the schedule were "
                f"chosen for. To go on with {size}, also at another number of replicas: "
                f"config |= grid.batch_sizes({size}, {micro})"
            )

    def check(self, path: Path, reason: str) -> Problems:
        """Check a share of the files, and this rank's parameters unless the layout differs; on every rank."""
        found = Problems(order=reason)
        engine, options = self._engine, self._options
        try:
            manifest = self.chosen.manifest if self.chosen is not None else folders.manifest_of(path)
            if manifest is not None and options.verify == DIGESTS:
                found.damaged = folders.wrong_digests(path, shared_out(manifest.files))
            if not reason and manifest is None and options.has_states:
                found.order = self._other_order(path)
            elif not reason and manifest is not None and facts.replica_of(engine) == 0:
                is_strict = options.load_module_strict and not options.has_custom_function
                if is_strict and (model := facts.difference_of_models(engine, manifest)):
                    found.model = f"{model} (model rank {int(engine.checkpoint_mp_rank)})"
                elif options.has_states and (order := facts.difference_of_orders(engine, manifest)):
                    found.order = (
                        f"has the optimizer's states by position, and {order}, or load by their names (convert=True), "
                        "or load parameters alone (load_module_only=True)"
                    )
            names = [file.path for file in manifest.files] if manifest else sorted(os.listdir(path))
            share = [name for name in shared_out(names) if name.endswith(".pt")]
            found.damaged = found.damaged or unreadable(path, share)
            if not found.damaged:
                found.refused = next(iter(refused_types([path / name for name in share])), "")
            needs_scheduler = options.has_scheduler and engine.lr_scheduler is not None
            if self._saved is not None and needs_scheduler and not found.damaged and not found.refused:
                file = path / name_of_model_states(self._saved, 0)
                state, own = opened(file).get(SCHEDULER), engine.lr_scheduler.state_dict()
                further = [] if state is None else sorted(state.keys() - own.keys())
                if state is None or (further and own.keys() - state.keys()):
                    there = f"the state of another learning-rate scheduler, with {listed(further)}"
                    if state is None:
                        there = "no state of a learning-rate scheduler"
                    found.scheduler = (
                        f"has {there}, and this job has a {type(engine.lr_scheduler).__name__}: load it with "
                        "load_lr_scheduler_states=False, and set the scheduler's step in the program"
                    )
        except OSError as error:
            found.damaged.append(f"{error.filename or path}: {reason_of(error)}")
        except CheckpointError as error:
            found.damaged.append(str(error))
        return found

    def _other_order(self, path: Path) -> str:
        """Say why files that DeepSpeed alone saved have parameters in other places; empty if they have not."""
        engine, layout = self._engine, self._layout
        file = path / name_of_model_states(layout, int(engine.checkpoint_mp_rank))
        if not ((layout.has_partitions or layout.is_pipeline) and file.exists()):
            return ""
        by_name = "load by name (convert=True)"
        with suppress(CheckpointError):  # another check names the file
            states, groups = opened(file), facts.names_of_groups(engine)
            if order := facts.difference_of_options(engine, options_of_files(states)):
                return f"has the optimizer's states by position, and {order}, or {by_name}"
            keep = "Give the pipeline the partition_method that it had, or"
            if not layout.has_partitions:
                counts, own_counts = stock.counts_of_groups(states.get("optimizer")), [*map(len, groups)]
                if counts in (None, own_counts):
                    return ""
                return (
                    f"has {counts} parameters in the groups of the optimizer of a stage, and this job {own_counts}, so "
                    f"that its stages have other layers or its groups other parameters. {keep} {by_name}"
                )
            place = SavedPlace(int(engine.checkpoint_mp_rank), 0)
            saved_groups = stock.groups_of_partitions(path, layout, place, states)
            saved, own = ([name for names in one for name in names] for one in (saved_groups, groups))
            other = (name for name in own + saved if (name in own) != (name in saved))
            if layout.is_pipeline and (first := next(other, "")):
                return f"has {first!r} on another stage of the pipeline. {keep} {by_name}"
        return ""

    def accepts(self, posted: list[dict[str, Any]]) -> bool | None:
        """Decide on rank 0, from all ranks' ``Problems``, whether to load the files as they are.

        False loads them by name, and None tries the next candidate. An error is raised if no other one may replace it.
        """
        assert self.chosen is not None
        if damaged := [problem for share in posted for problem in share["damaged"]]:
            self.damaged.append(replace(self.chosen, problems=tuple(damaged)))
            self.chosen = None
            return None
        where = f"the checkpoint {self.chosen.tag!r} of {self._root}"
        first = {kind: next((share[kind] for share in posted if share[kind]), "") for kind in posted[0]}
        model, order, refused, scheduler = (first[kind] for kind in ("model", "order", "refused", "scheduler"))
        if model and not self._options.convert:
            raise CheckpointModelError(
                f"{where} is of another model: {model}. Build the model as when it was saved; if only its slices or "
                "the padding of a vocabulary differ, load by name (convert=True)"
            )
        order = order or model  # a vocabulary may be padded anew; the copy by name compares models once more
        if order and not self._options.convert:
            raise CheckpointLayoutError(f"{where} {order}")
        if order and self._options.has_custom_function:
            raise CheckpointLayoutError(
                f"{where} {order}. custom_load_fn gets the state dict of a file, and these files are read by name: "
                "leave it out"
            )
        if refused and (order or not self._options.trusted):
            raise UnsafeCheckpointError(f"{where}: {refused}")
        if scheduler:
            raise CheckpointError(f"{where} {scheduler}")
        return not order

    def _to_try(self) -> Iterator[Checkpoint]:
        with suppress(OSError):  # without permission to write, no job was saving there
            folders.take_back_replaced(self._root)
        if self._tag is None:
            yield from folders.candidates(self._root)
        else:
            yield folders.look_at(self._root, self._tag)

    def _why_unreachable(self, checkpoint: Checkpoint) -> str:
        """Say why the files do not fit this layout, and what to do; empty if they do."""
        saved, bounds = self._saved, checkpoint.manifest.structure.bounds if checkpoint.manifest is not None else ()
        if saved is None:
            return ""
        reason = why_unreachable(saved, self._layout, optimizer_states=self._options.has_states)
        own = tuple(map(int, getattr(self._engine.module, "parts", ())))
        if not reason and bounds and own != bounds:
            reason = f"stages that begin with layers {[*bounds[:-1]]} became stages that begin with {[*own[:-1]]}"
        if not reason and self._options.has_states and saved.optimizer == BF16_OPTIMIZER and not saved.zero_stage:
            return (
                f"is of {saved}, and DeepSpeed cannot load the files of {BF16_OPTIMIZER} without ZeRO. Load it by name "
                "(convert=True)"
            )
        if not reason:
            return ""
        return (
            f"is of {saved}; this job is {self._layout}: {reason}. Start the job with the degrees and the ZeRO stage "
            "of the checkpoint, in any order of axes, or load by name (convert=True)"
        )

    def _nothing(self) -> CheckpointError:
        root, tag = self._root, self._tag
        known, kind = folders.tags_in(root), folders.other_kind(root)
        if folders.is_checkpoint(root):
            return MissingCheckpointError(
                f"{root} is one checkpoint: give the folder around it, {str(root.parent)!r}, and tag={root.name!r}"
            )
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
            near = folders.similar_folder(root)
            return MissingCheckpointError(f"no checkpoint in {root}" + f": did you mean {str(near)!r}?" * bool(near))
        return DamagedCheckpointError(f"no checkpoint in {root} is complete: {folders.told(problems)}")


# -- DeepSpeed's method ------------------------------------------------------------------------------------------------


def load_as_a_whole(
    load_checkpoint: Any, engine: DeepSpeedEngine, load_dir: Any, *arguments: Any, **options: Any
) -> Any:
    """Load an engine of a grid, with the arguments and results of ``load_checkpoint``, DeepSpeed's bound method.

    Without a tag and without any checkpoint it warns and returns nothing, as that method does, unless the folder is one
    checkpoint itself.
    """
    given = options_of(load_checkpoint, load_dir, *arguments, **options)
    if not is_ours(engine):
        return load_checkpoint(load_dir, **given)
    if engine.use_node_local_storage() or engine.load_universal_checkpoint():
        is_universal = engine.load_universal_checkpoint()
        with reading_checkpoint(check_folder(load_dir, "load_dir")) if is_universal else nullcontext():
            found, state = load_checkpoint(load_dir, **given)
        return found, state and entries_of_program(state)
    try:
        path, state = load(engine, load_dir, restore_random_states=False, **given)
    except MissingCheckpointError:
        if given.get("tag") is not None or folders.is_checkpoint(Path(load_dir)):
            raise
        if engine.mpu.grid_rank == 0 and (near := folders.similar_folder(Path(load_dir))):
            warn(
                f"load_checkpoint has found no checkpoint in {os.fspath(load_dir)} and returns (None, None), so "
                f"training begins anew: did you mean {str(near)!r}? At a first start, ignore this"
            )
        return load_checkpoint(load_dir, **given)
    folder = Path(path)
    return engine._get_ckpt_name(str(folder.parent), folder.name), state
