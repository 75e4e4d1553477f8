"""Print the parts of an engine on a grid, and the order of its methods: ``python -m tests.step_order data=2,model=2``.

``--config`` takes sections of a config as JSON, ``--pipeline`` asks for a pipeline engine, ``--experts`` for a model
with experts. The table of the parts decides (``ds_topo/engine/parts.py``); no engine is built.
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
from ds_topo.base.overrides import overridden_by
from ds_topo.engine.config import Case
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
    """Return the mixins for optimizers that the module of a part defines."""
    module = importlib.import_module(part.where)
    own = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == part.where]
    return [each for each in own if issubclass(each, Mixin) and not issubclass(each, EngineOnGrid)]


def page(spec: str, config: dict[str, Any], *, is_pipeline: bool = False, has_experts: bool = False) -> Iterator[str]:
    """Yield the lines of the page for a layout and a config."""
    topology = ProcessTopology.from_spec(spec)
    with fake_world(0, topology.world_size()), PipelineParallelGrid(topology) as grid:
        whole = {"train_micro_batch_size_per_gpu": 1, **config}
        case = Case(DeepSpeedConfig(whole, grid), grid, is_pipeline=is_pipeline, has_experts=has_experts)
        parts = parts_of(case)
        yield f"{len(parts)} parts, outermost first:"
        for part in reversed(parts):
            yield f"  {part.name:26} {part.where.removeprefix('ds_topo.engine.')}.{part.mixin}: {part.why}"
        engine = PipelineEngine if is_pipeline else DeepSpeedEngine
        yield from _methods(engine.__name__, [part.load() for part in reversed(parts)], engine)
        optimizer = optimizer_of(case)
        if optimizer is not None:
            given = [mixin for part in reversed(parts) for mixin in mixins_for_optimizers(part)]
            given = [mixin for mixin in given if issubclass(optimizer, mixin.__bases__[-1])]
            yield from _methods(optimizer.__name__, given, optimizer)


def _methods(name: str, mixins: list[type[Mixin]], stock: type) -> Iterator[str]:
    """Yield for each method the overrides, outermost first; then DeepSpeed's own runs."""
    overridden = {each for mixin in mixins for each in overridden_by(mixin)}
    for method in sorted(overridden, key=lambda each: (each.startswith("_"), each)):
        yield f"\n{name}.{method}"
        seen = dict.fromkeys(kind for mixin in mixins for kind in mixin.__mro__ if issubclass(kind, Mixin))
        for kind in (kind for kind in seen if method in vars(kind)):
            text = (inspect.getdoc(vars(kind)[method]) or "").partition("\n")[0]
            yield f"  {kind.__name__}: {text}"


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="a layout, such as data=2,model=2")
    parser.add_argument("--config", default="{}", help='sections, such as \'{"zero_optimization": {"stage": 1}}\'')
    parser.add_argument("--pipeline", action="store_true")
    parser.add_argument("--experts", action="store_true")
    given = parser.parse_args()
    config = json.loads(given.config)
    print("\n".join(page(given.spec, config, is_pipeline=given.pipeline, has_experts=given.experts)))


if __name__ == "__main__":
    main()
