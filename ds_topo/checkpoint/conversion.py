"""Convert checkpoints to other degrees, another ZeRO stage or plain files of weights.

:func:`convert` writes a checkpoint of another layout, :func:`to_single_file` one file of weights, and
:func:`to_hugging_face` Hugging Face's files. Loading with ``convert=True`` (``loading``) copies into a live engine
instead. These modules take part:

====================  ================================================================================================
``saved_model``       describes all parameters of the checkpoint, whatever the layout that saved it
``without_manifest``  describes checkpoints that DeepSpeed alone saved, and plain files of weights
``target``            plans the new layout and its optimizer's groups, or says why it cannot be reached
``shards``            computes which elements of which parameter lie where
``deepspeed_reader``  reads weights and optimizer states of single parameters from the saved files
``deepspeed_writer``  lays out the new files
``file_filling``      fills them in place, and resumes after a kill
``engine_filling``    copies into a live engine
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
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.deepspeed_reader import WEIGHT, Source
from ds_topo.checkpoint.deepspeed_writer import Writer
from ds_topo.checkpoint.disk import (
    check_folder,
    discard,
    failure_to_write,
    flush,
    hold,
    is_held,
    replace_text,
    require_space,
)
from ds_topo.checkpoint.engine_facts import versions
from ds_topo.checkpoint.engine_state import renaming
from ds_topo.checkpoint.file_filling import Filling, Region, bytes_of_regions, fill_all, make_room
from ds_topo.checkpoint.folder import (
    LATEST,
    Checkpoint,
    check_tag,
    put_in_place,
    require_free,
    tags_in,
    told,
    unreadable,
    wrong_without_manifest,
)
from ds_topo.checkpoint.manifest import Manifest, SavedParameter, SavedSplit
from ds_topo.checkpoint.safe_reading import refused_types
from ds_topo.checkpoint.saved_model import WholeModel, expert_of, model_of, require_splits, starred
from ds_topo.checkpoint.target import target_of
from ds_topo.checkpoint.without_manifest import (
    NAMES_OF_WEIGHTS,
    manifest_of_files,
    require_safetensors,
    structure_of_files,
)
from ds_topo.errors import (
    CheckpointError,
    CheckpointLayoutError,
    CheckpointVersionError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsafeCheckpointError,
    abridged,
    listed,
)

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
    padding: Mapping[str, int | tuple[int, int]] | None = None,
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
        padding: the rows of parameters whose padding changes, such as a vocabulary's, by name: ``rows`` of the new
            layout, or ``(real, rows)`` if the checkpoint does not say how many of its rows are no padding. Rows of
            padding are zero in weights and states.
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
    _require_no_file(to, "of checkpoints for the new one")
    _check_wanted(spec, zero, method, bounds, experts, zero_options, padding)
    manifest = readable(checkpoint)
    new_tag = check_tag(checkpoint.tag if tag is None else tag)
    model = model_of(manifest, _padded_splits(manifest, padding or {}))
    source = Source(model, checkpoint.path)
    target = target_of(model, spec, zero, method, bounds, experts, zero_options, hyperparameters=source.hyperparameters)
    if (to / new_tag).resolve() == checkpoint.path.resolve():
        raise CheckpointError(
            f"{checkpoint.path} would be replaced by its own conversion: give another folder or another tag"
        )
    require_free(to, new_tag)
    draft = to / f".{new_tag}.converting"
    if is_held(draft):
        raise CheckpointError(
            f"another process is converting into {draft} at this moment: wait for it, or give another folder or tag"
        )
    source.require_equal_copies(target.slices, has_states=True)
    writer, files = Writer(source, target), draft / new_tag
    with _begun(draft, new_tag, manifest, target, bytes_of_regions(writer.files())):
        with _naming(files):
            make_room(writer.files(), files)
            fillings = [Filling(source, files / name, content) for name, content in writer.files()]
            written = fill_all(fillings, draft / "done.txt", progress)
        written.sort(key=lambda file: file.path)
        step, time, layout, structure = manifest.step, manifests.time_now(), target.layout, target.structure
        new = Manifest(new_tag, step, time, layout, tuple(written), _rows(target), versions(), structure)
        replace_text(files / manifests.NAME, manifests.to_text(new))
        for name in _SCRIPTS:
            script, place = checkpoint.path.parent / name, to / name
            if script.exists() and not place.exists():
                shutil.copy(script, place)
        put_in_place(files, to, new_tag)
        if save_latest:
            replace_text(to / LATEST, new_tag)
        flush(to)
        discard(draft)
    return to / new_tag


def _padded_splits(manifest: Manifest, padding: Mapping[str, int | tuple[int, int]]) -> dict[str, SavedSplit]:
    names = [row.name for row in manifest.parameters]
    found = {}
    for name, given in padding.items():
        real, padded = (None, given) if isinstance(given, int) else given
        if name not in names:
            raise CheckpointLayoutError(
                f"padding of {name!r}: the checkpoint has no such parameter, but {listed(names)}"
            )
        found[name] = SavedSplit(0, 1, real, padded)
    return found


def _check_wanted(
    spec: object, zero: object, method: object, bounds: object, experts: object, zero_options: object, padding: object
) -> None:
    """Refuse values of wrong types, which must not look like faults of the checkpoint.

    Raises:
        TypeError: the message names the argument.
    """
    are_numbers = isinstance(bounds, Sequence) and all(isinstance(bound, int) for bound in bounds)
    are_options = zero_options is None or isinstance(zero_options, Mapping)
    rows = [*padding.values()] if isinstance(padding, Mapping) else []
    numbers = [list(one) if isinstance(one, tuple) else [one, one] for one in rows]
    are_rows = all(len(pair) == 2 and all(type(number) is int and number >= 0 for number in pair) for pair in numbers)
    are_rows = are_rows and (padding is None or isinstance(padding, Mapping))
    for name, value, is_right, wanted in (
        ("spec", spec, isinstance(spec, str), 'a topology with all degrees, such as "data=4"'),
        ("zero", zero, zero is None or type(zero) is int, "the stage 0, 1, 2 or 3"),
        ("method", method, method is None or isinstance(method, str), "a partition_method, such as 'parameters'"),
        ("bounds", bounds, are_numbers, "the first layer of every stage and the number of layers, such as (0, 3, 6)"),
        ("experts", experts, experts is None or type(experts) is int, "the expert parallel size of all layers"),
        ("zero_options", zero_options, are_options, "options such as {'round_robin_gradients': True}"),
        ("padding", padding, are_rows, "{'embedding.weight': 50304}, or (50257, 50304) with the rows without padding"),
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


def _require_no_file(path: Path, purpose: str) -> None:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file: give a folder {purpose}")


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
    names = [file.path for file in checkpoint.manifest.files] if checkpoint.manifest else os.listdir(checkpoint.path)
    names = [name for name in names if name.endswith(".pt")]
    if problems := unreadable(checkpoint.path, names):
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {told(problems)}")
    if refused := refused_types([checkpoint.path / name for name in names]):
        raise UnsafeCheckpointError(f"{checkpoint.path}: {refused[0]}")
    if checkpoint.manifest is not None:
        return checkpoint.manifest
    layout, structure = structure_of_files(checkpoint.path)
    if layout is not None and (missing := wrong_without_manifest(checkpoint.path, layout)):
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {told(missing)}")
    return manifest_of_files(checkpoint.path, layout, structure)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the path, and the free space of its disk, if writing fails."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # the latter is torch's
        raise failure_to_write(path, error) from error


def _begun(draft: Path, tag: str, manifest: Manifest, target: WholeModel, size: int) -> BinaryIO:
    """Make the folder of the new files, or keep those of a killed conversion to the same layout.

    Returns:
        A file to close after the commit: until then no other process converts into the same folder.

    Raises:
        CheckpointSpaceError: the disk has too little space.
    """
    plan = {
        "from": hashlib.sha256(manifests.to_text(manifest).encode()).hexdigest(),
        "layout": asdict(target.layout),
        "structure": asdict(target.structure),
        "boot": _BOOT.read_text().strip() if _BOOT.exists() else "",  # a reboot loses what the caches had
    }
    text, path, files = json.dumps(plan, sort_keys=True), draft / "plan.json", draft / tag
    if not path.is_file() or path.read_text(errors="replace") != text:
        discard(draft)
    needed = size - (sum(path.stat().st_size for path in files.glob("*")) if files.exists() else 0)
    require_space(draft.parent, f"the checkpoint {tag!r} of {target.layout}", needed)
    files.mkdir(parents=True, exist_ok=True)
    held = hold(draft)
    replace_text(path, text)
    return held


def _rows(target: WholeModel) -> tuple[SavedParameter, ...]:
    """Return the parameters as the manifest lists them, where one row stands for all experts of a layer."""
    found = []
    for one in target.parameters.values():
        expert = expert_of(one.name) if one.experts else None
        if expert is not None and expert.number:
            continue
        stages = [stage for stage, names in enumerate(target.names) if one.name in names]
        undeclared = -1 if one.name in target.structure.undeclared else None
        row = SavedParameter(
            starred(one.name) if one.experts else one.name,
            target.shape(one.name),
            str(one.dtype).removeprefix("torch."),
            tuple(stage * target.slices + place for stage in stages for place in range(target.slices)),
            undeclared if one.split is None or one.is_stacked else one.split.dim,
            one.experts or None,
            one.is_trained,
        )
        found.append(row)
    return tuple(sorted(found, key=lambda row: row.model_ranks[0]))


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
    path, checkpoint = check_folder(path, "path"), _checked(checkpoint)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: give the file to write, such as {path / 'weights.pt'}")
    if kind not in ("torch", "safetensors"):
        raise ValueError(f"kind={abridged(kind)} is not a format of a single file: give 'torch' or 'safetensors'")
    if kind == "safetensors":
        require_safetensors()
    source = _whole_weights(checkpoint, path.parent, path)
    parameters = source.model.parameters
    if kind == "safetensors":
        _write_safetensors(source, path, None, None, progress)
        return path
    draft = path.with_name(f".{path.name}.part")
    draft.unlink(missing_ok=True)

    weights = {name: Region.of_weight(one, 0, 1) for name, one in parameters.items()}
    aliases = {alias: weights[name] for alias, name in source.model.structure.aliases.items()}
    content = {**weights, **aliases, **dict(source.buffers())}
    with _naming(path):
        make_room([(draft.name, content)], draft.parent)
        filling = Filling(source, draft, content)
    filling.fill(None, 0, lambda done: progress("megabytes", done // 10**6, filling.bytes // 10**6))
    flush(draft)
    os.replace(draft, path)
    flush(path.parent)
    return path


def to_hugging_face(
    checkpoint: Checkpoint,
    folder: str | PathLike[str],
    *,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    largest: int = 5 * 10**9,
    progress: Progress = lambda step, done, of: None,
) -> Path:
    """Write all weights as Hugging Face's ``save_pretrained`` does: ``model.safetensors``, or several and an index.

    Weights have the module's types, with slices put together and without rows of padding. A tied parameter is written
    once, under its first name. Buffers are written too. One file after the other is in memory. ``config.json`` and the
    tokenizer are not written: copy those of the model.

    Args:
        checkpoint: checkpoint to read.
        folder: the folder, which may exist; other files of weights in it are refused.
        rename: from the checkpoint's names to those of the files: a function, or a mapping that may omit names that
            stay.
        largest: bytes of weights in one file.
        progress: called while the files are written.

    Raises:
        CheckpointError: the checkpoint cannot be read, slices cannot be put together, there is too little space,
            safetensors is not installed, or the folder has weights already.
    """
    path, checkpoint = check_folder(folder), _checked(checkpoint)
    _require_no_file(path, "for the files of the model")
    if type(largest) is not int or largest < 1:
        raise ValueError(f"largest={abridged(largest)}: give the bytes of weights in one file, such as {5 * 10**9:_}")
    if known := sorted(
        one.name for one in path.glob("*") if one.suffix in (".safetensors", ".bin") or ".index." in one.name
    ):
        raise CheckpointError(f"{path} has files of weights already, {listed(known, 3)}: give another folder")
    require_safetensors()
    source = _whole_weights(checkpoint, path, path, has_padding=False)
    _write_safetensors(source, path, rename, largest, progress)
    return path


def _whole_weights(checkpoint: Checkpoint, folder: Path, path: Path, *, has_padding: bool = True) -> Source:
    """Open a checkpoint whose weights will be put together and written into a folder, which is made.

    Raises:
        CheckpointLayoutError: slices cannot be put together.
        CheckpointSpaceError: there is too little space.
    """
    manifest = readable(checkpoint)
    known = manifest.structure.splits if manifest.structure is not None and not has_padding else {}
    splits = {name: replace(split, padded=split.real) for name, split in known.items() if split.real is not None}
    model = model_of(manifest, splits)
    require_splits(model, 1)
    source = Source(model, checkpoint.path)
    source.require_equal_copies(1, has_states=False)
    needed = sum(one.numel_of_slice(1) * one.dtype.itemsize for one in model.parameters.values())
    require_space(folder, str(path), needed)
    with _naming(path):
        folder.mkdir(parents=True, exist_ok=True)
    return source


def _write_safetensors(
    source: Source,
    path: Path,
    rename: Mapping[str, str] | Callable[[str], str] | None,
    largest: int | None,
    progress: Progress,
) -> None:
    """Write one file, or a folder of several with an index, each under its name when it is complete.

    Args:
        source: checkpoint to read.
        path: the file; with ``largest`` the folder.
        rename: from the checkpoint's names to those of the files.
        largest: bytes of tensors in one file; a larger tensor has a file of its own.
        progress: called with ``"parameters"``, how many are read, and how many there are.
    """
    parameters, buffers = source.model.parameters, dict(source.buffers())
    sizes = {name: one.numel_of_slice(1) * one.dtype.itemsize for name, one in parameters.items()}
    sizes.update((name, one.nbytes) for name, one in buffers.items())
    new_names = {name: new for name in sizes for new in renaming(rename)(name)}
    old_names = {new: name for name, new in new_names.items()}
    if len(old_names) < len(sizes):
        twice = next(name for name, new in new_names.items() if old_names[new] != name)
        raise CheckpointError(
            f"rename gives {twice!r} and {old_names[new_names[twice]]!r} the same name, {new_names[twice]!r}: give "
            "each its own"
        )

    def read(name: str) -> torch.Tensor:
        if (one := parameters.get(name)) is None:
            return buffers[name].detach().clone().contiguous()
        return source.elements(name, WEIGHT, 0, 1, 0, one.numel_of_slice(1)).view(one.shape_of_slice(1)).contiguous()

    parts: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if largest is not None and parts[-1] and held + size > largest:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    base = path if largest is None else path / NAMES_OF_WEIGHTS[0]
    count, weight_map = len(parts), dict[str, str]()
    with _naming(path):
        for number, names in enumerate(parts, 1):
            file = base if count == 1 else base.with_stem(f"{base.stem}-{number:05d}-of-{count:05d}")
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                tensors[new_names[name]], weight_map[new_names[name]] = read(name), file.name
                progress("parameters", len(weight_map), len(sizes))
            draft = file.with_name(f".{file.name}.part")
            importlib.import_module("safetensors.torch").save_file(tensors, draft, metadata={"format": "pt"})
            flush(draft)
            draft.replace(file)
        if count > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            replace_text(base.with_name(f"{base.name}.index.json"), json.dumps(index, indent=2))
        flush(base.parent)
