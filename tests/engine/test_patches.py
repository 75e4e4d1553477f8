"""Every row names an existing object, every private name has a row, and every patch is called and restored."""

from __future__ import annotations

import ast
import gc
import os
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import TopKGate
from deepspeed.moe.utils import configure_moe_param_groups
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ds_topo
from ds_topo import GradientReducer, PipelineModule, PipelineParallelGrid, initialize, use
from ds_topo.base import classes, patches
from ds_topo.base import ledger as ledger_module
from ds_topo.base.classes import mixins_of
from ds_topo.base.ledger import Patch, Reliance, ledger
from ds_topo.base.overrides import Override, mixins, overridden_by
from ds_topo.base.supported import is_missing
from ds_topo.base.torch_names import inherit_timeout
from ds_topo.verification.recorder import Recorded
from tests.names import ROWS, page
from tests.support.moe_training import Case, Trainer
from tests.support.ranks import run_ranks
from tests.support.small_engines import data_efficiency

pytestmark = pytest.mark.thorough  # for those who change ds_topo

PACKAGE = Path(ds_topo.__file__).parent


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_installed_release_has_every_name(row: Patch | Reliance) -> None:
    assert not is_missing(row)


def test_no_row_is_listed_twice() -> None:
    assert max(Counter((str(row), getattr(row, "during", "")) for row in ROWS).values()) == 1


def test_every_override_says_why() -> None:
    """A helper of a mixin must not have a name of DeepSpeed by accident."""
    assert [str(row) for row in ROWS if isinstance(row, Override) and not row.why] == []


def test_page_has_what_mixins_of_higher_layers_override() -> None:
    assert Recorded in mixins()
    of_mixins = {mixin.__name__: overridden_by(mixin) for mixin in mixins() if mixin.__module__.startswith("ds_topo.")}
    shown = {(row.owner, row.name) for row in ROWS if isinstance(row, Override)}
    assert {
        name: {(owner, member) for member, owner in found.items()} - shown for name, found in of_mixins.items()
    } == {name: set() for name in of_mixins}


def test_page_shows_every_row() -> None:
    text = page()
    for row in ROWS:
        assert f"{row}" in text
    sections = re.findall(r"^(?:P|Process-wide p)atches.*: (\d+)$", text, re.MULTILINE)
    assert sum(map(int, sections)) == sum(isinstance(row, Patch) for row in ROWS)
    absent = Reliance(dict, "absent", "nothing")
    assert "builtins.dict.absent  MISSING" in page([absent])
    assert "missing here: builtins.dict.absent" in page([absent])


def private_names_of_others() -> dict[str, set[str]]:
    """Return every ``x._name`` that the package uses but does not define, with the files that use it."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own: set[str] = set()
    used: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "face", "topology")
                if is_self and isinstance(node.ctx, ast.Store):
                    own.add(node.attr)
                used.setdefault(node.attr, set()).add(path.name)
    return {name: files for name, files in used.items() if name not in own}


def private_methods_called_by_super() -> set[str]:
    """Return every ``super()._name`` of the package: it may define the method, too, but another library has it."""
    return {
        node.attr
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) and node.value.func.id == "super"
    }


def test_no_private_name_is_used_without_a_row() -> None:
    listed = {row.name for row in ROWS}
    used = private_names_of_others()
    assert private_methods_called_by_super() - listed == set()
    public = {"_asdict", "_make", "_fields"}  # of named tuples
    public |= {"_hp_mapping", "_index_in_param_group"}  # on parameters, set by functions that have a row
    public |= {"_SubParsersAction", "_ArgumentGroup", "_actions"}  # argparse has no public names for these
    public |= {"_exit", "_current_frames", "_current_exceptions"}  # documented, of os and sys
    assert "_process_group_name" in listed
    assert "_world" in used, "the search finds what there is to find"
    modules_of_torch = {"_c10d_functional", "_parameters", "_modules"}  # documented for extensions of torch
    assert used.keys() - listed - public - modules_of_torch == set()


# -- every patch is restored -------------------------------------------------------------------------------------------


def owners_of_rows() -> list[type | ModuleType]:
    return list({id(row.owner): row.owner for row in ROWS}.values())


def snapshot() -> dict[str, Any]:
    """Return everything in the process that must be equal before and after."""
    gc.collect()  # engines are reference cycles, and keep the sockets of their groups open
    values: dict[str, Any] = {}
    for owner in owners_of_rows():
        for name in (row.name for row in ROWS if row.owner is owner):
            value = vars(owner).get(name, "absent")
            values[f"{owner.__name__}.{name}"] = dict(value) if isinstance(value, dict) else value
    files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    return {
        **values,
        "in force": ledger.in_force(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": Counter(file.partition(":")[0] for file in files),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "mpu": deepspeed.utils.groups.mpu,
    }


def hooks_of(module: nn.Module) -> int:
    """Count the hooks on parameters and gates, and the marks on parameters."""
    on_parameters = sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in module.parameters())
    on_gates = sum(len(part._forward_hooks) for part in module.modules() if isinstance(part, TopKGate))
    return on_parameters + on_gates + sum(hasattr(parameter, "_hp_grad") for parameter in module.parameters())


def bound_on(*objects: Any) -> set[str]:
    """Return the names of rows that objects have of their own, and what their mixins override."""
    methods = {row.name for row in patches.PATCHES if callable(getattr(row.owner, row.name, 0))}
    overridden = {name for item in objects for mixin in mixins_of(item) for name in overridden_by(mixin)}
    return overridden | {name for item in objects for name in vars(item) if name in methods}


def _settings(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }


def plain(spec: str = "data=2,model=2", **settings: Any) -> None:
    with PipelineParallelGrid(spec) as grid:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        config = _settings(**{"gradient_reducer": True, **settings})
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        dtype = next(module.parameters()).dtype
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 4, dtype=dtype)).sum())
            engine.step()
        assert bound_on(engine, engine.optimizer)
        engine.destroy()
    assert not bound_on(engine, engine.optimizer)
    assert hooks_of(module) == 0


def save_and_load(folder: str, settings: dict[str, Any]) -> None:
    """Save and load with our reducer and without it, also the parameters alone."""
    with PipelineParallelGrid("data=4") as grid:
        for reduced in (True, False):
            module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            config = _settings(gradient_reducer=reduced, **settings)
            engine, *_ = initialize(model=module, mpu=grid, config=config)
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 4, dtype=next(module.parameters()).dtype)).sum())
                engine.step()
            engine.save_checkpoint(folder, "last")
            engine.load_checkpoint(folder, "last")
            engine.load_checkpoint(folder, "last", load_module_only=True)
            engine.destroy()


def experts_over_shard(folder: str, settings: dict[str, Any]) -> None:
    """Save and load the partitions of experts and of dense parameters, which other ranks hold."""
    with PipelineParallelGrid("data=2,shard=2") as grid:
        module = nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2))
        groups = configure_moe_param_groups(list(module.parameters()))
        engine, *_ = initialize(model=module, model_parameters=groups, mpu=grid, config=_settings(**settings))
        engine.save_checkpoint(folder, "experts")
        engine.load_checkpoint(folder, "experts")
        engine.destroy()


def experts_without_zero() -> None:
    with PipelineParallelGrid("data=4") as grid:
        module = nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2, min_capacity=0))
        groups = configure_moe_param_groups(list(module.parameters()))
        config = _settings(**BF16, gradient_accumulation_steps=1)
        engine, *_ = initialize(model=module, model_parameters=groups, mpu=grid, config=config)
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16))[0].float().sum())
        engine.step()
        engine.destroy()


def load_weights_alone(folder: str) -> None:
    """Load the parameters of ZeRO 3 without optimizer states, which reads the partitions of all ranks."""
    with PipelineParallelGrid("data=4") as grid:
        zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
        config = _settings(zero_optimization=zero, gradient_accumulation_steps=1)
        for is_saved in (False, True):
            engine, *_ = initialize(model=nn.Linear(4, 4), mpu=grid, config=config)
            if is_saved:
                engine.load_checkpoint(folder, "whole", load_optimizer_states=False)
            else:
                engine.save_checkpoint(folder, "whole")
                engine.save_16bit_model(folder)
            engine.destroy()


def pipeline(**settings: Any) -> None:
    grid = PipelineParallelGrid("pipe=2,data=2")
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 4, grid=grid, loss_fn=F.mse_loss)
    engine, *_ = initialize(model=module, config=_settings(gradient_reducer=True, **settings))
    dtype = next(module.parameters()).dtype
    for _ in range(2):
        engine.train_batch(iter([(torch.ones(2, 4, dtype=dtype), torch.zeros(2, 4, dtype=dtype))] * 2))
    engine.gradient_reducer.detach()
    engine.destroy()
    grid.destroy()
    assert not bound_on(engine, engine.optimizer, module)
    assert hooks_of(module) == 0
    assert module.world_group is dist.group.WORLD


def mixture(**case: Any) -> None:
    trainer = Trainer(Case(pipeline=False, clip=0.1, **case))
    trainer.train(range(2))
    engine, optimizer, module = trainer.engine, trainer.engine.optimizer, trainer.engine.module
    trainer.destroy()
    assert not bound_on(engine, optimizer)
    assert hooks_of(module) == 0


def zero_3(spec: str, name: str, **zero: Any) -> None:
    with PipelineParallelGrid(spec) as grid:
        config = _settings(zero_optimization={"stage": 3, **zero}, gradient_accumulation_steps=1)
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), mpu=grid, config=config)
        assert name in bound_on(engine.optimizer)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        engine.destroy()
    assert not bound_on(engine, engine.optimizer)


class StockPipeline(deepspeed.PipelineModule):  # type: ignore[misc]
    """A pipeline that a program derives from DeepSpeed's class before a grid exists."""


def grid_in_use() -> None:
    grid = PipelineParallelGrid("data=2,pipe=2")
    with use(grid):
        tied = TiedLayerSpec("tied", nn.Linear, 4, 4)
        module = StockPipeline([tied, LayerSpec(nn.Linear, 4, 4), tied], num_stages=2, loss_fn=F.mse_loss)
        assert module.mpu().shares_groups_with(grid)
        engine, *_ = deepspeed.initialize(model=module, config=_settings(gradient_reducer=True))
        engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 2))
        engine.destroy()
    grid.destroy()
    assert not bound_on(engine, engine.optimizer, module)
    assert module.world_group is dist.group.WORLD
    use(grid := PipelineParallelGrid("seq=2,data=2"))
    config = _settings(zero_optimization={"stage": 3}, gradient_accumulation_steps=1)
    with deepspeed.zero.Init(config_dict_or_path=config):
        plain_module = nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=plain_module, config=config)
    assert engine.mpu is grid
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.destroy()
    grid.destroy()


def auto_tensor(folder: str) -> None:
    """Split a model by AutoTP, and save its weights."""
    layers = [
        {"patterns": [r".*0\.weight$"], "partition_type": "column"},
        {"patterns": [r".*1\.weight$"], "partition_type": "row"},
    ]
    section = {"partition_config": {"use_default_specs": False, "layer_specs": layers}}
    with PipelineParallelGrid("model=2,data=2") as grid:
        config = _settings(gradient_accumulation_steps=1, tensor_parallel=section)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        engine.save_16bit_model(folder)
        engine.destroy()


def two_levels() -> None:
    with mock.patch("socket.gethostname", return_value=f"host{dist.get_rank() // 2}"):
        module = nn.Linear(4, 4)
        reducer = GradientReducer(module, two_level=True)
        for _ in range(2):
            module(torch.ones(1, 4)).sum().backward()
            reducer.finish()
        assert any("exchange" in thread.name for thread in threading.enumerate())
        dist.barrier()
        reducer.detach()
        GradientReducer(nn.Linear(4, 4)).detach()  # the slower of the two reductions is gone
    assert hooks_of(module) == 0


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP32_GRADIENTS = {**BF16, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
OVER_SEQ = {"spec": "data=2,seq=2", "name": "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"}
OVER_SHARD = {"spec": "data=2,shard=2", "name": "partition_grads"}
SCENES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "plain, ZeRO 0": (plain, {}),
    "plain, ZeRO 1": (plain, {"zero_optimization": {"stage": 1}}),
    "plain, ZeRO 2": (plain, {"zero_optimization": {"stage": 2}}),
    "plain, parameters overlapped": (
        plain,
        {"zero_optimization": {"stage": 1}, "gradient_reducer": {"overlap_parameters": True}},
    ),
    "plain, bf16": (plain, BF16),
    "pipeline, ZeRO 0": (pipeline, {}),
    "pipeline, ZeRO 1": (pipeline, {"zero_optimization": {"stage": 1}}),
    "pipeline, bf16 in fp32 buffers": (
        pipeline,
        FP32_GRADIENTS,
    ),
    "experts on slices": (mixture, {"topology": "data=2,model=2", "sizes": (0, 2), "reduced": True}),
    "tensor-parallel experts, ZeRO 2": (
        mixture,
        {"topology": "model=2,data=2", "sizes": (0, 2), "zero": 2, "tensor_parallel": True},
    ),
    "ZeRO 3 over seq": (zero_3, OVER_SEQ),
    "ZeRO 3 over shard": (zero_3, OVER_SHARD),
    "two levels": (two_levels, {}),
    "a grid in use": (grid_in_use, {}),
}


KEPT_BY_DEEPSPEED = {name for name in SCENES if name.startswith(("pipeline", "ZeRO 3"))} | {"a grid in use"}
"""DeepSpeed itself never frees the engine of a last stage or of ZeRO-3, and so never closes their sockets."""


def _play_twice(names: list[str]) -> tuple[dict[str, dict[str, Any]], set[tuple[str, str]]]:
    """Run each scene once and note the calls of patches, then between two snapshots; return differences and calls."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    found, called = {}, set()
    for name in names:
        scene, settings = SCENES[name]
        with _calls_noted_in(called):
            scene(**settings)
        before = _settled(None, set())
        scene(**settings)
        compared = before.keys() - ({"files"} if name in KEPT_BY_DEEPSPEED else set())
        after = _settled(before, compared)
        found[name] = {key: f"{before[key]} -> {after[key]}" for key in compared if before[key] != after[key]}
        dist.barrier()
    return found, called


def _settled(wanted: dict[str, Any] | None, compared: Collection[str]) -> dict[str, Any]:
    """Return a snapshot once it has the wanted value (or has stopped to change), or after ten seconds.

    Peers close their connections a little later.
    """
    dist.barrier()
    before, now, end = None, snapshot(), time.monotonic() + 10
    while time.monotonic() < end:
        if now == before if wanted is None else all(now[key] == wanted[key] for key in compared):
            break
        time.sleep(0.2)
        before, now = now, snapshot()
    return now


@pytest.fixture(scope="module")
def played() -> list[tuple[dict[str, dict[str, Any]], set[tuple[str, str]]]]:
    """Return by rank what each scene left behind and called. Scenes of which DeepSpeed keeps something come last."""
    names = sorted(SCENES, key=lambda name: name in KEPT_BY_DEEPSPEED)
    return run_ranks(4, _play_twice, names, deadline=300)


@pytest.mark.parametrize("name", SCENES)
def test_everything_is_restored(played: list[tuple[dict[str, dict[str, Any]], Any]], name: str) -> None:
    assert [differing[name] for differing, _ in played] == [{}] * 4


# -- every replacement is called ------------------------------------------------------------------------------------

CALLED_BY_MISTAKES = {
    "DeepSpeedEngine.coalesce_grad_reduction",
    "DeepSpeedZeroOptimizer.offload_states",
    "DeepSpeedEngine.compile",
    *(f"PipelineEngine.{name}" for name in ("forward", "backward", "step")),
}
"""Overrides that raise or warn; each is tested with its feature."""
CALLED_BY_PROGRAMS = {
    patches.INITIALIZE,
    patches.MODIFIED_BY_ONE,
    patches.INFERENCE_GROUP,
    patches.FOLDING_TABLES,
    patches.WRITER_OF_FOLDED_EXPERTS,
    patches.PROCESS_TOPOLOGY,
    patches.PIPE_DATA_TOPOLOGY,
    patches.PIPE_MODEL_DATA_TOPOLOGY,
    patches.GRID,
    patches.SOURCE_OF_SLICES,
}
OVERRIDES_CALLED_BY_PROGRAMS = {
    "DeepSpeedEngine.get_autosp_backend",
    "DeepSpeedEngine.set_train_batch_size",
    "PipelineEngine.set_train_batch_size",
    "DeepSpeedEngine.set_train_micro_batch_size",
    "FP16_Optimizer.unscale_and_clip_grads",
    "DeepSpeedZeroOptimizer.update_lp_params",
    "BF16_Optimizer.accumulate_hp_grads_and_remove_lp",
    "DeepSpeedDataSampler.get_start_end_idx",
    "ZeROOptimizer.get_param_comm_dtype",
}
"""Names that DeepSpeed does not call itself, or only for universal checkpoints, with FusedAdam, in a data loader, or
with torch_autocast."""
CALLED_BY_VERIFY = {
    patches.LOCAL_EXPERTS,
    patches.DROPOUT,
    patches.ATTENTION_DROPOUT,
    patches.CONFIGURE,
}
"""The rows of recorded runs (tests/verification)."""
VALUES = {patches.SEQUENCE_GROUP, patches.SEQUENCE_DATA_GROUP, patches.INITIALIZE_SEQUENCES}
"""Values, and the function that long sequence training calls (tests/programs)."""


@contextmanager
def _calls_noted_in(called: set[tuple[str, str]]) -> Iterator[None]:
    """Note the patches that are made in the block and whose replacement DeepSpeed or torch calls."""

    def counting(patch: Patch, replacement: Any) -> Any:
        if isinstance(replacement, dict):
            return {key: counting(patch, value) for key, value in replacement.items()}
        if isinstance(replacement, MethodType):
            return MethodType(counting(patch, replacement.__func__), replacement.__self__)

        def counted(*args: Any, **options: Any) -> Any:
            called.add((str(patch), patch.during))
            return replacement(*args, **options)

        return counted if callable(replacement) else replacement

    replace = ledger_module._replace

    def replace_and_count(owner: Any, patch: Patch, make: Any) -> Any:
        return replace(owner, patch, lambda original: counting(patch, make(original)))

    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(ledger_module, "_replace", replace_and_count))
        overriding = {
            (kind, name): None
            for mixin in mixins()
            for name in overridden_by(mixin)
            for kind in [next(kind for kind in mixin.__mro__ if name in vars(kind))]
        }
        for kind, name in overriding:
            undo.enter_context(mock.patch.object(kind, name, _noting_calls(vars(kind)[name], name, called)))
        yield


def _noting_calls(method: Any, name: str, called: set[tuple[str, str]]) -> Any:
    if isinstance(method, property):
        return property(_noting_calls(method.fget, name, called), method.fset)

    @wraps(method)
    def noted(self: Any, *args: Any, **options: Any) -> Any:
        called.update((f"{kind.__name__}.{name}", "override") for kind in type(self).__mro__)
        return method(self, *args, **options)

    return noted


def _calls_of_further_features(folder: str) -> set[tuple[str, str]]:
    """Return the patches that are called in a job with every feature that the scenes do not use."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    called: set[tuple[str, str]] = set()
    with _calls_noted_in(called):
        inherit_timeout()
        group = dist.new_group()
        dist.barrier(group)  # all have connected
        dist.destroy_process_group(group)
        # Muon's own kernels do not matter here, so neither they nor DeepSpeed's Adam are compiled.
        with torch.compiler.set_stance("force_eager"):
            muon = {"type": "Muon", "params": {"lr": 0.1, "torch_adam": True}}
            plain(zero_optimization={"stage": 1}, optimizer=muon)
        half = {"enabled": True, "initial_scale_power": 4}
        plain("shard=2,data=2", gradient_reducer=False, zero_optimization={"stage": 1}, fp16=half)
        for stage in (2, 3):
            offloaded = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
            plain("data=4", gradient_reducer=False, zero_optimization=offloaded)
        experts_over_shard(folder, {"zero_optimization": {"stage": 1}})
        experts_over_shard(folder, FP32_GRADIENTS)
        experts_without_zero()
        save_and_load(folder, {"zero_optimization": {"stage": 1}})
        save_and_load(folder, FP32_GRADIENTS)
        load_weights_alone(folder)
        auto_tensor(folder)
        for zero in (0, 1):
            trainer = Trainer(Case("data=2,model=2", (0, 2), zero, pipeline=False, clip=0.1))
            trainer.train(range(2))
            trainer.engine.save_checkpoint(folder)
            trainer.engine.load_checkpoint(folder)
            trainer.destroy()
        with PipelineParallelGrid("pipe=2,data=2") as grid:
            module = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, grid=grid, loss_fn=F.mse_loss)
            samples = [(torch.ones(2, 4), torch.zeros(2, 4))] * 2
            config = _settings(data_efficiency=data_efficiency(folder))  # whose loaders have no processes of their own
            engine, *_ = initialize(model=module, config=config, training_data=samples)
            engine.eval_batch(iter(samples))
            engine.destroy()
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
        reducer = GradientReducer(nn.Linear(2, 2))
        reducer.module.zero_grad()
        optimizer.zero_grad()
        reducer.detach()
    dist.barrier()
    return called


CALLED_BY_DEEPSPEED = {
    *("accumulate_hp_grads_and_remove_lp", "async_accumulate_grad_in_cpu_via_gpu", "buffered_allreduce_fallback"),
    *("clear_hp_grads", "complete_grad_norm_calculation_for_cpu_offload", "get_autosp_backend"),
    *("get_flat_partition", "get_grad_norm_direct", "get_grads_for_norm", "get_param_comm_dtype"),
    *("get_start_end_idx", "has_overflow_partitioned_grads_serial", "has_overflow_serial"),
    *("independent_gradient_partition_epilogue", "overlapping_partition_gradients_reduce_epilogue"),
    *("partition_grads", "process_gradients", "reduce_gradients", "reduce_ipg_grads", "scaled_global_norm"),
    *("unscale_and_clip_grads", "update_hp_grads", "update_lp_params"),
}


def test_public_overrides_are_called_by_programs_or_by_deepspeed() -> None:
    """A method that a program kept must work after ``destroy()``: a new override belongs into one of the two lists."""
    overridden = [row for row in ROWS if isinstance(row, Override) and callable(getattr(row.owner, row.name, None))]
    public = {row.name for row in overridden if not row.name.startswith("_")}
    assert public - classes.CALLED_BY_PROGRAMS == CALLED_BY_DEEPSPEED
    assert classes.CALLED_BY_PROGRAMS - public == set()


def test_every_replacement_is_called(played: list[tuple[Any, set[tuple[str, str]]]], tmp_path: Path) -> None:
    """A name that DeepSpeed has but no longer calls would be patched in vain."""
    called = set().union(*(calls for _, calls in played))
    called.update(*run_ranks(4, _calls_of_further_features, str(tmp_path), deadline=240))
    bound = {row for row in ROWS if isinstance(row, Patch)} - CALLED_BY_PROGRAMS - CALLED_BY_VERIFY - VALUES
    assert {(str(patch), patch.during) for patch in bound} - called == set()
    overridden = {f"{row.owner.__name__}.{row.name}" for row in ROWS if isinstance(row, Override)}
    overridden -= CALLED_BY_MISTAKES | OVERRIDES_CALLED_BY_PROGRAMS
    assert {(name, "override") for name in overridden} - called == set()
