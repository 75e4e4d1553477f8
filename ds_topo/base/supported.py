"""Name the supported releases of DeepSpeed and torch. Refuse older ones, and warn of newer ones.

A release's number is checked before anything of DeepSpeed is imported, by the ``__init__`` of the packages that need
it. What a supported release lacks is refused when it is used (:func:`require`), and nothing else is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_topo.base.ledger import Row, exists, name_of
from ds_topo.errors import listed, warn


class Supported(NamedTuple):
    """The releases of a library that ds_topo was run with, from the oldest to the newest."""

    name: str
    oldest: Version
    newest: Version


DEEPSPEED = Supported("DeepSpeed", oldest=Version("0.18.9"), newest=Version("0.19.8"))
TORCH = Supported("torch", oldest=Version("2.8"), newest=Version("2.15"))


class Feature(NamedTuple):
    """A feature that only some of the supported releases of DeepSpeed have."""

    name: str
    oldest: Version
    """The oldest release with the feature."""
    reason: str
    """A sentence about older releases."""
    instead: str
    """A list of what works with older releases; it ends a sentence."""


ENGINES = Feature(
    "an engine with a grid as its mpu",
    Version("0.19.6"),
    "Older engines lack methods that ds_topo replaces, scale gradients of pipelines wrongly if they accumulate, and "
    "fail at ZeRO 1 and 2 with torch 2.13.",
    "or reduce gradients in a loop of your own with a GradientReducer",
)
DUALPIPEV = Feature(
    "DualPipeVModule", Version("0.19.8"), "Older releases do not have this schedule.", "or use PipelineModule"
)
SLICES_WITH_EXPERTS = Feature(
    "expert_parallel (AutoEP) with tensor_parallel (AutoTP)",
    Version("0.19.8"),
    "Older releases compute wrong gradients of the layers that AutoTP splits.",
    "or leave out one of the two sections",
)
SLICES_OF_PARTITIONED = Feature(
    "tensor_parallel (AutoTP) with a model that was built in deepspeed.zero.Init",
    Version("0.19.8"),
    "Older releases leave parts of gradients out of the norm that they clip by.",
    "or build the model outside of zero.Init",
)
SEQUENCES_ON_CPU = Feature(
    "compile.passes 'autosp' (AutoSP) on a CPU",
    Version("0.19.8"),
    "Older releases compile an extension for CUDA in the first backward pass.",
    "or use DistributedAttention",
)
CHECKPOINTS_ON_CPU = Feature(
    "activation checkpointing of a pipeline on a CPU",
    Version("0.19.8"),
    "Older releases create a stream, which CPUs do not have.",
    "or set activation_checkpoint_interval to 0",
)
PARTITIONED_PARAMETERS_ON_CPU = Feature(
    "ZeRO stage 3 on a CPU",
    Version("0.19.8"),
    "Older releases wait for the last of several gathers alone, and compute with parameters that have not arrived.",
    "or use stage 0, 1 or 2",
)
SEPARATE_GRADIENTS_ON_CPU = Feature(
    "contiguous_gradients false at ZeRO stage 1 or 2 on a CPU",
    Version("0.19.8"),
    "Older releases do not reduce any gradient there.",
    "or leave contiguous_gradients out",
)


def minutes_of_timeout() -> int:
    """Return the number in ``DEEPSPEED_TIMEOUT``, which is 10 by default; refuse what is no number of minutes."""
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    if not (minutes.isascii() and minutes.isdecimal()) or not int(minutes):
        raise ValueError(
            f"DEEPSPEED_TIMEOUT={minutes!r} is not a number of minutes >= 1: set a number alone, such as "
            "DEEPSPEED_TIMEOUT=10, or unset it; init_distributed(timeout=) takes seconds"
        )
    return int(minutes)


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


def require(feature: Feature) -> None:
    """Raise ``RuntimeError`` if the installed release of DeepSpeed lacks a feature."""
    release = _installed("deepspeed")
    if release is not None and number(release) < feature.oldest:
        raise RuntimeError(
            f"{feature.name} needs DeepSpeed >= {feature.oldest}, but {release} is installed. {feature.reason} "
            f"Upgrade it: pip install 'deepspeed>={feature.oldest}', {feature.instead}"
        )


def check_release(config: Any) -> None:
    """Raise ``RuntimeError`` for an engine, or options for it, that the installed release cannot train with."""
    from deepspeed.accelerator import get_accelerator  # only once its number was checked

    require(ENGINES)
    if config is None or get_accelerator().device_name() != "cpu":  # DeepSpeed refuses an engine without a config
        return
    if config.zero_config.stage in (1, 2) and not config.zero_config.contiguous_gradients:
        require(SEPARATE_GRADIENTS_ON_CPU)
    if config.zero_config.stage == 3:
        require(PARTITIONED_PARAMETERS_ON_CPU)


def is_due(row: Row) -> bool:
    """Tell whether the row is for the installed release."""
    if row.releases == "all":
        return True
    if row.releases == "builds with NCCL":
        import torch.distributed as dist

        return dist.is_nccl_available()
    release = _installed(name_of(row.owner).split(".")[0])
    return release is not None and number(release) in SpecifierSet(row.releases)


def is_missing(row: Row) -> bool:
    """Tell whether the installed release lacks a name that it should have."""
    return is_due(row) and not exists(row)


@cache
def warn_of_newer_releases(rows: Callable[[], Iterable[Row]]) -> None:
    """Warn once about each installed release that is newer than all tested ones; name the ``rows`` that it lacks."""
    for library in (DEEPSPEED, TORCH):
        release = _installed(library.name.lower())
        if release is not None and number(release) > library.newest:
            of_library = (row for row in rows() if name_of(row.owner).startswith(library.name.lower()))
            gone = [str(row) for row in of_library if is_missing(row)]
            warn(
                f"{library.name} {release} is newer than {library.newest}, the newest that ds_topo was run with. Names "
                f"that ds_topo replaces or relies on, and that it lacks: {listed(gone)}. Compare losses and norms of "
                "the first steps"
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
