"""Check that a running cluster is ready for a layout.

Versions, clocks and topologies must be equal everywhere, every group must give right results, and no link may be much
slower than its neighbors. Start with ``session``, which every rank runs step by step. ``probes`` runs collectives, and
``faults`` draws conclusions from values alone.
"""
