# SPDX-License-Identifier: Apache-2.0
"""Models larger than the device: each layer's weights are leased while it runs, and the next ones
are prefetched.

A module's forward is wrapped: enter() leases the weights that it used before and prefetches their
successors, leave() releases them.
"""

from __future__ import annotations

import errno
import functools
import inspect
import weakref
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from .._lib import Error, human_bytes, parse_size, short
from . import _guard, _plan
from ._engine import Engine, Frame, Scope, Token, Watch, running_frames
from ._target import ask_budget, give_budget, resolve, use_host_memory
from ._tensors import region_of, view


def wrap(module: nn.Module, scope: Scope, engine: Engine) -> None:
    """Wraps the module's forward. The closure reaches neither the module nor itself, so there is no
    cycle and a model without references is freed at once."""
    under = module.__dict__.get("forward")  # another library's forward
    plain, owner = type(module).forward, weakref.ref(module)

    def run(*args: Any, **kwargs: Any) -> Any:
        return under(*args, **kwargs) if under is not None else plain(owner(), *args, **kwargs)

    @functools.wraps(plain if under is None else under)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if engine.removed:
            return run(*args, **kwargs)
        token = Token()
        frame = Frame(scope, engine.target.stream(), token)
        try:
            engine.enter(frame, args)
            if (scope.seen and not engine.always) or any(f.watches for f in engine.stack()):
                result = run(*args, **kwargs)
            else:
                try:
                    frame.watches = True
                    with Watch(engine):
                        result = run(*args, **kwargs)
                finally:
                    frame.watches = False
            scope.seen = True
            return result
        finally:
            engine.leave(frame)
            here = owner()
            if scope.seen and not scope.use.blocks and not engine.always and here is not None:
                unwrap(here, scope)  # it uses no weights

    try:
        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    except ValueError:
        pass
    forward.vmem_engine, forward.vmem_scope, forward.vmem_under = engine, scope, under  # type: ignore[attr-defined]
    module.forward = forward  # type: ignore


def unwrap(module: nn.Module, scope: Scope) -> None:
    """Removes a forward, unless another one wraps it. That one then runs through it, without
    effect."""
    forward: Any = module.__dict__.get("forward")
    if getattr(forward, "vmem_scope", None) is not scope:
        return
    if forward.vmem_under is None:
        del module.__dict__["forward"]
    else:
        module.forward = forward.vmem_under  # type: ignore


class Offload:
    """The result of offload(). remove(), or the end of a with statement, removes the hooks."""

    def __init__(self, engine: Engine, plan: _plan.Plan) -> None:
        self._engine = engine
        self._plan = plan
        self._removed = False
        self._hooks: List[Tuple["weakref.ref[nn.Module]", Scope]] = []
        # Parameters with replaced data: the original data, and the address of the present data.
        self._placed: List[Tuple[nn.Parameter, torch.Tensor, int]] = []
        self._small: List[Tuple[nn.Parameter, torch.Tensor, int]] = []
        self._gradients: List[Tuple[nn.Parameter, bool]] = []
        self._buffers: List[Tuple["weakref.ref[nn.Module]", str, torch.device]] = []
        self._layers = [(layer.name, sum(w.nbytes for w in layer.weights)) for layer in plan.layers]

    @property
    def device(self) -> "torch.device":
        """The device on which inputs belong."""
        return self._engine.target.device

    @property
    def location(self) -> int:
        """The location of the layers' leases: a CUDA ordinal, or vmem.HOST."""
        return self._engine.target.location

    @property
    def budget(self) -> int:
        """Bytes at that location for the weights."""
        return self._engine.budget

    @property
    def layers(self) -> List[Tuple[str, int]]:
        """Names of the modules with offloaded weights, and the bytes of these weights."""
        return list(self._layers)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the paged weights."""
        return sum(w.nbytes for w in self._plan.weights)

    @property
    def whole_bytes(self) -> int:
        """Bytes of small weights and buffers, which stay on the device, outside the budget."""
        small = sum(p.numel() * p.element_size() for p, _ in self._plan.small)
        return small + sum(b.numel() * b.element_size() for _, _, b in self._plan.buffers)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of weights that stay on the device between passes, in whole blocks; known after the
        first pass."""
        return self._engine.pinned_bytes

    def _attach(self, model: nn.Module, align: Optional[int]) -> None:
        engine, target = self._engine, self._engine.target
        if align is None:
            align = _plan.ALIGN if target.on_gpu else 1
        for w in self._plan.weights:
            handle = region_of(w.tensor)
            assert handle is not None
            engine.own(handle)
        engine.all_cold()
        scopes: Dict[int, Scope] = {}
        for layer in self._plan.layers:
            scope = scopes[id(layer.module)] = Scope(layer.name)
            for w in layer.weights:
                scope.add(engine.blocks(w.tensor), engine)
                slots = layer.module._parameters
                own = [(name, p) for name, p in slots.items() if any(p is q for q in w.params)]
                scope.held += [(slots, name, p, w.tensor.data_ptr()) for name, p in own]
                if w.tensor.data_ptr() % align != 0:
                    scope.unaligned += [(p, view(w.tensor, target.device)) for _, p in own]
            if _plan.is_table(layer.module) and not scope.unaligned:
                scope.table = layer.weights[0].tensor
            else:
                engine.largest = max(engine.largest, scope.use.bytes)
            engine.scopes.append(scope)
        for p, before in self._plan.small:
            placed = before.to(target.device) if target.on_gpu else _out_of_regions(before)
            self._small.append((p, before, placed.data_ptr()))
            p.data = placed
        moved: Dict[int, torch.Tensor] = {}  # a buffer shared by two modules stays shared
        for module, name, b in self._plan.buffers:
            self._buffers.append((weakref.ref(module), name, b.device))
            if id(b) not in moved:
                moved[id(b)] = b.to(target.device) if target.on_gpu else _out_of_regions(b)
            module._buffers[name] = moved[id(b)]
        for w in self._plan.weights:
            on_device = view(w.tensor, target.device) if target.on_gpu else w.tensor
            for p in w.params:
                self._placed.append((p, w.tensor, on_device.data_ptr()))
                p.data = on_device
        for p in model.parameters():
            self._gradients.append((p, p.requires_grad))
            p.requires_grad_(False)
        for prefix, module in model.named_modules():
            scope = scopes.get(id(module)) or Scope(prefix or type(module).__name__)
            wrap(module, scope, engine)
            _guard.put_on(module, scope.name)
            self._hooks.append((weakref.ref(module), scope))

    def remove(self) -> None:
        """Removes the hooks. The model is then a CPU model again, with its weights still in their
        regions. Removing twice does nothing, or what an exception of a signal handler has left.
        EBUSY: called from within the model's forward."""
        engine = self._engine
        if self._removed:
            return
        running = running_frames()
        if any(f in running for f in engine.stack()):
            raise Error(errno.EBUSY, "the model is running: hooks cannot be removed from within its forward")
        engine.end_interrupted(list(engine.stack()))
        engine.target.synchronize()
        engine.removed = True
        for ref, scope in self._hooks:
            module = ref()
            if module is not None:
                unwrap(module, scope)
                _guard.take_off(module)
        engine.as_before()
        for p, before, address in self._placed + self._small:
            if p.data_ptr() == address:  # otherwise the program replaced its data
                p.data = before
        for ref_module, name, device in self._buffers:
            module = ref_module()
            if module is not None and module._buffers.get(name) is not None:
                module._buffers[name] = module._buffers[name].to(device)  # type: ignore[union-attr]
        for p, needed in self._gradients:
            p.requires_grad_(needed)
        engine.exports.clear()
        give_budget(engine)
        self._removed = True

    def __enter__(self) -> "Offload":
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        e = self._engine
        return (
            f"<vmem.torch.Offload of {human_bytes(self.offloaded_bytes)} in {len(self._layers)} layers at "
            f"{e.target.words}, budget {human_bytes(e.budget)}{', removed' if e.removed else ''}>"
        )


def _out_of_regions(t: torch.Tensor) -> torch.Tensor:
    # The CPU uses the copy without a lease, while neighbours in its block come and go.
    return t.clone() if region_of(t) is not None else t


def offload(
    model: nn.Module,
    device_budget: Any = None,
    *,
    device: Any = None,
    prefetch_bytes: Any = None,
    align: Optional[int] = None,
    small: int = 64 << 10,
    watch: str = "first",
) -> Offload:
    """Runs a model whose weights do not fit. Hooks lease each layer's weights on the current stream
    while it runs, and prefetch those of the next layers. For inference, under torch.no_grad().
    Inputs belong on the result's `device`.

    device_budget   bytes (or "8GiB") for the weights there; None: the setting device_budget. ENOMEM names
                    a layer that does not fit alone.
    device          a CUDA device; "sim", libvmem's simulated device, or "host": both compute on the CPU.
                    None: the first one available.
    prefetch_bytes  to prefetch beyond the layer in use (default: a quarter of the budget, at most
                    256 MiB).
    align           weights whose address is not a multiple of this are copied on the device, layer by
                    layer, because kernels compute such weights by other methods, with other roundings.
                    Default: 256 on a GPU, 1 (no copies) on the CPU.
    small           weights of fewer bytes, and all buffers, stay on the device, outside the budget.
    watch           "first": each module's first call is watched for weights of other modules that it
                    uses; "always": every call, for modules that sometimes use others' weights (slow).

    On a device, the setting staging_share goes from 50 to at most 85, which leaves at least 256 MiB
    of host_budget. The rest is then for weights, permanently. Any other value of the setting is
    left as it is.

    Weights that are in regions (vmem.torch.load) stay in place; others are copied into a region.
    While hooks are on, parameters are tensors on the device that only the model's modules, or code
    under vmem.torch.leased(), may touch. half(), to(), load_state_dict() and all other calls that
    would replace them answer EBUSY. If a call looks up few rows of an nn.Embedding's table, only
    those rows are leased: the table may exceed the budget.
    """
    if watch not in ("first", "always"):
        raise ValueError(f"watch {watch!r} is not known; give first or always")
    if align is not None and align < 1:
        raise ValueError(f"align {align} is not positive")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{short(model)} is no torch.nn.Module")
    _guard.check_free(model)
    target = resolve(device)
    plan = _plan.make(model, target, small)
    window = prefetch_bytes if prefetch_bytes is None or prefetch_bytes == 0 else parse_size(prefetch_bytes)
    engine = Engine(target, 0, window, watch == "always")
    engine.budget = ask_budget(engine, target, device_budget)
    use_host_memory(target)
    handle = Offload(engine, plan)
    try:
        _plan.make_room(plan, target, type(model).__name__, engine.budget)
        _plan.place(plan)
        handle._attach(model, align)
    except BaseException:
        if any(w.tensor is None for w in plan.weights):  # some are not placed; the others stay
            give_budget(engine)
            engine.removed = True
        else:
            handle.remove()
        raise
    return handle
