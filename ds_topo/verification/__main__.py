"""Run a program as one rank of a recorded run: ``python -m ds_topo.verification OPTIONS PROGRAM [ARGUMENT ...]``.

:mod:`ds_topo.verification.runs` starts it. ``OPTIONS`` is a JSON object with the fields of
:class:`ds_topo.verification.recorder.Recording`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from ds_topo.base import patches
from ds_topo.base.ledger import always, around, ledger
from ds_topo.launch.launchers import REFERENCE, TOPOLOGY_OVERRIDE
from ds_topo.verification.recorder import Finished, Recording, recording

_IMPORTED = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)


def main(words: list[str]) -> None:
    """Record a program's steps, then end this process at once, so that the program does not go on."""
    what, program = TypeAdapter(Recording).validate_json(words[0]), words[1]
    sys.argv = words[1:]
    sys.path[0] = str(Path(program).resolve().parent)
    with ExitStack() as undo:
        if REFERENCE in os.environ:
            undo.callback(ledger.bind(patches.CONFIGURE, of_reference))
            undo.callback(ledger.bind(patches.LOCAL_EXPERTS, with_all_experts))
        if not what.has_dropout:
            undo.callback(ledger.bind(patches.DROPOUT, always(lambda input, *_, **__: input)))
            undo.callback(ledger.bind(patches.ATTENTION_DROPOUT, without_attention_dropout))
        if not uses_ds_topo(Path(program)):  # it knows DeepSpeed alone
            from ds_topo.engine.grid import PipelineParallelGrid
            from ds_topo.engine.start import init_distributed
            from ds_topo.engine.use import use

            if importlib.util.find_spec("accelerate") is not None:  # use() patches it where it is imported
                importlib.import_module("accelerate")
            init_distributed(verbose=False)
            use(PipelineParallelGrid(os.environ[TOPOLOGY_OVERRIDE]))
        undo.enter_context(recording(what))
        try:
            runpy.run_path(program, run_name="__main__")
        except Finished:
            dist.barrier()  # no rank ends while another one may still receive from it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


@around
def without_attention_dropout(
    attend: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **more: Any
) -> Any:
    """Replace ``scaled_dot_product_attention``."""
    return attend(query, key, value, attn_mask, 0.0, **more)


def uses_ds_topo(program: Path) -> bool:
    """Tell whether a program imports ds_topo, itself or in a module beside it, and so creates its own grid."""
    waiting, known = [program], {program}
    while waiting:
        path = waiting.pop()
        names = _IMPORTED.findall(path.read_text(encoding="utf-8"))
        if "ds_topo" in names:
            return True
        beside = {program.with_name(f"{name}.py") for name in names} - known
        waiting += [one for one in beside if one.is_file()]
        known |= beside
    return False


@around
def of_reference(construct: Any, self: Any, config: Any, *arguments: Any, **named: Any) -> None:
    """Replace DeepSpeed's config by one that omits AutoTP, and ZeRO 1 and 2 in fp32; AutoEP gets one rank.

    In half precision DeepSpeed's optimizers without ZeRO compute other updates: they take a step without gradients when
    they are built, which counts in Adam's bias correction.
    """
    content = config
    if isinstance(config, (str, os.PathLike)) and os.path.exists(config):
        content = json.loads(Path(config).read_text(encoding="utf-8"))
    if isinstance(content, dict):
        omitted = {"tensor_parallel"}  # AutoTP: each process of the reference has whole layers
        section = content.get("zero_optimization")
        halves = [content.get(name) for name in ("fp16", "bf16", "bfloat16")]
        is_half = any(isinstance(one, dict) and one.get("enabled") for one in halves)
        if not is_half and not (isinstance(section, dict) and section.get("stage") == 3):
            omitted.add("zero_optimization")
        content = {name: value for name, value in content.items() if name not in omitted}
        if isinstance(experts := content.get("expert_parallel"), dict):  # AutoEP: each process has all experts
            content["expert_parallel"] = {**experts, "autoep_size": 1}
    construct(self, content, *arguments, **named)


@around
def with_all_experts(construct: Any, *arguments: Any, **named: Any) -> None:
    """Replace the constructor of MoE layers: each process of a reference has all experts."""
    given = inspect.signature(construct).bind(*arguments, **named)
    given.arguments["ep_size"] = 1
    construct(*given.args, **given.kwargs)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main(sys.argv[1:])
