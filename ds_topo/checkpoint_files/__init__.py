"""What is in a folder of checkpoints: manifests, whole or damaged, which one is the newest, who can read it.

===============  =====================================================================================================
``manifest``     the values that a manifest holds, and how they are written and read
``wholeness``    whether a checkpoint is whole, by sizes or digests; also one that DeepSpeed alone has saved
``folder``       the checkpoints of a folder, ``latest``, the newest whole one, what a killed save has left
``reach``        whether a layout can read the files of another one as they are
``durable``      files and folders that are there as a whole or not at all, after a power failure too
===============  =====================================================================================================

Standard library only: no torch, no process, and nothing is unpickled.
"""
