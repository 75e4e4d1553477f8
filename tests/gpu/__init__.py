"""Checks on a machine with a GPU: ``tests/gpu.sh``."""
