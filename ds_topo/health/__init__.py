"""Name a rank that dies, stops or fails on every other rank in time, and end the ranks that wait for it.

Start with ``watch``, the public class and its judging thread, which ends gloo's blocked collectives. ``heartbeat``
exchanges beats and findings through the store, ``activity`` infers what a rank is doing and whether it is stuck after a
fault, and ``witness`` answers for a rank that cannot. Without the watch, ``first_cause`` lets all ranks know of a rank
that fails alone.

``session`` checks that a running cluster is ready for a layout: versions, clocks and topologies must be equal
everywhere, every group must give right results, and no link may be much slower than its neighbors. ``probes`` runs
collectives, and ``faults`` draws conclusions from values alone.
"""

from ds_topo.health.first_cause import guard
from ds_topo.health.watch import Watch, job_watch, watch_limit

__all__ = ["Watch", "guard", "job_watch", "watch_limit"]
