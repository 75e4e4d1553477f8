"""Which rank runs on which host, before any process exists. Standard library only."""

from ds_topo.placement.hosts import Host, HostMap, Hosts
from ds_topo.placement.placement import Placement

__all__ = ["Host", "HostMap", "Hosts", "Placement"]
