"""A job whose store ends with rank 0, as that of most launchers."""

from __future__ import annotations

import torch.distributed as dist


def serve_a_store() -> None:
    """Restart the job with a store that rank 0 serves; another process serves the store of the tests."""
    rank, size = dist.get_rank(), dist.get_world_size()
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [served.port if served else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = served or dist.TCPStore("127.0.0.1", port[0], wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
