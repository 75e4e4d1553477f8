"""``python -m ds_topo`` is ``ds-topo``."""

import sys

from ds_topo.cli import main

sys.exit(main())
