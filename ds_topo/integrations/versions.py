"""The one place that knows which DeepSpeed releases behave differently."""

from __future__ import annotations

import warnings
from functools import cache

from packaging.version import Version

SUPPORTED = Version("0.19")

_DEFECTS = (
    (Version("0.16"), "cannot load its own checkpoints on torch >= 2.6"),
    (Version("0.19"), "scales pipeline gradients wrongly when gradient accumulation is greater than 1"),
)
"""Releases below the version have the defect; reproduced on 0.14.5, 0.15.4, 0.16.9, 0.17.6 and 0.18.9."""


def defects_of(release: str) -> list[str]:
    """What is known to be wrong with a DeepSpeed release for the layouts of this package.

    >>> defects_of("0.19.8")
    []
    >>> defects_of("0.17.6")
    ['scales pipeline gradients wrongly when gradient accumulation is greater than 1']
    """
    return [defect for fixed_in, defect in _DEFECTS if Version(Version(release).base_version) < fixed_in]


@cache
def warn_of_defects(release: str) -> None:
    """Warn once if ``release`` is older than what is supported."""
    defects = defects_of(release)
    if defects:
        warnings.warn(
            f"DeepSpeed {release} {' and '.join(defects)}: use DeepSpeed >= {SUPPORTED}", RuntimeWarning, stacklevel=3
        )
