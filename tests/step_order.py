"""Print the parts of an engine on a grid, and the order of its methods: ``python -m tests.step_order data=2,model=2``.

``--config`` takes the config of a job as JSON, ``--pipeline`` asks for a pipeline engine, ``--experts`` for a model
with experts. The table of the parts decides (``ds_topo/engine/parts.py``); no engine is built. A part may leave its
mixin for an optimizer out where the installed release, the backend or the number of ranks makes it needless.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo import PipelineParallelGrid
from ds_topo.base.classes import Mixin
from ds_topo.engine.config import Case, check_top_level
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.engine.parts import EnginePart, parts_of
from ds_topo.topology.process_topology import ProcessTopology
from tests.support.fake_world import fake_world

OPTIMIZERS = (
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    BF16_Optimizer,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
)


def optimizer_of(case: Case) -> type | None:
    """Return DeepSpeed's optimizer for a case; None if the program's own steps."""
    in_fp32 = case.config._param_dict.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    if case.is_bf16 and (case.is_pipeline or in_fp32) and case.stage < 2:
        return BF16_Optimizer
    if case.stage:
        return DeepSpeedZeroOptimizer_Stage3 if case.stage == 3 else DeepSpeedZeroOptimizer
    return FP16_UnfusedOptimizer if case.has_master_weights else None


def mixins_for_optimizers(part: EnginePart) -> list[type[Mixin]]:
    """Return the mixins for optimizers that the module of a part defines or imports."""
    found = [each for each in vars(importlib.import_module(part.where)).values() if inspect.isclass(each)]
    return [
        each for each in found if issubclass(each, Mixin) and each is not Mixin and not issubclass(each, EngineOnGrid)
    ]


OF_A_STEP = ("train_batch", "forward", "backward", "step", "_take_model_step")
"""The methods of engines in a step, in the order in which they run; ``_take_model_step`` runs where a step ends."""


def page(spec: str, config: dict[str, Any], *, is_pipeline: bool = False, has_experts: bool = False) -> Iterator[str]:
    """Yield the lines of the page for a layout and the whole config of a job.

    Raises:
        EngineOptionError: a key of the config is misspelt.
    """
    check_top_level(config)
    topology = ProcessTopology.from_spec(spec)
    if topology.get_dim("pipe") > 1 and not is_pipeline:
        yield "without --pipeline: an engine of one stage of the program's own pipeline\n"
    with fake_world(0, topology.world_size()), PipelineParallelGrid(topology) as grid:
        parsed = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config}, grid)
        has_experts = has_experts or parsed.expert_parallel_config.enabled
        case = Case(parsed, grid, is_pipeline, optimizer=parsed.optimizer_name, has_experts=has_experts)
        parts = parts_of(case)[::-1]
        yield f"{len(parts)} parts; the calls of a method go down this list, and end in DeepSpeed's own method:"
        for part in parts:
            yield f"  {part.mixin:30} {part.file}: {part.why}"
        yield "Not shown: the classes of a reducer, replicas and verify, which run outside of these."
        engine = PipelineEngine if is_pipeline else DeepSpeedEngine
        names = {kind: part.file for part in parts[::-1] for kind in part.load().__mro__}
        of_engine = {kind: names[kind] for part in parts for kind in part.load().__mro__ if issubclass(kind, Mixin)}
        optimizer = optimizer_of(case)
        of_optimizer = {mixin: part.file for part in parts for mixin in mixins_for_optimizers(part)}
        of_optimizer = {
            mixin: name for mixin, name in of_optimizer.items() if issubclass(optimizer or object, mixin.__bases__[-1])
        }
        in_step = [name for name in OF_A_STEP if hasattr(engine, name) and (is_pipeline or name != "train_batch")]
        for method in [name for name in in_step if not is_pipeline or name in ("train_batch", "_take_model_step")]:
            yield from _method(engine, method, of_engine)
        if optimizer is None:
            yield "\noptimizer.step: that of the program or of torch, unchanged"
        else:
            yield from _method(optimizer, "step", of_optimizer)
        yield "\n-- other methods"
        yield from _others(engine, of_engine, {*in_step})
        if optimizer is not None:
            yield from _others(optimizer, of_optimizer, {"step"})


def _others(stock: type, mixins: dict[type, str], but: set[str]) -> Iterator[str]:
    found = {name for mixin in mixins for name in vars(mixin) if hasattr(stock, name) and not name.startswith("__")}
    for method in sorted(found - but, key=lambda each: (each.startswith("_"), each)):
        yield from _method(stock, method, mixins)


def _method(stock: type, method: str, mixins: dict[type, str]) -> Iterator[str]:
    """Yield the overrides of a method, outermost first."""
    yield f"\n{stock.__name__}.{method}"
    for kind, part in mixins.items():
        if method in vars(kind):
            text = (inspect.getdoc(vars(kind)[method]) or "").partition("\n")[0]
            yield f"  {kind.__name__} ({part}): {text}"
    yield "  then DeepSpeed's own"


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="a layout, such as data=2,model=2")
    parser.add_argument("--config", default="{}", help='its config, such as \'{"zero_optimization": {"stage": 1}}\'')
    parser.add_argument("--pipeline", action="store_true")
    parser.add_argument("--experts", action="store_true")
    given = parser.parse_args()
    config = json.loads(given.config)
    print("\n".join(page(given.spec, config, is_pipeline=given.pipeline, has_experts=given.experts)))


if __name__ == "__main__":
    main()
