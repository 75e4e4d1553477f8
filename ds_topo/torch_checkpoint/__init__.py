"""What ``torch.distributed.checkpoint`` has to know of tensors that many ranks hold in pieces. No DeepSpeed.

===============  =====================================================================================================
``boxes``        a flat span of a slice of a tensor, as boxes of the whole tensor: arithmetic
``part``         a tensor of which this process has some boxes only, in whatever memory they lie
``keys``         under which keys of a checkpoint another program has put weights and optimizer states
===============  =====================================================================================================

A box is a run of consecutive places in every dimension, the only thing that torch's format can say of a tensor's part.
"""
