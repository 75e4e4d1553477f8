"""Count the communicators of one rank in published layouts: ours, DeviceMesh's, DeepSpeed's and Megatron-LM's.

    python -m tests.bench.communicators [--megatron FOLDER_OF_A_CHECKOUT]

Counts, with torch's fake backend, how often one rank calls ``new_group``, and how many groups of several ranks it is
then in. Each call is one of the whole job, unless only members create a group. ``sets`` is the number of different sets
of ranks of the axes, of data parallelism and of a pipeline's replicas, without the whole job. No layout needs more.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from ds_topo import PipelineParallelGrid, ProcessTopology, groups
from ds_topo.topology.rank_tables import ExpertPlan, grid_groups
from tests.support.fake_world import fake_world

LAYOUTS = {
    "Llama 3 405B": ("pipe=16,data=128,model=8", 1),
    "Llama 3 405B, long sequences": ("pipe=16,data=8,seq=16,model=8", 1),
    "DeepSeek-V3": ("pipe=16,data=128", 64),
    "1,024 ranks with seq": ("pipe=4,data=8,seq=8,model=4", 1),
    "64 ranks": ("pipe=4,data=2,model=8", 1),
}
"""Layouts: the topology, and the number of ranks that share the experts of a layer."""


@dataclass
class Count:
    """The calls of one rank, and the groups that it is in."""

    rank: int
    calls: int = 0
    held: int = 0

    def new_group(self, ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        """Count a call; replaces ``torch.distributed.new_group``."""
        self.calls += 1
        if ranks is not None and (len(ranks) == 1 or self.rank not in ranks):
            return mock.MagicMock()
        self.held += 1
        return mock.MagicMock()

    def __str__(self) -> str:
        return f"{self.calls:>8,} {self.held:>5}"


def ours(spec: str, experts: int, rank: int) -> Count:
    """Count a grid and the groups of its experts."""
    world_size = ProcessTopology.from_spec(spec).world_size()
    with fake_world(rank, world_size), _counted(rank) as count, PipelineParallelGrid(spec) as grid:
        if experts > 1:
            groups.create_expert_groups(grid, experts)
        return count


def device_mesh(spec: str, experts: int, rank: int) -> Count:
    """Count ``init_device_mesh``, and a second one with the experts' axis, as in torchtitan."""
    from torch.distributed.device_mesh import init_device_mesh

    topology = ProcessTopology.from_spec(spec)
    with fake_world(rank, topology.world_size()), _counted(rank, real=True) as count:
        init_device_mesh("cpu", tuple(topology.dims), mesh_dim_names=tuple(topology.axes))
        if experts > 1:
            dims = (topology.get_dim("pipe"), topology.get_dim("data") // experts, experts)
            init_device_mesh("cpu", dims, mesh_dim_names=("pipe", "expert_data", "expert"))
        return count


def deepspeed(spec: str, experts: int, rank: int) -> Count:
    """Count DeepSpeed's grid in its own order, and its groups of experts."""
    from deepspeed.runtime.pipe import topology as module
    from deepspeed.utils import groups as deepspeed_groups

    wanted = ProcessTopology.from_spec(spec)
    axes = [axis for axis in ("pipe", "data", "seq", "model") if axis in wanted.axes]
    count = Count(rank)
    stub = types.SimpleNamespace(
        get_rank=lambda: rank, get_world_size=wanted.world_size, new_group=count.new_group, ReduceOp=None
    )
    with mock.patch.object(module, "dist", stub):
        made = module.PipelineParallelGrid(module.ProcessTopology(axes, [wanted.get_dim(axis) for axis in axes]))
    if experts > 1:
        stub.is_initialized = lambda: True
        with (
            mock.patch.object(deepspeed_groups, "dist", stub),
            mock.patch.object(deepspeed_groups, "mpu", made),
            mock.patch.object(deepspeed_groups, "_EXPERT_PARALLEL_GROUP", {}),
            mock.patch.object(deepspeed_groups, "_EXPERT_DATA_PARALLEL_GROUP", {}),
        ):
            deepspeed_groups._create_expert_and_data_parallel(experts)
    return count


def megatron(spec: str, experts: int, rank: int) -> Count:
    """Count ``initialize_model_parallel``, without gloo's copies of its groups."""
    from megatron.core import parallel_state

    topology = ProcessTopology.from_spec(spec)
    degree = {axis: max(1, topology.get_dim(axis)) for axis in ("pipe", "seq", "model")}
    with fake_world(rank, topology.world_size()), _counted(rank) as count:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=degree["model"],
            pipeline_model_parallel_size=degree["pipe"],
            context_parallel_size=degree["seq"],
            expert_model_parallel_size=experts,
            create_gloo_process_groups=False,
        )
        parallel_state.destroy_model_parallel()
        return count


@contextmanager
def _counted(rank: int, *, real: bool = False) -> Iterator[Count]:
    """Count calls of torch's ``new_group``, and the groups of several ranks that this rank is then in."""
    count, make = Count(rank), dist.new_group

    def counted(ranks: Any = None, *args: Any, **options: Any) -> Any:
        stand_in = count.new_group(ranks, *args, **options)
        return make(ranks, *args, **options) if real else stand_in

    with (
        mock.patch.object(dist, "new_group", counted),
        mock.patch.object(dist.distributed_c10d, "new_group", counted),
        mock.patch("torch.distributed.device_mesh.new_group", counted, create=True),
    ):
        yield count


def needed(spec: str, experts: int, rank: int) -> int:
    """Return the number of different sets of several ranks of a layout, without the whole job."""
    topology = ProcessTopology.from_spec(spec)
    sets = {group.ranks for group in grid_groups(topology, rank)}
    if experts > 1:
        plan = ExpertPlan(topology, experts)
        sets |= {tuple(plan.expert_ranks(rank)), tuple(plan.expert_data_ranks(rank))}
    return sum(1 < len(ranks) < topology.world_size() for ranks in sets)


def _import_from(checkout: Path) -> None:
    """Make ``megatron.core.parallel_state`` importable without the other imports of its package."""
    for name in ("megatron", "megatron.core"):
        package = types.ModuleType(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules[name] = package
    inference = "megatron.core.inference"
    for name in ("megatron.core.utils", inference, f"{inference}.symmetric_memory"):
        sys.modules[name] = mock.MagicMock()


def main() -> None:
    """Count and print all layouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    arguments = parser.parse_args()
    sides: dict[str, Callable[[str, int, int], Count]] = {
        "ours": ours,
        "DeviceMesh": device_mesh,
        "DeepSpeed": deepspeed,
    }
    if arguments.megatron:
        _import_from(arguments.megatron)
        sides["Megatron-LM"] = megatron
    print(f"{'':62} sets  " + "  ".join(f"{side + ': calls, in':>18}" for side in sides))
    for name, (spec, experts) in LAYOUTS.items():
        rank = ProcessTopology.from_spec(spec).world_size() // 3
        layout = f"{name}: {spec}" + (f", experts={experts}" if experts > 1 else "")
        row = "  ".join(f"{side(spec, experts, rank)!s:>18}" for side in sides.values())
        print(f"{layout:62} {needed(spec, experts, rank):>4}  {row}", flush=True)


if __name__ == "__main__":
    main()
