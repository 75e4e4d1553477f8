"""DeepSpeed's engines call the same functions and collectives in each step as in ``golden_trace.txt``.

The file was recorded by this command. Repeat it only for a change that alters what DeepSpeed does in a step on purpose,
and review the difference::

    python -c "from tests.engine.test_golden_trace import record; record()"
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split_experts
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_topo import DualPipeVModule, PipelineModule, PipelineParallelGrid, groups, initialize
from tests.support.deepspeeds_calls import Calls, recorded_calls
from tests.support.ranks import run_ranks
from tests.support.small_engines import settings
from tests.support.world import Worlds

GOLDEN = Path(__file__).with_name("golden_trace.txt")
RELEASE = "0.19.8"
WIDTH = 8
SMALL = {"bucket_bytes": 300, "first_bucket_bytes": 100, "last_bucket_bytes": 100, "overlap": True}
"""Bucket sizes with which most parameters have their own, and overlap that does not depend on times."""
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 4}}
OVERFLOWING: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}}
WIDE: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
ADAM: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


class Residual(nn.Linear):
    """A layer that adds its result to its input."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(super().forward(hidden))


class Experts(nn.Module):
    """A layer of four experts, two on each rank of an expert parallel group."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=2, min_capacity=0, use_rts=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.moe(hidden)[0]
        return hidden + mixed


def plain(spec: str, has_experts: bool = False, **config: Any) -> Calls:
    """Train a plain engine of three layers."""
    with PipelineParallelGrid(spec) as grid:
        layers = [Residual(), Experts() if has_experts else Residual(), Residual()]
        module = nn.Sequential(*layers)
        parameters: Any = {"params": list(module.parameters()), "name": "all"}
        more = {"model_parameters": split_experts(parameters)} if has_experts else {}
        engine, *_ = initialize(model=module, mpu=grid, config=_config(config), **more)
        dtype = next(module.parameters()).dtype

        def step() -> None:
            for micro_batch in range(engine.gradient_accumulation_steps()):
                inputs = torch.full((2, WIDTH), 0.1 * (grid.get_sample_rank() + micro_batch), dtype=dtype)
                engine.backward(engine(inputs).float().square().mean())
                engine.step()

        return _second_step(engine, step)


def pipeline(spec: str, has_experts: bool = False, kind: Any = PipelineModule, **config: Any) -> Calls:
    """Train a pipeline of four layers."""
    with PipelineParallelGrid(spec) as grid:
        layers = [LayerSpec(Residual), *[LayerSpec(Experts if has_experts else Residual)] * 2, LayerSpec(Residual)]
        if has_experts:
            groups.create_expert_groups(grid, 2)
        module = kind(layers, grid=grid, loss_fn=F.mse_loss, partition_method="uniform")
        gas = 4 if kind is DualPipeVModule else 2
        engine, *_ = initialize(model=module, config=_config({"gradient_accumulation_steps": gas, **config}))
        dtype = next(module.parameters()).dtype
        batches = [(torch.full((2, WIDTH), 0.1 * i, dtype=dtype), torch.zeros(2, WIDTH, dtype=dtype)) for i in range(4)]
        return _second_step(engine, lambda: engine.train_batch(iter(batches)))


def _config(more: dict[str, Any]) -> dict[str, Any]:
    return settings(**{"gradient_clipping": 0.1, **more})


def _second_step(engine: Any, step: Callable[[], Any]) -> Calls:
    step()
    dist.barrier()
    with recorded_calls() as calls:
        step()
    dist.barrier()
    engine.destroy()
    return calls


SLICES, STAGES = {"spec": "data=2,model=2"}, {"spec": "pipe=2,data=2"}
Scene: TypeAlias = tuple[Callable[..., Calls], dict[str, Any]]


def _at(
    stages: Iterable[int], name: str, train: Callable[..., Calls], zero_options: Any = (), **options: Any
) -> dict[str, Scene]:
    """Return a scene for each ZeRO stage."""
    return {f"{name}, ZeRO {stage}": (train, {**options, **zero(stage, **dict(zero_options))}) for stage in stages}


WITH_REDUCER: dict[str, Scene] = {
    **_at((0, 1, 2), "plain", plain, **SLICES),
    **_at((1,), "seq", plain, spec="data=2,seq=2"),
    **_at((0, 1, 2), "fp16", plain, **SLICES, **FP16),
    **_at((0, 1), "overflow", plain, **SLICES, **OVERFLOWING),
    "fused fp16": (plain, {**SLICES, **ADAM, **FP16}),
    **_at((0, 1), "bf16", plain, **SLICES, **BF16),
    **_at((1, 2), "fp32 sums", plain, spec="data=4", **WIDE),
    **_at((0, 1, 2), "experts", plain, spec="data=4", has_experts=True),
    **_at((0, 1), "pipeline", pipeline, **STAGES),
    "pipeline, fp16": (pipeline, {**STAGES, **FP16, **zero(1)}),
    "pipeline, bf16": (pipeline, {**STAGES, **BF16}),
    "pipeline, fp32 sums": (pipeline, {**STAGES, **WIDE, **zero(1)}),
    **_at((0, 1), "pipeline, experts", pipeline, has_experts=True, **STAGES),
    **_at((0, 1), "DualPipeV", pipeline, kind=DualPipeVModule, **STAGES),
}
"""A function that trains, and its arguments; each is recorded with our reducer, too."""
SCENES: dict[str, Scene] = {
    **WITH_REDUCER,
    **_at((3,), "plain", plain, **SLICES),
    **_at((3,), "seq", plain, spec="data=2,seq=2"),
    **_at((1, 3), "shards", plain, spec="data=2,shard=2"),
    **_at((2, 3), "offloaded", plain, spec="data=4", **ADAM, zero_options=OFFLOAD),
    **_at((3,), "shards, offloaded", plain, spec="data=2,shard=2", **ADAM, zero_options=OFFLOAD),
    **_at((3,), "fp16", plain, **SLICES, **FP16),
    **_at((3,), "overflow", plain, **SLICES, **OVERFLOWING),
    "experts on slices": (plain, {**SLICES, "has_experts": True, **zero(1)}),
    **{
        f"{name}, reducer": (train, {**options, "gradient_reducer": SMALL})
        for name, (train, options) in WITH_REDUCER.items()
    },
}


def record_all(names: list[str]) -> dict[str, Calls]:
    """Run these scenes on this rank."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    found = {}
    for name in names:
        train, options = SCENES[name]
        found[name] = train(**options)
        dist.barrier()
    return found


def traces_of(by_rank: list[dict[str, Calls]]) -> dict[str, str]:
    """Return the text of each scene: the calls of the first rank, and in pipelines those of the last one."""
    return {
        name: "\n".join(
            textwrap.fill("; ".join(_without_repeated_classes(calls)), 118, break_on_hyphens=False)
            for rank in ((0, -1) if SCENES[name][0] is pipeline else (0,))
            for calls in (by_rank[rank][name].functions, by_rank[rank][name].collectives)
        )
        for name in by_rank[0]
    }


def _without_repeated_classes(calls: list[str]) -> Iterator[str]:
    """Write ``.step`` for a method of the same class as that of the name before."""
    before = ""
    for call in calls:
        owner = call.strip("[").rpartition(".")[0]
        yield call.replace(owner, "", 1) if owner and owner == before else call
        before = owner


def recorded() -> dict[str, str]:
    """Return the text of each scene in the file."""
    sections = (section.partition("\n") for section in GOLDEN.read_text().split("# ")[1:])
    found: dict[str, str] = {}
    for name, _, text in sections:
        text = text.strip()
        found[name] = found[text.removeprefix("= ")] if text.startswith("= ") else text
    return found


def record() -> None:
    """Write the file, in which ``= NAME`` says that a scene's calls are those of another one."""
    first_with: dict[str, str] = {}
    sections = []
    for name, text in traces_of(run_ranks(4, record_all, list(SCENES), deadline=300)).items():
        same = first_with.setdefault(text, name)
        sections.append(f"# {name}\n{text if same == name else f'= {same}'}\n")
    GOLDEN.write_text("\n".join(sections))


@pytest.fixture(scope="module")
def traced(world: Worlds, request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the texts of the scenes that are selected."""
    selected = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = {case.params["name"] for case in selected if case is not None}
    return traces_of(world(4).run(record_all, [name for name in SCENES if name in names]))


pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        deepspeed.__version__ != RELEASE, reason=f"golden_trace.txt has the calls of DeepSpeed {RELEASE}"
    ),
]


DEFAULT = (
    *("plain, ZeRO 0", "plain, ZeRO 1", "plain, ZeRO 2, reducer", "plain, ZeRO 3", "shards, ZeRO 3", "fp16, ZeRO 0"),
    *("fp32 sums, ZeRO 1", "experts, ZeRO 1, reducer", "pipeline, bf16", "pipeline, experts, ZeRO 1, reducer"),
    *("DualPipeV, ZeRO 0", "overflow, ZeRO 1"),
)
"""The scenes of the default set."""


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive) for name in SCENES]
)
def test_step_calls_the_same_functions_and_collectives(traced: dict[str, str], name: str) -> None:
    assert traced[name] == recorded()[name]


def test_file_has_the_scenes_and_no_others() -> None:
    assert recorded().keys() == SCENES.keys()
