# SPDX-License-Identifier: Apache-2.0
"""PyTorch over libvmem: tensors over regions, model files mapped without a copy, models larger than the GPU.

    import torch, vmem.torch
    with vmem.torch.init_empty_weights():
        model = MyModel()                                              # no weights yet
    vmem.torch.assign(model, vmem.torch.load("model.safetensors"))     # mapped, not read
    with vmem.torch.offload(model, device_budget="8GiB") as run, torch.no_grad():
        y = model(x.to(run.device))
"""

from ._files import assign, init_empty_weights, load, save
from ._gather import Table, gather, open_table
from ._offload import Offload, offload
from ._tensors import leased, tensor, view

__all__ = [
    "Offload",
    "Table",
    "assign",
    "gather",
    "init_empty_weights",
    "leased",
    "load",
    "offload",
    "open_table",
    "save",
    "tensor",
    "view",
]
