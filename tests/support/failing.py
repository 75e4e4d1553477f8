"""A backward that fails on its way."""

from __future__ import annotations

from typing import Any

import torch


class FailsInBackward(torch.autograd.Function):
    """Identity, whose backward raises ArithmeticError."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ArithmeticError("in backward")
