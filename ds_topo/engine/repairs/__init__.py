"""Repair defects of DeepSpeed in which the layout plays no role, one file for each, until DeepSpeed has mended them.

``tests/engine/test_repairs.py`` runs DeepSpeed alone, and fails when a release no longer has a defect.
"""
