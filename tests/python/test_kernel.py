# SPDX-License-Identifier: Apache-2.0
"""Ranges that are open to kernels. tests/system/kernel_paging_test.cpp tests the kernels."""

import ctypes
import errno
import glob
import os
import struct

import numpy as np
import pytest

import vmem
from conftest import MIB, finish, start

BLOCK = 2 * MIB


@pytest.fixture
def handles():
    start(device="sim-handles", host_budget=128 * MIB)
    yield
    finish()


def of_view(view):
    """Returns blocks, frames, address, bytes, and whether stores are allowed
    (include/vmem/detail/paging_view.h).
    """
    words = struct.unpack("6Q4I4Q2I", view[:104])
    return words[7], words[8], words[12], words[13], words[15]


def test_a_range_is_open_until_its_end(handles):
    region = vmem.alloc(8 * BLOCK)
    with vmem.kernel(region, budget=3 * BLOCK) as opened:
        assert opened.open and len(opened.view) == 128
        assert of_view(opened.view) == (8, 3, region.ptr, 8 * BLOCK, 0)
        with pytest.raises(vmem.Error) as e:
            region.free()
        assert e.value.errno == errno.EBUSY
    assert not opened.open
    opened.end()  # does nothing
    region.free()


def test_parts_are_opened_for_writing(handles):
    with vmem.alloc(8 * BLOCK) as region:
        part = region.numpy("float32")[BLOCK // 4 + 5 : BLOCK]
        opened = vmem.kernel((part, vmem.READ | vmem.WRITE), budget="4MiB")
        assert of_view(opened.view) == (3, 2, part.ctypes.data, part.nbytes, 1)
        with vmem.kernel(region[:BLOCK], access=vmem.READ | vmem.WRITE) as second:
            assert of_view(second.view)[4] == 1
        opened.end(stream=None)
        del part


def test_what_cannot_be_opened_is_refused(handles):
    with vmem.alloc(BLOCK) as region:
        for wrong in ({"access": vmem.WRITE}, {"device": 7}, {"budget": "1GiB"}):
            with pytest.raises(vmem.Error):
                vmem.kernel(region, **wrong)
        with pytest.raises(ValueError, match="not a size"):
            vmem.kernel(region, budget="much")
        with pytest.raises(TypeError):
            vmem.kernel(np)


def test_one_that_is_dropped_is_ended_and_says_so(handles):
    with vmem.alloc(BLOCK) as region:
        opened = vmem.kernel(region)
        with pytest.warns(ResourceWarning, match="without end"):
            del opened


def test_without_handles_it_says_what_to_set(sim):
    with vmem.alloc(BLOCK) as region, pytest.raises(vmem.Error) as e:
        vmem.kernel(region)
    assert e.value.errno == errno.EOPNOTSUPP and "device" in e.value.strerror


KERNEL = b"""
#include "vmem/device.cuh"
extern "C" __global__ void gather(vmem::device_region<float> table, const long long* ids, size_t count, float* out) {
  vmem::block_group<float> group(table);
  if (!group.gather(ids, count, 64, out)) *out = 0;
}
"""


def nvrtc():
    """Returns NVIDIA's run-time compiler, if this machine has it."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for path in ["libnvrtc.so", *sorted(glob.glob(os.path.join(home, "lib*", "libnvrtc.so*")))]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            pass
    pytest.skip("libnvrtc is not installed")


def test_kernels_that_ask_are_compiled_at_run_time():
    compiler = nvrtc()
    headers = os.path.join(os.path.dirname(__file__), "..", "..", "include")
    options = [b"-arch=compute_80", b"-std=c++17", b"-I" + os.fsencode(os.path.abspath(headers))]
    program = ctypes.c_void_p()
    assert compiler.nvrtcCreateProgram(ctypes.byref(program), KERNEL, b"gather.cu", 0, None, None) == 0
    failed = compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    words = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetProgramLog(program, words)
    assert not failed, words.value.decode()
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
