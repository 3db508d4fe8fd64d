# SPDX-License-Identifier: Apache-2.0
"""The plan of an offloaded model: its offloaded weights, their places, and the tensors that stay on the device."""

from __future__ import annotations

import errno
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import nn

from .. import _memory, _status
from .._lib import HOST, READ, Error, human_bytes
from .._range import span_of
from .._region import alloc
from ._target import Target, block_beside
from ._tensors import CPU, flat, region_of

ALIGN = 256  # bytes: the minimum alignment of torch's allocations, and the most that kernels check


class Weight:
    """One parameter's memory, shared by all Parameter objects with the same bytes."""

    __slots__ = ("name", "source", "offset", "nbytes", "params", "tensor")

    def __init__(self, name: str, source: torch.Tensor) -> None:
        self.name = name
        self.source: Optional[torch.Tensor] = source
        self.nbytes = source.numel() * source.element_size()
        self.offset = -1  # in the new region; -1: it already has a region
        self.params: List[nn.Parameter] = []
        self.tensor: Any = None  # its present CPU tensor


class Layer(NamedTuple):
    """A module with weights of its own."""

    name: str
    module: nn.Module
    weights: List[Weight]


class Plan:
    def __init__(self) -> None:
        self.layers: List[Layer] = []
        self.weights: List[Weight] = []
        self.small: List[Tuple[nn.Parameter, torch.Tensor]] = []  # with their original data
        self.buffers: List[Tuple[nn.Module, str, torch.Tensor]] = []
        self.to_place = 0  # bytes of the new region
        self.region: Any = None  # kept until the weights are there


def _plain(name: str, t: torch.Tensor) -> None:
    if t.device.type == "meta":
        raise Error(
            errno.EINVAL, f"{name!r} is on the meta device: it has no bytes; give it some first (vmem.torch.assign)"
        )
    if t.layout != torch.strided or type(t.data) is not torch.Tensor:
        raise Error(
            errno.EINVAL, f"{name!r} is a {t.layout} {type(t.data).__name__}; only plain dense tensors can be offloaded"
        )


def make(model: nn.Module, target: Target, small: int) -> Plan:
    """Plans without changing anything; refuses a model that cannot be offloaded."""
    plan = Plan()
    weights: Dict[Tuple[Any, ...], Weight] = {}
    kept: Dict[int, bool] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise Error(errno.EINVAL, f"layer {prefix!r} is a ScriptModule; offload the model before it is scripted")
        dot = prefix + "." if prefix else ""
        own: List[Weight] = []
        for name, p in module._parameters.items():
            if p is None:
                continue
            _plain(dot + name, p)
            nbytes = p.numel() * p.element_size()
            if nbytes < small or nbytes == 0:
                if id(p) not in kept:
                    kept[id(p)] = True
                    plan.small.append((p, p.data))
                continue
            key = (p.data_ptr(), p.device, p.dtype, tuple(p.shape), p.stride())
            weight = weights.get(key)
            if weight is None:
                weight = weights[key] = Weight(dot + name, p.data)
            if all(p is not q for q in weight.params):
                weight.params.append(p)
            if weight not in own:
                own.append(weight)
        for name, b in module._buffers.items():
            if b is not None:
                _plain(dot + name, b)
                plan.buffers.append((module, name, b))
        if own:
            plan.layers.append(Layer(prefix or type(module).__name__, module, own))
    plan.weights = list(weights.values())
    return plan


def _lay_out(plan: Plan, target: Target, block: int) -> None:
    """Assigns places to weights that are in no region the target can use. A layer of several blocks
    begins at a block, so that layers share none; smaller layers are packed."""
    at = 0
    for w in plan.weights:
        w.offset = -1
    for layer in plan.layers:
        new = [w for w in layer.weights if w.offset < 0 and not _usable(w, target)]
        if sum(w.nbytes for w in new) >= 4 * block:
            at += -at % block
        for w in new:
            at += -at % ALIGN
            w.offset = at
            at += w.nbytes
    plan.to_place = at


def _usable(weight: Weight, target: Target) -> bool:
    assert weight.source is not None
    if weight.source.device.type != "cpu":
        return False
    handle = region_of(weight.source)
    return handle is not None and (target.location == HOST or not handle.host_only)


def blocks_of(ptr: int, nbytes: int, handle: _memory.Handle, block: int) -> range:
    """Returns the addresses of the blocks that the bytes touch, in units of `block`; a larger block
    of a region counts as several."""
    whole = max(block, handle.block)
    begin = ptr - handle.ptr
    return range(handle.ptr + begin // whole * whole, handle.ptr - -(begin + nbytes) // whole * whole, block)


def is_table(module: nn.Module) -> bool:
    """Returns True if calls use rows of its only weight, unchanged."""
    return type(module) is nn.Embedding and module.max_norm is None and module.weight.stride(1) == 1


def check_layers(plan: Plan, target: Target, budget: int, block: int) -> None:
    """Raises ENOMEM if a layer does not fit into the budget alone. New weights count in blocks of
    `block` bytes."""
    least = target.block()
    for layer in plan.layers:
        if is_table(layer.module):
            continue  # a call may use only a few rows
        touched: Set[int] = set()
        for w in layer.weights:
            if w.offset >= 0:
                first, end = w.offset // block * block, -(-(w.offset + w.nbytes) // block) * block
                touched.update(range(first, end, least))
            else:
                assert w.source is not None
                ptr, nbytes, _, _ = span_of(w.source, READ)
                handle = region_of(w.source)
                assert handle is not None
                touched.update(blocks_of(ptr, nbytes, handle, least))
        need = len(touched) * least
        if need > budget:
            held = sum(w.nbytes for w in layer.weights)
            raise Error(
                errno.ENOMEM,
                f"layer {layer.name!r} ({type(layer.module).__name__}) has {human_bytes(held)} of weights and needs "
                f"{human_bytes(need)} at {target.words}, in whole blocks of {human_bytes(block)}; the device budget is "
                f"{human_bytes(budget)}",
            )


def make_room(plan: Plan, target: Target, name: str, budget: int) -> None:
    """Makes a region for weights that are in none, before anything moves. Its blocks are the
    largest that waste little of the budget and at which each layer fits alone."""
    least = target.block()
    host_only = target.location == HOST
    _lay_out(plan, target, least)
    region = alloc(plan.to_place, host_only=host_only, name=name) if plan.to_place else None
    chosen = region is not None and not host_only and _status.get("device_block_size") == "auto"
    try:
        block = max(least, region._handle.block) if region is not None else least
        if chosen:
            block = block_beside(budget, block)
        while True:
            _lay_out(plan, target, block)
            try:
                check_layers(plan, target, budget, block)
                break
            except Error:
                if not chosen or block <= least:
                    raise
            block //= 2
        if region is not None and (region.nbytes < plan.to_place or block < region._handle.block):
            region.free()
            region = None
            region = alloc(plan.to_place, name=name, block_size=block)
    except BaseException:
        if region is not None:
            region.free()
        raise
    plan.region = region


def place(plan: Plan) -> None:
    """Copies weights that are in no region into the new one, one by one, and frees the old memory.
    After any failure the model is still usable on the CPU."""
    region, plan.region = plan.region, None
    for w in plan.weights:
        source = w.source
        assert source is not None
        if w.offset >= 0:
            bytes_ = flat(region._handle, region.ptr + w.offset, w.nbytes, CPU)
            w.tensor = bytes_.view(source.dtype).view(tuple(source.shape))
            w.tensor.copy_(source)
            for p in w.params:
                p.data = w.tensor
        else:
            w.tensor = source
        w.source = None
