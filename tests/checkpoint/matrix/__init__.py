"""Convert checkpoints between jobs drawn at random: ``python -m tests.checkpoint.matrix``."""
