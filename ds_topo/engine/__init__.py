"""DeepSpeed's engines and optimizers on a grid. Open ``on_grid.py`` first: it has the order of a step."""

from ds_topo.base.supported import minutes_of_timeout, refuse_older_releases

refuse_older_releases()
minutes_of_timeout()  # DeepSpeed fails at its import, without naming the variable
