"""Repairs of DeepSpeed in which the layout plays no role, one file for each defect, until DeepSpeed has none."""
