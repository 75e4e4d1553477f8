"""Keep the former import paths of the modules of :mod:`ds_topo.plan`, such as ``ds_topo.planner.search``."""

from __future__ import annotations

import sys

from ds_topo.plan import hardware, job, model, search

for _module in (hardware, job, model, search):
    sys.modules[_module.__name__.replace(".plan.", ".planner.")] = _module
