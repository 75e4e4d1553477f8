"""Convert checkpoints to other degrees, another ZeRO stage or one plain file of weights.

:func:`convert` writes a checkpoint of another layout, and :func:`to_single_file` one file of weights. Loading with
``convert=True`` (``loading``) copies into a live engine instead. These modules take part:

====================  ================================================================================================
``saved_model``       describes all parameters of the checkpoint, whatever the layout that saved it
``stock_files``       describes checkpoints that DeepSpeed alone saved
``target``            plans the new layout, or says why it cannot be reached
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
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.deepspeed_reader import WEIGHT, Source
from ds_topo.checkpoint.deepspeed_writer import Writer
from ds_topo.checkpoint.disk import check_folder, discard, failure_to_write, flush, hold, is_held, replace_text
from ds_topo.checkpoint.engine_facts import (
    versions,
)
from ds_topo.checkpoint.file_filling import FileContent, Filling, Region, fill_all, make_room
from ds_topo.checkpoint.folder import (
    LATEST,
    Checkpoint,
    check_tag,
    put_in_place,
    require_free,
    tags_in,
    told,
    wrong_without_manifest,
)
from ds_topo.checkpoint.manifest import Manifest, SavedFile, SavedParameter
from ds_topo.checkpoint.safe_reading import refused_types, unreadable
from ds_topo.checkpoint.saved_model import expert_of, model_of, require_splits
from ds_topo.checkpoint.saving import free_bytes
from ds_topo.checkpoint.stock_files import manifest_of_files, structure_of_files
from ds_topo.checkpoint.target import Target, target_of
from ds_topo.errors import (
    CheckpointError,
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
    model = model_of(manifest)
    target = target_of(model, spec, zero, method, bounds, experts, zero_options)
    conversion = Conversion(checkpoint, manifest, target, to, new_tag)
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
    names = [file.path for file in checkpoint.manifest.files] if checkpoint.manifest else os.listdir(checkpoint.path)
    paths = [checkpoint.path / name for name in names if name.endswith(".pt")]
    if problems := unreadable(paths):
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {told(problems)}")
    if refused := refused_types(paths):
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


class Conversion:
    """The conversion of one checkpoint, in steps.

    Args:
        checkpoint: checkpoint to read.
        manifest: its manifest.
        target: the new layout.
        folder: folder of checkpoints for the new one.
        tag: tag of the new checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest, target: Target, folder: Path, tag: str) -> None:
        self._manifest = manifest
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
        self._source.require_equal_copies(self._target.slices, has_states=True)
        plan = {
            "from": hashlib.sha256(manifests.to_text(self._manifest).encode()).hexdigest(),
            "layout": asdict(self._target.layout),
            "structure": asdict(self._target.structure),
            "boot": _BOOT.read_text().strip() if _BOOT.exists() else "",  # a reboot loses what the caches had
        }
        text, path = json.dumps(plan, sort_keys=True), self._draft / "plan.json"
        if not path.is_file() or path.read_text(errors="replace") != text:
            discard(self._draft)
        written = sum(path.stat().st_size for path in self._files.glob("*")) if self._files.exists() else 0
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
        with _naming(self._files):
            make_room(self._writer.files(), self._files)

    def fill(self, progress: Progress = lambda step, done, of: None) -> list[SavedFile]:
        """Fill the files and flush them to the disk."""
        fillings = [Filling(self._source, self._target.slices, file, self._files) for file in self._writer.files()]
        with _naming(self._files):
            digests = fill_all(fillings, self._draft / "done.txt", progress)
        return [
            SavedFile(one.path.relative_to(self._files).as_posix(), one.bytes, digest, 0)
            for one, digest in zip(fillings, digests, strict=True)
        ]

    def commit(self, files: Iterable[SavedFile], *, save_latest: bool = True) -> Path:
        """Write the manifest and give the new checkpoint its name. Return its folder."""
        manifest = Manifest(
            self._tag,
            self._manifest.step,
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
    model = model_of(manifest)
    require_splits(model, 1)
    source = Source(model, checkpoint.path)
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
        with _naming(path):
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
