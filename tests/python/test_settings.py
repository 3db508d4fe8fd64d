# SPDX-License-Identifier: Apache-2.0
import ctypes
import dataclasses
import errno
import os
import re

import pytest

import vmem
from vmem import _lib
from conftest import python


def test_settings_are_set_and_read_and_refusals_give_the_accepted_form(host):
    vmem.set("host_budget", "96MiB")
    assert vmem.stats().host_budget == 96 << 20
    vmem.configure(checksum=False, readahead=4 << 20)
    assert vmem.get("checksum") in ("off", "0")
    vmem.set("checksum", True)
    with pytest.raises(vmem.Error) as e:
        vmem.set("no_such_setting", 1)
    assert e.value.errno == errno.ENOENT and "no_such_setting" in e.value.strerror
    with pytest.raises(vmem.Error):
        vmem.get("no_such_setting")
    with pytest.raises(vmem.Error) as e:
        vmem.set("host_budget", "a lot")
    assert e.value.errno == errno.EINVAL and "a lot" in e.value.strerror and "MiB" in e.value.strerror


def test_a_setting_of_the_start_is_refused_while_regions_exist(host):
    with vmem.alloc(4096):
        with pytest.raises(vmem.Error) as e:
            vmem.set("device", "sim")
        assert e.value.errno == errno.EBUSY


def test_statistics_count(host):
    before = vmem.stats()
    with vmem.alloc(4 << 20) as region:
        region.numpy()[:] = 1
        after = vmem.stats()
        assert after.regions == before.regions + 1 and after.host_bytes >= 4 << 20
    assert vmem.stats().regions == before.regions


def test_a_struct_of_another_version_gets_what_it_has_room_for(host):
    # As vmem.h says: from the first version's size on, nothing is written beyond the size.
    with vmem.alloc(4096) as region:
        calls = {
            _lib.StatsStruct: (16, lambda out: _lib.lib.vmem_stats(out)),
            _lib.ResidencyStruct: (40, lambda out: _lib.lib.vmem_query(region.ptr, 1, out)),
        }
        for struct, (least, call) in calls.items():
            for size in range(0, ctypes.sizeof(struct) + 1, 8):
                out = struct(*[0x5555] * len(struct._fields_))
                out.size = size
                assert call(ctypes.byref(out)) == (0 if size >= least else -errno.EINVAL), size
                beyond = [getattr(out, name) for name, _ in struct._fields_[size // 8 if size >= least else 1 :]]
                assert beyond == [0x5555] * len(beyond), size
            assert out.size == size and size == ctypes.sizeof(struct)
            for size, answer in ((4096, 0), (4097, -errno.EINVAL)):
                room = (ctypes.c_uint64 * 1024)(*[size])
                assert call(ctypes.cast(room, ctypes.POINTER(struct))) == answer and not any(room[512:])


def test_sizes_are_read_as_libvmem_reads_them():
    assert vmem.parse_size("8GiB") == vmem.parse_size("8G") == vmem.parse_size("8gb") == 8 << 30
    assert vmem.parse_size("1.5 MiB") == 3 << 19
    assert vmem.parse_size("4096") == vmem.parse_size(4096) == 4096
    for bad in ("", "G", "-1", "8 X", 0, -5, None, 1.5):
        with pytest.raises(ValueError):
            vmem.parse_size(bad)


def test_an_error_is_an_oserror_with_the_words(host):
    with pytest.raises(OSError) as e:
        vmem.set("host_budget", "1K")
    assert isinstance(e.value, vmem.Error) and e.value.strerror in str(e.value) and e.value.strerror


def test_a_bad_environment_variable_is_named():
    ended = python("import vmem; vmem.init()", VMEM_HOST_BUDGET="plenty")
    assert ended.returncode != 0 and "VMEM_HOST_BUDGET" in ended.stderr and "plenty" in ended.stderr


def test_a_library_that_is_not_there_is_named():
    ended = python("import vmem", VMEM_LIBRARY="/nowhere/libvmem.so")
    assert ended.returncode != 0 and "/nowhere/libvmem.so" in ended.stderr and "VMEM_LIBRARY" in ended.stderr


def test_another_library_of_that_name_is_not_taken(make_file):
    places = ("/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib64/libc.so.6", "/lib64/libc.so.6")
    libc = next(p for p in places if os.path.exists(p))
    ended = python("import vmem", VMEM_LIBRARY=libc)
    assert ended.returncode != 0 and "is not libvmem" in ended.stderr
    ended = python("import vmem", VMEM_LIBRARY=make_file(b"no library", "libvmem.so"))
    assert ended.returncode != 0 and "libvmem.so" in ended.stderr


def test_structs_calls_and_numbers_are_those_of_the_header():
    top = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with open(os.path.join(top, "include", "vmem", "vmem.h"), encoding="utf-8") as f:
        header = re.sub(r"/\*.*?\*/", "", f.read(), flags=re.S)
    structs = {"vmem_range": _lib.RangeStruct, "vmem_residency": _lib.ResidencyStruct, "vmem_stats": _lib.StatsStruct}
    structs["vmem_device_stats"] = _lib.DeviceStatsStruct
    for name, struct in structs.items():
        body = re.search(r"struct " + name + r" \{(.*?)\};", header, re.S)[1]
        fields = [re.findall(r"\w+", part)[-1] for part in re.split(r"[,;]", body) if part.strip()]
        assert [f for f, _ in struct._fields_] == fields, name
    assert [f.name for f in dataclasses.fields(vmem.Stats)] == [f for f, _ in _lib.StatsStruct._fields_[1:]]
    assert [f.name for f in dataclasses.fields(vmem.DeviceStats)] == [f for f, _ in _lib.DeviceStatsStruct._fields_[1:]]
    assert vmem.Residency._fields == tuple(f for f, _ in _lib.ResidencyStruct._fields_[1:])
    advice = dict(re.findall(r"VMEM_ADVISE_(\w+) = (\d+)", header))
    assert {a.name: a.value for a in vmem.Advice} == {n: int(v) for n, v in advice.items()}
    for name, value in re.findall(r"#define VMEM_(\w+) \(?(-?\w+?)u?\)?\s", header):
        mine = getattr(vmem, name, None) or getattr(_lib, "FLAG_" + name, None)
        if mine is not None:
            assert mine == int(value, 0), name


def test_a_sync_of_everything_and_the_librarys_version(host, tmp_path):
    path = tmp_path / "shared"
    path.write_bytes(bytes(2 << 20))
    with vmem.map(path, mode="shared", host_only=True) as region, vmem.alloc(2 << 20, host_only=True) as zeros:
        region.numpy()[:3] = 7
        zeros.numpy()[:] = 1
        before = vmem.stats().write_bytes
        vmem.sync()
        assert path.read_bytes()[:4] == b"\7\7\7\0"
        assert vmem.stats().write_bytes - before >= 4 << 20
    major, minor = vmem.library_version()
    assert f"{major}.{minor}" == vmem.__version__
