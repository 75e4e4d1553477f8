"""A launch is detected from a launcher's variables; errors name missing or contradictory ones."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo import ProcessGrid, ProcessTopology
from ds_topo.errors import LaunchError
from ds_topo.launch import launchers
from ds_topo.launch.launchers import Launch, detect_launch
from tests.support.fake_world import fake_world

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
TORCHRUN = {**TORCH, "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
DEEPSPEED = {**TORCH, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def of(launch: Launch) -> tuple[object, ...]:
    return launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.local_world_size, launch.node


@pytest.mark.parametrize(
    ("environ", "expected", "master"),
    [
        (TORCH, ("environment", 3, 4, 1, None, None), "node0"),
        (TORCHRUN, ("torchrun", 3, 4, 1, 2, (1, 2)), "node0"),
        (DEEPSPEED, ("deepspeed", 3, 4, 1, 2, (1, 2)), "node0"),
        (OPEN_MPI, ("mpirun (Open MPI)", 3, 4, 1, 2, None), "node0"),
        (HYDRA, ("mpiexec (hydra)", 1, 2, 1, 2, None), "127.0.0.1"),
        (SRUN, ("srun", 3, 4, 1, 2, (1, 2)), "node0"),
        ({**SRUN, **TORCHRUN}, ("torchrun", 3, 4, 1, 2, (1, 2)), "node0"),
        ({**SRUN, **OPEN_MPI}, ("mpirun (Open MPI)", 3, 4, 1, 2, None), "node0"),
        ({**SRUN, "MASTER_ADDR": "10.0.0.9"}, ("srun", 3, 4, 1, 2, (1, 2)), "10.0.0.9"),
    ],
    ids=["variables", "torchrun", "deepspeed", "openmpi", "hydra", "srun", "torchrun in srun", "mpi in srun", "own"],
)
def test_each_launcher_is_detected(environ: dict[str, str], expected: tuple[object, ...], master: str) -> None:
    launch = detect_launch(environ, ["train.py"])
    assert of(launch) == expected
    assert launch.master_addr == master


def test_exported_variables_describe_the_same_launch() -> None:
    launch = detect_launch(SRUN, ["train.py"])
    again = detect_launch(launch.variables, ["train.py"])
    assert (again.launcher, *of(again)[1:]) == ("deepspeed", *of(launch)[1:])
    assert (again.master_addr, again.master_port) == (launch.master_addr, launch.master_port)


def test_slurm_tasks_on_uneven_nodes_get_local_ranks_in_any_order() -> None:
    nodes = {"SLURM_STEP_NODELIST": "n[01-03]", "SLURM_STEP_TASKS_PER_NODE": "3,1,2", "SLURM_STEP_NUM_TASKS": "6"}
    of_rank_4 = {**SRUN, **nodes, "SLURM_PROCID": "4", "SLURM_LOCALID": "0"}
    launch = detect_launch(of_rank_4, [])
    assert (launch.master_addr, launch.local_rank, launch.local_world_size, launch.node) == ("n01", 0, 2, (2, 3))
    # cyclic: ranks 0 to 2 on the nodes in turn, then 3 on n01, 4 on n03
    cyclic = detect_launch({**of_rank_4, "SLURM_LOCALID": "1", "SLURM_DISTRIBUTION": "cyclic"}, [])
    assert (cyclic.node, cyclic.local_world_size) == ((2, 3), 2)


def test_slurm_jobs_have_different_ports() -> None:
    ports = {detect_launch({**SRUN, "SLURM_JOB_ID": str(job)}, []).master_port for job in range(50)}
    assert len(ports) > 45
    assert all(20000 <= port < 30000 for port in ports)
    assert detect_launch({**SRUN, "SLURM_STEP_RESV_PORTS": "12000-12003"}, []).master_port == 12000
    assert detect_launch({**SRUN, "MASTER_PORT": "555"}, []).master_port == 555


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, r"no launcher started this process .*\n  torchrun --nproc-per-node 4 train.py\n  deepspeed --num_gpus"),
        ({"SLURM_JOB_ID": "7"}, r"inside Slurm job 7, but is none of its tasks.*\n  srun .* python train.py"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            r"RANK=0, WORLD_SIZE=2 set, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing",
        ),
        ({**TORCH, "RANK": "4"}, "rank 4 of a world of 4"),
        ({**TORCH, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TORCH, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2 ranks on this host"),
        ({**SRUN, "RANK": "0"}, "RANK=0 is set, but srun says 3: unset RANK"),
        ({**SRUN, **TORCH, "RANK": "0"}, "RANK=0, but srun says SLURM_PROCID=3: do not set RANK in the batch script"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": ""}, r"srun \(job 7, step 0\): the Slurm job has no tasks"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "5"}, "SLURM_STEP_NUM_TASKS=5, but the tasks per node make 4"),
        ({**SRUN, "SLURM_STEP_NODELIST": "node[0-"}, r"srun \(job 7, step 0\): .*node\[0-"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is not set, though .* started by mpirun"),
        ({**HYDRA, "WORLD_SIZE": "8"}, r"WORLD_SIZE=8 is set, but mpiexec \(hydra\) says 2"),
    ],
)
def test_error_names_missing_or_wrong_variables(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=f"(?s){message}"):
        detect_launch(environ, ["train.py"])


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["ds-topo", "check", "data=2"], 2),
        (["train.py", "--topology", "pipe=3,data=-1"], 6),
        (["train.py", "--lr=1", "--topology=pipe=2,tp=4"], 8),
        (["train.py", "steps=3"], 4),
    ],
)
def test_advice_starts_the_ranks_of_the_topology_on_the_command_line(words: list[str], ranks: int) -> None:
    with pytest.raises(LaunchError) as caught:
        detect_launch({}, words)
    starts = (f"torchrun --nproc-per-node {ranks} ", f"deepspeed --num_gpus {ranks} ", f"srun --ntasks {ranks} ")
    assert all(start in str(caught.value) for start in (*starts, f"mpirun -n {ranks} "))


def test_process_without_a_launcher_is_a_job_of_one_rank_only_on_request() -> None:
    launch = detect_launch({"MASTER_ADDR": "elsewhere"}, ["train.py", "--fast"], alone=True)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.master_addr) == (0, 1, 0, "127.0.0.1")
    advice = "(torchrun --nproc-per-node 4 train.py --fast starts 4 ranks)"
    assert str(launch).startswith(f"1 rank, because no launcher started this process {advice}, master 127.0.0.1:")
    for environ in ({"RANK": "0"}, {"WORLD_SIZE": "4"}, {"SLURM_JOB_ID": "7"}):
        with pytest.raises(LaunchError):
            detect_launch(environ, ["train.py"], alone=True)
    assert detect_launch(TORCH, [], alone=True) == detect_launch(TORCH, [])


variables = st.dictionaries(
    st.sampled_from(sorted({*TORCHRUN, *DEEPSPEED, *SRUN, "SLURM_DISTRIBUTION"})),
    st.sampled_from(["", "0", "1", "2", "-1", "2(x2)", "node[0-1]", "node0", "cyclic", "x", "99999999999"]),
)


@settings(deadline=None)
@given(variables, st.sampled_from([{}, TORCH, TORCHRUN, DEEPSPEED, SRUN]))
def test_any_variables_raise_only_documented_errors(changed: dict[str, str], start: dict[str, str]) -> None:
    try:
        launch = detect_launch({**start, **changed}, ["train.py"])
    except LaunchError:
        return
    assert 0 <= launch.rank < launch.world_size
    assert launch.local_world_size is None or launch.local_rank < launch.local_world_size


def test_misspelt_variables_are_named_once_on_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DS_TOPO_WACTH", "5"), ("DSTOPO_WATCH", "5"), ("ds_topo_watch", "5"), ("DS_TOPO_RUNS", "a")):
        monkeypatch.setenv(name, value)
    for rank in range(2):
        launchers.warn_of_misspelt_variables.cache_clear()
        with fake_world(rank, 2), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for spec in ("+wacth=2", "data=2"):  # an axis of this name exports DS_TOPO_WACTH
                with ProcessGrid(spec):
                    pass
        named = [re.findall(r"(\w+)='5' has no effect: did you mean (\w+)", str(each.message)) for each in said]
        expected = [] if rank else ["DS_TOPO_WACTH", "DSTOPO_WATCH", "ds_topo_watch"]
        assert named == [[(name, "DS_TOPO_WATCH")] for name in expected]
    launchers.warn_of_misspelt_variables.cache_clear()


def test_exported_variables_and_those_that_are_read_are_not_misspelt() -> None:
    topology = ProcessTopology.from_spec("pipe=2,tensor=2,+wacth=2")
    restore = launchers.export_coordinates(topology, 3)
    try:
        assert launchers.misspelt_variables(os.environ) == {}
    finally:
        restore()
    package = Path(launchers.__file__).parents[1]
    read = {name for path in package.rglob("*.py") for name in re.findall(r'"(DS_TOPO_[A-Z_]+)"', path.read_text())}
    assert read - {"DS_TOPO_WACTH", "DS_TOPO_CACHE"} <= set(launchers._SWITCHES), "in docstrings are two others"
    assert launchers.misspelt_variables(dict.fromkeys(launchers._SWITCHES, "")) == {}
