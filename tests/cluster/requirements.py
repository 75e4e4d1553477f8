"""Check what this machine lacks to run virtual hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache

TOOLS = ("hostname", "ip", "mount", "nsenter", "setpriv", "ssh", "ssh-keygen", "sshd", "tc", "unshare")
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
"""The path for the tools: a user's PATH often lacks the folders of sshd, ip and tc."""

_PROBE = """set -e
ip link add bridge type bridge
ip link add port0 type veth peer name eth0
tc qdisc add dev port0 root tbf rate 1gbit burst 256kb latency 50ms
"""


def missing_requirement(more_tools: Iterable[str] = ()) -> str | None:
    """Return the reason why a cluster cannot run here, or None if it can."""
    absent = [tool for tool in (*TOOLS, *more_tools) if shutil.which(tool, path=SEARCH_PATH) is None]
    if absent:
        packages = (
            "apt-get install iproute2 openssh-server pdsh util-linux; for some tests slurm-wlm faketime openmpi-bin"
        )
        return f"virtual hosts need {', '.join(absent)} (Debian: {packages})"
    return _missing_permission()


@lru_cache(maxsize=1)
def _missing_permission() -> str | None:
    if sys.platform != "linux":
        return f"virtual hosts need Linux's namespaces, this is {sys.platform}"
    if os.geteuid() != 0:
        return "virtual hosts need root"
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "sh", "-c", _PROBE]
    probe = subprocess.run(command, env={**os.environ, "PATH": SEARCH_PATH}, capture_output=True, text=True)
    return f"virtual hosts are not permitted here: {probe.stderr.strip()}" if probe.returncode else None
