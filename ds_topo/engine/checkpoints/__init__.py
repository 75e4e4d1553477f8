"""An engine's checkpoints that are there as a whole or not at all, in DeepSpeed's own files."""
