"""Whether a running cluster is what a layout needs: the same versions, clocks and topology everywhere, right results in
every group, and links as fast as their neighbors.

``faults`` and ``tournament`` are pure; ``session`` runs on every rank, ``verdict`` on rank 0. ``replicas`` is for jobs
that train: whether what ranks must have alike is alike.
"""
