# SPDX-License-Identifier: Apache-2.0
"""Leases of an offloaded model: what each module uses, what comes next, what stays.

A scope is a module that uses weights: those it owns, and those that its first call was seen to touch. Every module's
first call runs under a dispatch mode that leases weights of other modules at their first use (nn.MultiheadAttention
uses those of a child that it never calls).

The order is learned as it happens: after these two scopes came that one. In the first pass nothing is known and
nothing is prefetched. At its end a part of the weights, spread evenly, is pinned to the device: of a model that is
walked in a circle, a cache that keeps what came last would keep nothing.
"""

from __future__ import annotations

import errno
import sys
import threading
import weakref
from typing import AbstractSet, Any, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode

from .. import _memory
from .._lib import READ, Error, RangeStruct, answer, failure, human_bytes, lib
from .._range import Advice, span_of
from . import _guard, _plan
from ._target import Target

AHEAD = 256 << 20  # bytes prefetched beyond the layer in use: 5 ms of PCIe, 0.1 s of SSD
SMALL_TABLE = 16 << 20  # bytes: leased whole, without a look at the indices
MANY_ROWS = 1 << 16  # a larger lookup leases the whole table
MAX_PINS = 200  # ranges; libvmem keeps advice for 256 in a region


class Use(NamedTuple):
    """What a scope uses. One object, so that an exception of a signal handler leaves all of the old or all of the
    new. Blocks are block-aligned addresses; spans are runs of them, clipped to their regions."""

    blocks: FrozenSet[int] = frozenset()
    spans: Tuple[Tuple[int, int], ...] = ()  # address, bytes
    bytes: int = 0  # in the blocks
    ranges: Any = None  # the spans as struct vmem_range[]


class Scope:
    """One module's leases."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.use = Use()
        self.seen = False  # its first call has ended
        self.pinned = False
        self.unaligned: List[Tuple[nn.Parameter, torch.Tensor]] = []
        self.table: Optional[torch.Tensor] = None  # of an nn.Embedding, of which a call uses some rows
        self.held: List[_guard.Held] = []  # its own weights, as they were placed
        self.running: Set[Frame] = set()  # active calls; more than one if the module calls itself

    def add(self, blocks: Set[int], engine: "Engine") -> None:
        every = self.use.blocks | blocks
        spans = engine.spans(every)
        self.use = Use(every, tuple(spans), len(every) * engine.block, struct_of(spans))


def struct_of(spans: Sequence[Tuple[int, int]]) -> Any:
    made = (RangeStruct * len(spans))()
    for struct, (ptr, nbytes) in zip(made, spans):
        struct.ptr, struct.size, struct.access = ptr, nbytes, READ
    return made


class Token:
    """A local variable of a wrapped forward, which dies with the call."""

    __slots__ = ("__weakref__",)


class Frame:
    """One call of a scope's module, with its leases."""

    __slots__ = ("scope", "leases", "stream", "watches", "token")

    def __init__(self, scope: Scope, stream: int, token: Token) -> None:
        self.scope = scope
        # Ranges, the answer of the acquire, the answer of the release: empty lists if there was no
        # such call.
        self.leases: List[Tuple[Any, List[int], List[int]]] = []
        self.stream = stream
        self.watches = False  # under a dispatch mode of its own
        self.token = weakref.ref(token)


def running_frames() -> List[Frame]:
    """Returns the calls that this thread is in, by its Python stack."""
    found: List[Frame] = []
    caller: Any = sys._getframe(1)
    while caller is not None:
        if caller.f_code.co_name == "forward" and isinstance(caller.f_locals.get("frame"), Frame):
            found.append(caller.f_locals["frame"])
        caller = caller.f_back
    return found


class Watch(TorchDispatchMode):
    """Observes every operation of a first call."""

    def __init__(self, engine: "Engine") -> None:
        super().__init__()
        self.engine = engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.look(args)
        self.look(kwargs.values())
        return func(*args, **kwargs)

    def look(self, values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self.engine.touched(value)
            elif isinstance(value, (list, tuple)):
                self.look(value)


class Engine:
    def __init__(self, target: Target, budget: int, ahead: Optional[int], always: bool) -> None:
        self.target = target
        self.budget = budget
        self.block = target.block()
        self.always = always
        self.removed = False
        self.regions: List[_memory.Handle] = []
        self.exports: List[_memory.Export] = []  # keep the leased addresses valid
        self.scopes: List[Scope] = []
        self.largest = 0
        self.ahead = ahead
        self.pinned_bytes = 0
        # Successors of scopes. They are only hints: threads may mix them up.
        self.after_two: Dict[Tuple[Optional[Scope], Scope], Scope] = {}
        self.after_one: Dict[Scope, Scope] = {}
        self.trail: Tuple[Optional[Scope], Optional[Scope]] = (None, None)
        self.asked: Set[Scope] = set()  # prefetched but not used yet
        self.order: List[Scope] = []  # by first use
        self.pins_for = 0  # length of `order` when the pins were chosen
        self.local = threading.local()
        self.adding = threading.Lock()  # two threads may be in a module's first calls

    def stack(self) -> List[Frame]:
        """This thread's calls, the outermost first."""
        return self.local.__dict__.setdefault("stack", [])  # type: ignore[no-any-return]

    # ---- what a scope uses

    def own(self, handle: _memory.Handle) -> None:
        if handle not in self.regions:
            self.regions.append(handle)
            self.exports.append(handle.export())

    def blocks(self, t: torch.Tensor) -> Set[int]:
        """Blocks of the model's regions that a tensor lies in."""
        ptr, nbytes, _, _ = span_of(t, READ)
        for handle in self.regions:
            if handle.ptr <= ptr < handle.ptr + handle.size:
                return set(_plan.blocks_of(ptr, nbytes, handle, self.block))
        return set()

    def spans(self, blocks: AbstractSet[int]) -> List[Tuple[int, int]]:
        found: List[Tuple[int, int]] = []
        for at in sorted(blocks):
            handle = next(h for h in self.regions if h.ptr <= at < h.ptr - -h.size // h.block * h.block)
            end = min(at + self.block, handle.ptr + handle.size)
            if at >= end:  # in the last block, after the region's end
                continue
            if found and sum(found[-1]) == at and found[-1][0] >= handle.ptr:
                found[-1] = (found[-1][0], end - found[-1][0])
            else:
                found.append((at, end - at))
        return found

    def touched(self, t: torch.Tensor) -> None:
        """In a first call: leases a weight that has no lease yet, and adds it to the innermost
        module."""
        if t.device != self.target.device or t.layout != torch.strided or t.numel() == 0:
            return
        blocks = self.blocks(t)
        stack = self.stack()
        if not blocks or not stack:  # no stack: the mode has outlived its call
            return
        for frame in stack:
            blocks -= frame.scope.use.blocks
        if blocks:
            frame = stack[-1]
            if frame.scope not in self.scopes:
                self.scopes.append(frame.scope)
            more = struct_of(self.spans(blocks))
            self.lease(frame, more)
            with self.adding:
                frame.scope.add(blocks, self)
            self.largest = max(self.largest, frame.scope.use.bytes)

    # ---- leases

    def lease(self, frame: Frame, ranges: Any) -> None:
        taken: List[int] = []
        frame.leases.append((ranges, taken, []))  # before the call: a signal's exception may come in it
        answer(taken, lib.vmem_acquire_ranges, ranges, len(ranges), self.target.location, frame.stream)
        if taken[0] != 0:
            held = human_bytes(sum(f.scope.use.bytes for f in self.stack() if f is not frame))
            prefix = f"layer {frame.scope.name!r} with {human_bytes(frame.scope.use.bytes)} of weights"
            raise failure(taken[0], f"{prefix} (layers around it hold {held}): ")

    def enter(self, frame: Frame, arguments: Tuple[Any, ...] = ()) -> None:
        """Takes the leases. leave() must follow, even if this fails."""
        stack = self.stack()
        self.end_interrupted([f for f in stack if f.token() is None])
        stack.append(frame)
        if frame.scope.use.spans:
            self.begin(frame, arguments)

    def begin(self, frame: Frame, arguments: Tuple[Any, ...]) -> None:
        scope = frame.scope
        if torch.is_grad_enabled():
            raise Error(
                errno.EINVAL,
                f"layer {scope.name!r}: its weights are there only while it runs, a backward pass would miss them; run "
                "the model under torch.no_grad()",
            )
        if not scope.running:
            _guard.check_held(scope.name, scope.held)
        ranges = scope.use.ranges if scope.table is None else self.rows(scope, arguments)
        with self.target.current():
            self.lease(frame, ranges)
        self.learn(scope)
        self.fetch(scope)
        scope.running.add(frame)
        if len(scope.running) == 1:
            for p, weight in scope.unaligned:
                p.data = weight.clone()

    def rows(self, scope: Scope, arguments: Tuple[Any, ...]) -> Any:
        """Returns the blocks of a table that a lookup uses: otherwise one word would move the whole
        of a large vocabulary. Waits until the device has made the indices."""
        table = scope.table
        assert table is not None
        if len(arguments) != 1 or not isinstance(arguments[0], torch.Tensor) or arguments[0].is_floating_point():
            return scope.use.ranges
        if scope.use.bytes <= SMALL_TABLE or arguments[0].numel() > MANY_ROWS:
            return scope.use.ranges
        first, size = table.data_ptr(), table.stride(0) * table.element_size()
        handle = next(h for h in self.regions if h.ptr <= first < h.ptr + h.size)
        used: Set[int] = set()
        for row in set(arguments[0].reshape(-1).tolist()):
            if 0 <= row < table.shape[0]:  # the lookup itself refuses others
                used.update(_plan.blocks_of(first + row * size, size, handle, self.block))
        return struct_of(self.spans(used or {min(scope.use.blocks)}))

    def leave(self, frame: Frame) -> None:
        try:
            self.undo(frame)
        except BaseException:  # including a signal's: release the rest anyway
            self.undo(frame)
            raise
        if not self.stack() and len(self.order) > self.pins_for:
            self.pin()

    def undo(self, frame: Frame) -> None:
        """Undoes the part of its work that enter() did. A second call continues after the step that
        failed."""
        scope = frame.scope
        if frame in scope.running:
            if len(scope.running) == 1:
                for p, weight in scope.unaligned:
                    p.data = weight
            scope.running.discard(frame)
        with self.target.current():
            while frame.leases:
                ranges, taken, released = frame.leases[-1]
                if taken == [0] and not released:
                    answer(released, lib.vmem_release_ranges, ranges, len(ranges), frame.stream)
                frame.leases.pop()
                if released and released[0] != 0:
                    raise failure(released[0])
        if frame in self.stack():
            self.stack().remove(frame)

    def end_interrupted(self, frames: List[Frame]) -> None:
        """Ends calls that an exception of a signal handler cut off before or within leave(), and the
        dispatch mode that such an exception left on."""
        for frame in frames:
            self.undo(frame)
        if not any(f.watches for f in self.stack()):
            while getattr(_get_current_dispatch_mode(), "engine", None) is self:
                _pop_mode()

    # ---- what comes next

    def learn(self, scope: Scope) -> None:
        before, last = self.trail
        if last is not None:
            if last not in self.after_one:
                self.order.append(last)
            self.after_one[last] = scope
            self.after_two[(before, last)] = scope
        self.trail = (last, scope)
        if scope not in self.asked and not scope.pinned and scope.table is None:
            self.asked.clear()  # the order has changed
        self.asked.discard(scope)

    def fetch(self, scope: Scope) -> None:
        """Prefetches the successors, up to the window. These are hints: the leases report
        failures."""
        before, last = self.trail[0], scope
        room = self.window()
        for _ in range(len(self.scopes)):
            following = self.after_two.get((before, last)) or self.after_one.get(last)
            if following is None or following is scope or room <= 0:
                return
            if not following.pinned and following.table is None:
                if following not in self.asked:
                    left = room
                    for ptr, nbytes in following.use.spans:
                        if left > 0:
                            lib.vmem_prefetch(ptr, min(nbytes, left), self.target.location, None)  # at once
                            left -= nbytes
                    if left >= 0:
                        self.asked.add(following)
                room -= following.use.bytes
            before, last = last, following

    def window(self) -> int:
        """Bytes to prefetch: they must fit beside the largest layer. With more than a third of the
        unpinned memory, layers would leave before they are used."""
        wanted = min(AHEAD, self.budget // 4) if self.ahead is None else self.ahead
        return min(wanted, max(0, self.budget - self.largest))

    def pin(self) -> None:
        """Pins part of the weights to the device, so that the layer in use, the window, and as much
        again for layers that the device has not finished fit beside it. This is advice: under
        pressure pinned blocks leave like others."""
        last = self.trail[1]
        order = self.order + ([last] if last is not None and last not in self.after_one else [])
        self.pins_for = len(self.order)
        order = [s for s in order if s.table is None]
        total = sum(s.use.bytes for s in order)
        room = self.budget if total <= self.budget else self.budget - self.largest - 2 * self.window()
        self.unpin()
        credit, ranges = 0.0, 0
        for scope in order:
            credit += scope.use.bytes * min(1.0, room / total) if room > 0 else 0
            if credit >= scope.use.bytes and ranges + len(scope.use.spans) <= MAX_PINS:
                credit -= scope.use.bytes
                ranges += len(scope.use.spans)
                self.advise(scope.use.spans, Advice.PIN)
                scope.pinned = True
                self.pinned_bytes += scope.use.bytes

    def unpin(self) -> None:
        for scope in self.scopes:
            if scope.pinned:
                self.advise(scope.use.spans, Advice.COLD)
                scope.pinned = False
        self.pinned_bytes = 0

    def all_cold(self) -> None:
        """Marks all regions cold. Among cold blocks the least recently used leave first, and
        prefetched blocks that are not used yet leave last. Policies for data of unknown use would
        favour used blocks."""
        self.advise([(h.ptr, h.size) for h in self.regions], Advice.COLD)

    def as_before(self) -> None:
        self.advise([(h.ptr, h.size) for h in self.regions], Advice.NORMAL)

    def advise(self, spans: Sequence[Tuple[int, int]], advice: Advice) -> None:
        for ptr, nbytes in spans:
            lib.vmem_advise(ptr, nbytes, int(advice), self.target.location)
