"""Layouts of a job before it runs: bytes per rank, seconds per step, and the search for the best.

=====================  ==============================================================================================
``model`` ``layers``   how large a model is; ``families`` reads config files
``cluster``            hosts, links and ``accelerators``; ``machine`` reads what was measured
``layout``             one candidate: degrees, order, micro-batch, ZeRO; ``candidates`` lists them
``work``               what a rank does, by kind of layer in ``layer_work``; ``compute`` and ``communication`` time it
``costs``              the work of a job's pieces, remembered; ``stages`` deals layers to a pipeline
``memory``             bytes of a rank at its peak
``step_time``          seconds of a step; ``replicas`` for gradients, ``group_spans`` for which links groups are on
``search``             the best layouts; ``smallest`` the cluster that would do
``explain``            every term in words; ``traffic`` bytes between hosts
``runs``               published runs, predicted
``config_writer``      a plan as a DeepSpeed config
=====================  ==============================================================================================

Standard library only. Formulas and their sources: ``examples/plan.md``.
"""
