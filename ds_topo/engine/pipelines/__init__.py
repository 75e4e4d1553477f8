"""Pipelines on a grid. ``pipeline`` builds the module, ``pipeline_engine`` is the part of its engine."""
