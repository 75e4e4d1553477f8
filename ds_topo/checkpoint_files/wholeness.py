"""Whether a checkpoint is whole. What is wrong is a list of sentences, empty where nothing is."""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ds_topo.checkpoint_files.manifest import Manifest, SavedFile

_CHUNK = 1 << 18
"""Bytes that are read at a time."""
_MODEL_STATES = re.compile(r"(?:zero_pp_rank_(?P<replica>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
_OPTIMIZER_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<replica>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")


class Places(NamedTuple):
    """How many files DeepSpeed's names must tell apart, where somebody knows."""

    model_ranks: int
    replicas: int


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, as 64 hexadecimal digits.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "file").write_bytes(b"text"), digest_of(Path(folder, "file"))[:8]
    (4, '982d9e3e')
    """
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def sizes_in(folder: Path) -> dict[str, int]:
    """Bytes of every file in a folder and those below it, by its path from there with ``/``."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            found[path.relative_to(folder).as_posix()] = path.stat().st_size
    return found


def wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    """Files of a checkpoint that are missing or have another size than when they were written."""
    found = sizes_in(folder)
    return [
        f"{file.path} is missing"
        if file.path not in found
        else f"{file.path} has {found[file.path]:,} bytes instead of {file.bytes:,}"
        for file in manifest.files
        if found.get(file.path) != file.bytes
    ]


def wrong_digests(folder: Path, files: Iterable[SavedFile]) -> list[str]:
    """Files whose content is not as it was written, those that cannot be read among them."""
    problems = []
    for file in files:
        try:
            digest = digest_of(folder / file.path)
        except OSError as error:
            problems.append(f"{file.path}: {error.strerror or error}")
            continue
        if digest != file.sha256:
            problems.append(f"{file.path} is not as it was written (its SHA-256 differs)")
    return problems


def wrong_without_manifest(folder: Path, expected: Places | None = None) -> list[str]:
    """What tells that DeepSpeed alone did not finish saving a checkpoint, or that a file was cut off.

    Judged by names, sizes and the end of every archive: a missing file is found if another name shows that it must be
    there, or if ``expected`` says so. A changed byte is not found.

    Args:
        folder: of the checkpoint.
        expected: of the engine that is to load it, if its degrees are the same.
    """
    sizes = sizes_in(folder)
    names = [name for name in sizes if name.endswith(".pt")]
    if not any(_MODEL_STATES.fullmatch(name) for name in names):
        return ["there is no *_model_states.pt of a model rank"]
    problems = [f"{name} is missing" for name in _absent(names, expected)]
    problems += [f"{name} is empty" for name in names if not sizes[name]]
    problems += [f"{name} is cut off or damaged" for name in names if sizes[name] and _is_cut_off(folder / name)]
    return problems


def _absent(names: Sequence[str], expected: Places | None) -> Iterator[str]:
    """Names that must be there beside those that are: every combination of a replica and a model rank."""
    for pattern in (_MODEL_STATES, _OPTIMIZER_STATES):
        found = {match for name in names if (match := pattern.fullmatch(name))}
        if not found:
            continue
        replicas = {match["replica"] for match in found if match["replica"] is not None}
        model_ranks = max(int(match["model"]) for match in found) + 1
        count = max(map(int, replicas), default=-1) + 1
        if expected is not None:
            model_ranks, count = max(model_ranks, expected.model_ranks), max(count, expected.replicas if count else 0)
        example = min(found, key=lambda match: match.string)
        for model in range(model_ranks):
            for replica in range(count) if count else [None]:
                name = _named(example, model, replica)
                if name not in names:
                    yield name


def _named(example: re.Match[str], model: int, replica: int | None) -> str:
    """The name of another place."""
    start, end = example.span("model")
    name = f"{example.string[:start]}{model:02d}{example.string[end:]}"
    if replica is None:
        return name
    start, end = example.span("replica")
    return f"{name[:start]}{replica}{name[end:]}"


def _is_cut_off(path: Path) -> bool:
    """Of torch's archives, which end with their directory; its older format tells nothing."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
    try:
        with zipfile.ZipFile(path) as archive:
            archive.infolist()
    except (zipfile.BadZipFile, OSError):
        return True
    return False


def told(problems: Sequence[str]) -> str:
    """Problems as one sentence, not too many.

    >>> told(["a is missing", "b is empty"])
    'a is missing; b is empty'
    """
    shown = 4
    more = f"; and {len(problems) - shown} further" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + more
