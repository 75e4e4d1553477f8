"""The one place that knows which releases of DeepSpeed and torch were run, and which behave differently."""

from __future__ import annotations

import warnings
from functools import cache
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_topo.ledger import Change, Reliance, exists, name_of


class Defect(NamedTuple):
    """What is wrong with the releases of a library before ``fixed_in``."""

    fixed_in: Version
    what: str


class Supported(NamedTuple):
    """The releases of a library from the oldest to the newest that all tests were run with."""

    name: str
    oldest: Version
    newest: Version
    defects: tuple[Defect, ...]

    def defects_of(self, release: str) -> list[str]:
        """What is known to be wrong with a release for the layouts of this package.

        >>> DEEPSPEED.defects_of("0.19.8")
        []
        >>> DEEPSPEED.defects_of("0.19.7")
        ['crashes in activation checkpointing on a CPU']
        """
        return [defect.what for defect in self.defects if _number(release) < defect.fixed_in]

    def doubts_about(self, release: str) -> str:
        """Why not to trust a release, empty for one between the oldest and the newest.

        >>> TORCH.doubts_about("2.13.0+cpu")
        ''
        """
        if _number(release) > self.newest:
            return (
                f"{self.name} {release} is newer than {self.newest}, the newest that ds_topo was run with: "
                "compare losses and norms of the first steps; python -m ds_topo.engine shows what it relies on"
            )
        if _number(release) < self.oldest:
            known = "".join(f"; it {defect}" for defect in self.defects_of(release))
            return f"{self.name} {release} is older than {self.oldest}, the oldest that ds_topo was run with{known}"
        return ""


def _number(release: str) -> Version:
    """The release that a build is of: ``2.13.0`` for ``2.13.0+cpu`` and for ``2.13.0a0``."""
    return Version(Version(release).base_version)


DEEPSPEED = Supported(
    "DeepSpeed",
    oldest=Version("0.19.8"),
    newest=Version("0.19.8"),
    defects=(
        # reproduced on 0.14.5, 0.15.4, 0.16.9, 0.17.6, 0.18.9 and 0.19.0
        Defect(Version("0.16"), "cannot load its own checkpoints on torch >= 2.6"),
        Defect(Version("0.19.8"), "crashes in activation checkpointing on a CPU"),  # seen on 0.19.7
        Defect(Version("0.19.3"), "scales pipeline gradients wrongly when gradient accumulation is greater than 1"),
    ),
)
TORCH = Supported(
    "torch",
    oldest=Version("2.8"),
    newest=Version("2.13"),
    defects=(
        # seen on 2.6.0, not on 2.8.0
        Defect(Version("2.8"), "may hang when a gloo group is destroyed"),
    ),
)


@cache
def warn_of_releases(of_deepspeed: str, of_torch: str) -> None:
    """Warn once of each release that is older or newer than any that was run."""
    for doubts in (DEEPSPEED.doubts_about(of_deepspeed), TORCH.doubts_about(of_torch)):
        if doubts:
            warnings.warn(doubts, RuntimeWarning, stacklevel=3)


def is_missing(row: Change | Reliance) -> bool:
    """Whether the installed releases lack a name that the row's ``releases`` should have."""
    return is_due(row) and not exists(row)


def is_due(row: Change | Reliance) -> bool:
    """Whether the installed release is one of the row's."""
    if row.releases == "all":
        return True
    if row.releases == "builds with NCCL":
        return dist.is_nccl_available()
    release = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}[name_of(row.owner).split(".")[0]]
    return _number(release) in SpecifierSet(row.releases)
