"""Joining sets one timeout for all groups, exports variables, and raises errors that name the cause of a failure."""

from __future__ import annotations

import inspect
import os
import re
import socket
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore

from ds_topo import init_distributed
from ds_topo.engine import start
from ds_topo.errors import DisagreementError, LaunchError, StoreTimeoutError
from ds_topo.launch import joining
from ds_topo.launch.council import ranks_that_came
from ds_topo.launch.joining import as_timeout, create_world, join, open_store, wait_for_all, warn_of_restarts
from ds_topo.launch.launchers import Launch
from tests.support.ports import free_port
from tests.support.served_store import errors_of, served_store

NOT_INHERITED = ("SLURM_", "OMPI_", "PMI_", "MPI_", "TORCHELASTIC_", "CROSS_", "LOCAL_")


def run_rank(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program as the one rank of a job whose variables are set by hand."""
    port = str(free_port())
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    of_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, **of_rank, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.thorough
def test_all_groups_have_one_timeout_also_deepspeeds() -> None:
    result = run_rank(
        "import torch, torch.distributed as dist, ds_topo\n"
        "def timeout(group): return group._get_backend(torch.device('cpu')).options._timeout\n"
        "launch = ds_topo.init_distributed(timeout=77)\n"
        "import deepspeed.comm\n"
        "groups = [dist.group.WORLD, dist.new_group([0]), deepspeed.comm.new_group([0])]\n"
        "print(*(int(timeout(group).total_seconds()) for group in groups), launch.world_size)\n"
        "again = ds_topo.init_distributed()\n"
        "print(again == launch)\n"
    )
    assert result.stdout.splitlines()[-2:] == ["77 77 77 1", "True"], result.stderr[-3000:]
    assert "ds_topo: 1 rank, by variables of the environment, master 127.0.0.1:" in result.stderr


def test_program_without_a_launcher_runs_as_one_rank_and_says_so_once() -> None:
    result = run_rank(
        "import ds_topo\n"
        "launch = ds_topo.init_distributed(verbose=False)\n"
        "ds_topo.init_distributed()\n"
        "with ds_topo.PipelineParallelGrid('pipe=1,data=-1') as grid:\n"
        "    print(launch.world_size, grid.topology().spec)\n",
        **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), ""),
    )
    assert result.stdout.splitlines()[-1] == "1 pipe=1,data=1", result.stderr[-3000:]
    assert result.stderr.count("ds_topo: 1 rank, because no launcher started this process") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize(("option", "found"), [("-v", ["deepspeed_shm_comm"]), ("--version", [])])
def test_a_build_is_found_by_its_process(option: str, found: list[str], tmp_path: Path) -> None:
    program, folder = tmp_path / "ninja", tmp_path / "deepspeed_shm_comm"
    program.write_text("#!/bin/sh\necho begun\nread -r end\n")
    program.chmod(0o755)
    folder.mkdir()
    pipe = subprocess.PIPE
    with subprocess.Popen([str(program), option], cwd=folder, stdin=pipe, stdout=pipe) as ninja:
        assert ninja.stdout is not None
        assert ninja.stdout.readline() == b"begun\n"
        assert start._builds() == found
        ninja.communicate(b"\n")
    assert start._builds() == []


def test_a_build_is_named_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    looks, enough = iter([[], ["cpu_adam"], ["cpu_adam"]]), threading.Event()

    def builds() -> list[str]:
        found = next(looks, None)
        if found is None:
            enough.set()
        return found or []

    monkeypatch.setattr(start, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(start, "_builds", builds)
    with start._naming_builds():
        assert enough.wait(60)
    said = capsys.readouterr().err
    assert said.count("\n") == said.count("compiles cpu_adam, an extension of DeepSpeed") == 1
    assert "ds_topo-builds" not in [thread.name for thread in threading.enumerate()]


def test_a_grid_exports_coordinates() -> None:
    result = run_rank(
        "import os, warnings; from ds_topo.launch.joining import join\n"
        "from ds_topo.process_groups.process_grid import ProcessGrid\n"
        "join(timeout=60, backend='gloo', verbose=False)\n"
        "said = lambda: sorted(name for name in os.environ if name.startswith('DS_TOPO_'))\n"
        "[os.environ.pop(name) for name in said()]\n"
        "grid = ProcessGrid('pipe=1,data=1')\n"
        "print(*said())\n"
        "grid.destroy()\n"
        "print(*said())\n"
    )
    said = [line for line in result.stdout.splitlines() if not line.startswith("[Gloo]")]  # some releases print this
    assert said == ["DS_TOPO_COORDINATE DS_TOPO_DATA DS_TOPO_PIPE", ""], result.stderr[-3000:]


@pytest.mark.thorough
def test_error_names_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run_rank("from ds_topo.launch.joining import join; join(timeout=10, backend='gloo')", MASTER_PORT=port)
    assert result.returncode == 1
    assert f"LaunchError: port {port} is in use on {socket.gethostname()}, probably by another job" in result.stderr


@pytest.mark.parametrize(("timeout", "variable"), [(0, "10"), (-1.0, "10"), (None, "0"), (None, "ten")])
def test_timeouts_must_be_positive(timeout: float | None, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", variable)
    with pytest.raises(ValueError, match=r"timeout=|DEEPSPEED_TIMEOUT="):
        as_timeout(timeout)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"timeout": "gloo"}, TypeError, r"timeout='gloo': give seconds.*backend='gloo'"),
        ({"timeout": True}, TypeError, "timeout=True: give seconds"),
        ({"timeout": float("nan")}, ValueError, "give seconds, or a datetime.timedelta, above 0"),
        ({"timeout": 1e300}, ValueError, "give seconds, or a datetime.timedelta, above 0"),
        ({"backend": "gllo"}, ValueError, r"no backend 'gllo', did you mean 'gloo'\?"),
        ({"backend": "cpu:gloo,cuda:nccll"}, ValueError, r"no backend 'nccll', did you mean 'nccl'\?"),
        ({"backend": "carrier pigeon"}, ValueError, "It knows fake, gloo"),
        ({"watch": True}, TypeError, "watch=True is not a number"),
        ({"watch": "yes"}, TypeError, "watch='yes' is not a number"),
        ({"dist_backend": "gloo"}, TypeError, "dist_backend: write backend="),
        ({"rank": 0, "world_size": 4}, TypeError, "rank: omit it.*; world_size: omit it, because it comes from the la"),
        ({"timeouts": 60}, TypeError, r"takes timeout, backend, .*timeouts: there is no such argument"),
    ],
)
def test_mistakes_are_refused_before_ranks_join(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        init_distributed(**options)


def test_ranks_end_with_their_launcher_and_say_which_it_was_unless_told_otherwise() -> None:
    for function in (init_distributed, join):
        defaults = inspect.signature(function).parameters
        assert (defaults["end_with_launcher"].default, defaults["verbose"].default) == (True, True)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 3), r"1 ranks have WORLD_SIZE=3, but rank 0 has 2 \(.* \(rank 1\)\): start every rank with the same"),
        ((2, 2, 3), r"rank 2 on .* has WORLD_SIZE=3, but rank 0 has 2: start every rank with the same WORLD_SIZE"),
        ((3, 2), r"1 of 3 ranks did not come .*: 2\. .* 1 ranks have WORLD_SIZE=2, but rank 0 has 3"),
    ],
    ids=["too large on rank 1", "a rank too many", "too large on rank 0"],
)
def test_other_world_size_is_named(sizes: tuple[int, ...], message: str) -> None:
    store = HashStore()

    def wait(rank: int) -> str:
        launch = Launch("environment", rank, sizes[rank], 0, "127.0.0.1", 29500)
        try:
            wait_for_all(store, launch, timedelta(seconds=30 if rank else 1))  # rank 0 answers all
        except DisagreementError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as ranks:
        said = list(ranks.map(wait, range(len(sizes))))
    assert re.search(message, said[-1]), said
    assert len(sizes) == 3 or said[0] == said[1]


def test_a_few_missing_ranks_of_many_are_found_by_few_requests() -> None:
    store, keys, missing = HashStore(), [f"here/{rank}" for rank in range(1024)], {0, 700}
    for rank in set(range(1024)) - missing:
        store.set(keys[rank], "")
    counting: Any = mock.Mock(wraps=store)
    assert set(range(1024)) - missing == set(ranks_that_came(counting, keys, timedelta(milliseconds=10)))
    assert counting.check.call_count <= 2 * 2 * 10 + 1


def test_rank_of_another_process_is_refused() -> None:
    store, launch = HashStore(), Launch("environment", 0, 1, 0, "node1", 29500)
    wait_for_all(store, launch, timedelta(seconds=1))
    wait_for_all(store, launch, timedelta(seconds=1))  # the same process may join again
    store.set("here/0", '["node2", 7]')
    with pytest.raises(LaunchError, match=r"process 7 on node2 is rank 0 of the job at node1:29500. .*MASTER_PORT"):
        wait_for_all(store, launch, timedelta(seconds=1))


def test_error_names_an_address_that_is_not_rank_0s() -> None:
    launch = Launch("environment", 0, 2, 0, "203.0.113.1", free_port())
    with pytest.raises(LaunchError, match=r"MASTER_ADDR='203\.0\.113\.1' is not an address of .*: give the address"):
        open_store(launch, timedelta(seconds=1))


RESTARTING = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.mark.parametrize(
    ("hosts", "variables", "warns"),
    [
        (2, {}, True),
        (1, {}, False),
        (2, {"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        (2, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False),
    ],
    ids=["two hosts", "one host", "no restarts", "a new store each time"],
)
def test_separate_counts_of_restarts_warn(
    hosts: int, variables: dict[str, str], warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**RESTARTING, **variables}.items():
        monkeypatch.setenv(name, value)
    launch = Launch("torchrun", 0, 2, 0, "node1", 29500, node=(0, hosts))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_restarts(launch)
    assert ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(warning.message) for warning in caught] == [True] * warns


@pytest.mark.thorough
def test_ranks_join_if_their_hosts_count_restarts_differently() -> None:
    """Join on two hosts with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: rank 0 serves a new store after each restart."""
    port = str(free_port())
    program = "from ds_topo.launch.joining import join; join(timeout=60, backend='gloo', verbose=False)"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    shared = {**inherited, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]


def test_rank_0_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(joining, "NOTICE_AFTER", timedelta(seconds=0.05))
    launch = Launch("torchrun", 0, 4, 0, "127.0.0.1", 29500)
    with pytest.raises(DisagreementError, match="3 of 4 ranks did not come"):
        wait_for_all(HashStore(), launch, timedelta(seconds=1))
    assert "has waited 0 s for 3 of 4 ranks, 1-3, to join the job at 127.0.0.1:29500" in capsys.readouterr().err


# -- a store that stops ------------------------------------------------------------------------------------------------


def _assert_names_the_server(error: BaseException | None, port: int) -> None:
    assert isinstance(error, (LaunchError, StoreTimeoutError)), error
    assert f"the store of the job at 127.0.0.1:{port} did not answer within 0:00:0" in str(error)
    assert "The process that serves it (rank 0, or the launcher on its host) has stopped" in str(error)
    assert "look there, and start the job again" in str(error)


@pytest.mark.thorough
@pytest.mark.parametrize("step", ["connecting", "waiting for all ranks", "creating the world"])
def test_store_that_has_stopped_is_named_in_time_on_every_rank(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher serves the store, as with torchrun."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    limit = timedelta(seconds=1)
    with served_store() as store:
        launches = [Launch("torchrun", rank, 2, rank, "127.0.0.1", store.port) for rank in range(2)]
        clients = [store.client(1) for _ in launches]
        store.stop()
        calls = {
            "connecting": lambda rank: open_store(launches[rank], limit),
            "waiting for all ranks": lambda rank: wait_for_all(clients[rank], launches[rank], limit),
            "creating the world": lambda rank: create_world(clients[rank], launches[rank], limit, "gloo"),
        }
        ranks = [0] if step == "creating the world" else [0, 1]  # a process is in one world
        for error in errors_of(*(partial(calls[step], rank) for rank in ranks), seconds=10):
            _assert_names_the_server(error, store.port)


@pytest.mark.thorough
def test_store_that_stops_while_ranks_wait_for_another_is_named_in_time() -> None:
    with served_store() as store:
        launches = [Launch("environment", rank, 3, 0, "127.0.0.1", store.port) for rank in (0, 2)]
        clients = [store.client(3) for _ in launches]
        pairs = zip(clients, launches, strict=True)
        threading.Timer(1.0, store.stop).start()
        for error in errors_of(*(partial(wait_for_all, *pair, timedelta(seconds=3)) for pair in pairs), seconds=15):
            _assert_names_the_server(error, store.port)
