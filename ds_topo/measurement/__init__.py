"""What the planner measures with torch: the machine at hand (``calibrate``), a live module (``module``)."""
