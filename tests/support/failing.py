"""An autograd function whose backward pass fails."""

from __future__ import annotations

from typing import Any

import torch


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward pass raises ArithmeticError."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ArithmeticError("in backward")
