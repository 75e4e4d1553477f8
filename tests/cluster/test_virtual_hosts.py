"""Virtual hosts are isolated, reach each other by name, have links of a given rate, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.cluster import Cluster, requirements
from tests.support.ranks import RankFailure

pytestmark = pytest.mark.thorough  # for those who change ds_topo

StartCluster = Callable[..., Cluster]
MEGABYTES = 4


def _place() -> tuple[int, str, str, list[float]]:
    gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank())]))
    return dist.get_rank(), socket.gethostname(), os.environ["LOCAL_RANK"], [value.item() for value in gathered]


def _broadcast_from_first() -> None:
    dist.broadcast(torch.ones(MEGABYTES * 2**20 // 4), src=0)


def _fail_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        try:
            assert [dist.get_rank()] == [7]
        except AssertionError as error:
            raise ValueError("the last rank is unhappy") from error
    dist.barrier()


def _wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        signal.pause()


@pytest.mark.exhaustive
def test_ranks_are_numbered_host_by_host_and_join_one_group(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=2)
    everyone = [0.0, 1.0, 2.0, 3.0]
    assert cluster.run_ranks(_place, ranks_per_host=2) == [
        (0, "host0", "0", everyone),
        (1, "host0", "1", everyone),
        (2, "host1", "0", everyone),
        (3, "host1", "1", everyone),
    ]


@pytest.mark.exhaustive
def test_failures_show_output_of_every_rank(start_cluster: StartCluster) -> None:
    accounts = r"(?s)rank 0 on host0.*rank 1 on host1.*assert \[1\] == \[7\].*the last rank is unhappy"
    with pytest.raises(RankFailure, match=accounts):
        start_cluster(hosts=2).run_ranks(_fail_on_last)


@pytest.mark.exhaustive
def test_hangs_show_where_every_rank_waits(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=2)
    with pytest.raises(RankFailure, match=r"(?s)rank 0 on host0.*Timeout.*in _wait_for_nobody"):
        cluster.run_ranks(_wait_for_nobody, timeout=40.0)  # includes the start of ranks
    assert "_wait_for_nobody" not in cluster.hosts[0].run(["ps", "ax"])


def test_hosts_connect_by_ssh_and_have_separate_names_and_memory(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=3)
    first = cluster.hosts[0]
    for host in cluster.hosts:
        seen = first.run(["ssh", host.name, "hostname; hostname -I; ls /dev/shm; touch /dev/shm/mine"]).split()
        assert seen == [host.name, host.address]
        assert host.run(["getent", "ahostsv4", host.name]).split()[0] == host.address
    assert not Path("/dev/shm/mine").exists()
    assert set(first.run(["cat", "/proc/net/dev"]).split()) >= {"eth0:", "lo:"}


def test_limited_link_has_its_rate(start_cluster: StartCluster, record_property: Callable[[str, object], None]) -> None:
    cluster = start_cluster(hosts=2, rate="50mbit")
    receive = "import socket; server = socket.create_server(('host1', 5000)); print('ready', flush=True)\n"
    receive += "c, _ = server.accept()\n"
    receive += "while c.recv(1 << 20): pass\n"
    receive += "c.send(b'.')"
    send = "import socket, sys, time; c = socket.create_connection(('host1', 5000)); started = time.perf_counter()\n"
    send += "c.sendall(bytes(int(sys.argv[1]))); c.shutdown(socket.SHUT_WR); c.recv(1)\n"
    send += "print(time.perf_counter() - started)"
    payload = MEGABYTES * 2**20
    with cluster.hosts[1].start([sys.executable, "-c", receive], stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"ready\n"
        before = cluster.bytes_sent()
        seconds = float(cluster.hosts[0].run([sys.executable, "-c", send, str(payload)]))
        sent, answered = (after - start for after, start in zip(cluster.bytes_sent(), before, strict=True))
    record_property("megabits_per_second", payload * 8 / seconds / 1e6)
    assert payload < sent < 1.1 * payload
    assert answered < 0.1 * payload
    # A token bucket never lets through more than its rate and one burst; how much slower it was is only reported.
    assert payload * 8 <= 50e6 * seconds + 8 * 2 * 256 * 1024


@pytest.mark.exhaustive
def test_traffic_between_ranks_of_one_host_stays_off_the_link(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=2)
    payload = MEGABYTES * 2**20
    before = cluster.bytes_sent()[0]
    cluster.run_ranks(_broadcast_from_first)
    across = cluster.bytes_sent()[0] - before
    single = start_cluster(hosts=1)
    single.run_ranks(_broadcast_from_first, ranks_per_host=2)
    inside = single.bytes_sent()[0]
    assert across > payload
    assert inside < 0.01 * payload


@contextmanager
def _watched(pids: list[int]) -> Iterator[list[int]]:
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_killed_owner_leaves_no_process(start_cluster: StartCluster, tmp_path: Path) -> None:
    start_cluster(hosts=1)  # skips where virtual hosts cannot run
    source = """if True:
        import signal
        from tests.cluster import Cluster
        with Cluster(hosts=2) as cluster:
            inner = cluster.hosts[0].start(["sleep", "1000"])
            print(*(host.pid for host in cluster.hosts), inner.pid, cluster._switch.pid, flush=True)
            signal.pause()
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        with _watched([int(word) for word in owner.stdout.readline().split()]) as alive:
            assert len(alive) == 4
            owner.kill()
            while alive:
                gone = wait(alive, timeout=60)
                assert gone, "processes of the cluster outlived the process that made it"
                for descriptor in gone:
                    assert isinstance(descriptor, int)
                    alive.remove(descriptor)
                    os.close(descriptor)
    assert not list(tmp_path.iterdir())


def test_a_failed_start_leaves_no_process(start_cluster: StartCluster) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with pytest.raises(RuntimeError, match="fast as light"):
        start_cluster(hosts=2, rate="fast as light")
    assert children.read_text() == before


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "TOOLS", ("sh", "no-such-tool"))
    assert "need no-such-tool (Debian:" in str(requirements.missing_requirement())
    with pytest.raises(RuntimeError, match=r"need no-such-tool \(Debian: apt-get install .*openssh-server"), Cluster():
        pass
