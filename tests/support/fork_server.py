"""Import once what every rank needs: ranks are forks of the process that imports this module, and start at once.

Only the fork server imports it, because the import does the work.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
from contextlib import suppress
from typing import Any

import torch
from torch import nn

import ds_topo
from tests.support.assertions import show_values_of_asserts

show_values_of_asserts()  # first: asserts of modules that are imported earlier show no values
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # torch < 2.7 starts a thread on import, and forks of threads hang

for module in (
    *("torch.distributed", "deepspeed", "deepspeed.pipe", "tests.support.rank_main"),
    *("hypothesis", "tests.support.strict_backend"),  # many tests import them
    # DeepSpeed imports these when it builds an engine: a second or two for each rank
    *("torch.utils.cpp_extension", "deepspeed.ops.op_builder.all_ops", "deepspeed.module_inject.auto_ep_layer"),
    *("torch._dynamo", "torch.distributed.tensor.debug", "deepspeed.runtime.zero.muon.original_muon"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.superoffload.superoffload_stage3"),
    *("deepspeed.comm.mori", "deepspeed.utils.pin_memory", "torch.profiler._cupti_monitor"),
    *("matplotlib.figure", "rich.progress"),  # of the examples
    *("torch._subclasses.schema_check_mode", "torch.distributed.checkpoint"),
    *("tests.support.gpt_training", "tests.support.moe_training"),
):
    with suppress(ModuleNotFoundError):  # some releases of torch or DeepSpeed lack some of them
        importlib.import_module(module)

for name in ds_topo.__all__:
    getattr(ds_topo, name)

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # noqa: E402
from deepspeed.comm.torch import TorchBackend  # noqa: E402
from deepspeed.ops import __compatible_ops__  # noqa: E402, F401 - finding out starts compilers
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # noqa: E402

from tests.support import rank_main  # noqa: E402
from tests.support.gpt_training import some_text  # noqa: E402

some_text()
with suppress(ModuleNotFoundError):
    muon = importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    muon.MuonWithAuxAdam([{"params": [nn.Parameter(torch.ones(1, 1))], "use_muon": True}])  # torch wraps its step() now

# ranks.py has compiled the extension. Loaded here, it is not looked up in each job of each rank.
shared_memory = ShareMemCommBuilder().load()
initialize_shared_memory, sizes = shared_memory.initialize, []


@functools.wraps(TorchBackend.inference_all_reduce)
def inference_all_reduce(self: TorchBackend, *args: Any, **options: Any) -> Any:
    """Write the 66 MiB of shared memory of this rank before the first call that uses them: few jobs do."""
    if sizes:
        initialize_shared_memory(*sizes.pop())
        sizes.clear()
    return inference_all_reduce.__wrapped__(self, *args, **options)


shared_memory.initialize = lambda *size_and_rank: sizes.append(size_and_rank)
TorchBackend.inference_all_reduce = inference_all_reduce

# DeepSpeed refuses fp16 on CPUs that have no instructions for it, although torch computes it on all of them
CPU_Accelerator.is_fp16_supported = lambda _: True

rank_main.STATE.note()
gc.collect()
gc.freeze()  # the garbage collections of a rank need not look at all this
