"""Save and load checkpoints of DeepSpeed engines: atomic, with their layout, for any order of axes and other degrees.

:func:`save` and :func:`load` take any engine. Engines on a grid call them from their own ``save_checkpoint`` and
``load_checkpoint``. :func:`checkpoints_in` and :func:`look_at` check the checkpoints of a folder without an engine, as
``ds-topo checkpoint FOLDER`` does. :func:`to_single_file` and :func:`to_hugging_face` write plain files of weights, as
``ds-topo export`` does.

:class:`TorchState` and :func:`load_torch` exchange the same state with other programs through
``torch.distributed.checkpoint``, in its own format.

To read the code, start with ``saving``, ``loading`` and ``folder``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_topo.base import lazy_attributes
from ds_topo.base.supported import refuse_older_releases

if TYPE_CHECKING:
    from ds_topo.checkpoint.folder import Checkpoint as Checkpoint
    from ds_topo.checkpoint.folder import checkpoints_in as checkpoints_in
    from ds_topo.checkpoint.folder import look_at as look_at
    from ds_topo.checkpoint.loading import load as load
    from ds_topo.checkpoint.manifest import Manifest as Manifest
    from ds_topo.checkpoint.plain_weights import to_hugging_face as to_hugging_face
    from ds_topo.checkpoint.plain_weights import to_single_file as to_single_file
    from ds_topo.checkpoint.saving import BackgroundSave as BackgroundSave
    from ds_topo.checkpoint.saving import save as save
    from ds_topo.checkpoint.saving import save_in_background as save_in_background
    from ds_topo.checkpoint.torch_format import TorchState as TorchState
    from ds_topo.checkpoint.torch_format import load_torch as load_torch

_MODULES = {
    "BackgroundSave": "saving",
    "Checkpoint": "folder",
    "Manifest": "manifest",
    "TorchState": "torch_format",
    "checkpoints_in": "folder",
    "load": "loading",
    "load_torch": "torch_format",
    "look_at": "folder",
    "save": "saving",
    "save_in_background": "saving",
    "to_hugging_face": "plain_weights",
    "to_single_file": "plain_weights",
}
__all__ = sorted(_MODULES)
_import, __dir__ = lazy_attributes(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    if _MODULES.get(name, "folder") not in ("folder", "manifest"):  # these need neither torch nor DeepSpeed
        refuse_older_releases()  # they lack names that the module imports
    return _import(name)
