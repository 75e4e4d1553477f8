"""Run an elastic job on virtual hosts under torchrun, break its hosts and ranks, and see what each restart takes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from attempts import cost_of_restarts, describe_restarts, read_attempts

from tests.cluster.virtual_hosts import Cluster

PROGRAM = Path(__file__).with_name("elastic_rank.py")
ROOT = PROGRAM.parents[2]
PORT = 29400
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=3"
"""A host is given up after five seconds without a sign of life, and a round waits three seconds for further hosts."""
VARIABLES = {
    "DS_TOPO_WATCH": "4",
    "DEEPSPEED_TIMEOUT": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
}
SHAPE = ("--batch-size", "12", "--micro-batch-size", "6", "--context", "16", "--width", "16", "--heads", "2")
SHAPE += ("--depth", "2")


class ElasticJob:
    """A job whose torchruns are started and broken by a test; the store is on the first host.

    Args:
        cluster: the hosts.
        out: the folder of checkpoints, and of the hosts' logs.
        options: options of the program.
        ranks: the ranks of each host.
        hosts: torchrun's ``--nnodes``.
        endpoint: where the store of the rendezvous is.
        program: the program that each rank runs.
    """

    def __init__(
        self,
        cluster: Cluster,
        out: Path,
        options: Sequence[str],
        *,
        ranks: int = 1,
        hosts: str = "1:3",
        endpoint: str = f"host0:{PORT}",
        program: Path = PROGRAM,
    ) -> None:
        self.cluster, self.out, self._program = cluster, out, program.name
        out.mkdir(parents=True, exist_ok=True)
        self.faults: list[tuple[float, str]] = []
        """The time of each fault, and what it was."""
        self._torchruns: dict[int, subprocess.Popen[Any]] = {}
        launcher = [str(Path(sys.executable).with_name("torchrun")), "--nnodes", hosts, "--nproc-per-node", str(ranks)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "elastic"]
        launcher += ["--rdzv-conf", RENDEZVOUS, "--max-restarts", "20"]
        self._command = [*launcher, str(program), "--resume", "auto", "--out", str(out), *options]

    # -- what happens --------------------------------------------------------------------------------------------------

    def start(self, *hosts: int) -> None:
        """Start torchrun on hosts."""
        for index in hosts:
            with self._log(index).open("a") as log:
                self._torchruns[index] = self.cluster.hosts[index].start(
                    self._command, env=VARIABLES, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    def serve_store(self, index: int) -> None:
        """Serve the store of the rendezvous on a host without ranks."""
        serve = f"from torch.distributed import TCPStore as S; s = S('0.0.0.0', {PORT}, is_master=True, "
        serve += "wait_for_workers=False); print('ready', flush=True); import signal; signal.pause()"
        server = self.cluster.hosts[index].start([sys.executable, "-c", serve], stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"

    def kill_host(self, index: int) -> None:
        """Cut a host off and kill its processes, as if it had lost its power; it can be started again."""
        self._note(f"host{index} killed")
        self.cluster.unplug(index)
        for pid in self._processes(index):
            _send(pid, signal.SIGKILL)
        if index in self._torchruns:
            self._torchruns.pop(index).wait()

    def cut_cable(self, index: int) -> None:
        """Cut a host off; its processes live on."""
        self._note(f"cable of host{index} cut")
        self.cluster.unplug(index)

    def stop_host(self, index: int) -> None:
        """Stop all processes of a host."""
        self._note(f"host{index} stopped")
        for pid in self._processes(index):
            _send(pid, signal.SIGSTOP)

    def resume_host(self, index: int) -> None:
        """Let the processes of a stopped host go on."""
        self._note(f"host{index} goes on")
        for pid in self._processes(index):
            _send(pid, signal.SIGCONT)
        self._torchruns[index].send_signal(signal.SIGCONT)  # nsenter has stopped with what it has started

    def kill_rank(self, index: int) -> None:
        """Kill one rank of a host."""
        self._note(f"a rank of host{index} killed")
        os.kill(self._ranks(index)[-1], signal.SIGKILL)

    def add_host(self, index: int, what: str = "comes") -> None:
        """Start torchrun on a host that the job does not have, or no longer."""
        for pid in self._processes(index):
            _send(pid, signal.SIGKILL)
        if index in self._torchruns:
            torchrun = self._torchruns.pop(index)
            torchrun.send_signal(signal.SIGCONT)  # nsenter stops with what it has started, and would not see its end
            torchrun.wait()
        self.cluster.plug_in(index)
        self._note(f"host{index} {what}")
        self.start(index)

    def make_slow(self, what: str) -> None:
        """Wait until a rank is in a ``save`` or ``load``, which takes some time."""
        (self.out / f"slow-{what}").touch()
        self.until(lambda: (self.out / f"slow-{what}.begun").exists())

    def terminate(self) -> None:
        """Send SIGTERM to all torchruns, as a scheduler does that needs the hosts, and wait for their end."""
        self._note("SIGTERM to all torchruns")
        for index in self._torchruns:
            for pid in self._processes(index):
                if b"torchrun" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGTERM)
        for torchrun in self._torchruns.values():
            torchrun.wait(60)
        self._torchruns.clear()

    def step(self) -> int:
        """Return the number of steps that the job has done."""
        return int(self._newest().get("step", 0))

    # -- waiting -------------------------------------------------------------------------------------------------------

    def until_step(self, step: int) -> None:
        """Wait until the job has done a step."""
        self.until(lambda: self.step() >= step)

    def until_continued(self, attempts: int) -> None:
        """Wait until so many attempts have begun, and the last has done a step."""
        self.until(lambda: len(found := read_attempts(self.out)) >= attempts and len(found[-1]) > 1)

    def until(self, what: Callable[[], Any], seconds: float = 240.0) -> None:
        """Wait until a function returns something true; fail if the job ends before."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"no progress in {seconds:.0f} s:\n{self.logs()}"
            codes = [torchrun.poll() for torchrun in self._torchruns.values()]
            has_ended = None not in codes or 0 in codes
            assert not has_ended, f"the job has ended:\n{self.logs()}"
            time.sleep(0.02)

    def is_in_rendezvous(self, index: int) -> bool:
        """Tell whether torchrun of a host is connected to the store of another, and has started no rank."""
        network = Path(f"/proc/{self.cluster.hosts[index].pid}/net")
        lines = [line.split() for name in ("tcp", "tcp6") for line in (network / name).read_text().splitlines()]
        is_connected = any(line[2].endswith(f":{PORT:04X}") and line[3] == "01" for line in lines)
        return is_connected and not self._ranks(index)

    def finish(self, *hosts: int, seconds: float = 400.0) -> list[float]:
        """Wait for the end of torchrun on these hosts; return the losses of all steps."""
        self.wait_for_end(*hosts, seconds=seconds)
        return losses_in(self.out)

    def wait_for_end(self, *hosts: int, seconds: float = 400.0) -> None:
        """Wait for the end of torchrun on these hosts, without an error."""
        end = time.monotonic() + seconds
        for index in hosts:
            try:
                code = self._torchruns[index].wait(end - time.monotonic())
            except subprocess.TimeoutExpired:
                raise AssertionError(f"host{index} goes on after {seconds:.0f} s:\n{self.logs()}") from None
            assert code == 0, f"torchrun of host{index} ended with {code}:\n{self.logs()}"

    # -- what was ------------------------------------------------------------------------------------------------------

    def attempts(self) -> list[dict[str, Any]]:
        """Return the start of each attempt."""
        return [start for start, *_ in read_attempts(self.out)]

    def table(self) -> str:
        """Return the seconds of each restart by phase, from the last step before it on."""
        attempts = read_attempts(self.out)
        lines = ["  until ranks end  until new ones  joining  loading  repeating  steps again  goes on with"]
        costs, _ = cost_of_restarts(attempts)
        failures = [second for log in self.out.glob("host*.log") for second in _failures(log)]
        for (start, *steps), (until, join, load, repeat), former in zip(attempts[1:], costs, attempts, strict=False):
            ended = min([second for second in failures if start["born"] - until < second < start["born"]], default=None)
            ends = "by SIGTERM" if ended is None else f"{ended - start['born'] + until:13.1f} s"
            rendezvous = until if ended is None else start["born"] - ended
            again = sum(entry.get("step", 1e9) <= former[-1].get("step", 0) for entry in steps)
            what = start["what"].rpartition(", ")[0]
            lines.append(f"{ends:>15}{rendezvous:14.1f} s{join:7.1f} s{load:7.1f} s{repeat:9.1f} s{again:13}  {what}")
        return "\n".join([", ".join(what for _, what in self.faults), *lines])

    def report(self) -> str:
        """Return the sentence that the job prints at its end."""
        return describe_restarts(self.out)

    def logs(self) -> str:
        """Return the end of each host's log."""
        texts = [f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.out.glob("host*.log")]
        return "\n".join([*texts, *(str(attempt) for attempt in self.attempts())])

    # -- processes -----------------------------------------------------------------------------------------------------

    def _note(self, what: str) -> None:
        self.faults.append((time.time(), what))

    def _log(self, index: int) -> Path:
        return self.out / f"host{index}.log"

    def _newest(self) -> dict[str, Any]:
        attempts = read_attempts(self.out)
        return attempts[-1][-1] if attempts else {}

    def _processes(self, index: int) -> list[int]:
        """Return the machine's IDs of all processes of a host except its first, sshd."""
        first = self.cluster.hosts[index].pid
        namespace = os.readlink(f"/proc/{first}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != first:
                try:
                    if os.readlink(entry / "ns/pid") == namespace:
                        found.append(int(entry.name))
                except OSError:  # it has just ended
                    continue
        return found

    def _ranks(self, index: int) -> list[int]:
        """Return the processes of a host that torchrun has started as ranks."""
        found = []
        for pid in self._processes(index):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if len(command) > 2 and command[1] == b"-u" and command[2].endswith(self._program.encode()):
                found.append(pid)
        return sorted(found)


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _failures(log: Path) -> list[float]:
    """Return the times at which torchrun found ranks that had failed."""
    found = re.findall(r"^E(\d{4} [\d:.]+) .*\] failed [(]exitcode", log.read_text(errors="replace"), re.MULTILINE)
    year = time.strftime("%Y")
    return [datetime.strptime(f"{year}{each}", "%Y%m%d %H:%M:%S.%f").timestamp() for each in found]


def losses_in(out: Path) -> list[float]:
    """Return the loss of each step of a job that has ended."""
    history = json.loads((out / "history.json").read_text())["history"]
    assert [row["step"] for row in history] == [*range(1, len(history) + 1)]
    return [row["loss"] for row in history]
