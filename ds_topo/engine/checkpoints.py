"""Save and load the checkpoints of an engine on a grid by :mod:`ds_topo.checkpoint`, which the first call imports."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.utils import is_model_parallel_parameter

from ds_topo.engine.current_mpu import agreement
from ds_topo.engine.on_call import LOADING, SAVING
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import EngineOptionError, listed
from ds_topo.topology.axes import MODEL, PIPE

_GATHERING = "gathering the whole weights (save_16bit_model, or the state dict of an engine)"


class EngineWithCheckpoints(EngineOnGrid):
    """The methods that save and load."""

    def save_checkpoint(self, save_dir: Any, *arguments: Any, **options: Any) -> Any:
        """Save by :func:`ds_topo.checkpoint.save`.

        DeepSpeed writes ``latest`` when rank 0 has written its own files; other ranks' files may be missing.
        """
        return SAVING.load().save_as_a_whole(super().save_checkpoint, self, save_dir, *arguments, **options)

    def load_checkpoint(self, load_dir: Any, *arguments: Any, **options: Any) -> Any:
        """Load by :func:`ds_topo.checkpoint.load`.

        DeepSpeed loads incomplete files, fails on some ranks only, and runs code that a file contains.
        """
        return LOADING.load().load_as_a_whole(super().load_checkpoint, self, load_dir, *arguments, **options)

    def save_16bit_model(self, *arguments: Any, **options: Any) -> Any:
        """Refuse parts of a model, which DeepSpeed would write as the whole one."""
        _require_whole_weights(self)
        return super().save_16bit_model(*arguments, **options)

    def _zero3_consolidated_16bit_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Start on all ranks or on none: programs often gather weights on the rank alone that writes them."""
        with agreement(self.mpu.members, _GATHERING):
            _require_whole_weights(self)
        return super()._zero3_consolidated_16bit_state_dict(*arguments, **options)

    def _replace_module_consolidated_state_dict(self) -> Any:
        """Start to gather on all ranks or on none, where AutoTP has split the weights."""
        with agreement(self.mpu.members, _GATHERING):
            pass
        return super()._replace_module_consolidated_state_dict()


def _require_whole_weights(engine: EngineOnGrid) -> None:
    """Refuse to save the weights of stages, or of slices that the program made itself, as those of the whole model.

    Raises:
        EngineOptionError: DeepSpeed would write the part of rank 0 alone.
    """
    grid = engine.mpu
    slices = [name for name, each in engine.module.named_parameters() if is_model_parallel_parameter(each)]
    if grid.get_axis_size(PIPE) > 1:
        part = f"the stages of {grid.topology().spec!r}"
    elif grid.get_axis_size(MODEL) > 1 and engine.autotp_size() <= 1 and slices:
        part = f"the slices {listed(slices)}"
    else:
        return
    raise EngineOptionError(
        f"save_16bit_model with {part}: DeepSpeed would write those of rank 0 as the whole model. Only slices "
        'of AutoTP and partitions of ZeRO 3 are put together. Call ds_topo.checkpoint.save(engine, "checkpoints") on '
        "every rank, and then ds-topo export checkpoints weights.safetensors, which writes all weights into one file"
    )
