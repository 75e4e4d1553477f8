"""Each program's questions are answered with its own meanings, on every rank and for every order of axes."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from itertools import permutations
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_topo import PipelineParallelGrid, ProcessTopology, groups, parallel_state
from ds_topo.errors import DisagreementError, TopologyError
from tests.parallel_state.names import main
from tests.support.fake_world import fake_world
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

ORDERS = [",".join(order) for order in permutations(("pipe=2", "data=2", "model=2"))]
RANKS = range(8)


def _members(topology: ProcessTopology, rank: int, *axes: str) -> list[int]:
    """Ranks that share all other coordinates, by brute force."""
    own = topology.get_coord(rank)._asdict()
    fixed = {axis: index for axis, index in own.items() if axis not in axes}
    return sorted(
        other for other in range(topology.world_size()) if fixed.items() <= topology.get_coord(other)._asdict().items()
    )


def _ranks(group: Any) -> list[int]:
    return sorted(dist.get_process_group_ranks(group))


@pytest.mark.parametrize("spec", ORDERS)
def test_model_parallel_has_each_programs_meaning_in_every_order(spec: str) -> None:
    topology = ProcessTopology.from_spec(spec)
    for rank in RANKS:
        with fake_world(rank, 8), PipelineParallelGrid(spec) as grid:
            tensor, pipe, data, replica = (
                _members(topology, rank, *axes) for axes in (["model"], ["pipe"], ["data"], ["pipe", "model"])
            )
            neox: Any = parallel_state.of(grid, "gpt-neox")
            assert _ranks(neox.get_model_parallel_group()) == _ranks(neox.get_tensor_model_parallel_group()) == tensor
            assert neox.get_model_parallel_world_size() == 2
            assert neox.get_model_parallel_rank() == tensor.index(rank)
            assert neox.get_model_parallel_src_rank() == neox.get_tensor_model_parallel_src_rank() == tensor[0]
            assert _ranks(neox.get_pipe_parallel_group()) == pipe
            assert neox.get_topology() == topology
            ends = [other for other in RANKS if topology.get_coord(other).model == 0]
            if rank in ends:
                assert _ranks(neox.get_io_parallel_group()) == ends
            else:
                with pytest.raises(RuntimeError, match="no first slice of a first or last stage"):
                    neox.get_io_parallel_group()
            for program in ("megatron-deepspeed", "megatron-lm"):
                state: Any = parallel_state.of(grid, program)
                assert _ranks(state.get_model_parallel_group()) == replica
                assert state.get_model_parallel_src_rank() == replica[0]
                assert _ranks(state.get_data_parallel_group()) == data
                assert state.get_data_parallel_rank() == data.index(rank)
                assert state.get_data_parallel_src_rank() == data[0]
                assert _ranks(state.get_amax_reduction_group()) == _members(topology, rank, "model", "data")
                assert state.is_pipeline_first_stage() is (rank == pipe[0])
                assert state.is_pipeline_last_stage() is (rank == pipe[-1])
                assert _ranks(state.get_embedding_group()) == pipe


@pytest.mark.parametrize("spec", ["pipe=2,data=2,seq=2,model=2", "model=2,seq=2,data=2,pipe=2"])
def test_sequence_and_context_parallel_groups_span_the_seq_axis(spec: str) -> None:
    topology = ProcessTopology.from_spec(spec)
    for rank in range(16):
        with fake_world(rank, 16), PipelineParallelGrid(spec) as grid:
            seq, both = _members(topology, rank, "seq"), _members(topology, rank, "seq", "data")
            ours: Any = parallel_state.of(grid, "megatron-deepspeed")
            assert _ranks(ours.get_sequence_parallel_group()) == seq
            assert (ours.get_sequence_parallel_rank(), ours.get_sequence_parallel_src_rank()) == (
                seq.index(rank),
                seq[0],
            )
            assert _ranks(ours.get_sequence_data_parallel_group()) == both
            assert ours.get_sequence_data_parallel_rank() == both.index(rank)
            assert _ranks(ours.get_data_parallel_group()) == _members(topology, rank, "data")
            megatron: Any = parallel_state.of(grid)
            assert megatron.get_context_parallel_global_ranks() == _ranks(megatron.get_context_parallel_group()) == seq
            assert _ranks(megatron.get_data_parallel_group()) == _members(topology, rank, "data")
            assert _ranks(megatron.get_data_parallel_group(with_context_parallel=True)) == both
            assert megatron.get_data_parallel_world_size(with_context_parallel=True) == 4
            slices = _members(topology, rank, "model", "seq")
            assert _ranks(megatron.get_tensor_and_context_parallel_group()) == slices
            assert megatron.get_tensor_and_context_parallel_rank() == slices.index(rank)


def test_without_seq_axis_the_sequence_group_is_one_rank() -> None:
    with fake_world(1, 4), PipelineParallelGrid("data=2,model=2") as grid:
        state: Any = parallel_state.of(grid, "megatron-deepspeed")
        assert _ranks(state.get_sequence_parallel_group()) == [1]
        assert (state.get_sequence_parallel_world_size(), state.get_sequence_parallel_rank()) == (1, 0)
        assert not hasattr(grid, "get_sequence_parallel_group")


def test_expert_groups_come_from_the_grid() -> None:
    for rank in range(4):
        with fake_world(rank, 4), PipelineParallelGrid("data=4") as grid:
            state: Any = parallel_state.of(grid)
            assert (state.get_expert_model_parallel_world_size(), state.get_expert_data_parallel_world_size()) == (1, 4)
            with pytest.raises(TopologyError, match=r"create_expert_groups\(grid, 2\)"):
                state.initialize_model_parallel(expert_model_parallel_size=2)
            groups.create_expert_groups(grid, 2)
            state.initialize_model_parallel(expert_model_parallel_size=2)
            assert _ranks(state.get_expert_model_parallel_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert state.get_expert_model_parallel_rank() == rank % 2
            assert _ranks(state.get_expert_data_parallel_group()) == [rank % 2, rank % 2 + 2]


def test_expert_groups_of_one_size_can_be_created_anew() -> None:
    with fake_world(0, 8), PipelineParallelGrid("data=4,model=2") as grid:
        state: Any = parallel_state.of(grid)
        for is_sliced, experts, slices in ((False, [0, 1], [0, 1]), (True, [0, 2], [0, 1, 2, 3])):
            made = groups.create_expert_groups(grid, 2, expert_tensor_parallel=is_sliced)
            assert _ranks(state.get_expert_model_parallel_group()) == experts
            assert _ranks(state.get_expert_tensor_and_model_parallel_group()) == slices
            made.destroy()


@pytest.mark.parametrize("is_sliced", [False, True])
@pytest.mark.parametrize("spec", ORDERS)
def test_expert_tensor_parallel_follows_layers_unless_experts_are_whole(spec: str, is_sliced: bool) -> None:
    topology = ProcessTopology.from_spec(spec)
    for rank in RANKS:
        with fake_world(rank, 8), PipelineParallelGrid(spec) as grid:
            state: Any = parallel_state.of(grid)
            slices = _members(topology, rank, "model")
            assert _ranks(state.get_expert_tensor_parallel_group()) == slices
            assert _ranks(state.get_expert_tensor_and_model_parallel_group()) == slices
            groups.create_expert_groups(grid, 2, expert_tensor_parallel=is_sliced)
            experts = _ranks(state.get_expert_model_parallel_group())
            mine = slices if is_sliced else [rank]
            of_layer = sorted({peer for expert in experts for peer in _members(topology, expert, "model")})
            of_layer = of_layer if is_sliced else experts
            assert state.get_expert_model_parallel_src_rank() == experts[0]
            assert _ranks(state.get_expert_tensor_parallel_group()) == mine
            assert state.get_expert_tensor_parallel_rank() == mine.index(rank)
            assert state.get_expert_tensor_parallel_world_size() == len(mine)
            assert _ranks(state.get_expert_tensor_and_model_parallel_group()) == of_layer
            assert state.get_expert_tensor_and_model_parallel_rank() == of_layer.index(rank)
            assert state.get_expert_tensor_and_model_parallel_world_size() == len(of_layer)
            all_stages = sorted(peer for expert in of_layer for peer in _members(topology, expert, "pipe"))
            assert _ranks(state.get_expert_tensor_model_pipeline_parallel_group()) == all_stages
            state.initialize_model_parallel(2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=len(mine))
            with pytest.raises(TopologyError, match=f"experts in 4 slices, but they are in {len(mine)}"):
                state.initialize_model_parallel(2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=4)


def test_partial_groups_and_weight_rematerialisation_have_one_instance() -> None:
    with fake_world(1, 4), PipelineParallelGrid("data=2,model=2") as grid:
        state: Any = parallel_state.of(grid)
        replicas = state.get_data_parallel_group(with_context_parallel=True)
        assert state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True) is replicas
        assert state.get_expert_data_parallel_group(partial_expert_data_parallel=True) is replicas
        assert _ranks(state.get_intra_distributed_optimizer_instance_group()) == [0, 1, 2, 3]
        for kind in ("", "expert_"):
            assert _ranks(getattr(state, f"get_{kind}gtp_weight_remat_group")(check_initialized=False)) == [1]
            assert getattr(state, f"get_{kind}gtp_weight_remat_global_ranks")() == [1]
            assert getattr(state, f"get_{kind}gtp_weight_remat_world_size")() == 1
            assert getattr(state, f"get_{kind}gtp_weight_remat_rank")() == 0
        for ask in (
            state.get_inter_distributed_optimizer_instance_group,
            state.get_hierarchical_context_parallel_groups,
        ):
            assert ask(check_initialized=False) is None
            with pytest.raises(RuntimeError, match=rf"{ask.__name__}\(\): a grid has"):
                ask()
        state.initialize_model_parallel(2, num_distributed_optimizer_instances=1, hybrid_context_parallel=False)
        with pytest.raises(TopologyError, match="num_distributed_optimizer_instances=2: a grid has no distributed"):
            state.initialize_model_parallel(2, num_distributed_optimizer_instances=2)


@pytest.mark.parametrize(("spec", "own"), [("model=2", 1), ("data=2", 0)])
def test_neox_expert_tokens_are_split_over_slices(spec: str, own: int) -> None:
    with fake_world(1, 2), PipelineParallelGrid(spec) as grid:
        state: Any = parallel_state.of(grid, "gpt-neox")
        counts = torch.tensor([1, 2, 0, 3])
        tokens = torch.arange(6)
        held = [counts[:2], counts[2:]] if spec == "model=2" else [counts]
        assert state.get_expert_token_counts_for_rank(counts).tolist() == held[own].tolist()
        expected = [[0, 1, 2], [3, 4, 5]] if spec == "model=2" else [[0, 1, 2, 3, 4, 5]]
        assert state.get_expert_tokens_for_rank(tokens, counts).tolist() == expected[own]
        assert state.get_expert_tokens_for_rank(tokens, counts, 0).tolist() == expected[0]
        # without a pipeline every slice has its own group for files
        assert _ranks(state.get_io_parallel_group()) == _ranks(state.get_data_parallel_group())


def test_virtual_and_split_stages_follow_the_program() -> None:
    with fake_world(3, 4), PipelineParallelGrid("pipe=4") as grid:
        state: Any = parallel_state.of(grid, "megatron-deepspeed")
        state.initialize_model_parallel(1, 4, 1, 2, 2)
        assert (state.is_pipeline_last_stage(), state.is_pipeline_last_stage(ignore_virtual=True)) == (False, True)
        state.set_virtual_pipeline_model_parallel_rank(1)
        assert state.is_pipeline_last_stage()
        assert state.is_rank_in_embedding_group()
        assert [state.is_pipeline_stage_before_split(stage) for stage in range(4)] == [True, True, False, False]
        assert [state.is_pipeline_stage_after_split(stage) for stage in range(4)] == [False, False, True, True]
        assert not state.is_pipeline_stage_at_split()
        megatron: Any = parallel_state.of(grid)
        megatron.initialize_model_parallel(1, 4, 2)
        assert megatron.is_pipeline_last_stage(ignore_virtual=False, vp_stage=1)
        assert not megatron.is_pipeline_last_stage(ignore_virtual=False, vp_stage=0)


@pytest.mark.parametrize("stage", range(4))
def test_only_the_absence_of_embedding_groups_is_excused(stage: int) -> None:
    with fake_world(stage, 4), PipelineParallelGrid("pipe=4") as grid:
        state = parallel_state.of(grid)
        embeds, is_first = stage in (0, 3), stage == 0
        for ask, exists in ((state.get_embedding_group, embeds), (state.get_position_embedding_group, is_first)):
            assert (ask(check_initialized=False) is not None) is exists
            with mock.patch.object(grid, "create_group", side_effect=DisagreementError("other ranks")):
                with pytest.raises(RuntimeError, match="other ranks" if exists else f"is on stage {stage}"):
                    ask()
                with pytest.raises(DisagreementError) if exists else nullcontext():
                    ask(check_initialized=False)
        grid.destroy()
        assert state.get_embedding_group(check_initialized=False) is None


def test_global_memory_buffer_is_reused() -> None:
    with fake_world(0, 1), PipelineParallelGrid("data=1") as grid:
        buffer = parallel_state.of(grid).get_global_memory_buffer()
        large = buffer.get_tensor((4, 4), torch.float32, "mpu")
        assert buffer.get_tensor((2, 3), torch.float32, "mpu").data_ptr() == large.data_ptr()
        assert buffer.get_tensor((2, 3), torch.float64, "mpu").data_ptr() != large.data_ptr()


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("gpt-neox", {"model_parallel_size": 4}, "wants 4 ranks along 'model', but the grid is 'model=2,data=2'"),
        ("megatron-deepspeed", {"tensor_model_parallel_size": 2, "sequence_parallel_size": 2}, "along 'seq'"),
        ("megatron-lm", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, "along 'pipe'"),
    ],
)
def test_other_degrees_are_refused(program: str, arguments: dict[str, int], message: str) -> None:
    with fake_world(0, 4), PipelineParallelGrid("model=2,data=2") as grid:
        state: Any = parallel_state.of(grid, program)
        with pytest.raises(TopologyError, match=message):
            state.initialize_model_parallel(**arguments)
        with pytest.raises(TopologyError, match="the rank along model is the grid's, 0"):
            state.set_tensor_model_parallel_rank(rank=1)
        assert state.set_tensor_model_parallel_world_size(world_size=2) is None


def test_neox_refuses_topology_in_another_order() -> None:
    with fake_world(0, 4), PipelineParallelGrid("model=2,data=2") as grid:
        state: Any = parallel_state.of(grid, "gpt-neox")
        for same in ("model=2,data=2", "pipe=1,model=2,data=2"):  # GPT-NeoX names the axis pipe without a pipeline, too
            state.initialize_model_parallel(2, topology=ProcessTopology.from_spec(same))
        message = r"'data=2,model=2' is not the layout of the grid in use, 'model=2,data=2'.* ranks \[1, 2\]"
        with pytest.raises(TopologyError, match=message):
            state.initialize_model_parallel(2, topology=ProcessTopology.from_spec("data=2,model=2"))


# -- a program's own module --------------------------------------------------------------------------------------------

PROGRAM = """
def get_io_parallel_group(): raise AssertionError
def get_model_parallel_group(): raise AssertionError("model parallel group is not initialized")
def get_model_parallel_rank(): raise AssertionError
def model_parallel_is_initialized(): return False
def initialize_model_parallel(model_parallel_size, topology=None, fp32_allreduce=False): raise AssertionError
def get_fp32_allreduce(): raise AssertionError
def split_tensor(tensor): return tensor
def initialize_distributed(size, **options):
    if model_parallel_is_initialized():
        return "model parallel is already initialized"
    initialize_model_parallel(size, **options)
"""


@pytest.fixture
def program() -> Iterator[ModuleType]:
    """A package whose layers import the functions of its parallel state by name, as GPT-NeoX's do."""
    package, state, layers = (ModuleType(name) for name in ("someones", "someones.state", "someones.layers"))
    exec(PROGRAM, vars(state))
    package.get_model_parallel_rank = state.get_model_parallel_rank  # type: ignore[attr-defined]
    layers.my_rank = state.get_model_parallel_rank  # type: ignore[attr-defined]
    modules = {module.__name__: module for module in (package, state, layers)}
    sys.modules.update(modules)
    yield state
    for name in modules:
        del sys.modules[name]


def test_installed_module_answers_until_the_grid_is_destroyed(program: ModuleType) -> None:
    before = {name: dict(vars(sys.modules[name])) for name in ("someones", "someones.state", "someones.layers")}
    with fake_world(5, 8), PipelineParallelGrid("model=2,pipe=2,data=2") as grid:
        parallel_state.install(grid, program)
        program.initialize_model_parallel(2)
        assert _ranks(program.get_model_parallel_group()) == [1, 5]
        assert sys.modules["someones"].get_model_parallel_rank() == sys.modules["someones.layers"].my_rank() == 1
        assert isinstance(program.split_tensor, FunctionType)
    assert {name: dict(vars(sys.modules[name])) for name in before} == before
    with pytest.raises(AssertionError, match="not initialized"):
        program.get_model_parallel_group()


def test_a_guarded_initialisation_of_the_program_is_called_and_checked(program: ModuleType) -> None:
    with fake_world(5, 8), PipelineParallelGrid("model=2,pipe=2,data=2") as grid:
        parallel_state.install(grid, program)
        assert not program.model_parallel_is_initialized()
        with pytest.raises(TopologyError, match="wants 4 ranks along 'model'"):
            program.initialize_distributed(4)
        assert not program.model_parallel_is_initialized()
        program.initialize_distributed(2, topology=grid.topology(), fp32_allreduce=True)
        assert program.model_parallel_is_initialized()
        assert program.get_fp32_allreduce() is True
        again = parallel_state.install(grid, program)
        assert again.model_parallel_is_initialized(), "the program has asked, and will not ask again"
        assert program.initialize_distributed(4) == "model parallel is already initialized"
        again.destroy_tensor_model_parallel()
        assert not grid.is_alive


@pytest.mark.parametrize("install_program", ["megatron-deepspeed", "megatron-lm"])
def test_an_installed_state_is_initialised_when_the_program_says_so(install_program: str, program: ModuleType) -> None:
    with fake_world(0, 4), PipelineParallelGrid("model=2,data=2") as grid:
        state: Any = parallel_state.install(grid, program, install_program)
        assert not state.model_parallel_is_initialized()
        state.initialize_model_parallel(tensor_model_parallel_size=2)
        assert state.model_parallel_is_initialized()
        assert parallel_state.of(grid, install_program).model_parallel_is_initialized(), "an object is not awaited"


def test_modules_imported_after_install_get_their_functions_back(program: ModuleType) -> None:
    late = ModuleType("someones.late")
    with fake_world(5, 8):
        with PipelineParallelGrid("model=2,pipe=2,data=2") as grid:
            parallel_state.install(grid, program)
            late.rank_by_name = program.get_model_parallel_rank  # type: ignore[attr-defined]
            sys.modules["someones.late"] = late
            assert late.rank_by_name() == 1
        try:
            assert late.rank_by_name is program.get_model_parallel_rank
            with PipelineParallelGrid("model=4,data=2") as grid:
                parallel_state.install(grid, program)
                assert late.rank_by_name() == 2
        finally:
            del sys.modules["someones.late"]


def test_install_refuses_a_second_grid(program: ModuleType) -> None:
    with fake_world(5, 8), PipelineParallelGrid("model=2,data=4") as grid, PipelineParallelGrid("data=8") as other:
        parallel_state.install(grid, program)
        parallel_state.install(grid, program)
        with pytest.raises(RuntimeError, match=r"someones\.state answers from another grid"):
            parallel_state.install(other, program)


def test_install_and_of_refuse_unknown_modules_and_programs() -> None:
    with fake_world(0, 2), PipelineParallelGrid("data=2") as grid:
        with pytest.raises(ValueError, match="module 'sys' has none of"):
            parallel_state.install(grid, sys)
        with pytest.raises(ValueError, match=r"program='gpt2': choose one of \['gpt-neox'"):
            parallel_state.of(grid, "gpt2")
        with pytest.raises(TypeError, match="pass a live grid"):
            parallel_state.of("data=2")  # type: ignore[arg-type]


def test_refused_functions_raise_with_the_reason() -> None:
    state = ModuleType("theirs")
    for name in ("get_context_parallel_group", "get_hybrid_data_context_parallel_groups", "create_all_gather_groups"):
        exec(f"def {name}(): return None", vars(state))
    sys.modules["theirs"] = state
    try:
        with fake_world(0, 2), PipelineParallelGrid("data=2") as grid:
            parallel_state.install(grid, state)
            with pytest.raises(RuntimeError, match=r"get_hybrid_data_context_parallel_groups\(\): a grid has no such"):
                state.get_hybrid_data_context_parallel_groups()
            with pytest.raises(RuntimeError, match=r"create_all_gather_groups\(\): a grid has one group of any ranks"):
                state.create_all_gather_groups()
    finally:
        del sys.modules["theirs"]


def _sum_over_groups() -> list[float]:
    with PipelineParallelGrid("model=2,data=2") as grid:
        state: Any = parallel_state.of(grid)
        sums = []
        for group in (state.get_tensor_model_parallel_group(), state.get_data_parallel_group_gloo()):
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total, group=group)
            sums.append(float(total))
        return sums


def test_groups_can_all_reduce(world: Worlds) -> None:
    assert world(4).run(_sum_over_groups) == [[2, 1], [4, 1], [2, 5], [4, 5]]


def _ask_in_an_order_of_its_own() -> list[list[int]]:
    with PipelineParallelGrid("seq=2,data=2,model=2") as grid:
        state: Any = parallel_state.of(grid)
        state.initialize_model_parallel(2, context_parallel_size=2)
        questions = [
            state.get_tensor_and_data_parallel_group,
            state.get_tensor_and_context_parallel_group,
            state.get_expert_tensor_model_pipeline_parallel_group,
            state.get_intra_distributed_optimizer_instance_group,
            state.get_model_parallel_group,
        ]
        first = dist.get_rank() % len(questions)
        asked = [_ranks(ask()) for ask in questions[first:] + questions[:first]]
        return asked[-first:] + asked[:-first]


def test_ranks_may_ask_for_megatron_groups_in_any_order_after_initialize(world: Worlds) -> None:
    topology = ProcessTopology.from_spec("seq=2,data=2,model=2")
    spans = [["model", "data"], ["model", "seq"], ["model"], topology.axes, ["model"]]
    expected = [[_members(topology, rank, *span) for span in spans] for rank in RANKS]
    assert world(8).run(_ask_in_an_order_of_its_own) == expected


SEEN = """
from ds_topo.parallel_state import {public}
from ds_topo import PipelineParallelGrid
grid = PipelineParallelGrid("data=1")
neox, deepspeed, megatron = of(grid, "gpt-neox"), of(grid, "megatron-deepspeed"), of(grid)
rank: int = neox.get_model_parallel_rank() + deepspeed.get_sequence_parallel_rank()
rank += megatron.get_data_parallel_rank(with_context_parallel=True) + megatron.get_expert_tensor_parallel_rank()
group = megatron.get_context_parallel_group(check_initialized=False)
{calls}
megatron.get_context_parallel_rank(1)
neox.get_context_parallel_rank()
"""


def test_mypy_sees_every_answer_and_its_arguments(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    root = Path(__file__).parents[2]
    calls = [
        f"{variable}.{name}"
        for variable, program in (
            ("neox", "gpt-neox"),
            ("deepspeed", "megatron-deepspeed"),
            ("megatron", "megatron-lm"),
        )
        for name in dir(parallel_state.PROGRAMS[program])
        if not name.startswith("_")
    ]
    assert len(calls) > 150, "the search finds what there is to find"
    program = tmp_path / "program.py"
    program.write_text(SEEN.format(public=", ".join(parallel_state.__all__), calls="\n".join(calls)))
    package = str(Path(parallel_state.__file__).parent)
    options = [f"--config-file={root / 'pyproject.toml'}", f"--cache-dir={tmp_path}", "--follow-imports=skip"]
    found, _, _ = api.run([*options, package, str(program)])
    errors = [line.split(": error: ")[1] for line in found.splitlines() if line.startswith(f"{program}:")]
    assert [error.split(";")[0] for error in errors] == [
        "Too many arguments  [call-arg]",
        '"GPTNeoXState" has no attribute "get_context_parallel_rank"',
    ], found


def test_guide_contains_the_names_with_other_meanings_and_those_refused() -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        main()
    lines = printed.getvalue().splitlines(keepends=True)
    table = [*lines[:2], *(line for line in lines[2:] if "translated: " in line or "refused: " in line)]
    guide = Path(__file__).parents[2] / "examples/guides/parallel_state_names.md"
    assert "".join(table) in guide.read_text(), "copy them from what python -m tests.parallel_state.names prints"
