"""Choose the layout of a job before it runs: predict bytes per rank and seconds per step, and search for the best.

=====================  ==============================================================================================
``model``              the size of a model, from numbers by hand, a ``config.json``, or the name of a public model
``live_module``        the size of a live module, measured on the meta device
``hardware``           GPUs, links and hosts, from tables or from measurements
``calibrate``          measurements of the GPUs at hand
``job``                a job (model, cluster, batch, precision, program), a layout of it, and the rules for layouts
``work``               the matrix products, memory traffic and messages of each kind of layer, and their seconds
``stages``             the stages of a pipeline, and the cost of their pieces
``memory``             the bytes of a rank at its peak
``step_time``          the hosts that groups span, the seconds of their collectives, and those of a step
``search``             the best layouts, and the smallest cluster that fits
``explain``            every term in words, and the bytes between hosts
=====================  ==============================================================================================

Read ``job`` first, then ``memory`` and ``step_time``. All but ``live_module`` and ``calibrate`` need the standard
library only. ``examples/plan.md`` lists the formulas and their sources. Numbers, names and files that cannot be used
raise :class:`~ds_topo.errors.TopologyError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_topo.errors import TopologyError, abridged


def read_json(path: str | Path, name: str) -> Any:
    """Return the content of a JSON file; an error calls the file ``name``."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"{name} {str(path)!r} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # of UTF-8 and of numbers too; nested too deeply
        raise TopologyError(f"{name} {str(path)!r} is not JSON: {error}") from error


def whole_number(content: Mapping[str, Any], *keys: str, least: int = 1, default: int | None = None) -> int:
    """Return the value of the first of ``keys`` that an object of a JSON file has, or the default if it has none.

    >>> whole_number({"heads": 8, "ffn": None}, "heads"), whole_number({"heads": 8, "ffn": None}, "ffn", default=4)
    (8, 4)
    """
    key = next((key for key in keys if content.get(key) is not None), keys[0])
    value = content.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = "is missing" if value is None else f"is {abridged(value)}"
        raise TopologyError(f"{key!r} {found}; a whole number from {least} on must be there")
    return value
