"""Load checkpoints into other layouts: ``python -m tests.checkpoint.conversions``."""
