"""Start a real Slurm on the virtual hosts: slurmctld on the first and slurmd on each, in a second or two.

It needs neither munge nor cgroups. All of its state is in the hosts' own ``/run`` and ends with the cluster.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.virtual_hosts import Cluster

SLURM_TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo")
READY_SECONDS = 60.0

_CONFIGURATION = """
ClusterName=virtual
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldLogFile=/run/slurmctld.log
SlurmdLogFile=/run/slurmd.log
MpiDefault=none
ReturnToService=2
NodeName=host[0-{last}] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES
"""


def start_slurm(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Start Slurm on all hosts; return the variables that its commands need."""
    configuration = _CONFIGURATION.format(first=cluster.hosts[0].name, last=len(cluster.hosts) - 1)
    (folder / "slurm.conf").write_text(configuration)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    # the daemons survive nsenter and end with the host
    cluster.hosts[0].run(["sh", "-c", "mkdir -p /run/slurmctld && slurmctld -c"], env=variables)
    for host in cluster.hosts:
        host.run(["sh", "-c", "mkdir -p /run/slurmd && slurmd -c"], env=variables)
    end = time.monotonic() + READY_SECONDS
    state = ""
    while time.monotonic() < end:
        try:
            state = cluster.hosts[0].run(["sinfo", "-h", "-o", "%T %D"], env=variables).strip()
        except RuntimeError as error:  # slurmctld does not listen yet
            state = str(error)
        if state == f"idle {len(cluster.hosts)}":
            return variables
        time.sleep(0.1)
    log = subprocess.run(
        ["cat", f"/proc/{cluster.hosts[0].pid}/root/run/slurmctld.log"], capture_output=True, text=True
    )
    raise RuntimeError(f"Slurm is not ready after {READY_SECONDS} s, sinfo says {state!r}:\n{log.stdout[-3000:]}")
