"""Keep the import path ``ds_topo.measurement.live_module`` of :mod:`ds_topo.plan.live_module`."""

from __future__ import annotations

import sys

from ds_topo.plan import live_module

sys.modules[f"{__name__}.live_module"] = live_module
