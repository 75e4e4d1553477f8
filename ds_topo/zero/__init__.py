"""Implement ZeRO 1 and 2 over torch: gradients go to the ranks that own them, updated parameters return to all ranks.

A flat tensor shared by a group of ``n`` ranks is cut into regions, and each region evenly into ``n`` slices. Rank ``i``
owns slice ``i`` of every region (:mod:`~ds_topo.zero.partitions`, the file to open first).
:mod:`~ds_topo.zero.exchange` sums slices for their owners and gathers them into whole regions;
:mod:`~ds_topo.zero.arrivals` lets readers wait for parameters that are still in flight.
"""

from __future__ import annotations

from ds_topo.zero.exchange import Exchange, Pending, exchange_of
from ds_topo.zero.partitions import PartitionLayout, Region

__all__ = ["Exchange", "PartitionLayout", "Pending", "Region", "exchange_of"]
