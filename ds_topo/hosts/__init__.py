"""Decide which rank runs on which host, before any process exists. Standard library only.

Hostfiles, numbers and Slurm variables give a ``HostMap``; ``Placement`` combines it with a topology. Start with
``hosts``.
"""

from ds_topo.hosts.hosts import Host, HostMap, Hosts
from ds_topo.hosts.placement import Placement

__all__ = ["Host", "HostMap", "Hosts", "Placement"]
