"""Convert checkpoints to other degrees, another ZeRO stage or one plain file of weights.

:func:`convert` writes a checkpoint of another layout, and :func:`to_single_file` one file of weights. :func:`load`
loads a checkpoint into an engine, and copies its elements by name if the files do not fit. These modules take part:

====================  ================================================================================================
``saved_model``       describes all parameters of the checkpoint, whatever the layout that saved it
``target``            plans the new layout, or says why it cannot be reached
``shards``            computes which elements of which parameter lie where
``deepspeed_reader``  reads weights and optimizer states of single parameters from the saved files
``deepspeed_writer``  lays out the new files
``file_filling``      fills them in place, and resumes after a kill
``engine_filling``    copies into a live engine instead
====================  ================================================================================================

The steps of a conversion into files:

1. Plan: read the manifest, plan the layout, and check that the disk has enough space.
2. Make room: write every file without the bytes of its tensors, into ``.<tag>.converting/<tag>``.
3. Fill: read pieces of parameters, put them together and write them to their places. Both sides are mapped into memory,
   so that no more than the largest parameter is in the memory of the process.
4. Commit: write the manifest, rename the folder to ``<tag>`` and replace ``latest``.

A conversion that was killed is resumed by the next one of the same checkpoint to the same layout.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.deepspeed_reader import WEIGHT, Source, fitting_files, opened
from ds_topo.checkpoint.deepspeed_writer import Writer
from ds_topo.checkpoint.disk import check_folder, discard, failure_to_write, flush, hold, is_held, replace_text
from ds_topo.checkpoint.engine_facts import (
    digests_of_buffers,
    layout_of,
    name_of_states,
    share_of_structure,
    stage_and_slice,
    versions,
    whole_structure,
)
from ds_topo.checkpoint.engine_facts import restore_random_states as set_random_states
from ds_topo.checkpoint.engine_filling import Comparison, EngineFilling
from ds_topo.checkpoint.engine_state import SCHEDULER, restore_progress
from ds_topo.checkpoint.file_filling import FileContent, Filling, Region, fill_all, make_room
from ds_topo.checkpoint.folder import (
    LATEST,
    Checkpoint,
    candidates,
    check_tag,
    look_at,
    put_in_place,
    require_free,
    tags_in,
    text_of_tag,
    told,
    why_passed_over,
    wrong_digests,
)
from ds_topo.checkpoint.loading import DIGESTS, SIZES
from ds_topo.checkpoint.loading import load as load_as_it_is
from ds_topo.checkpoint.manifest import Manifest, SavedFile, SavedParameter, structure_from
from ds_topo.checkpoint.rank_zero import Meeting, shared_out
from ds_topo.checkpoint.safe_reading import OF_DEEPSPEED, reading_checkpoint, refused_types, unreadable
from ds_topo.checkpoint.saved_model import expert_of, model_of, require_splits
from ds_topo.checkpoint.saving import free_bytes
from ds_topo.checkpoint.target import Target, require_loadable, target_of
from ds_topo.errors import (
    CheckpointError,
    CheckpointLayoutError,
    CheckpointModelError,
    CheckpointSpaceError,
    CheckpointVersionError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsafeCheckpointError,
    abridged,
    listed,
)

_MARGIN = 1.02
_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Progress = Callable[[str, int, int], None]
"""A callback: called with the name of a step, the amount that is done, and the total amount."""


def convert(
    checkpoint: Checkpoint,
    folder: str | PathLike[str],
    spec: str,
    *,
    zero: int | None = None,
    tag: str | None = None,
    method: str | None = None,
    bounds: Sequence[int] = (),
    experts: int | None = None,
    zero_options: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    progress: Progress = lambda step, done, of: None,
) -> Path:
    """Write a checkpoint of another layout, which DeepSpeed loads as its own, with or without ds_topo.

    Weights, master weights and optimizer states keep their values bit by bit. So do steps, schedules and the program's
    own state. Random states are kept if the numbers of stages, slices and replicas stay the same.

    Args:
        checkpoint: checkpoint to read, from :func:`ds_topo.checkpoint.look_at`. It is not changed.
        folder: folder of checkpoints for the new one.
        spec: spec of the topology, with all degrees, such as ``"pipe=2,data=4"``.
        zero: ZeRO stage; by default the saved one.
        tag: tag of the new checkpoint; by default the same. An existing checkpoint of this tag is replaced.
        method: ``partition_method`` of the pipeline; by default the saved one.
        bounds: first layer of every stage and the number of layers, instead of a method.
        experts: expert parallel size of every layer (``ep_size``); by default the saved ones.
        zero_options: ``round_robin_gradients``, ``parameter_alignment`` and ``sub_group_size`` of the new job's section
            ``zero_optimization``, as far as they differ from the saved ones.
        save_latest: whether the new checkpoint is loaded by default.
        progress: called while the conversion advances.

    Returns:
        The new checkpoint's own folder.

    Raises:
        DamagedCheckpointError, CheckpointVersionError, UnsafeCheckpointError: the checkpoint cannot be read.
        CheckpointLayoutError, TopologyError: the layout cannot be reached; the message says why.
        CheckpointSpaceError: the disk has too little space. In all of these cases nothing was written.
    """
    to, checkpoint = check_folder(folder), _checked(checkpoint)
    _check_wanted(spec, zero, method, bounds, experts, zero_options)
    manifest = readable(checkpoint)
    new_tag = check_tag(checkpoint.tag if tag is None else tag)
    with fitting_files(checkpoint.path):
        model = model_of(manifest)
        target = target_of(model, spec, zero, method, bounds, experts, zero_options)
        conversion = Conversion(checkpoint, target, to, new_tag)
    with conversion.begin():
        conversion.make_room()
        files = conversion.fill(progress=progress)
        return conversion.commit(files, save_latest=save_latest)


def _check_wanted(
    spec: object, zero: object, method: object, bounds: object, experts: object, zero_options: object
) -> None:
    """Refuse values of wrong types, which must not look like faults of the checkpoint.

    Raises:
        TypeError: the message names the argument.
    """
    are_numbers = isinstance(bounds, Sequence) and all(isinstance(bound, int) for bound in bounds)
    for name, value, is_right, wanted in (
        ("spec", spec, isinstance(spec, str), 'a topology with all degrees, such as "data=4"'),
        ("zero", zero, zero is None or type(zero) is int, "the stage 0, 1, 2 or 3"),
        ("method", method, method is None or isinstance(method, str), "a partition_method, such as 'parameters'"),
        ("bounds", bounds, are_numbers, "the first layer of every stage and the number of layers, such as (0, 3, 6)"),
        ("experts", experts, experts is None or type(experts) is int, "the expert parallel size of all layers"),
        (
            "zero_options",
            zero_options,
            zero_options is None or isinstance(zero_options, Mapping),
            "options of zero_optimization, such as {'round_robin_gradients': True}",
        ),
    ):
        if not is_right:
            raise TypeError(f"{name}={abridged(value)}: give {wanted}")


def _checked(checkpoint: object) -> Checkpoint:
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"checkpoint={abridged(checkpoint)} is not a checkpoint: give what ds_topo.checkpoint.look_at(folder, tag) "
            "returns"
        )
    return checkpoint


def readable(checkpoint: Checkpoint) -> Manifest:
    """Return the manifest of a complete checkpoint whose files are safe to read.

    Raises:
        DamagedCheckpointError, CheckpointVersionError, CheckpointLayoutError, UnsafeCheckpointError: it cannot be read.
    """
    if checkpoint.needs:
        raise CheckpointVersionError(f"the checkpoint {checkpoint.tag!r}: {checkpoint.needs}")
    if not os.path.lexists(checkpoint.path):
        known = listed(tags_in(checkpoint.path.parent))
        raise MissingCheckpointError(f"no checkpoint {checkpoint.tag!r} in {checkpoint.path.parent}: there are {known}")
    if checkpoint.problems:
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {told(checkpoint.problems)}")
    if checkpoint.manifest is None:
        raise CheckpointLayoutError(
            f"{checkpoint.path} has no {manifests.NAME}: DeepSpeed alone saved it, and its layout is not known. Load "
            "it in the layout that saved it, and save it with ds_topo"
        )
    paths = [checkpoint.path / file.path for file in checkpoint.manifest.files if file.path.endswith(".pt")]
    if problems := unreadable(paths):
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {told(problems)}")
    if refused := refused_types(paths):
        raise UnsafeCheckpointError(f"{checkpoint.path}: {refused[0]}")
    return checkpoint.manifest


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the path, and the free space of its disk, if writing fails."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # the latter is torch's
        raise failure_to_write(path, error) from error


class Conversion:
    """The conversion of one checkpoint, in steps.

    Args:
        checkpoint: checkpoint to read.
        target: the new layout.
        folder: folder of checkpoints for the new one.
        tag: tag of the new checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, target: Target, folder: Path, tag: str) -> None:
        self._checkpoint, self._target, self.folder, self._tag = checkpoint, target, folder, tag
        self.source = checkpoint.path
        self._source = Source(target.model, checkpoint.path)
        self._writer = Writer(self._source, target)
        self._draft = folder / f".{tag}.converting"
        self._files = self._draft / tag

    def begin(self) -> BinaryIO:
        """Prepare the folder, or keep the files of a killed conversion.

        Returns:
            A file to close after the commit: until then no other process converts into the same folder.

        Raises:
            CheckpointError: the new checkpoint would replace the old one, or another process is converting.
            CheckpointLayoutError: slices hold different values of something that would become one.
            CheckpointSpaceError: the disk has too little space.
        """
        if (self.folder / self._tag).resolve() == self._checkpoint.path.resolve():
            raise CheckpointError(
                f"{self._checkpoint.path} would be replaced by its own conversion: give another folder or another tag"
            )
        require_free(self.folder, self._tag)
        if is_held(self._draft):
            raise CheckpointError(
                f"another process is converting into {self._draft} at this moment: wait for it, or give another folder "
                "or tag"
            )
        with fitting_files(self.source):
            self._source.require_equal_copies(self._target.slices, has_states=True)
        manifest = (self._checkpoint.path / manifests.NAME).read_bytes()
        plan = {
            "from": hashlib.sha256(manifest).hexdigest(),
            "layout": asdict(self._target.layout),
            "structure": asdict(self._target.structure),
            "boot": _BOOT.read_text().strip() if _BOOT.exists() else "",  # a reboot loses what the caches had
        }
        text, path = json.dumps(plan, sort_keys=True), self._draft / "plan.json"
        if not path.is_file() or path.read_text(errors="replace") != text:
            discard(self._draft)
        written = sum(path.stat().st_size for path in self._files.glob("*")) if self._files.exists() else 0
        with fitting_files(self.source):
            needed = self._writer.bytes() - written
        if (free := free_bytes(self.folder)) < needed * _MARGIN:
            raise CheckpointSpaceError(
                f"the checkpoint {self._tag!r} of {self._target.layout} takes {needed:,} bytes, and the disk of "
                f"{self.folder} has {free:,}. Free some space, or convert to another disk. Nothing was written"
            )
        self._files.mkdir(parents=True, exist_ok=True)
        held = hold(self._draft)
        replace_text(path, text)
        return held

    def make_room(self) -> None:
        """Write the files without the bytes of their tensors."""
        with fitting_files(self.source), _naming(self._files):
            make_room(self._writer.files(), self._files)

    def fill(self, progress: Progress = lambda step, done, of: None) -> list[SavedFile]:
        """Fill the files and flush them to the disk."""
        with fitting_files(self.source):
            fillings = [Filling(self._source, self._target.slices, file, self._files) for file in self._writer.files()]
        with _naming(self._files):
            digests = fill_all(fillings, self._draft / "done.txt", progress)
        return [
            SavedFile(one.path.relative_to(self._files).as_posix(), one.bytes, digest, 0)
            for one, digest in zip(fillings, digests, strict=True)
        ]

    def commit(self, files: Iterable[SavedFile], *, save_latest: bool = True) -> Path:
        """Write the manifest and give the new checkpoint its name. Return its folder."""
        assert self._checkpoint.manifest is not None
        manifest = Manifest(
            self._tag,
            self._checkpoint.manifest.step,
            datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            self._target.layout,
            tuple(sorted(files, key=lambda file: file.path)),
            tuple(self._rows()),
            versions(),
            self._target.structure,
        )
        replace_text(self._files / manifests.NAME, manifests.to_text(manifest))
        for name in _SCRIPTS:
            script, place = self._checkpoint.path.parent / name, self.folder / name
            if script.exists() and not place.exists():
                shutil.copy(script, place)
        put_in_place(self._files, self.folder, self._tag)
        if save_latest:
            replace_text(self.folder / LATEST, self._tag)
        discard(self._draft)
        flush(self.folder)
        return self.folder / self._tag

    def _rows(self) -> list[SavedParameter]:
        """Return the parameters as the manifest lists them, where one row stands for all experts of a layer."""
        slices = self._target.slices
        found = []
        for one in self._target.model.parameters.values():
            expert = expert_of(one.name) if one.experts else None
            if expert is not None and expert.number:
                continue
            stages = [stage for stage, names in enumerate(self._target.names) if one.name in names]
            row = SavedParameter(
                one.name if expert is None else expert.numbered("*"),
                one.shape_of_slice(slices),
                str(one.dtype).removeprefix("torch."),
                tuple(stage * slices + place for stage in stages for place in range(slices)),
                one.split.dim if one.split is not None else None,
                one.experts or None,
                one.is_trained,
            )
            found.append(row)
        return sorted(found, key=lambda row: row.model_ranks[0])


def to_single_file(
    checkpoint: Checkpoint,
    path: str | PathLike[str],
    kind: str = "torch",
    progress: Progress = lambda step, done, of: None,
) -> Path:
    """Write all weights into one file, in the module's types and under its names, with slices put together.

    A tied parameter is written once, under its first name: ``tied_modules.<key>.`` in a pipeline, whose layers go by
    their number. Buffers are written too. Torch's file also has other names of the same parameter.

    Args:
        checkpoint: checkpoint to read.
        path: the file.
        kind: ``"torch"``, for ``torch.load``, or ``"safetensors"``.
        progress: called while the file is written.

    Raises:
        ValueError: unknown kind.
        CheckpointError: the checkpoint cannot be read, slices cannot be put together, there is too little space, or
            safetensors is not installed.
    """
    path, manifest = check_folder(path, "path"), readable(_checked(checkpoint))
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: give the file to write, such as {path / 'weights.pt'}")
    if kind not in ("torch", "safetensors"):
        raise ValueError(f"kind={abridged(kind)} is not a format of a single file: give 'torch' or 'safetensors'")
    if kind == "safetensors" and importlib.util.find_spec("safetensors") is None:
        raise CheckpointError(
            "--to safetensors needs the package safetensors, which is not installed: pip install safetensors"
        )
    with fitting_files(checkpoint.path):
        model = model_of(manifest)
        require_splits(model, 1)
    source = Source(model, checkpoint.path)
    with fitting_files(checkpoint.path):
        source.require_equal_copies(1, has_states=False)
    needed = sum(one.numel_of_slice(1) * one.dtype.itemsize for one in model.parameters.values())
    if (free := free_bytes(path.parent)) < needed:
        raise CheckpointSpaceError(
            f"{path} takes {needed:,} bytes, and its disk has {free:,}. Free some space, or write to another disk. "
            "Nothing was written"
        )
    draft = path.with_name(f".{path.name}.part")
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
    if kind == "torch":

        def content() -> dict[str, Any]:
            found: dict[str, Any] = {name: Region.of_weight(one, 0, 1) for name, one in model.parameters.items()}
            found.update({alias: found[name] for alias, name in model.structure.aliases.items()})
            return {**found, **dict(source.buffers())}

        file = FileContent(draft.name, content)
        with fitting_files(checkpoint.path), _naming(path):
            make_room([file], draft.parent)
            filling = Filling(source, 1, file, draft.parent)
        filling.fill(None, 0, lambda done: progress("megabytes", done // 10**6, filling.bytes // 10**6))
    else:  # this package writes all at once, and refuses tensors that share memory, such as other names of the same
        weights: dict[str, torch.Tensor] = {}
        for number, (name, one) in enumerate(model.parameters.items(), 1):
            elements = source.elements(name, WEIGHT, 0, 1, 0, one.numel_of_slice(1))
            weights[name] = elements.view(one.shape_of_slice(1)).detach().contiguous()
            progress("parameters", number, len(model.parameters))
        weights.update((name, buffer.clone()) for name, buffer in source.buffers())
        importlib.import_module("safetensors.torch").save_file(weights, draft, metadata={"format": "pt"})
    flush(draft)
    os.replace(draft, path)
    flush(path.parent)
    return path


def load(
    engine: Any,
    folder: str | PathLike[str],
    tag: str | None = None,
    *,
    convert: bool = False,
    verify: str = SIZES,
    trusted: bool = False,
    restore_random_states: bool = True,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., None] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint into an engine; with ``convert=True`` it may have another layout. Collective over all ranks.

    If the files do not fit the engine's layout, every rank reads its own elements out of them, by the names of
    parameters. Nothing is written to the disk.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        folder: folder of all checkpoints.
        tag: the only tag to load. By default it is the one that ``latest`` names, or else the newest complete one.
        convert: convert the checkpoint if this layout cannot read its files: other degrees, stages of a pipeline,
            stages of ZeRO, precision, groups of the optimizer, or frozen parameters. Random states are restored if the
            numbers of stages, slices and replicas are the same.
        verify: ``"sizes"`` of its files, or ``"digests"`` as well.
        trusted: as in :func:`ds_topo.checkpoint.loading.load`.
        restore_random_states: see there.
        load_module_strict: as in ``engine.load_checkpoint``, like all following arguments. If it is False, a conversion
            leaves parameters that the checkpoint does not have as they are, and a warning names them.
        load_optimizer_states: see there.
        load_lr_scheduler_states: see there.
        load_module_only: see there.
        custom_load_fn: see there; not possible with a conversion.

    Returns:
        The checkpoint's own folder, and the ``client_state`` that was saved.

    Raises:
        CheckpointLayoutError: this layout cannot read the files, and with ``convert`` cannot be reached; the message
            says why.
        CheckpointModelError: the checkpoint is of another model; the message names the first parameter that differs.
        Exception: others as in :func:`ds_topo.checkpoint.loading.load`.
    """
    options = {
        "load_module_strict": load_module_strict,
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
    }
    try:
        return load_as_it_is(
            engine,
            folder,
            tag,
            verify=verify,
            trusted=trusted,
            restore_random_states=restore_random_states,
            custom_load_fn=custom_load_fn,
            **options,
        )
    except CheckpointLayoutError:  # raised on all ranks
        if not convert:
            raise
    failure = None
    if custom_load_fn is not None:
        failure = ValueError("custom_load_fn gets the state dict of a file, and conversions read parameters by name")
    root, tag = Path(folder), None if tag is None else text_of_tag(tag)
    meeting = Meeting.begin(f"converting a checkpoint of {root}", f"tag {tag!r} {verify=} {options}", failure)
    found = look_at(root, meeting.decided("choice", lambda: _choose(root, tag)))
    manifest = found.manifest
    problems = (
        wrong_digests(found.path, shared_out(manifest.files)) if verify == DIGESTS and manifest is not None else []
    )
    if manifest is None:
        problems.append(f"{found.path} is not visible here, but all ranks must share its file system")
    damaged = DamagedCheckpointError(f"the checkpoint {found.tag!r}: {told(problems)}") if problems else None
    meeting.all_or_none("the checkpoint is whole", damaged)
    assert manifest is not None
    has_states = load_optimizer_states and not load_module_only
    has_scheduler = load_lr_scheduler_states and not load_module_only
    with reading_checkpoint(found.path):
        source = _reachable(engine, meeting, found, manifest, has_states=has_states)
        filling = _compared(engine, meeting, found, source, has_states=has_states, is_strict=load_module_strict)
        state: dict[str, Any] = {}

        def copy() -> None:
            filling.copy()
            is_like = source.is_like(layout_of(engine))
            saved = source.model_states(int(engine.checkpoint_mp_rank) if is_like else 0)
            state.update((key, value) for key, value in saved.items() if key not in OF_DEEPSPEED)
            if not load_module_only:
                scale = source.loss_scale() if layout_of(engine).precision == source.layout.precision == "fp16" else {}
                left_out = () if has_scheduler else (SCHEDULER,)
                restore_progress(
                    engine, {key: value for key, value in {**saved, **scale}.items() if key not in left_out}
                )
            states = found.path / name_of_states(engine)
            if restore_random_states and is_like and states.exists():
                set_random_states(engine, opened(states))

        _step(meeting, found, "copied", copy)
        _step(meeting, found, "weights updated", filling.finish)
    return str(found.path), state


def _choose(root: Path, tag: str | None) -> str:
    """Return, on rank 0, the tag of the checkpoint whose layout did not fit.

    Raises:
        CheckpointError: it cannot be read.
    """
    damaged: list[Checkpoint] = []
    for found in candidates(root) if tag is None else [look_at(root, tag)]:
        if found.is_whole or tag is not None:
            break
        damaged.append(found)
    else:
        raise MissingCheckpointError(f"no checkpoint in {root} is complete: save one first, or give another folder")
    if tag is None and (said := why_passed_over(root, found, damaged)):
        warnings.warn(said, RuntimeWarning, stacklevel=5)
    readable(found)
    return found.tag


def _step(meeting: Meeting, found: Checkpoint, done: str, work: Callable[[], Any]) -> Any:
    """Do a part of the work on all ranks, and raise on all of them if one fails."""
    failure, result = None, None
    try:
        with fitting_files(found.path):
            result = work()
    except Exception as error:  # of any class: the other ranks must receive it
        failure = error
    meeting.all_or_none(done, failure, is_alone=failure is not None)
    return result


def _reachable(engine: Any, meeting: Meeting, found: Checkpoint, manifest: Manifest, *, has_states: bool) -> Source:
    """Open the checkpoint for this job's layout.

    Raises:
        CheckpointLayoutError: the layout cannot be reached; the same on every rank.
    """
    meeting.post("structure", share_of_structure(engine))
    meeting.all_or_none("described", None)
    layout, (_, _, slices) = layout_of(engine), stage_and_slice(engine)

    def plan() -> Mapping[str, Any]:
        structure = whole_structure(meeting.posted("structure"))
        if structure is None:
            raise CheckpointLayoutError(
                "no rank of this job describes the structure of its model. Convert the checkpoint by "
                "ds-topo convert, and load the new one"
            )
        with fitting_files(found.path):
            model = model_of(manifest, structure.splits)
            require_loadable(model, layout, structure, slices, has_states=has_states)
            Source(model, found.path).require_equal_copies(slices, has_states=has_states)
        return asdict(structure)

    structure = structure_from(meeting.decided("structure", plan))
    return Source(model_of(manifest, structure.splits), found.path)


def _compared(
    engine: Any, meeting: Meeting, found: Checkpoint, source: Source, *, has_states: bool, is_strict: bool
) -> EngineFilling:
    """Compare the checkpoint with the engines of all ranks.

    Raises:
        CheckpointModelError, CheckpointLayoutError: they do not fit; the same on every rank.
    """

    def compare() -> tuple[EngineFilling, Comparison]:
        filling = EngineFilling(engine, source, has_states=has_states)
        return filling, filling.compare()

    filling: EngineFilling
    filling, comparison = _step(meeting, found, "compared", compare)
    has_new_slices = stage_and_slice(engine)[2] != source.model.slices
    buffers = (stage_and_slice(engine)[0], digests_of_buffers(engine) if has_new_slices else {})

    def judge(posted: list[Any]) -> str:
        rows = [Comparison(**row) for row, _ in posted]
        names, added = {name for row in rows for name in row.names}, {}
        for row in rows:
            added.update(row.added)
        there: dict[str, Any] = {**source.model.parameters, **dict(source.buffers())}
        left_out = [
            f"it has {name!r} {list(one.shape)}, which the model does not have"
            for name, one in there.items()
            if name not in names
        ]
        problem = next((row.problem for row in rows if row.problem), "")
        if problem or (is_strict and (added or left_out)):
            shape, problem = problem, problem or next(iter(added.values()), "") or left_out[0]
            raise CheckpointModelError(
                f"the checkpoint {found.tag!r} of {found.path.parent} is of another model: {problem}. Build "
                "the model and freeze its parameters as when it was saved"
                + ("" if shape else ", or load what both have (load_module_strict=False)")
            )
        if conflict := next((row.conflict for row in rows if row.conflict), ""):
            raise CheckpointLayoutError(f"the checkpoint {found.tag!r} of {found.path.parent}: {conflict}")
        known: dict[tuple[int, str], str] = {}
        for _, (stage, digests) in posted:
            for name, digest in digests.items():
                if known.setdefault((stage, name), digest) != digest:
                    raise CheckpointLayoutError(
                        f"the buffer {name!r} differs between slices of this job, and the checkpoint of "
                        f"model={source.model.slices} has one value for all of its slices: set partition_dim on it, "
                        "after deepspeed.initialize, if slices split it. Register one that follows from the slice "
                        "itself with persistent=False"
                    )
        return "; ".join([*added.values(), *left_out])

    said = meeting.decided_from("difference", (asdict(comparison), buffers), judge)
    if said and dist.get_rank() == 0:
        warnings.warn(
            f"the checkpoint {found.tag!r} of {found.path.parent} was loaded although {said}",
            RuntimeWarning,
            stacklevel=3,
        )
    return filling
