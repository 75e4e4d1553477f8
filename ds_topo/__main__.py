"""Run the command line: ``python -m ds_topo`` is ``ds-topo``."""

from __future__ import annotations

import sys

from ds_topo.cli import main

sys.exit(main())
