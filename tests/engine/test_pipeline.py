"""DeepSpeed's pipeline engine on our grid trains as one process does, in every layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.runtime.pipe.module as deepspeed_module
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_topo import DisagreementError, PipelineModule, PipelineParallelGrid, TopologyError
from tests.support.gpt_training import Run, train_alone, train_pipeline
from tests.support.ranks import run_ranks

STEPS = 20
TOPOLOGIES = ["data=4", "pipe=2,data=2", "data=2,pipe=2", "pipe=4", "pipe=2,seq=2", "seq=2,pipe=2"]


@pytest.fixture(scope="module")
def alone() -> Run:
    return run_ranks(1, train_alone, STEPS)[0]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_training_equals_one_process(alone: Run, topology: str, zero: int) -> None:
    for run in run_ranks(4, train_pipeline, topology, STEPS, zero):
        torch.testing.assert_close(run.losses, alone.losses, rtol=1e-4, atol=0)
        torch.testing.assert_close(run.norms, alone.norms, rtol=1e-4, atol=0)
        assert run.parameters
        for name, parameter in run.parameters.items():
            torch.testing.assert_close(parameter, alone.parameters[name], rtol=1e-4, atol=1e-5, msg=name)


def _tied_layers() -> list[Any]:
    """Six layers, the first and last of them the same."""
    ends = partial(TiedLayerSpec, "embedding", nn.Linear, 8, 8)
    return [ends(), *(LayerSpec(nn.Linear, 8, 8) for _ in range(4)), ends()]


def _inspect(topology: Any, **options: Any) -> dict[str, Any]:
    before = {id(value) for value in vars(deepspeed_module).values()}
    module = PipelineModule(_tied_layers(), topology=topology, **options)
    grid = module.mpu()
    return {
        "unpatched": before == {id(value) for value in vars(deepspeed_module).values()},
        "topology": module.topology().spec,
        "grid": isinstance(grid, PipelineParallelGrid),
        "tied": {key: comm["ranks"] for key, comm in module.tied_comms.items()},
        "tied_group": {key: dist.get_process_group_ranks(comm["group"]) for key, comm in module.tied_comms.items()},
        "sequence": [name for name in dir(grid) if name.startswith("get_sequence")],
        "layer_file": Path(module.ckpt_layer_path("", 0)).name,
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def test_construction_patches_nothing_and_ties_first_and_last_stage() -> None:
    reports = run_ranks(8, _inspect, "seq=2,pipe=4")
    for rank, report in enumerate(reports):
        stage, base = rank % 4, rank - rank % 4
        ends = [base, base + 3]
        assert report["unpatched"]
        assert report["grid"]
        assert report["topology"] == "seq=2,pipe=4"
        assert report["tied"] == ({"embedding": ends} if stage in (0, 3) else {})
        assert report["tied_group"] == report["tied"]
        assert report["sequence"] == []
        # the world, DeepSpeed's copy of it, pipe, seq; the ends also share their tied layers
        assert report["groups"] == (5 if stage in (0, 3) else 4)


def test_checkpoint_names_show_the_model_axis_alone() -> None:
    for rank, report in enumerate(run_ranks(4, _inspect, "model=2,seq=2")):
        assert report["layer_file"] == f"layer_00-model_{rank // 2:02d}-model_states.pt"


def test_topology_from_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "topology": "data=-1,pipe=2"}))
    for source in (path, {"topology": {"data": 2, "pipe": 2}}):
        assert run_ranks(4, _inspect_config, source)[0] == "data=2,pipe=2"


def _inspect_config(source: Any) -> str:
    return PipelineModule(_tied_layers(), config=source).topology().spec


def _errors() -> list[str]:
    messages = []
    for options in ({}, {"num_stages": 3}, {"topology": "pipe=2", "config": {"topology": "pipe=2"}}):
        with pytest.raises(TopologyError) as caught:
            PipelineModule(_tied_layers(), **options)
        messages.append(str(caught.value))
    with pytest.raises(DisagreementError) as disagreement:
        PipelineModule(_tied_layers(), topology="pipe=2,data=2" if dist.get_rank() else "data=2,pipe=2")
    return [*messages, str(disagreement.value), str(len(dist.distributed_c10d._world.pg_map))]


def test_bad_input_raises_on_every_rank_before_any_group_exists() -> None:
    for messages in run_ranks(4, _errors):
        none, num_stages, both, disagreement, groups = messages
        assert "needs a topology" in none
        assert "does not divide the world size 4" in num_stages
        assert "topology and config are given" in both
        assert "ranks [0]" in disagreement
        assert "ranks [1, 2, 3]" in disagreement
        assert groups == "1"  # the world
