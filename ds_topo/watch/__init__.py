"""A rank that dies, stops or fails is named on every other one, in time; those that wait for it are ended."""

from __future__ import annotations

from ds_topo.watch.watch import Watch, compare_steps, start_watch, watch_limit

__all__ = ["Watch", "compare_steps", "start_watch", "watch_limit"]
