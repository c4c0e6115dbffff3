"""Virtual ranks: the kernels of several ranks on one GPU, or in the interpreter on none."""

import torch

from moe_serve.dispatch.gpu.region import Region
from moe_serve.dispatch.gpu.symmetric import SymmetricRegions


def virtual_regions(region: Region, device: torch.device) -> SymmetricRegions:
    """Returns the regions of region.num_ranks virtual ranks, all in this process and on this device."""
    memory = torch.zeros(region.num_ranks, region.region_bytes, dtype=torch.uint8, device=device)
    offsets = torch.arange(region.num_ranks, dtype=torch.int64, device=device) * region.region_bytes
    return SymmetricRegions(region, offsets + memory.data_ptr(), 0, region.num_ranks, memory, own=memory)
