"""Measure what the planner needs with torch: the machine at hand (``calibrate``), a live module (``live_module``)."""
