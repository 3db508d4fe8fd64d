# SPDX-License-Identifier: Apache-2.0
"""Gathers rows of a table larger than the GPU with a kernel. The kernel pages in the blocks that it
needs, or loads a row from its block's present place (docs/gpu-paging.md)."""

from __future__ import annotations

import ctypes
import errno
import glob
import math
import operator
import os
from typing import Any, Dict, List, Optional, Tuple, Union

import torch

from .._kernel import KernelRange, kernel
from .._lib import READ, Error, lib

THREADS = 256
SOURCE = """
#include <vmem/device.cuh>
extern "C" __global__ void __launch_bounds__(256) vmem_gather_rows(vmem::device_region<unsigned char> table,
    const long long* rows, unsigned long long count, unsigned long long row, unsigned char* to, unsigned* failed) {
  vmem::warp_group<unsigned char> group(table);
  const unsigned long long warps = gridDim.x * (blockDim.x / 32ull);
  const unsigned long long me = blockIdx.x * (blockDim.x / 32ull) + threadIdx.x / 32;
  const unsigned long long each = (count + warps - 1) / warps, first = me * each;
  if (first >= count) return;
  const unsigned long long mine = count - first < each ? count - first : each;
  const auto got = group.gather(rows + first, mine, row, to + first * row);
  if (!got && threadIdx.x % 32 == 0) atomicMax(failed, static_cast<unsigned>(got.answer));
}
"""
# The values of vmem::Answer (include/vmem/detail/paging_protocol.h) as errors like those of the
# library's other calls.
ANSWERS: Dict[int, Tuple[int, str]] = {
    2: (errno.EIO, "a block of the table could not be read (the library's log says why)"),
    3: (errno.ENOMEM, "there is no memory for a block of the table"),
    4: (errno.ECANCELED, "the library is being shut down"),
    5: (errno.ETIMEDOUT, "no block came for 10 s"),
    8: (errno.EINVAL, "a row's number is not that of a row of the table"),
    10: (errno.EBUSY, "a block of the table is leased at another location"),
    11: (errno.ETIMEDOUT, "the rows did not come within 60 s"),
}


def include_dirs() -> List[str]:
    """Returns the folders that may contain <vmem/device.cuh>: VMEM_INCLUDE, the one beside this
    package, and those of packages."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = [
        os.environ.get("VMEM_INCLUDE", ""),
        os.path.join(here, "include"),
        os.path.join(here, "..", "..", "include"),
        os.path.join(os.path.dirname(getattr(lib, "_name", "") or ""), "..", "include"),
        "/usr/local/include",
        "/usr/include",
    ]
    return [p for p in places if p and os.path.isfile(os.path.join(p, "vmem", "device.cuh"))]


def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    for root in (os.path.dirname(os.path.dirname(torch.__file__)),):
        names += sorted(glob.glob(os.path.join(root, "nvidia", "*", "lib", f"libnvrtc.so.{major}*")))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Error(errno.ENOENT, f"libnvrtc of CUDA {torch.version.cuda} is not installed: no kernel can be compiled")


def _compile(device: int) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    found = include_dirs()
    if not found:
        raise Error(errno.ENOENT, "vmem/device.cuh is not found; say in VMEM_INCLUDE in which folder vmem/ is")
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", f"-I{found[0]}"]

    def must(code: int) -> None:
        if code == 0:
            return
        size = ctypes.c_size_t()
        text = b""
        if program and nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0:
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            text = log.value
        raise Error(errno.ENOEXEC, f"NVRTC error {code}: {text.decode(errors='replace').strip()}")

    source = SOURCE.encode()
    must(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"vmem_gather.cu", 0, None, None))
    try:
        argv = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        must(nvrtc.nvrtcCompileProgram(program, len(options), argv))
        size = ctypes.c_size_t()
        must(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        must(nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class _Kernel:
    """The kernel, loaded on one device. It is loaded before any range is open: a first launch may
    wait for kernels that are requesting bytes."""

    _of: Dict[int, "_Kernel"] = {}

    def __init__(self, device: int) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.code = _compile(device)
        self.function = ctypes.c_void_p()
        module = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the primary context current
            torch.empty(1, device="cuda")
            self._must(self.cuda.cuModuleLoadData(ctypes.byref(module), self.code))
            self._must(self.cuda.cuModuleGetFunction(ctypes.byref(self.function), module, b"vmem_gather_rows"))
        self.blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count

    def _must(self, code: int) -> None:
        if code != 0:
            raise Error(errno.EIO, f"CUDA error {code} of the kernel that gathers rows")

    @classmethod
    def of(cls, device: int) -> "_Kernel":
        if device not in cls._of:
            cls._of[device] = cls(device)
        return cls._of[device]

    def launch(self, view: bytes, ids: "torch.Tensor", row: int, out: "torch.Tensor", failed: "torch.Tensor") -> None:
        values = [
            ctypes.create_string_buffer(view, len(view)),
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.c_ulonglong(ids.numel()),
            ctypes.c_ulonglong(row),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(failed.data_ptr()),
        ]
        argv = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        stream = ctypes.c_void_p(torch.cuda.current_stream(out.device).cuda_stream)
        warps = THREADS // 32
        blocks = max(1, min(self.blocks, math.ceil(ids.numel() / warps)))
        with torch.cuda.device(out.device):
            self._must(self.cuda.cuLaunchKernel(self.function, blocks, 1, 1, THREADS, 1, 1, 0, stream, argv, None))


class Table:
    """A table of rows over a region that is open to gather(), until end() or the end of a with
    statement. Made by open_table()."""

    def __init__(self, table: "torch.Tensor", device: Any, budget: Union[int, str, None]) -> None:
        if table.device.type != "cpu" or table.dim() < 1 or not table.is_contiguous():
            raise ValueError("the table is to be a contiguous tensor over a region, on the CPU: vmem.torch.tensor()")
        found = torch.device("cuda", operator.index(device)) if hasattr(device, "__index__") else torch.device(device)
        self.device = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
        self._table = table
        self._row = table[0].numel() * table.element_size() if len(table) else 0
        self._kernel = _Kernel.of(self.device.index)
        self._stream = torch.cuda.Stream(self.device)
        self._failed = torch.zeros(1, dtype=torch.int32, device=self.device)  # for all gathers since check()
        torch.cuda.current_stream(self.device).synchronize()  # gathers may be on any stream
        self._range: Optional[KernelRange] = kernel(
            table, READ, self.device.index, self._stream.cuda_stream, budget if budget is not None else None
        )

    def gather(self, ids: "torch.Tensor", out: Optional["torch.Tensor"] = None) -> "torch.Tensor":
        """Returns rows table[ids], in the order of ids (int64, on the device), on torch's current
        stream; asynchronous. check() or end() raises the error of rows that could not be read. out:
        a contiguous tensor of the device for the rows."""
        if self._range is None:
            raise ValueError("the table was ended")
        if ids.device != self.device or ids.dtype != torch.int64:
            raise ValueError(f"ids are to be int64 on {self.device}")
        shape = (*ids.shape, *self._table.shape[1:])
        if out is None:
            out = torch.empty(shape, dtype=self._table.dtype, device=self.device)
        if tuple(out.shape) != shape or out.dtype != self._table.dtype or out.device != self.device:
            raise ValueError(f"out is to be {self._table.dtype} of {shape} on {self.device}")
        if not out.is_contiguous():
            raise ValueError("out is to be contiguous")
        ids = ids.contiguous()
        if ids.numel() == 0 or self._row == 0:
            return out
        self._kernel.launch(self._range.view, ids, self._row, out, self._failed)
        current = torch.cuda.current_stream(self.device)
        for used in (ids, out, self._failed):
            used.record_stream(current)
        self._stream.wait_stream(current)  # end() waits for the work on its stream
        return out

    def check(self) -> None:
        """Waits for the gathers so far, and raises the error of the first that failed."""
        self._stream.synchronize()
        answer = int(self._failed.item())
        self._failed.zero_()
        torch.cuda.current_stream(self.device).synchronize()
        if answer != 0:
            raise Error(*ANSWERS.get(answer, (errno.EIO, f"rows are not available: answer {answer}")))

    def end(self) -> None:
        """Waits for the gathers, closes the range, and raises as check() does. Ending twice does nothing."""
        if self._range is None:
            return
        self._range.end()
        self._range = None
        self.check()

    def __enter__(self) -> "Table":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()


def open_table(table: "torch.Tensor", device: Any = "cuda", budget: Union[int, str, None] = None) -> Table:
    """Opens a table of rows (its first dimension) to gathers on a device, during a with statement.

        with vmem.torch.open_table(table, budget="8GiB") as rows: y = rows.gather(ids)

    At most `budget` bytes of it are on the device at once (None: half of device_budget). Rows of
    other blocks are loaded from host memory, or their blocks are read from the SSD. End it before
    the CPU stores to the table: gathers see an earlier store only after its block has left the
    device and returned.
    """
    return Table(table, device, budget)


def gather(table: "torch.Tensor", ids: "torch.Tensor", budget: Union[int, str, None] = None) -> "torch.Tensor":
    """Returns rows table[ids] on the device of ids: open_table() for one gather. Waits for it."""
    with open_table(table, ids.device, budget) as rows:
        return rows.gather(ids)
