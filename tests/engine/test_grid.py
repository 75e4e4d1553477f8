"""Query grids on every rank of big worlds, over the ``fake`` backend; compare with DeepSpeed's grid and brute force."""

import warnings
from itertools import permutations
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from deepspeed.runtime.pipe import topology as deepspeed_topology

from ds_topo import PipelineParallelGrid, ProcessTopology
from ds_topo.engine.grid import SEQUENCE_QUERIES
from ds_topo.errors import CoordinateError, TopologyError, UnknownAxisError, WorldSizeError
from tests.support.fake_world import fake_world

DENSE_ORDERS = list(permutations(("pipe", "data", "model")))
SPECS_OF_64_RANKS = [
    "pipe=4,data=4,model=4",
    "model=2,data=8,pipe=4",
    "data=64",
    "pipe=64",
    "model=8,data=8",
    "model=4,pipe=16",
    "seq=4,pipe=2,data=4,model=2",
    "data=2,seq=2,model=4,pipe=4",
    "pipe=8,seq=8",
    "expert=2,pipe=2,+replica=2,data=2,model=2,seq=2",
    "pipe=1,data=64,model=1",
]


def peers(topology: ProcessTopology, rank: int, *axes: str) -> list[int]:
    """Return the ranks that differ from ``rank`` along these axes alone, ascending, by brute force."""
    own = topology.get_coord(rank)._asdict()
    return topology.filter_match(**{axis: index for axis, index in own.items() if axis not in axes})


def assert_group_is(group: dist.ProcessGroup, ranks: list[int]) -> None:
    assert dist.get_process_group_ranks(group) == ranks


@pytest.mark.parametrize("spec", SPECS_OF_64_RANKS)
def test_every_rank_of_64_asks_every_group(spec: str) -> None:
    topology = ProcessTopology.from_spec(spec)
    replicas = [axis for axis in topology.axes if axis not in ("pipe", "model")]
    seen: dict[str, list[tuple[int, ...]]] = {}
    for rank in range(64):
        with fake_world(rank, 64), PipelineParallelGrid(topology) as grid:
            for axis in {*topology.axes, "pipe", "data", "model"}:
                expected = peers(topology, rank, axis)
                assert grid.get_ranks(axis) == expected
                assert_group_is(grid.get_group(axis), expected)
                assert grid.get_axis_rank(axis) == dist.get_rank(grid.get_group(axis))
                assert grid.get_axis_rank(axis) == getattr(topology.get_coord(rank), axis, 0)
                assert grid.get_axis_size(axis) == len(expected)
                others = peers(topology, rank, *(other for other in topology.axes if other != axis))
                assert grid.is_logging_rank(each=axis) == (rank == others[0]), "one for each index along the axis"
                place = expected.index(rank)
                assert grid.get_next_rank(axis) == expected[(place + 1) % len(expected)]
                assert grid.get_prev_rank(axis) == expected[place - 1]
                seen.setdefault(axis, []).append(tuple(expected))
            assert grid.is_logging_rank() == (rank == 0)
            assert_mpu_is_brute_force(grid, topology, rank, replicas)
    for axis, lists in seen.items():
        for ranks in set(lists):
            assert [rank for rank in range(64) if lists[rank] == ranks] == list(ranks), f"{axis}: once each"


QUERIES_OF_DEEPSPEED = [
    *(
        f"{kind}_parallel_{what}"
        for kind in ("data", "model", "slice", "pipe")
        for what in ("group", "rank", "world_size")
    ),
    *(f"{kind}_model_parallel_{what}" for kind in ("tensor", "pipeline") for what in ("group", "rank", "world_size")),
    *("data_parallel_group_ranks", "tensor_model_parallel_src_rank"),
]
"""What its engines, ZeRO, checkpoints and activation checkpointing ask an mpu."""


def assert_mpu_is_brute_force(
    grid: PipelineParallelGrid, topology: ProcessTopology, rank: int, replicas: list[str]
) -> None:
    assert all(callable(getattr(grid, f"get_{name}")) for name in QUERIES_OF_DEEPSPEED)
    coordinate = topology.get_coord(rank)
    pipe, data, model = (peers(topology, rank, axis) for axis in ("pipe", "data", "model"))
    stage, slice_rank = getattr(coordinate, "pipe", 0), getattr(coordinate, "model", 0)
    data = peers(topology, rank, *replicas)
    samples = peers(topology, rank, *(axis for axis in replicas if axis != "seq"))
    replica = peers(topology, rank, "pipe", "model")

    assert_group_is(grid.get_data_parallel_group(), data)
    assert grid.get_data_parallel_group_ranks() == grid.dp_group == data
    assert (grid.get_data_parallel_world_size(), grid.data_parallel_size) == (len(samples), len(samples))
    assert (grid.get_data_parallel_rank(), grid.get_data_parallel_id()) == (samples.index(rank), samples.index(rank))
    assert grid.get_data_parallel_src_rank() == data[0]

    assert_group_is(grid.get_model_parallel_group(), replica)
    assert grid.get_model_parallel_world_size() == len(replica)
    assert grid.get_model_parallel_rank() == stage * len(model) + slice_rank, "pipe-major in every order"

    for kind in ("slice", "tensor_model"):
        assert_group_is(getattr(grid, f"get_{kind}_parallel_group")(), model)
        assert getattr(grid, f"get_{kind}_parallel_world_size")() == len(model)
        assert getattr(grid, f"get_{kind}_parallel_rank")() == slice_rank
    assert grid.get_tensor_model_parallel_src_rank() == model[0]

    for kind in ("pipe", "pipeline_model"):
        assert_group_is(getattr(grid, f"get_{kind}_parallel_group")(), pipe)
        assert getattr(grid, f"get_{kind}_parallel_world_size")() == len(pipe)
        assert getattr(grid, f"get_{kind}_parallel_rank")() == stage
    assert grid.get_pipeline_model_parallel_first_rank() == pipe[0]
    assert grid.get_pipeline_model_parallel_last_rank() == pipe[-1]
    assert grid.get_pipeline_model_parallel_next_rank() == pipe[(stage + 1) % len(pipe)]
    assert grid.get_pipeline_model_parallel_prev_rank() == pipe[stage - 1]
    ends = (stage == 0, stage == len(pipe) - 1)
    assert (grid.is_first_stage, grid.is_last_stage) == ends
    assert (grid.is_pipeline_first_stage(), grid.is_pipeline_last_stage(ignore_virtual=False)) == ends

    assert grid.is_rank_in_embedding_group() == any(ends)
    if any(ends):
        assert_group_is(grid.get_embedding_group(), sorted({pipe[0], pipe[-1]}))
    else:
        with pytest.raises(RuntimeError, match=r"joins stage 0 and stage .*is_rank_in_embedding_group"):
            grid.get_embedding_group()
    assert grid.is_rank_in_position_embedding_group() == ends[0]
    if ends[0]:
        assert_group_is(grid.get_position_embedding_group(), [rank])
    else:
        with pytest.raises(RuntimeError, match="stage 0 holds the position embedding"):
            grid.get_position_embedding_group()

    for name in SEQUENCE_QUERIES:
        assert hasattr(grid, name) == ("seq" in topology.axes), "their presence changes DeepSpeed's path"
        assert name not in dir(grid)
    assert hasattr(grid, "get_pipe_parallel_rank")
    assert not hasattr(grid, "initialize_sequence_parallel"), "it turns the data-parallel queries off"
    if "seq" in topology.axes:
        for kind, ranks in (("sequence", peers(topology, rank, "seq")), ("sequence_data", data)):
            group = getattr(grid, f"get_{kind}_parallel_group")()
            assert_group_is(group, ranks)
            assert getattr(grid, f"get_{kind}_parallel_world_size")() == len(ranks)
            assert getattr(grid, f"get_{kind}_parallel_rank")() == ranks.index(rank) == dist.get_rank(group)
            assert getattr(grid, f"get_{kind}_parallel_src_rank")() == ranks[0]


# -- DeepSpeed's own grid ------------------------------------------------------------------------------------------

SHARED_VALUES = [
    "global_rank",
    "world_size",
    "data_parallel_size",
    "pipe_parallel_size",
    "model_parallel_size",
    "slice_parallel_size",
    "stage_id",
    "data_parallel_id",
    "ds_model_world_size",
    "dp_group",
    "dp_groups",
    "pp_group",
    "pipe_groups",
    "p2p_groups",
    "is_first_stage",
    "is_last_stage",
    "slice_group",
]
SHARED_QUERIES = [
    "get_stage_id",
    "get_data_parallel_id",
    "get_global_rank",
    "get_pipe_parallel_rank",
    "get_pipeline_model_parallel_rank",
    "get_pipe_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_data_parallel_group_ranks",
    "get_model_parallel_world_size",
    "get_slice_parallel_rank",
    "get_tensor_model_parallel_rank",
    "get_slice_parallel_world_size",
    "get_tensor_model_parallel_world_size",
]
SHARED_GROUPS = [
    "get_pipe_parallel_group",
    "get_data_parallel_group",
    "get_model_parallel_group",
    "get_slice_parallel_group",
]


def deepspeeds_grid(topology: Any) -> Any:
    """Return DeepSpeed's grid over the existing process group; it does not initialize another one."""
    with mock.patch.object(deepspeed_topology, "dist", dist), mock.patch("builtins.print"):
        return deepspeed_topology.PipelineParallelGrid(topology=topology)


def assert_grid_is_deepspeeds(ours: PipelineParallelGrid, theirs: Any) -> None:
    for name in SHARED_VALUES:
        assert getattr(ours, name) == getattr(theirs, name), name
        assert type(getattr(ours, name)) is type(getattr(theirs, name)), name
    for name in SHARED_QUERIES:
        expected = getattr(theirs, name)()
        assert getattr(ours, name)() == expected, name
        assert type(getattr(ours, name)()) is type(expected), name
    for name in SHARED_GROUPS:
        assert_group_is(getattr(ours, name)(), dist.get_process_group_ranks(getattr(theirs, name)()))
    for name in ("dp_proc_group", "pp_proc_group", "slice_proc_group", "ds_model_proc_group"):
        assert_group_is(getattr(ours, name), dist.get_process_group_ranks(getattr(theirs, name)))
    for stage in range(theirs.pipe_parallel_size):
        assert ours.stage_to_global(stage) == theirs.stage_to_global(stage)
        assert ours.stage_to_global(stage_id=stage, data=0) == theirs.stage_to_global(stage_id=stage, data=0)
    assert ours.topology().get_axis_names() == theirs.topology().get_axis_names()
    for wrong in ({"stage_id": theirs.pipe_parallel_size}, {"stage_id": 0, "data": 99}, {"stage_id": 0, "absent": 0}):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            theirs.stage_to_global(**wrong)
        with pytest.raises(caught.type):
            ours.stage_to_global(**wrong)


@pytest.mark.parametrize("axes", DENSE_ORDERS, ids="-".join)
def test_grid_answers_as_deepspeeds_grid(axes: tuple[str, ...]) -> None:
    topology = deepspeed_topology.ProcessTopology(
        list(axes), [{"pipe": 3, "data": 4, "model": 2}[axis] for axis in axes]
    )
    for rank in range(24):
        with fake_world(rank, 24), PipelineParallelGrid(topology) as ours:
            theirs = deepspeeds_grid(topology)
            assert_grid_is_deepspeeds(ours, theirs)
            assert ours.model_groups == theirs.model_groups
            assert ours.mp_group == ours.slice_group, "DeepSpeed leaves this list empty"
            if axes.index("pipe") < axes.index("model"):
                assert ours.get_model_parallel_rank() == theirs.get_model_parallel_rank()


@pytest.mark.parametrize("world_size", [1, 2, 6, 7, 16])
def test_grid_without_topology_has_deepspeeds_degrees(world_size: int) -> None:
    for rank in range(world_size):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with fake_world(rank, world_size), PipelineParallelGrid() as ours:
                assert_grid_is_deepspeeds(ours, deepspeeds_grid(None))
                assert not hasattr(ours, "get_sequence_parallel_group")
        expected = ours.topology().get_dim("pipe") > 1 and rank == 0
        assert ["name the axes" in str(each.message) for each in said] == [True] * expected


def test_grid_passes_deepspeeds_unit_tests() -> None:
    """The expected values are those of DeepSpeed's unit tests of its grid."""
    with fake_world(0, 4):
        grid = PipelineParallelGrid(topology=ProcessTopology(["pipe", "data"], [2, 2]))
        assert grid._is_grid_valid()
        assert grid.p2p_groups == [[0, 2], [1, 3], [2, 0], [3, 1]]
        assert (grid.stage_to_global(stage_id=0, data=0), grid.stage_to_global(stage_id=1, data=1)) == (0, 3)
        assert (grid.is_first_stage, grid.is_last_stage) == (True, False)
        assert grid.topology().get_rank(pipe=1, data=0) == 2
        with pytest.raises(AssertionError):
            PipelineParallelGrid(topology=ProcessTopology(["pipe", "data"], [2, 3]))


# -- extra and missing axes ----------------------------------------------------------------------------------------


def test_extra_axes_are_data_for_deepspeed() -> None:
    with fake_world(13, 16):
        grid = PipelineParallelGrid("seq=2,pipe=2,data=2,model=2")
        assert grid.topology().axes == ["seq", "pipe", "data", "model"]
        assert set(grid._topo.get_axis_names()) == {"pipe", "data", "model"}
        assert grid._topo.get_rank_repr(13) == grid._topo.get_rank_repr(5) == "model_01", "replicas share files"
        assert grid.dp_groups == [[0, 2, 8, 10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]]
        assert grid.get_data_parallel_group_ranks() == [5, 7, 13, 15]
        assert (grid.get_data_parallel_world_size(), grid.get_data_parallel_rank()) == (2, 0)
        assert grid.stage_to_global(0) == 9
        assert [grid.stage_to_global(0, data=replica) for replica in range(4)] == [1, 3, 9, 11]
        assert grid.stage_to_global(0, seq=0, data=1) == 3
        assert grid.stage_to_global(1, tensor=0) == grid.stage_to_global(1, model=0) == 12
        with pytest.raises(CoordinateError):
            grid.stage_to_global(0, data=4)
        with pytest.raises(UnknownAxisError, match="'expert'"):
            grid.stage_to_global(0, expert=0)


def test_missing_axes_have_degree_one() -> None:
    with fake_world(3, 4):
        grid = PipelineParallelGrid("model=4")
        assert (grid.pipe_parallel_size, grid.data_parallel_size, grid.slice_parallel_size) == (1, 1, 4)
        assert (grid.is_first_stage, grid.is_last_stage, grid.stage_to_global(0)) == (True, True, 3)
        assert grid.p2p_groups == [[rank, rank] for rank in range(4)]
        assert grid.dp_groups == grid.pipe_groups == [[0], [1], [2], [3]]
        assert dist.get_process_group_ranks(grid.get_pipe_parallel_group()) == [3]
        assert grid._topo.get_coord(3) == grid._topo.ProcessCoord(pipe=0, data=0, model=3)
        with pytest.raises(CoordinateError):
            grid.stage_to_global(1)
        grid = PipelineParallelGrid("data=4")
        assert (grid.get_slice_parallel_rank(), grid.get_tensor_model_parallel_src_rank()) == (0, 3)
        assert dist.get_process_group_ranks(grid.get_tensor_model_parallel_group()) == [3]
        assert grid.model_groups == []
        with pytest.raises(UnknownAxisError, match="'expert'"):
            grid.get_group("expert")


def test_a_folded_topology_keeps_group_ranks_ascending() -> None:
    """torch sorts the ranks of a group; indices, group ranks and equal sets of ranks rely on this order."""
    topology = ProcessTopology.from_spec("data=2,pipe=2,seq=2,model=1")
    with pytest.raises(TopologyError, match=r"must name the axes .* outermost first"):
        topology.fold({"pipe": ["pipe"], "model": ["model"], "data": ["seq", "data"]})
    folded = topology.fold({"model": ["model"], "pipe": ["pipe"], "data": ["data", "seq"]})
    for rank in range(8):
        with fake_world(rank, 8), PipelineParallelGrid(folded) as grid:
            assert grid.get_ranks("data") == ([0, 1, 4, 5] if rank in (0, 1, 4, 5) else [2, 3, 6, 7])
            assert grid.get_data_parallel_rank() == dist.get_rank(grid.get_data_parallel_group())
            assert grid.get_ranks(("pipe", "data")) == list(range(8))


def test_norms_can_be_switched_until_an_engine_is_built() -> None:
    with fake_world(0, 2), PipelineParallelGrid("data=2") as grid:
        grid.correct_norms = False
        grid._core.has_engines = True
        with pytest.raises(RuntimeError, match="correct_norms"):
            grid.correct_norms = True


def test_axes_with_equal_ranks_share_one_group() -> None:
    with fake_world(5, 16):
        grid = PipelineParallelGrid("pipe=2,data=4,model=2")
        assert_group_is(grid.get_group(("model", "data")), [0, 1, 2, 3, 4, 5, 6, 7])
        assert grid.get_group(("data", "tensor")) is grid.get_group(["model", "data"])
        assert grid.get_group(("pipe", "data", "model")) is dist.group.WORLD
        assert grid.get_group(("pipe", "tensor")) is grid.get_model_parallel_group()
        assert grid.get_group("tensor") is grid.get_slice_parallel_group()
        assert repr(grid) == "PipelineParallelGrid('pipe=2,data=4,model=2', rank 5: pipe=0, data=2, model=1)"


# -- a part of the job ---------------------------------------------------------------------------------------------


def test_grid_over_a_part_of_the_job_has_its_ranks_only() -> None:
    with fake_world(6, 8):
        part = dist.new_group([1, 3, 4, 6])
        grid = PipelineParallelGrid(topology=ProcessTopology(["pipe", "data"], [2, 2]), process_group=part)
        assert (grid.world_size, grid.stage_id, grid.get_data_parallel_rank()) == (4, 1, 1)
        assert (grid.pp_group, grid.dp_group) == ([3, 6], [4, 6])
        assert_group_is(grid.get_data_parallel_group(), [4, 6])
        assert grid.p2p_groups == [[1, 4], [3, 6], [4, 1], [6, 3]]
        assert (grid.stage_to_global(0), grid.stage_to_global(0, data=0)) == (3, 1)
        with pytest.raises(ValueError, match="rank 6 is not one of its ranks"):
            PipelineParallelGrid("data=2", process_group=dist.new_group([0, 1]))


# -- how many groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "calls"),
    [
        ("pipe=8,data=128,model=8", 4),
        ("model=8,data=128,pipe=8", 4),
        ("data=8192", 1),
        ("pipe=8,data=1024", 3),
        ("seq=4,pipe=8,data=32,model=8", 6),
    ],
)
def test_a_rank_creates_only_its_own_groups(spec: str, calls: int) -> None:
    """Count the calls at 8,192 ranks; DeepSpeed's grid makes 2,240 calls for pipe 8, model 8."""
    for rank in (0, 5000, 8191):
        with fake_world(rank, 8192), mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
            grid = PipelineParallelGrid(spec)
            for name in ("data", "model", "pipe", "slice", "tensor_model", "pipeline_model"):
                getattr(grid, f"get_{name}_parallel_group")()
            created = [tuple(call.args[0]) for call in new_group.call_args_list]
            assert len(set(created)) == len(created) <= calls
            assert all(rank in ranks and len(ranks) < 8192 for ranks in created)


# -- errors --------------------------------------------------------------------------------------------------------


def test_calls_before_creation_or_after_destruction_raise() -> None:
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed: call ds_topo\.init_distributed\(\)"):
        PipelineParallelGrid("data=1")
    with fake_world(0, 8):
        with PipelineParallelGrid("data=4,pipe=2") as grid:
            assert grid.model_parallel_is_initialized()
        assert not grid.model_parallel_is_initialized()
        grid.destroy()
        for ask in (grid.get_data_parallel_group, grid.get_slice_parallel_group, lambda: grid.get_group("pipe")):
            with pytest.raises(RuntimeError, match="were destroyed; build a new grid"):
                ask()
        assert (grid.get_data_parallel_rank(), grid.get_ranks("data")) == (0, [0, 2, 4, 6])


def test_a_grid_may_outlive_its_world() -> None:
    with fake_world(0, 8):
        grid = PipelineParallelGrid("data=4,pipe=2")
    with fake_world(0, 8):
        other = PipelineParallelGrid("data=4,pipe=2")
        grid.destroy_model_parallel()
        assert_group_is(other.get_group("data"), [0, 2, 4, 6])


def test_a_wrong_topology_creates_no_group() -> None:
    with fake_world(0, 12), mock.patch.object(dist, "new_group") as new_group:
        with pytest.raises(
            WorldSizeError, match=r"is for 16 ranks \(2 x 4 x 2\), but the job has 12: .*data=3,model=2"
        ):
            PipelineParallelGrid("pipe=2,data=4,model=2")
        for wrong in ("pipe=2,pipe=6", "pipe=0", "pipe", 12, ["data"], "pipe=5,data=-1"):
            with pytest.raises(TopologyError):
                PipelineParallelGrid(wrong)
        new_group.assert_not_called()


@pytest.mark.parametrize("name", ["context", "cp", "sp"])
def test_context_names_the_seq_axis(name: str) -> None:
    topology = ProcessTopology(axes=["data", name], dims=[2, 2])
    assert topology == ProcessTopology(axes=["data", "seq"], dims=[2, 2])
    with fake_world(3, 4), PipelineParallelGrid(topology) as grid:
        assert grid.get_group(name) is grid.get_context_parallel_group() is grid.get_sequence_parallel_group()
        assert grid.get_ranks(name) == grid.get_context_parallel_global_ranks() == [2, 3]
        assert (grid.get_context_parallel_rank(), grid.get_context_parallel_world_size()) == (1, 2)


def test_context_groups_have_one_rank_without_a_seq_axis() -> None:
    with fake_world(3, 4), PipelineParallelGrid("data=4") as grid:
        assert dist.get_process_group_ranks(grid.get_context_parallel_group()) == [3]
        assert (grid.get_context_parallel_rank(), grid.get_context_parallel_world_size()) == (0, 1)
        assert not hasattr(grid, "get_sequence_parallel_group")  # DeepSpeed checks for this name
