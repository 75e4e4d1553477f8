"""Choose the layout of a job before it runs: predict bytes per rank and seconds per step, and search for the best.

``model``, ``hardware`` and ``job`` describe what is planned, ``work`` and ``stages`` what a rank has to do. ``memory``
and ``step_time`` add this up, and ``search`` compares layouts. Read ``job`` first, then ``memory`` and ``step_time``.
All but ``calibrate`` do without torch. ``examples/guides/plan.md`` lists the formulas and their sources. Numbers, names
and files that cannot be used raise :class:`~ds_topo.errors.TopologyError`.
"""
