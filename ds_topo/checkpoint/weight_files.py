"""Read and write plain files of weights: safetensors as Hugging Face shares them, and state dicts of torch.

A model has one file, or several and an index (``model.safetensors.index.json``) with the file of each tensor.
:class:`WeightFiles` presents them as a checkpoint of one slice without an optimizer, so that an engine of any layout
reads its own elements. :func:`write_safetensors` writes them, one file after the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_topo.checkpoint.deepspeed_reader import Source, opened
from ds_topo.checkpoint.disk import flush, replace_text
from ds_topo.checkpoint.manifest import SavedLayout, SavedStructure
from ds_topo.checkpoint.safe_reading import refused_types
from ds_topo.checkpoint.saved_model import Parameter, SavedModel, expert_of
from ds_topo.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError, abridged, listed

_NAMES = ("model.safetensors", "pytorch_model.bin")
"""The files that Hugging Face's ``save_pretrained`` writes; with several, an index has their names."""
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def files_of_weights(path: Path) -> list[Path]:
    """Return the files of weights that a path means; an empty list if it is neither such a file nor a folder with them.

    Raises:
        DamagedCheckpointError: the index cannot be read, or names files that do not exist.
    """
    if path.is_file():
        return [path] if path.suffix in _SUFFIXES else []
    for name in _NAMES:
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
    """Return the tensors of a file, whose bytes are read when they are used.

    Raises:
        DamagedCheckpointError, UnsafeCheckpointError: the file cannot be read, or must not be.
        CheckpointError: safetensors is not installed, or the file holds something else than tensors by name.
    """
    if path.suffix != ".safetensors":
        if refused := refused_types([path]):
            raise UnsafeCheckpointError(f"{path}: {refused[0]}")
        content = opened(path)
        if not isinstance(content, dict) or not all(map(torch.is_tensor, content.values())):
            kinds = listed(list(content), 4) if isinstance(content, dict) else type(content).__name__
            raise CheckpointError(f"{path} is not a state dict, which has tensors by name: it holds {kinds}")
        return content
    require_safetensors()
    try:
        with importlib.import_module("safetensors").safe_open(path, "pt") as file:
            names: list[str] = file.keys()  # it is no mapping
            return {name: file.get_tensor(name) for name in names}
    except Exception as error:  # the package's own class, or of the file system
        raise DamagedCheckpointError(f"{path} cannot be read as safetensors ({error}): copy it once more") from error


class WeightFiles(Source):
    """Plain files of weights as a checkpoint of one slice without an optimizer.

    Args:
        path: the file, or the folder.
        structure: structure of the model that will read them; names are those of the files.
        buffers: names of the buffers among the tensors.
    """

    def __init__(self, path: Path, structure: SavedStructure, buffers: Collection[str]) -> None:
        self.folder, self.layout = path, SavedLayout("data=1", 1, 1, 1, 0, None, "fp32")
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files_of_weights(path):
            self._tensors.update(_tensors_of(file))
        self._names_of_buffers = [name for name in self._tensors if name in buffers]
        names = [name for name in self._tensors if name not in buffers]
        experts: dict[str, int] = {}
        for name in names:
            if (expert := expert_of(name)) is not None:
                experts[expert.head] = max(experts.get(expert.head, 0), expert.number + 1)
        parameters: dict[str, Parameter] = {}
        for name in names:
            expert, tensor = expert_of(name), self._tensors[name]
            split = structure.splits.get(expert.numbered(0) if expert else name)
            count = experts[expert.head] if expert else 0
            one = Parameter(name, tuple(tensor.shape), tensor.dtype, True, split, 1, count)
            padded = split.padded if split is not None and split.padded not in (None, one.size) else None
            parameters[name] = replace(one, padded=padded)
        self.model = SavedModel(parameters, structure, self.layout, 1, dict.fromkeys(names, 0))

    def _elements(
        self, model_rank: int, parameter: Parameter, key: str, start: int, stop: int, part: int = 0
    ) -> torch.Tensor:
        return self._tensors[parameter.name].reshape(-1)[start:stop]

    def buffers_of(self, place: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers."""
        yield from ((name, self._tensors[name]) for name in self._names_of_buffers)


def write_safetensors(
    sizes: Mapping[str, int],
    read: Callable[[str], torch.Tensor],
    path: Path,
    largest: int | None,
    progress: Callable[[str, int, int], Any],
) -> None:
    """Write one file of tensors, or a folder of several with an index, each under its name when it is complete.

    Args:
        sizes: bytes of every tensor, by name, in order.
        read: returns a tensor, which is in memory until its file is written.
        path: the file; with ``largest`` the folder.
        largest: bytes of tensors in one file; a larger tensor has a file of its own.
        progress: called with ``"parameters"``, how many are read, and how many there are.
    """
    parts: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if largest is not None and parts[-1] and held + size > largest:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    base = path if largest is None else path / _NAMES[0]
    count, done, weight_map = len(parts), 0, {}
    for number, names in enumerate(parts, 1):
        file = base if count == 1 else base.with_stem(f"{base.stem}-{number:05d}-of-{count:05d}")
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors[name] = read(name).detach().contiguous()
            weight_map[name], done = file.name, done + 1
            progress("parameters", done, len(sizes))
        draft = file.with_name(f".{file.name}.part")
        importlib.import_module("safetensors.torch").save_file(tensors, draft, metadata={"format": "pt"})
        flush(draft)
        draft.replace(file)
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        replace_text(base.with_name(f"{base.name}.index.json"), json.dumps(index, indent=2))
    flush(base.parent)
