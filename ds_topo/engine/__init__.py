"""DeepSpeed's engines on a grid.

Open three files first: ``parts`` lists what changes an engine, ``on_grid`` has the base of all parts and the calls of a
program, and ``grid`` gives an engine its parts. ``pipelines`` has what only pipelines need, and ``repairs`` what mends
DeepSpeed where the layout plays no role.
"""

from ds_topo.base.supported import minutes_of_timeout, refuse_older_releases

refuse_older_releases()
minutes_of_timeout()  # DeepSpeed fails at its import, without naming the variable
