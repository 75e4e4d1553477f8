"""``deepspeed.initialize`` with what the config says of ds_topo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed

from ds_topo.engine.gradient_reducer import GradientReducer

CONFIG_SECTION = "gradient_reducer"


def initialize(*args: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, then a reducer if the config has a section ``"gradient_reducer"``.

    The section holds arguments of :meth:`~ds_topo.GradientReducer.attach` that JSON can express, or ``true``;
    ``"enabled": false`` switches it off. The engine has it as ``engine.gradient_reducer`` (None without).

    Raises:
        ValueError: an argument that there is not, or one that cannot be.
    """
    engine, *others = deepspeed.initialize(*args, **options)
    section = engine._config._param_dict.get(CONFIG_SECTION, False)
    arguments: dict[str, Any] = dict(section) if isinstance(section, Mapping) else {"enabled": bool(section)}
    engine.gradient_reducer = None
    if arguments.pop("enabled", True):
        try:
            engine.gradient_reducer = GradientReducer.attach(engine, **arguments)
        except TypeError as error:
            raise ValueError(f'config section "{CONFIG_SECTION}": {error}') from error
    return (engine, *others)
