# SPDX-License-Identifier: Apache-2.0
"""Model files: mapped without a copy, written so that they map well, and put into modules."""

from __future__ import annotations

import collections.abc
import contextlib
import contextvars
import errno
import operator
import threading
import weakref
from typing import IO, Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .. import _safetensors, _status
from .._dtypes import dtype_of
from .._lib import HOST, READ, Error, short
from .._range import _PIECE, Lease
from .._region import map_open
from .._replace import replaced
from ._guard import check_free
from ._plain import extent, plain
from ._target import block_within
from ._tensors import CPU, flat, region_of, shaped, torch_dtype


def load(path: Any, *, host_only: bool = False) -> Dict[str, torch.Tensor]:
    """Maps the tensors of safetensors files: a file, a list of files, an index (.json), or the
    folder of a model.

    From a folder it maps the file or index that transformers' from_pretrained() loads, or refuses
    it. It tries the file that config.json names as transformers_weights, model.safetensors and
    model.safetensors.index.json, in this order. If transformers loads none, it maps the only
    safetensors file. From an index it maps every tensor of each file.

    Returns CPU tensors by name over regions of the files. Bytes are read at their first access, and
    at most host_budget of them are in memory. The files must not change while they are mapped. A
    region is freed with the last tensor over it. host_only: the tensors are only for the CPU, in
    blocks of block_size.

    The program must not change the tensors in place. No change is refused, but it may be lost at
    any time, without a message: when its block leaves memory, the file's bytes are seen again.
    Change a clone() of the tensor.

    vmem.FormatError: a file is truncated, has an unknown dtype, overlapping tensors, or disagrees
    with the index. The message names file, tensor and numbers. No file stays mapped then.
    """
    tensors: Dict[str, torch.Tensor] = {}
    for header in _safetensors.headers(path):
        with header.file:
            _map_one(header, host_only, tensors)
    return tensors


def _map_one(header: _safetensors.Header, host_only: bool, tensors: Dict[str, torch.Tensor]) -> None:
    wanted = header.tensors
    dtypes = {n: _dtype(header.path, n, e) for n, e in wanted.items()}
    if any(e.end > e.begin for e in wanted.values()):
        region = map_open(header.file, header.path, header.size, host_only=host_only)
        if not host_only and _status.get("device_block_size") == "auto":
            block = block_within(_layers(wanted), region._handle.block)
            if block < region._handle.block:
                region.free()
                region = map_open(header.file, header.path, header.size, block_size=block)
    for name, entry in wanted.items():
        if entry.end == entry.begin:
            tensors[name] = torch.empty(entry.shape, dtype=dtypes[name])
            continue
        bytes_ = flat(region._handle, region.ptr + entry.begin, entry.end - entry.begin, CPU)
        tensors[name] = shaped(bytes_, dtypes[name], entry.shape)


def _layers(tensors: Dict[str, _safetensors.Entry]) -> Iterable[int]:
    """Yields the bytes of tensors that are used together, by name: "model.layers.7.mlp.up.weight"
    belongs to "model.layers.7"."""
    sizes: Dict[str, int] = {}
    for name, entry in tensors.items():
        parts = name.split(".")
        last = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts) - 2)
        layer = ".".join(parts[: last + 1])
        sizes[layer] = sizes.get(layer, 0) + entry.end - entry.begin
    return sizes.values()


def _dtype(path: str, name: str, entry: _safetensors.Entry) -> "torch.dtype":
    try:
        return torch_dtype(entry.dtype.name)
    except TypeError as e:
        raise Error(errno.ENOTSUP, f"{path}: tensor {name!r} is {entry.dtype.safetensors}: {e}") from None


def save(
    tensors: Mapping[str, torch.Tensor],
    path: Any,
    *,
    align: int = 256,
    metadata: Optional[Dict[str, str]] = None,
    shared: str = "refuse",
) -> None:
    """Writes a safetensors file that maps well: tensors of a multiple of `align` bytes come first,
    in the given order, at multiples of `align`. Small odd ones (biases, norms) follow, so that no
    large one is among them.

    The file is written beside `path`, made durable, its header read back, and renamed: until then
    the old file stays. The new one has its permissions. A symbolic link stays one.

    shared: the format cannot express that tensors share memory. "refuse": such tensors are refused,
    as by safetensors.torch.save_file. "once": names of the same tensor (tied weights) are written
    under the first name, and assign() gives the value to all; other overlaps are refused.

    TypeError: the format cannot hold a tensor (its type; sparse, quantized, nested and meta ones),
    the metadata is not a dictionary of strings, or a name is not a string. ValueError: the format
    cannot hold a text. The message names the tensor.
    """
    align = operator.index(align)
    if align not in (1 << bits for bits in range(3, 25)):
        raise ValueError(f"align {short(align)} is not a power of two from 8 to {1 << 24}")
    if shared not in ("refuse", "once"):
        raise ValueError(f"shared {short(shared)} is not known; give refuse or once")
    if not isinstance(tensors, collections.abc.Mapping):
        raise TypeError(f"a {type(tensors).__name__} is no dictionary of tensors")
    said = _safetensors.check_metadata(metadata)
    chosen = _unshared({name: plain(name, t) for name, t in tensors.items()}, shared == "once")
    chosen.sort(key=lambda item: item[1].numel() * item[1].element_size() % align != 0)  # stable
    entries = [(n, dtype_of(t.dtype), tuple(t.shape)) for n, t in chosen]
    head = _safetensors.make_header(entries, said, max(align, 4096))
    with replaced(path, lambda part: _safetensors.check_written(part, entries, said)) as file:
        file.write(head)
        for _, t in chosen:
            if t.numel():
                dense = t.to("cpu").resolve_conj().resolve_neg().contiguous()
                # Not view(-1): a single element is contiguous with any stride, and view() keeps the
                # stride.
                _write(file, dense.as_strided((dense.numel(),), (1,)))


def _unshared(tensors: Dict[str, torch.Tensor], once: bool) -> List[Tuple[str, torch.Tensor]]:
    """Returns the tensors to write, in the given order. TypeError: two share memory."""
    first: Dict[Tuple[Any, ...], str] = {}
    for name, t in tensors.items():
        if t.numel():
            at = (t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride(), t.is_conj(), t.is_neg())
            first.setdefault(at if once else (*at, name), name)
    kept = set(first.values())
    spans = sorted((str(t.device), *extent(t), n) for n, t in tensors.items() if n in kept)
    last = ("", 0, 0, "")
    for span in spans:
        if span[0] == last[0] and span[1] < last[2]:
            raise TypeError(
                f"tensors {short(last[3])} and {short(span[3])} have memory in common, which a file cannot say; give "
                "a clone() of one, or leave it out"
                + ("" if once else "; shared='once' writes tied weights under the first of their names")
            )
        last = max(last, span, key=lambda s: (s[0], s[2]))
    return [(n, t) for n, t in tensors.items() if n in kept or not t.numel()]


def _write(file: IO[bytes], dense: torch.Tensor) -> None:
    """Writes bytes of a region under leases, part by part, because write(2) fails with "Bad
    address" on absent blocks."""
    data = memoryview(dense.view(torch.uint8).numpy())
    if region_of(dense) is None:
        file.write(data)
        return
    for at in range(0, len(data), _PIECE):
        piece = data[at : at + _PIECE]
        with Lease([(dense.data_ptr() + at, len(piece), READ, dense)], HOST, None):
            file.write(piece)


# Inside init_empty_weights(): the meta parameters made so far, by the id of the parameter, which a weak reference
# proves to be the same.
_memo: "contextvars.ContextVar[Optional[Dict[int, Any]]]" = contextvars.ContextVar("vmem_empty_weights", default=None)
_blocks = 0  # threads and tasks inside
_patching = threading.Lock()
_register = nn.Module.register_parameter


def _register_on_meta(self: nn.Module, name: str, param: Optional[nn.Parameter]) -> None:
    _register(self, name, param)
    memo = _memo.get()
    if memo is None or param is None or param.device.type == "meta" or is_lazy(param):  # a lazy one has no memory yet
        return
    of, made = memo.get(id(param), (None, None))
    if of is None or of() is not param:
        made = torch.Tensor._make_subclass(type(param), param.detach().to("meta"), param.requires_grad)
        made.__dict__.update(param.__dict__)
        memo[id(param)] = weakref.ref(param), made
    self._parameters[name] = made


@contextlib.contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules that this thread (or asyncio task) makes inside have their parameters on the meta device: they cost no
    memory until assign(). Buffers are real, since files often leave them out."""
    global _blocks, _register
    with _patching:
        _blocks += 1
        if nn.Module.register_parameter is not _register_on_meta:
            _register = nn.Module.register_parameter
            nn.Module.register_parameter = _register_on_meta  # type: ignore
    outer = _memo.set({})
    try:
        yield
    finally:
        _memo.reset(outer)
        with _patching:
            _blocks -= 1
            if _blocks == 0 and nn.Module.register_parameter is _register_on_meta:
                nn.Module.register_parameter = _register  # type: ignore


def _slots(model: nn.Module) -> Dict[str, Tuple[nn.Module, str, bool, torch.Tensor]]:
    """Returns every name of a parameter or buffer, shared ones under each of their names, with its
    module, attribute, whether it is a parameter, and the tensor."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = prefix + "." if prefix else ""
        for name, p in module._parameters.items():
            if p is not None:
                found[dot + name] = (module, name, True, p)
        for name, b in module._buffers.items():
            if b is not None:
                found[dot + name] = (module, name, False, b)
    return found


def assign(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, strict: bool = True) -> nn.Module:
    """Makes tensors the parameters and buffers of a model, by name, without a copy; returns the
    model.

    Parameters that are one object in the model stay one: a value for any of their names is enough.
    strict: every parameter must get a value and every tensor a place. A tensor keeps its own dtype.
    Parameters need no gradient afterwards. EBUSY: the model is offloaded.
    """
    check_free(model)
    slots = _slots(model)
    unknown = [n for n in tensors if n not in slots]
    if strict and unknown:
        raise Error(errno.EINVAL, f"the model has no place for {_some(unknown)}")
    given: Dict[int, torch.Tensor] = {}
    for name, value in tensors.items():
        if name not in slots:
            continue
        module, attribute, is_parameter, old = slots[name]
        if tuple(old.shape) != tuple(value.shape):
            raise Error(errno.EINVAL, f"tensor {name!r} is {list(value.shape)}, the model wants {list(old.shape)}")
        given.setdefault(id(old), value)
    missing = [
        n
        for n, (module, attribute, is_parameter, old) in slots.items()
        if id(old) not in given and (is_parameter or attribute not in module._non_persistent_buffers_set)
    ]
    if strict and missing:
        raise Error(errno.EINVAL, f"nothing was given for {_some(missing)} of the model")
    made: Dict[int, torch.Tensor] = {}
    for module, attribute, is_parameter, old in slots.values():
        if id(old) not in given:
            continue
        if id(old) not in made:
            value = given[id(old)]
            made[id(old)] = nn.Parameter(value.detach(), requires_grad=False) if is_parameter else value
        slot: Any = module._parameters if is_parameter else module._buffers
        slot[attribute] = made[id(old)]
    return model


def _some(names: List[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
