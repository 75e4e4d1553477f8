"""Read and write plain weights: safetensors as Hugging Face shares them, or a state dict of torch.

They are in one file, or in several with an index (``model.safetensors.index.json``). :class:`WeightFiles` presents them
as a checkpoint, so that an engine of any layout reads its own elements. :func:`to_single_file` and
:func:`to_hugging_face` write those of a checkpoint: slices are put together, and experts have their number in the whole
layer. Files are mapped into memory, so that no more than one file of safetensors, or the largest parameter, is in the
memory of the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch
from torch.serialization import set_default_mmap_options, skip_data
from typing_extensions import override

from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint.by_name import model_of_whole
from ds_topo.checkpoint.deepspeed_reader import DeepSpeedFiles, Located, opened
from ds_topo.checkpoint.engine_state import Named, NamedBuffer, renaming
from ds_topo.checkpoint.folder import Checkpoint
from ds_topo.checkpoint.manifest import Manifest, SavedLayout, SavedStructure
from ds_topo.checkpoint.safe_reading import refused_types
from ds_topo.checkpoint.saved_model import model_of, require_splits
from ds_topo.checkpoint.stock_checkpoints import layout_of_files, manifest_of_files
from ds_topo.checkpoint.table import BUFFER, WEIGHT, Part, Piece, Slice, Vector
from ds_topo.errors import (
    CheckpointError,
    CheckpointVersionError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsafeCheckpointError,
    abridged,
    listed,
)

# -- reading -----------------------------------------------------------------------------------------------------------

NAMES_OF_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""The files that Hugging Face's ``save_pretrained`` writes; with several, an index has their names."""
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def files_of_weights(path: Path) -> list[Path]:
    """Return the files of weights that a path means; an empty list if it is neither such a file nor a folder with them.

    If the index cannot be read, or names files that do not exist, DamagedCheckpointError is raised.
    """
    if path.is_file():
        return [path] if path.suffix in _SUFFIXES else []
    for name in NAMES_OF_WEIGHTS:
        if (index := path / f"{name}.index.json").is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
                found = [path / name for name in names if Path(name).name == name]
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise DamagedCheckpointError(
                    f"{index} is not an index of weights ({type(error).__name__}: {abridged(str(error))}): copy it "
                    "once more"
                ) from None
            if missing := [name for name in names if path / name not in found or not (path / name).is_file()]:
                raise DamagedCheckpointError(
                    f"{index} names files that are not in its folder, {listed(missing, 3)}: copy all files of the model"
                )
            return found
        if (path / name).is_file():
            return [path / name]
    alone = sorted(one for one in path.glob("*.safetensors") if one.is_file()) if path.is_dir() else []
    return alone if len(alone) == 1 else []


def require_safetensors() -> None:
    """Raise CheckpointError if the package that reads and writes safetensors is not installed."""
    if importlib.util.find_spec("safetensors") is None:
        raise CheckpointError(
            "safetensors files: this needs the package safetensors, which is not installed: pip install safetensors"
        )


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, whose bytes are read when they are used, or raise CheckpointError."""
    if path.suffix != ".safetensors":
        if refused := refused_types([path]):
            raise UnsafeCheckpointError(f"{path}: {refused[0]}")
        content = opened(path)
        if not isinstance(content, dict) or not all(map(torch.is_tensor, content.values())):
            kinds = listed(list(content), 4) if isinstance(content, dict) else type(content).__name__
            raise CheckpointError(
                f"{path} is not a state dict, which has tensors by name: it holds {kinds}. Save the weights in a file "
                "of their own, or, with an optimizer's state, in torch's format, and call load_torch(engine, folder)"
            )
        return content
    require_safetensors()
    try:
        with importlib.import_module("safetensors").safe_open(path, "pt") as file:
            names: list[str] = file.keys()  # it is no mapping
            return {name: file.get_tensor(name) for name in names}
    except Exception as error:  # the package's own class, or of the file system
        raise DamagedCheckpointError(f"{path} cannot be read as safetensors ({error}): copy it once more") from error


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file or folder of weights, whose bytes are read when they are used."""
    return {name: tensor for file in files_of_weights(path) for name, tensor in _tensors_of(file).items()}


class WeightFiles(DeepSpeedFiles):
    """A file or a folder of plain weights, as a checkpoint of whole parameters without an optimizer.

    Parameters and buffers of the rank that reads it have their names in the files.
    """

    def __init__(self, path: Path, named: Iterable[Named], buffers: Mapping[str, NamedBuffer]) -> None:
        tensors = tensors_in(path)
        self._shapes = {name: tuple(one.shape) for name, one in tensors.items()}
        shapes = {name: (one.shape, one.dtype) for name, one in tensors.items()}
        super().__init__(model_of_whole(shapes, named, buffers), path)
        self._open[""], self._known = tensors, {""}
        for name, shape in self._shapes.items():
            key, piece = BUFFER if name in buffers else WEIGHT, Piece(name, Slice(shape))
            whole = Part(0, 0, piece.slice.numel, 0)
            self._rows[name, key] = [Located(0, piece, Vector("", {key: ((name,), "")}, {}, (whole,)), whole)]

    @override
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    @override
    def require_reachable(self, layout: SavedLayout, structure: SavedStructure, *, has_states: bool) -> None:
        """No-op: every layout has the parameters, and each of them is compared."""


# -- writing -----------------------------------------------------------------------------------------------------------

Progress = Callable[[str, int, int], None]
"""A callback: called with the name of a step, the amount that is done, and the total amount."""


def readable(checkpoint: Checkpoint) -> Manifest:
    """Return the manifest of a complete checkpoint whose files are safe to read; raise CheckpointError for others."""
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"checkpoint={abridged(checkpoint)} is not a checkpoint: give what ds_topo.checkpoint.look_at(folder, tag) "
            "returns"
        )
    if checkpoint.needs:
        raise CheckpointVersionError(f"the checkpoint {checkpoint.tag!r}: {checkpoint.needs}")
    if not os.path.lexists(checkpoint.path):
        known = listed(folders.tags_in(checkpoint.path.parent))
        raise MissingCheckpointError(f"no checkpoint {checkpoint.tag!r} in {checkpoint.path.parent}: there are {known}")
    if checkpoint.problems:
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {folders.told(checkpoint.problems)}")
    names = [file.path for file in checkpoint.manifest.files] if checkpoint.manifest else os.listdir(checkpoint.path)
    names = [name for name in names if name.endswith(".pt")]
    if problems := folders.unreadable(checkpoint.path, names):
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {folders.told(problems)}")
    if refused := refused_types([checkpoint.path / name for name in names]):
        raise UnsafeCheckpointError(f"{checkpoint.path}: {refused[0]}")
    if checkpoint.manifest is not None:
        return checkpoint.manifest
    layout = layout_of_files(checkpoint.path, None)
    if layout is not None and (missing := folders.wrong_in_stock_checkpoint(checkpoint.path, layout)):
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {folders.told(missing)}")
    return manifest_of_files(checkpoint.path, layout, SavedStructure(None, ()))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the path, and the free space of its disk, if writing fails."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # the latter is torch's
        raise folders.failure_to_write(path, error) from error


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
    path = folders.check_folder(path, "path")
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: give the file to write, such as {path / 'weights.pt'}")
    if kind not in ("torch", "safetensors"):
        raise ValueError(f"kind={abridged(kind)} is not a format of a single file: give 'torch' or 'safetensors'")
    if kind == "safetensors":
        require_safetensors()
    source = _whole_weights(checkpoint, path.parent, path)
    if kind == "safetensors":
        _write_safetensors(source, path, None, None, progress)
        return path
    draft = path.with_name(f".{path.name}.part")
    parameters = source.model.parameters.values()
    rooms = {one.name: torch.empty(one.shape_of_slice(1), dtype=one.dtype) for one in parameters}  # never touched
    buffers = {name: one.detach().contiguous() for name, one in source.buffers().items()}
    aliases = {alias: rooms[name] for alias, name in source.model.structure.aliases.items()}
    with _naming(path):
        with skip_data():
            torch.save({**rooms, **aliases, **buffers}, draft)
        with draft.open("r+b") as file:  # fail now if the disk is full
            os.posix_fallocate(file.fileno(), 0, draft.stat().st_size)
        with set_default_mmap_options(mmap.MAP_SHARED):  # its tensors are the file
            written = opened(draft)
        for number, one in enumerate(parameters, 1):
            written[one.name].copy_(source.weight(one.name))
            progress("parameters", number, len(rooms))
        for name, value in buffers.items():
            written[name].copy_(value)
        del written
        folders.flush(draft)
        os.replace(draft, path)
        folders.flush(path.parent)
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
    path = folders.check_folder(folder)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file: give a folder for the files of the model")
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


def _whole_weights(checkpoint: Checkpoint, folder: Path, path: Path, *, has_padding: bool = True) -> DeepSpeedFiles:
    """Open a checkpoint whose weights will be put together and written into a folder, which is made."""
    manifest = readable(checkpoint)
    known = {} if has_padding else manifest.structure.splits
    splits = {name: replace(split, padded=split.real) for name, split in known.items() if split.real is not None}
    model = model_of(manifest, splits)
    require_splits(model, 1)
    source = DeepSpeedFiles(model, checkpoint.path)
    source.require_equal_copies(1, has_states=False)
    needed = sum(one.numel_of_slice(1) * one.dtype.itemsize for one in model.parameters.values())
    folders.require_space(folder, str(path), needed)
    with _naming(path):
        folder.mkdir(parents=True, exist_ok=True)
    return source


def _write_safetensors(
    source: DeepSpeedFiles,
    path: Path,
    rename: Mapping[str, str] | Callable[[str], str] | None,
    largest: int | None,
    progress: Progress,
) -> None:
    """Write one file; or with ``largest`` a folder of several and an index, each under its name when it is complete.

    A tensor of more than ``largest`` bytes has a file of its own.
    """
    parameters, buffers = source.model.parameters, source.buffers()
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
        if name in parameters:
            return source.weight(name).contiguous()
        return buffers[name].detach().clone().contiguous()

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
            draft.touch()
            mode = draft.stat().st_mode & 0o777  # by the umask; safetensors creates files that only their owner reads
            importlib.import_module("safetensors.torch").save_file(tensors, draft, metadata={"format": "pt"})
            draft.chmod(mode)
            folders.flush(draft)
            draft.replace(file)
        if count > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            folders.replace_text(base.with_name(f"{base.name}.index.json"), json.dumps(index, indent=2))
        folders.flush(base.parent)
