"""Start a job over all virtual hosts as a user would, under any launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.virtual_hosts import Cluster, Host

LAUNCHERS = ("pdsh", "no_ssh", "torchrun", "srun", "openmpi", "slurm")
"""``pdsh``, ``openmpi``, ``slurm`` are values of DeepSpeed's ``--launcher``, ``no_ssh`` is its option."""
SLURM_LAUNCHERS = ("srun", "slurm")
VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
"""The variables that every rank needs on a CPU; ``GLOO_SOCKET_IFNAME`` is left for ds_topo to set."""
_FORWARDED = ("PATH", "HOME", "PYTHONPATH", "TORCH_EXTENSIONS_DIR")
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def start_job(
    cluster: Cluster,
    launcher: str,
    job: Sequence[str],
    folder: Path,
    *,
    slots: int = 2,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> list[subprocess.Popen[Any]]:
    """Start ``python *job`` in ``folder`` on ``slots`` ranks of every host; return the launcher's processes.

    A launcher that must be started on each host returns one process per host; the others return one process.
    ``options`` are passed to the launcher.
    """
    hosts, count = cluster.hosts, len(cluster.hosts)
    _write_files(hosts, folder, slots, env or {})
    deepspeed, torchrun = (str(Path(sys.executable).with_name(name)) for name in ("deepspeed", "torchrun"))
    if launcher == "no_ssh":
        parts = ["--hostfile", "hosts", "--no_ssh", "--master_addr", hosts[0].name]
        commands = [[deepspeed, *parts, "--node_rank", str(node), *options, *job] for node in range(count)]
    elif launcher == "torchrun":
        parts = ["--nnodes", str(count), "--nproc-per-node", str(slots), "--master-addr", hosts[0].name]
        commands = [[torchrun, *parts, "--node-rank", str(node), *options, *job] for node in range(count)]
    elif launcher == "srun":
        commands = [["srun", "-N", str(count), "--ntasks-per-node", str(slots), *options, sys.executable, *job]]
    elif launcher == "slurm":
        parts = ["--hostfile", "hosts", "--launcher", "slurm", "--launcher_args", f"--ntasks-per-node {slots}"]
        commands = [[deepspeed, *parts, *options, *job]]
    elif launcher in ("pdsh", "openmpi"):
        commands = [[deepspeed, "--hostfile", "hosts", "--launcher", launcher, *options, *job]]
    else:
        raise ValueError(f"launcher {launcher!r} is not one of {LAUNCHERS}")
    return [
        host.start(
            command,
            env={**VARIABLES, **_AS_ROOT, **(env or {})},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, command in zip(hosts, commands, strict=False)
    ]


def finish(processes: Sequence[subprocess.Popen[Any]], timeout: float = 240.0) -> str:
    """Wait for the end of a job; return its output. Raise RuntimeError with the output if it failed or did not end."""
    end = time.monotonic() + timeout
    output = "".join(output_until(end, process) for process in processes)
    codes = [process.returncode for process in processes]
    if any(codes):
        raise RuntimeError(f"exit codes {codes} within {timeout:.0f} s\n{output[-8000:]}")
    return output


def output_until(end: float, process: subprocess.Popen[Any]) -> str:
    """Return the output until the process or the time ends: ranks may outlive a launcher and keep its output open."""
    try:
        return str(process.communicate(timeout=max(0.1, end - time.monotonic()))[0])
    except subprocess.TimeoutExpired as late:
        process.kill()
        process.wait()
        return (late.output or b"").decode(errors="replace")


def _write_files(hosts: Sequence[Host], folder: Path, slots: int, env: Mapping[str, str]) -> None:
    (folder / "hosts").write_text("".join(f"{host.name} slots={slots}\n" for host in hosts))
    # pdsh forwards few variables; DeepSpeed exports the variables in this file on every host.
    paths = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    exports = {**VARIABLES, **paths, **env}
    (folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in exports.items()))
