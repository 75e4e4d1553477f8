"""Modules that have moved: their former paths still import, with a ``DeprecationWarning``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "agreement": ["process_groups.agreement"],
    "axes": ["topology.spec"],
    "device_mesh": ["process_groups.device_mesh"],
    "expert_ranks": ["topology.expert_tables"],
    "gradient_reducer": ["reducer", "engine.gradient_reducer"],
    "grid": ["engine.grid"],
    "integrations": ["engine"],
    "integrations.engine_checks": ["engine.options", "engine.grid"],
    "integrations.engine_reducer": ["engine.initialize", "engine.reducer_drivers"],
    "integrations.experts": ["engine.expert_registry"],
    "integrations.gradient_norm": ["engine.norms"],
    "integrations.pipeline": ["engine.pipeline", "engine.grid"],
    "integrations.versions": ["engine.releases"],
    "layout": ["topology.layout"],
    "megatron": ["engine.megatron"],
    "mpu": ["engine.mpu", "engine.grid"],
    "rank_groups": ["topology.rank_tables"],
}
"""Former path -> where its names are now, both below ``ds_topo``."""


class MovedModules(MetaPathFinder, Loader):
    """Answers for former paths alone, after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for a former path."""
        package, _, name = fullname.partition(".")
        if package != "ds_topo" or name not in MOVED:
            return None
        is_package = any(other.startswith(f"{name}.") for other in MOVED)
        return ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        """A plain new module."""

    def exec_module(self, module: ModuleType) -> None:
        """Let the module pass every question on to where its names are now."""
        paths = [f"ds_topo.{path}" for path in MOVED[module.__name__.partition(".")[2]]]
        warnings.warn(f"{module.__name__} is now {' and '.join(paths)}", DeprecationWarning, stacklevel=2)

        def ask(name: str) -> Any:
            for path in paths if not name.startswith("__") else []:
                if hasattr(import_module(path), name):
                    return getattr(import_module(path), name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        vars(module).update(__getattr__=ask, __doc__=f"Moved to {' and '.join(paths)}.")


def install() -> None:
    """Let former paths import. Idempotent."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
