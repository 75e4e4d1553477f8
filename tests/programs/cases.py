"""Share between the runs of programs with their own training loops: cases, samples and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Case:
    """A run of the program: its degrees, ZeRO stage, precision and further options."""

    name: str
    pipe: int = 1
    model: int = 1
    seq: int = 1
    zero: int = 0
    precision: str = "fp32"
    options: tuple[str, ...] = ()
    clip: float = 1.0

    def __str__(self) -> str:
        """Return a name for ``pytest -k``."""
        return self.name


STEPS, SAVED_STEP = 4, 2
SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 16, 2, 2
VOCABULARY = 127


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences that note the index of each sample that the program reads."""

    def __init__(self, samples: int, seed: int, read: list[tuple[int, int]]) -> None:
        self.samples, self.seed, self.read = samples, seed, read

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append((self.seed, int(index)))
        generator = torch.Generator().manual_seed(1000 * self.seed + int(index))
        return {"text": torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=generator)}


def edit(folder: Path, edits: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Replace texts in a program's files, by name."""
    for name, changes in edits.items():
        text = (folder / name).read_text()
        for old, new in changes:
            assert old in text, f"{name} has no {old!r}: another version of the program"
            text = text.replace(old, new)
        (folder / name).write_text(text)
