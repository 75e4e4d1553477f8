"""Run DeepSpeed's own tests on grids: a plugin of pytest, ``pytest -p tests.programs.deepspeeds_tests FOLDER``.

``DS_TOPO_ORDER`` names the order of the axes: ``stock`` leaves DeepSpeed as it is; ``inner`` has ``model``, ``seq`` and
the stages where DeepSpeed has them; ``outer`` has them in the other order. The tests stay as they are: an engine gets
the grid that has the degrees of its config, of its mpu or of ``tp_model_init``, and pipelines are built on a grid.

DeepSpeed's tests fork their ranks from a server, which imports this module first. Those that spawn them now fork them.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
from collections.abc import Mapping
from functools import cache, wraps
from typing import Any

import deepspeed
import deepspeed.pipe
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.pipe import topology as pipe_topology
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.runtime.tensor_parallel import init_utils

import ds_topo
from ds_topo import PipelineModule, initialize, use  # before the names below are replaced

MISSPELT = "grandient_accumulation_steps"
"""A key of DeepSpeed's tests that DeepSpeed ignores, and that an engine of a grid refuses."""
ORDER = os.environ.get("DS_TOPO_ORDER", "stock")
multiprocessing.set_forkserver_preload([__name__])
stock_context = multiprocessing.get_context


def _context(method: str | None = None) -> Any:
    return stock_context("forkserver" if method == "spawn" else method)


multiprocessing.get_context = torch.multiprocessing.get_context = _context  # type: ignore[assignment]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append one line for each test to the file ``DS_TOPO_RESULTS``: its result, its name, and why."""
    where = os.environ.get("DS_TOPO_RESULTS")
    if where is None or (report.when != "call" and report.passed) or (report.when == "teardown" and not report.failed):
        return
    text = report.longreprtext
    errors = re.findall(r"^(?:E +)?([\w.]+(?:Error|Exception|Failed|Exit)\b.*)", text, re.MULTILINE)
    reason = "" if report.passed else (errors or text.splitlines())[-1].replace("\t", " ")
    with open(where, "a", encoding="utf-8") as results:
        results.write(f"{report.outcome}\t{report.nodeid}\t{reason}\n")


@cache
def _grid(**degrees: int) -> ds_topo.PipelineParallelGrid:
    inner = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
    return ds_topo.PipelineParallelGrid(",".join(["data=-1", *inner] if ORDER == "inner" else [*inner, "data=-1"]))


def _grid_of(config: Any, mpu: Any) -> ds_topo.PipelineParallelGrid:
    section = config.get("tensor_parallel", {}) if isinstance(config, Mapping) else {}
    args = init_utils._TP_MODEL_INIT_ARGS
    model = section.get("autotp_size", 1) if args is None else args["tp_size"]
    seq = config.get("sequence_parallel_size", 1) if isinstance(config, Mapping) else 1
    if mpu is parallel_state_sp:
        seq = parallel_state_sp.get_sequence_parallel_world_size()
    elif mpu is not None:
        model = mpu.get_model_parallel_world_size()
    return _grid(seq=seq, model=model)


def _initialized_on_grid(stock: Any) -> Any:
    signature = inspect.signature(stock)

    @wraps(stock)
    def on_grid(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        if isinstance(given.get("config"), dict):
            given["config"].pop(MISSPELT, None)
        if not isinstance(given.get("model"), deepspeed.PipelineModule):
            given["mpu"] = _grid_of(given.get("config") or given.get("config_params"), given.get("mpu"))
        return initialize(**given)

    return on_grid


def _joined_on_grid(join: Any) -> Any:
    """Wrap a function that joins neighboring ranks along sequences: the grid in use joins its own."""

    @wraps(join)
    def on_grid(*args: Any, **options: Any) -> Any:
        given = inspect.signature(join).bind(*args, **options).arguments
        use(_grid(seq=given["sequence_parallel_size"]))
        is_patched = join.__name__ == "initialize_sequence_parallel"  # by use()
        return (parallel_state_sp.initialize_sequence_parallel if is_patched else join)(*args, **options)

    return on_grid


class _PipelineOnGrid(PipelineModule):
    def __init__(self, layers: Any, num_stages: Any = None, topology: Any = None, *args: Any, **options: Any) -> None:
        if topology is None:
            topology = f"pipe={num_stages or 1},data=-1"
        axes = topology.axes if hasattr(topology, "axes") else ["pipe", "data"]
        dims = topology.dims if hasattr(topology, "dims") else [num_stages, dist.get_world_size() // num_stages]
        places = list(zip(axes, dims, strict=True))
        if ORDER == "outer":
            places.reverse()
        spec = ",".join(f"{axis}={degree}" for axis, degree in places)
        super().__init__(layers, None, spec, *args, **options)


if get_accelerator().device_name() == "cpu":  # what the tests ask for, and a CPU lacks
    type(get_accelerator()).current_device = lambda _: "cpu"
    torch.cpu.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
if ORDER != "stock":
    deepspeed.initialize = _initialized_on_grid(deepspeed.initialize)
    parallel_state_sp.initialize_sequence_parallel = _joined_on_grid(parallel_state_sp.initialize_sequence_parallel)
    UlyssesSPAttentionHF.register_with_transformers = _joined_on_grid(UlyssesSPAttentionHF.register_with_transformers)
    deepspeed.pipe.PipelineModule = pipe_module.PipelineModule = _PipelineOnGrid
    for name in ("ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology"):
        setattr(pipe_topology, name, getattr(ds_topo, name))
    pipe_topology.PipelineParallelGrid = ds_topo.PipelineParallelGrid
