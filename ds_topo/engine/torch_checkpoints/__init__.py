"""An engine's state for ``torch.distributed.checkpoint``."""
