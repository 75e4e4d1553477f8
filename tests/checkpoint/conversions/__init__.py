"""Conversions from layout to layout, one after the other: ``python -m tests.checkpoint.conversions``."""
