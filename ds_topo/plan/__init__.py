"""Choose the layout of a job before it runs: predict bytes per rank and seconds per step, and search for the best.

=====================  ==============================================================================================
``model``              the size of a model, from numbers by hand, a ``config.json``, or the name of a public model
``hardware``           GPUs, links and hosts, from tables or from measurements
``calibrate``          measurements of the GPUs at hand
``job``                a job (model, cluster, batch, precision, program), a layout of it, and the rules for layouts
``work``               the matrix products, memory traffic and messages of each kind of layer, and their seconds
``stages``             the stages of a pipeline, and the cost of their pieces
``memory``             the bytes of a rank at its peak
``step_time``          the hosts that groups span, the seconds of their collectives, and those of a step
``search``             the best layouts, and the smallest cluster that fits
``explain``            every term in words, and what another layout loses
=====================  ==============================================================================================

Read ``job`` first, then ``memory`` and ``step_time``. All but ``calibrate`` do without torch.
``examples/guides/plan.md`` lists the formulas and their sources. Numbers, names and files that cannot be used raise
:class:`~ds_topo.errors.TopologyError`.
"""
