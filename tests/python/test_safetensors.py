# SPDX-License-Identifier: Apache-2.0
"""The parser, without torch: what is refused, and with which words."""

import json
import os
import struct

import pytest

import vmem
from vmem import _safetensors as st


def content(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_good_header_gives_names_types_shapes_and_places(make_file):
    header = {"b": tensor([2, 3], 4, 28), "a": tensor([], 0, 4), "none": tensor([0, 5], 28, 28)}
    path = make_file(content({"__metadata__": {"format": "pt"}, **header}, bytes(28)))
    found = st.read_header(path)
    start = os.path.getsize(path) - 28
    assert list(found.tensors) == ["a", "b", "none"] and found.metadata == {"format": "pt"}
    assert found.tensors["b"].shape == (2, 3) and found.tensors["b"].dtype.name == "float32"
    assert (found.tensors["b"].begin, found.tensors["b"].end) == (start + 4, start + 28)


def test_what_the_writer_makes_the_parser_takes(make_file):
    from vmem._dtypes import BY_NAME

    head = st.make_header([("x", BY_NAME["bfloat16"], (4, 8)), ("y", BY_NAME["int64"], ())], {"k": "v"}, 4096)
    assert len(head) % 4096 == 0
    found = st.read_header(make_file(head + bytes(72)))
    assert found.tensors["y"].end == len(head) + 72 and found.metadata == {"k": "v"}


GOOD = {"a": tensor([4], 0, 16), "b": tensor([4], 16, 32)}

REFUSED = [
    ("an empty file", b"", "0 bytes"),
    ("a file of seven bytes", b"1234567", "7 bytes"),
    ("a length beyond the file", content(GOOD, b"", length=5000), "5000 bytes"),
    ("a length beyond reason", content(GOOD, b"", length=1 << 60), str(1 << 60)),
    ("no JSON", content(b"{nonsense"), "not JSON"),
    ("no object", content(b"[1, 2, 3]"), "does not begin"),
    ("no UTF-8", content(b'{"\xff\xfe": 1}'), "not JSON"),
    ("JSON nested without end", content(b'{"a":' * 100000), "not JSON"),
    ("a name twice", content(b'{"a": 1, "a": 2}'), "'a' is there twice"),
    ("metadata that is no text", content({"__metadata__": {"a": 1}}), "__metadata__"),
    ("an entry that is no object", content({"a": 5}), "'a'"),
    ("an entry without a shape", content({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)), "'a'"),
    ("an unknown dtype", content({"a": tensor([4], 0, 16, "Q9")}, bytes(16)), "'Q9'"),
    ("a dtype that is no text", content({"a": tensor([4], 0, 16, 7)}, bytes(16)), "dtype 7"),
    ("a negative shape", content({"a": tensor([-4], 0, 16)}, bytes(16)), "[-4]"),
    ("a number of a million digits", content(b'{"a": [' + b"9" * 1000000 + b"]}"), "digits"),
    ("no bytes, and strides without end", content({"a": tensor([0, 1 << 62, 1 << 62], 0, 0)}, b""), "more than"),
    ("a product without end", content({"a": tensor([1 << 62] * 64, 0, 16)}, bytes(16)), "more than"),
    ("a million dimensions", content({"a": tensor([9] * 1000000, 0, 16)}, bytes(16)), "1000000 dimensions"),
    ("a shape of truth", content({"a": tensor([True], 0, 4)}, bytes(4)), "[True]"),
    ("a shape of fractions", content({"a": tensor([1.5], 0, 6)}, bytes(6)), "[1.5]"),
    ("three offsets", content({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, bytes(1)), "[0, 1, 2]"),
    ("offsets the wrong way round", content({"a": tensor([4], 16, 0)}, bytes(16)), "-16"),
    ("a size that does not fit the shape", content({"a": tensor([5], 0, 16)}, bytes(16)), "20 bytes"),
    ("tensors that overlap", content({"a": tensor([4], 0, 16), "b": tensor([4], 8, 24)}, bytes(24)), "'b' overlap"),
    ("a hole between", content({"a": tensor([4], 0, 16), "b": tensor([4], 20, 36)}, bytes(36)), "4 bytes after"),
    ("bytes before the first tensor", content({"a": tensor([4], 4, 20)}, bytes(20)), "4 bytes after"),
    ("bytes after the last tensor", content(GOOD, bytes(40)), "8 bytes follow"),
    ("a file that was cut short", content(GOOD, bytes(31)), "tensor 'b'"),
]


@pytest.mark.parametrize("bytes_, words", [r[1:] for r in REFUSED], ids=[r[0].replace(" ", "-") for r in REFUSED])
def test_is_refused_with_the_file_and_the_numbers(bytes_, words, make_file):
    path = make_file(bytes_, "model.safetensors")
    with pytest.raises(vmem.FormatError) as e:
        st.headers(path)
    assert path in e.value.strerror and words in e.value.strerror, e.value.strerror
    assert isinstance(e.value, ValueError) and isinstance(e.value, vmem.Error)


def test_every_cut_of_a_file_is_refused(make_file):
    whole = content(GOOD, bytes(32))
    for size in range(len(whole)):
        path = make_file(whole[:size])
        with pytest.raises(vmem.FormatError):
            st.read_header(path)
    assert st.read_header(make_file(whole))


def write_index(folder, weight_map):
    path = os.path.join(folder, "model.safetensors.index.json")
    with open(path, "w", encoding="utf-8") as f:
        json.dump({"metadata": {}, "weight_map": weight_map}, f)
    return path


def test_an_index_gives_the_files_and_what_is_wanted_from_each(make_file):
    file = make_file(content(GOOD, bytes(32)), "one.safetensors")
    folder = os.path.dirname(file)
    index = write_index(folder, {"a": "one.safetensors"})
    for given in (index, folder):
        ((header, names),) = st.headers(given)
        assert header.path == file and names == ["a"]


def test_an_index_that_disagrees_with_its_files_is_refused(make_file):
    file = make_file(content(GOOD, bytes(32)), "one.safetensors")
    folder = os.path.dirname(file)
    with pytest.raises(vmem.Error, match="tensor 'c' is in 'two.safetensors'"):
        st.headers(write_index(folder, {"a": "one.safetensors", "c": "two.safetensors"}))
    with pytest.raises(vmem.FormatError, match="tensor 'c'.*does not hold"):
        st.headers(write_index(folder, {"c": "one.safetensors"}))
    for outside in ("../one.safetensors", "/etc/passwd", "", 5):
        with pytest.raises(vmem.FormatError, match="no file name inside"):
            st.headers(write_index(folder, {"a": outside}))
    for weights in ({}, None, [1]):
        with pytest.raises(vmem.FormatError, match="weight_map"):
            st.headers(write_index(folder, weights))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
        f.write("{")
    with pytest.raises(vmem.FormatError, match="not JSON"):
        st.headers(folder)


def test_a_name_in_two_files_is_refused(make_file):
    one, two = (make_file(content(GOOD, bytes(32))) for _ in range(2))
    with pytest.raises(vmem.FormatError, match="'a' is in"):
        st.headers([one, two])


def test_a_folder_without_a_model_is_refused(make_file, tmp_path):
    with pytest.raises(vmem.Error, match="0 other"):
        st.headers(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        st.headers(str(tmp_path / "none.safetensors"))
    with pytest.raises(ValueError, match="empty"):
        st.headers([])
    file = make_file(content(GOOD, bytes(32)), "only.safetensors")
    assert st.headers(os.path.dirname(file))[0][0].path == file
