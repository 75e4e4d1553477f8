"""Convert checkpoints from layout to layout: ``python -m tests.checkpoint.conversions``."""
