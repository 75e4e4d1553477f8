"""Hold what all other packages need: backends, patches, classes for objects of others, and the supported releases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

OLDEST_PYTHON = (3, 10)
if sys.version_info < OLDEST_PYTHON:  # this module is imported before any that older ones cannot compile
    raise ImportError(
        f"Python {sys.version.split()[0]} runs this program, but ds_topo needs Python 3.10 or newer: create an "
        "environment with one, and install ds_topo there"
    )


def lazy_attributes(
    package: str, modules: Mapping[str, str | None]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package whose names are imported on first use (PEP 562).

    ``modules`` has the submodule that defines each name, or ``None`` for a name that is itself a submodule. ``dir()``
    lists what ``__all__`` has, and names with underscores.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        if module is None:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(f"{package}.{module}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807
        present = vars(sys.modules[package])
        return sorted({*present["__all__"], *(name for name in present if name.startswith("_"))})

    return __getattr__, __dir__
