"""The one place that knows which DeepSpeed releases behave differently."""

from __future__ import annotations

import warnings
from functools import cache

from packaging.version import Version

_FIXED_IN = (
    (Version("0.16"), "cannot load its own checkpoints on torch >= 2.6"),
    (Version("0.19.3"), "scales pipeline gradients wrongly when gradient accumulation is greater than 1"),
)
"""First release without a defect, and the defect; reproduced on 0.14.5, 0.15.4, 0.16.9, 0.17.6, 0.18.9 and 0.19.0."""


NEWEST_RUN = Version("0.19.8")
"""The newest release that the tests were run with."""


def defects_of(release: str) -> list[str]:
    """What is known to be wrong with a DeepSpeed release for the layouts of this package.

    >>> defects_of("0.19.8")
    []
    >>> defects_of("0.19.0")
    ['scales pipeline gradients wrongly when gradient accumulation is greater than 1']
    """
    return [defect for fixed_in, defect in _FIXED_IN if Version(Version(release).base_version) < fixed_in]


@cache
def warn_of_defects(release: str) -> None:
    """Warn once if ``release`` is known to train wrongly, or newer than any that was run."""
    if Version(Version(release).base_version) > NEWEST_RUN:
        warnings.warn(
            f"DeepSpeed {release} is newer than {NEWEST_RUN}, the newest release that ds_topo was run with: compare "
            "losses and norms of the first steps; python -m ds_topo.engine shows what it relies on",
            RuntimeWarning,
            stacklevel=3,
        )
    defects = defects_of(release)
    if defects:
        warnings.warn(
            f"DeepSpeed {release} {' and '.join(defects)}: use DeepSpeed >= {_FIXED_IN[-1][0]}",
            RuntimeWarning,
            stacklevel=3,
        )
