"""Name the supported releases of DeepSpeed and torch. Refuse older ones, and warn of newer ones.

An older release lacks names that ds_topo imports. So its number is checked before anything of DeepSpeed is imported, by
the ``__init__`` of the packages that need it.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.version import Version

from ds_topo.errors import warn


class Supported(NamedTuple):
    """The releases of a library from the oldest to the newest that all tests were run with."""

    name: str
    oldest: Version
    newest: Version


DEEPSPEED = Supported("DeepSpeed", oldest=Version("0.18.9"), newest=Version("0.19.8"))
TORCH = Supported("torch", oldest=Version("2.8"), newest=Version("2.15"))


def number(release: str) -> Version:
    """Return the release of a build.

    >>> number("2.13.0+cpu"), number("2.13.0a0")
    (<Version('2.13.0')>, <Version('2.13.0')>)
    """
    return Version(Version(release).base_version)


@cache
def refuse_older_releases() -> None:
    """Raise ``ImportError`` if an installed release is older than the supported ones."""
    for library in (DEEPSPEED, TORCH):
        release = _installed(library.name.lower())
        if release is not None and number(release) < library.oldest:
            package = f"{library.name.lower()}>={library.oldest}"
            raise ImportError(
                f"{library.name} {release} is installed, but ds_topo imports names that older releases than "
                f"{library.oldest} do not have. Upgrade it: pip install '{package}'"
            )


def _installed(package: str) -> str | None:
    """Return the release of a package without importing it; None if this is unknown."""
    module = sys.modules.get(package)
    if module is not None:
        return str(module.__version__).strip()
    try:
        return version(package)
    except PackageNotFoundError:  # a folder on PYTHONPATH
        return None


@cache
def warn_of_newer_releases(of_deepspeed: str, of_torch: str) -> None:
    """Warn once about each installed release that is newer than all tested ones."""
    for (name, _, newest), release in ((DEEPSPEED, of_deepspeed), (TORCH, of_torch)):
        if number(release) > newest:
            warn(
                f"{name} {release} is newer than {newest}, the newest that ds_topo was run with: compare losses and "
                "norms of the first steps; python -m ds_topo.engine lists the names it relies on"
            )
