# SPDX-License-Identifier: Apache-2.0
"""Weights stay in their places while hooks are on: calls that would replace them are refused before they change any.

nn.Module does half(), to(), cuda() and their kind by _apply(), and load_state_dict() by _load_from_state_dict(), each
module for itself: both are refused in every module. A weight that was replaced otherwise is found when its module runs.
Copies of a module are refused as well: theirs would be the hooks, which run the module that they were put on.
"""

from __future__ import annotations

import errno
from typing import Any, Callable, Dict, List, Tuple

from torch import nn

from .._lib import Error

_INSTEAD = "call remove() of offload()'s result (or leave its with statement), change the model, and offload it again"
_CALLS = {
    "_apply": "half(), float(), to(), cuda() and their kind would replace its weights",
    "_load_from_state_dict": "load_state_dict() would replace its weights",
    "__deepcopy__": "a copy would run this model's weights",
    "__reduce_ex__": "a copy, also a pickled one, would lack the hooks that run here",
}

# A module's parameters, the name of one, the parameter, and its address while hooks are on.
Held = Tuple[Dict[str, Any], str, nn.Parameter, int]


def _refusal(layer: str, calls: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Error(errno.EBUSY, f"layer {layer!r} is offloaded: {calls}; {_INSTEAD}")

    return refuse


def put_on(module: nn.Module, layer: str) -> None:
    for name, calls in _CALLS.items():
        module.__dict__[name] = _refusal(layer, calls)


def take_off(module: nn.Module) -> None:
    for name in _CALLS:
        module.__dict__.pop(name, None)


def check_held(layer: str, held: List[Held]) -> None:
    for parameters, name, p, address in held:
        if parameters.get(name) is not p or p.data_ptr() != address:
            raise Error(
                errno.EBUSY, f"layer {layer!r} is offloaded, and its {name} was replaced since; {_INSTEAD}"
            )


def check_free(model: nn.Module) -> None:
    """Raises EBUSY if hooks are on."""
    for name, module in model.named_modules():
        engine = getattr(module.__dict__.get("forward"), "vmem_engine", None)
        if engine is not None and not engine.removed:
            label = name or type(module).__name__
            raise Error(errno.EBUSY, f"layer {label!r} is offloaded already; remove() that first")
