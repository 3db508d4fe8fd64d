# SPDX-License-Identifier: Apache-2.0
import ctypes
import errno
import gc
import io
import sys

import numpy as np
import pytest

import vmem
from conftest import MIB


def test_a_memoryview_reads_and_writes_the_region(host):
    with vmem.alloc(MIB) as region:
        view = region.memoryview()
        assert view.nbytes == MIB and view.format == "B" and not view.readonly
        view[10:14] = b"vmem"
        assert bytes(region[10:14].memoryview()) == b"vmem"
        assert io.BytesIO(b"12345678").readinto(region[0:8].memoryview()) == 8
        assert region.numpy()[7] == ord("8")
        del view


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the buffer protocol of Python classes is new in 3.12")
def test_regions_and_arrays_are_buffers(host):
    with vmem.alloc(4096) as region:
        memoryview(region)[0] = 1
        assert bytes(region[0:2]) == b"\1\0"


def test_numpy_takes_dlpack_and_keeps_the_region(host):
    region = vmem.alloc(MIB)
    array = region.array("float32", (256, 1024))
    assert array.__dlpack_device__() == (1, 0)
    a = np.from_dlpack(array)
    assert a.shape == (256, 1024) and a.dtype == "float32"
    region.numpy("float32")[3] = 2.5
    assert a[0, 3] == 2.5
    del array
    with pytest.raises(vmem.Error):
        region.free()
    del a
    gc.collect()
    region.free()


def test_a_capsule_that_nobody_took_lets_go(host):
    region = vmem.alloc(MIB)
    capsules = [region.array().__dlpack__(), region.array().__dlpack__(max_version=(1, 0))]
    with pytest.raises(vmem.Error):
        region.free()
    del capsules
    gc.collect()
    region.free()


def test_dlpack_refuses_what_it_cannot_say(host, make_file):
    path = make_file(bytes(4096))
    with vmem.map(path) as region, vmem.alloc(4096, host_only=True) as other:
        with pytest.raises(BufferError, match="mapped for reading"):
            region.array().__dlpack__()
        region.array().__dlpack__(max_version=(1, 0))  # has a read-only flag
        with pytest.raises(BufferError, match="copy"):
            other.array().__dlpack__(copy=True)
        with pytest.raises(BufferError, match="device"):
            other.array().__dlpack__(dl_device=(2, 0))
        with pytest.raises(vmem.Error) as e:
            other.array().on(0)
        assert e.value.errno == errno.EINVAL and "device tier" in e.value.strerror


def test_a_gpu_consumer_is_told_the_same_address(sims):
    with vmem.alloc(4 * MIB) as region:
        array = region.array("float16", (16, 4)).on(0)
        where = (13 if sims == "sim" else 2, 0)  # CUDA managed, or CUDA
        assert array.__dlpack_device__() == where
        interface = array.__cuda_array_interface__
        assert interface["data"] == (region.ptr, False) and interface["shape"] == (16, 4)
        assert interface["typestr"] == "<f2"
        assert array.device == 0 and array.on(vmem.HOST).device == vmem.HOST
        assert not hasattr(region.array(), "__cuda_array_interface__")
        assert not hasattr(region.array("bfloat16").on(0), "__cuda_array_interface__")
        capsule = array.__dlpack__(stream=1, max_version=(1, 1), dl_device=where)
        name = ctypes.pythonapi.PyCapsule_GetName
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
        assert name(capsule) == b"dltensor_versioned"
        del array, interface, capsule


def test_types_that_numpy_lacks_are_refused_with_what_to_take(host):
    with vmem.alloc(4096) as region:
        with pytest.raises(TypeError, match="uint16"):
            region.array("bfloat16").numpy()
        assert region.array("bfloat16", (4, 4)).nbytes == 32


def test_numpy_by_dlpack_says_which_types_it_lacks(host):
    with vmem.alloc(4096) as region:
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
            with pytest.raises(TypeError, match=f"{name}: it has no such type; take the bytes as uint"):
                np.from_dlpack(region.array(name))
        try:  # only later versions of NumPy accept it
            assert np.from_dlpack(region.array("bool")).dtype == "bool"
        except TypeError as e:
            assert "cannot take by DLPack bool" in str(e) and "numpy()" in str(e)
        assert region.numpy("bool").dtype == "bool"
        for name in ("uint16", "float64", "complex64"):
            assert np.from_dlpack(region.array(name)).dtype == name
        from numpy import from_dlpack

        with pytest.raises(TypeError, match="bfloat16"):
            from_dlpack(region.array("bfloat16"))


def test_others_are_given_the_types_that_numpy_lacks(host):
    with vmem.alloc(4096) as region:
        for name in ("bool", "bfloat16", "float8_e5m2"):
            assert "dltensor" in repr(region.array(name).__dlpack__())


class Refuses:
    """A consumer that cannot use the array: it drops the refused array while its exception is
    raised.
    """

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_a_consumer_that_refuses_a_capsule_says_why_itself_and_keeps_nothing(host):
    region = vmem.alloc(MIB)
    for _ in range(3):
        with pytest.raises((BufferError, RuntimeError), match="dtype") as e:
            np.from_dlpack(Refuses(region.array("bfloat16")))
        assert not isinstance(e.value, SystemError)
    del e
    gc.collect()
    region.free()
    assert region.closed


def test_capsules_and_the_arrays_made_of_them_are_not_mixed_up(host):
    from vmem import _dlpack

    region = vmem.alloc(MIB)
    arrays = [np.from_dlpack(region[4096 * i : 4096 * (i + 1)]) for i in range(50)]
    waiting = region.array().__dlpack__()
    _dlpack.sweep()
    assert len(_dlpack._offered) == 1 and len(_dlpack._held) >= 51
    region[49 * 4096 : 50 * 4096].numpy()[:] = 7
    del arrays[:49], waiting
    gc.collect()
    with pytest.raises(vmem.Error, match="1 arrays"):
        region.free()
    assert (arrays[0] == 7).all() and region.numpy()[49 * 4096] == 7
    del arrays
    gc.collect()
    region.free()
    assert not _dlpack._offered


def test_an_array_may_go_while_an_exception_unwinds(host):
    """The interpreter would crash if the end of the array ran Python code then."""

    def fail():
        raise KeyError("no such thing")

    region = vmem.alloc(MIB)
    for _ in range(3):
        try:
            np.from_dlpack(region.array("float32", 1000)) + fail()  # the left operand dies with the frame
            raise AssertionError
        except KeyError as e:
            assert e.args == ("no such thing",)
    with pytest.raises(ValueError, match="reshape"):
        np.from_dlpack(region.array("float32", 1000)).reshape(7, 7)
    gc.collect()
    region.free()


def test_a_capsule_that_is_taken_while_others_are_swept_keeps_its_region(host, monkeypatch):
    """Another thread takes the capsule and drops it between the check of its name and the action on
    it.
    """
    from vmem import _dlpack

    region = vmem.alloc(MIB)
    waiting, arrays = [region.array()], []
    looked = _dlpack._is_valid

    class Offers:
        def __init__(self, array):
            self.capsule = array.__dlpack__()

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            capsule, self.capsule = self.capsule, None
            return capsule

    waiting[0] = Offers(waiting[0])

    def look(capsule, name):
        valid = looked(capsule, name)
        if waiting:
            arrays.append(np.from_dlpack(waiting.pop()))
        return valid

    monkeypatch.setattr(_dlpack, "_is_valid", look)
    _dlpack.sweep()
    monkeypatch.undo()
    assert arrays[0].ctypes.data in [held[0].tensor.data for held in _dlpack._held.values()]
    with pytest.raises(vmem.Error, match="1 arrays"):
        region.free()
    del arrays[:]
    region.free()
    assert not _dlpack._offered


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "uint32", "int64", "uint64", "complex64"])
def test_numpy_asarray_has_the_type_and_the_shape(host, dtype):
    """From Python 3.12 on NumPy got only the bytes: it tries the buffer protocol first."""
    with vmem.alloc(4096) as region:
        for shape in ((16,), (2, 3, 4), (), (0, 4)):
            array = region.array(dtype, shape, offset=64)
            seen = np.asarray(array)
            assert seen.dtype == dtype and seen.shape == shape
            if seen.size:
                assert seen.__array_interface__["data"][0] == array.ptr
        del array, seen


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the buffer protocol of Python classes is new in 3.12")
def test_an_array_is_a_buffer_of_its_type_where_there_is_one(host):
    with vmem.alloc(4096) as region:
        view = memoryview(region.array("int32", (2, 4)))
        assert view.format == "i" and view.shape == (2, 4) and view.nbytes == 32
        with pytest.raises(BufferError, match="bfloat16"):
            memoryview(region.array("bfloat16"))
        with pytest.raises(TypeError, match="uint16"):
            np.asarray(region.array("bfloat16"))
        del view
