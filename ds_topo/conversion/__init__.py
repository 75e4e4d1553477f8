"""Checkpoints of one layout as checkpoints of another: other degrees, another stage of ZeRO, one plain file.

===============  =====================================================================================================
``model``        a saved model's parameters as a whole, whatever the layout: values
``experts``      experts: their names, the ranks that have them, groups of the optimizer
``stages``       which layers and parameters each stage of a pipeline has: arithmetic
``target``       the layout that is wanted, or why it cannot be reached
``partitions``   which elements of which parameter lie where in ZeRO's partitions: arithmetic
``slices``       slices of a tensor-parallel parameter, cut and put together
``reading``      weights and optimizer states of a checkpoint, by parameter, from DeepSpeed's files of any layout
``states``       what optimizers have saved, at each stage of ZeRO
``content``      what a file is to hold, before its tensors are there
``files``        DeepSpeed's files of the wanted layout; ``optimizer_files`` has what is of the optimizer in them
``filling``      files written in place, parameter by parameter, and taken up again after a kill
``converting``   all of it
``single_file``  one plain file of weights, for torch or safetensors
``loading``      a share of the conversion on every rank, then loading
===============  =====================================================================================================

A parameter is read from the old files, put together and copied into the new ones, one after the other: both sides are
mapped into memory, which holds no more than the largest parameter beside what the system caches.
"""

from __future__ import annotations

from ds_topo.conversion.converting import convert
from ds_topo.conversion.single_file import to_single_file

__all__ = ["convert", "to_single_file"]
