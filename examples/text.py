"""Read text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

VALIDATION_SHARE = 0.05
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """The concatenated bytes of the training files and of the validation files, as uint8."""

    train: torch.Tensor
    validation: torch.Tensor


def standard_library() -> Text:
    """Read the ``.py`` files of the standard library; each file is either for training or for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(_sources(root)):
        parts[_is_validation(str(path.relative_to(root)))].append(path.read_bytes())
    train, validation = (torch.frombuffer(bytearray(b"".join(parts[key])), dtype=torch.uint8) for key in (False, True))
    return Text(train, validation)


def windows(text: torch.Tensor, length: int, step: int, indices: range, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels ``[len(indices), length]`` of a step, as int64.

    The position of a window depends only on seed, step and index. So any rank of any layout can draw its own share of a
    step's samples, and a resumed run draws the same samples as an uninterrupted one.
    """
    positions = torch.rand(indices.stop, generator=torch.Generator().manual_seed(seed * 1_000_003 + step))
    starts = (positions[indices.start :] * (len(text) - length - 1)).long()
    rows = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]  # os.walk enters these alone
        yield from (Path(folder, file) for file in files if file.endswith(".py"))


def _is_validation(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") < VALIDATION_SHARE * 2**32
