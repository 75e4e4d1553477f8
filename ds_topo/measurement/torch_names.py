"""Private names of torch that measurements read."""

from __future__ import annotations

import torch

from ds_topo.ledger import Change, Reliance

ROWS: tuple[Change | Reliance, ...] = (
    Reliance(torch.Tensor, "_base", "whether a tensor that backward keeps is a view of a parameter"),
    Reliance(torch.UntypedStorage, "_cdata", "which tensors on the meta device share their storage"),
)
