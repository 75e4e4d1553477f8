"""Import the names of DeepSpeed that some supported releases lack. All other modules import them from here.

``ds_topo.ledger.is_absent`` tells whether the installed release lacks one. No object is an instance of an absent class.
"""

from __future__ import annotations

from ds_topo.ledger import find

DualPipeVEngine = find("deepspeed.runtime.pipe.dualpipev.DualPipeVEngine")
DualPipeVModule = find("deepspeed.runtime.pipe.dualpipev.DualPipeVModule")
FoldingGroupTables = find("deepspeed.module_inject.auto_ep_folding.FoldingGroupTables")
validate_autoep_config = find("deepspeed.module_inject.auto_ep_config.validate_autoep_config")
placement_of_experts = find("deepspeed.checkpoint.autoep_affine.legacy_uniform_autoep_placement_descriptor")
map_of_placement = find("deepspeed.checkpoint.autoep_affine.autoep_placement_to_affine_map")
is_functorch_transforming = find("deepspeed.utils.torch.is_functorch_transforming")
