"""The process that ranks are forks of: it imports once what every rank needs, so that a rank starts at once.

Importing this module does the importing, so only the fork server itself does that.
"""

from __future__ import annotations

import gc
import importlib
import os

import ds_topo
from tests.support.assertions import show_values_of_asserts

show_values_of_asserts()  # first: what is imported before it shows nothing
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # torch < 2.7 starts a thread on import, and forks of threads hang

for module in (
    *("torch.distributed", "deepspeed", "deepspeed.pipe", "tests.support.rank_main"),
    # what every DeepSpeed engine imports when it is built: a second or two for each rank
    *("torch.utils.cpp_extension", "deepspeed.runtime.zero.muon.original_muon"),
):
    importlib.import_module(module)

for name in ds_topo.__all__:
    getattr(ds_topo, name)

gc.collect()
gc.freeze()  # a rank collects its own garbage after every function, and need not look at all this
