# SPDX-License-Identifier: Apache-2.0
import errno
import os

import pytest

import vmem
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
