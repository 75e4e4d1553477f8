"""Create virtual hosts: process trees in their own namespaces, joined by links of a given speed.

Every host has its own network (``eth0`` and ``lo``), host name, mounts, processes and System V memory; ``/etc/hosts``,
``/etc/ssh``, ``/dev/shm`` and ``/run`` are private; all other files are shared. Its first process is sshd, so that
hosts reach each other by name over ssh without a password. A bridge in another network namespace connects the links.
The machine's own network stays unchanged, and no process remains: when the process that created the cluster ends, the
kernel kills the first process of each host, and with it all others of the host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster.rank_jobs import call_on_ranks, command_on_ranks
from tests.cluster.requirements import SEARCH_PATH, missing_requirement

BURST, LATENCY = "256kb", "50ms"
READY_SECONDS = 60.0
ADDRESS = "10.77.0.{}"
_NAMESPACES = ["--net", "--uts", "--mount", "--pid", "--ipc"]
_DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL", "--"]

_SWITCH = """
set -e
ip link add bridge type bridge
ip link set bridge addrgenmode none up
echo ready
exec sleep infinity
"""
_HOST = """
set -e
folder=$1 name=$2 address=$3 sshd=$4
mount -t tmpfs tmpfs /etc/ssh
cp -p "$folder/ssh/"* /etc/ssh
cp "$folder/hosts" /etc/ssh/hosts
mount --bind /etc/ssh/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
hostname "$name"
ip link set lo up
echo ready
read -r connected
ip link set eth0 addrgenmode none
ip address add "$address/24" dev eth0
ip link set eth0 up
exec "$sshd" -D -e
"""
_SSHD_CONFIG = """
AddressFamily inet
HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
Subsystem sftp internal-sftp
"""
_SSH_CONFIG = """
Host *
    IdentityFile /etc/ssh/key
    IdentitiesOnly yes
    GlobalKnownHostsFile /etc/ssh/known_hosts
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    LogLevel ERROR
"""


class Host:
    """A virtual host with its ``name``, ``address``, and ``pid``, the machine's ID of its first process."""

    def __init__(self, folder: Path, name: str, address: str) -> None:
        self.name, self.address, self.pid = name, address, 0
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open until kill)
        sshd = str(shutil.which("sshd", path=SEARCH_PATH))
        script = ["sh", "-c", _HOST, "host", str(folder), name, address, sshd]
        self._process = subprocess.Popen(
            [*_DIE_WITH_PARENT, "unshare", *_NAMESPACES, "--mount-proc", "--fork", "--kill-child=KILL", *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PATH": SEARCH_PATH},
            text=True,
        )

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on this host; killing the returned process kills the command too.

        ``env`` is added to the caller's environment without its ``GLOO_SOCKET_IFNAME``, which names an interface of
        another host. ``cwd`` defaults to the caller's folder, and ``options`` are passed to Popen.
        """
        enter = ["nsenter", "--target", str(self.pid), *_NAMESPACES, "--", *_DIE_WITH_PARENT]
        folder = ["env", "-C", str(cwd or Path.cwd())]
        callers = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        environment = {**callers, "PATH": SEARCH_PATH, **(env or {})}
        return subprocess.Popen([*enter, *folder, *command], env=environment, **options)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 60.0,
    ) -> str:
        """Run a command on this host and return its standard output; RuntimeError with all output if it fails."""
        process = self.start(
            command,
            env=env,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        with process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                output, errors = process.communicate()
                errors += f"\nkilled after {timeout} s"
        if process.returncode:
            raise RuntimeError(
                f"{self.name}: {' '.join(command)} gave exit code {process.returncode}\n{output}\n{errors}"
            )
        return str(output)

    def bytes_sent(self) -> int:
        """Return the bytes that left through ``eth0`` so far, from the kernel's counter."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        [counters] = [line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")]
        return int(counters[8])

    def wait_until_isolated(self) -> None:
        """Block until the first process is in its namespaces, and store its process ID."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise self._failure("its namespaces could not be set up")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        self.pid = int(children)

    def connect(self) -> None:
        """Signal to the first process that ``eth0`` exists; it brings the interface up and becomes sshd."""
        assert self._process.stdin is not None
        self._process.stdin.write("connected\n")
        self._process.stdin.flush()

    def wait_until_reachable(self) -> None:
        """Block until sshd listens."""
        end = time.monotonic() + READY_SECONDS
        listening = f":{22:04X} 00000000:0000 0A"
        while listening not in Path(f"/proc/{self.pid}/net/tcp").read_text():
            if self._process.poll() is not None or time.monotonic() > end:
                raise self._failure("sshd does not listen")
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the first process, and with it all others of this host."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _failure(self, what: str) -> RuntimeError:
        self._log.seek(0)
        return RuntimeError(f"{self.name}: {what}: {self._log.read()}")


class Cluster:
    """Virtual hosts ``host0``, ``host1``, ... that exist while a ``with`` statement runs.

    ``rate`` limits every host's link in each direction, in tc's notation (``"1gbit"``, ``"400mbit"``); None sets no
    limit. Ranks of one host communicate over ``lo``, which has no limit. Enter and leave the cluster in one thread: the
    hosts end with the thread that created them.
    """

    def __init__(self, hosts: int = 2, rate: str | None = None) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts={hosts}: a cluster has 1 to 250 hosts")
        self.rate = rate
        self.hosts: list[Host] = []
        self._size = hosts
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Cluster:
        if reason := missing_requirement():
            raise RuntimeError(reason)
        try:
            self._start_switch()
            self._start_hosts()
            for index, host in enumerate(self.hosts):
                self._lay_cable(index, host)
                host.connect()
            for host in self.hosts:
                host.wait_until_reachable()
            self.set_rate(self.rate)
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    def set_rate(self, rate: str | None) -> None:
        """Limit both ends of every host's link to ``rate``; None removes the limit."""
        for index in range(len(self.hosts)):
            self.set_rate_of(index, rate)
        self.rate = rate

    def set_rate_of(self, index: int, rate: str | None) -> None:
        """Limit both ends of one host's link."""
        discipline = ["tbf", "rate", rate, "burst", BURST, "latency", LATENCY] if rate else ["noqueue"]
        shape = ["tc", "qdisc", "replace", "dev"]
        self._in_network_of(self.hosts[index].pid, *shape, "eth0", "root", *discipline)
        self._in_network_of(self._switch_pid, *shape, f"port{index}", "root", *discipline)

    def unplug(self, index: int) -> None:
        """Take down the link of one host; its processes continue."""
        self._in_network_of(self._switch_pid, "ip", "link", "set", f"port{index}", "down")

    def plug_in(self, index: int) -> None:
        """Bring the link of one host up again. Idempotent."""
        self._in_network_of(self._switch_pid, "ip", "link", "set", f"port{index}", "up")

    def bytes_sent(self) -> list[int]:
        """Return the bytes that each host has sent to other hosts so far."""
        return [host.bytes_sent() for host in self.hosts]

    def run_ranks(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = 120.0,
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank of a gloo process group over the hosts; return each rank's result.

        ``function`` must be importable (module level; also of a module run with ``python -m``). Ranks are numbered host
        by host and see torchrun's variables; results come in that order. A rank that fails or outlasts ``timeout``
        seconds raises RankFailure with every rank's output.
        """
        return call_on_ranks(self.hosts, function, args, ranks_per_host, env or {}, timeout)

    def run_command(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = 120.0,
    ) -> list[str]:
        """Run ``command`` once per rank with torchrun's variables set; return what each rank wrote, in rank order."""
        return command_on_ranks(self.hosts, command, ranks_per_host, env or {}, timeout)

    @property
    def _switch_pid(self) -> int:
        if self._switch is None:
            raise RuntimeError("the cluster is not running: use it in a with statement")
        return self._switch.pid

    def _start_hosts(self) -> None:
        """Start every host and wait until it has its own copy of the files that they share at first."""
        with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
            self._write_files(Path(folder))
            for index in range(self._size):
                self.hosts.append(Host(Path(folder), f"host{index}", ADDRESS.format(index + 1)))
            for host in self.hosts:
                host.wait_until_isolated()

    def _write_files(self, folder: Path) -> None:
        names = "".join(f"{ADDRESS.format(index + 1)} host{index}\n" for index in range(self._size))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        ssh = folder / "ssh"
        ssh.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "key")], check=True)
        (ssh / "known_hosts").write_text(f"* {(ssh / 'key.pub').read_text()}")
        (ssh / "sshd_config").write_text(_SSHD_CONFIG)
        (ssh / "ssh_config").write_text(_SSH_CONFIG)

    def _start_switch(self) -> None:
        self._switch = subprocess.Popen(
            [*_DIE_WITH_PARENT, "unshare", "--net", "sh", "-c", _SWITCH],
            stdout=subprocess.PIPE,
            env={**os.environ, "PATH": SEARCH_PATH},
            text=True,
        )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise RuntimeError("the switch: its network namespace could not be set up")

    def _lay_cable(self, index: int, host: Host) -> None:
        port = f"port{index}"
        new_pair = ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        self._in_network_of(self._switch_pid, "ip", "link", "add", port, *new_pair)
        self._in_network_of(
            self._switch_pid, "ip", "link", "set", port, "master", "bridge", "addrgenmode", "none", "up"
        )

    @staticmethod
    def _in_network_of(pid: int, *command: str) -> None:
        result = subprocess.run(
            ["nsenter", "--target", str(pid), "--net", "--", *command],
            env={**os.environ, "PATH": SEARCH_PATH},
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")

    def _tear_down(self) -> None:
        for host in self.hosts:
            host.kill()
        self.hosts.clear()
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
            self._switch = None
