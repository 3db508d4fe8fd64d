# SPDX-License-Identifier: Apache-2.0
"""The parser without torch: what it refuses, and the words of each refusal."""

import json
import os
import random
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


BYTE = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],%b}}'  # an entry with more fields
# Entries with one name.
ONE_TWO = (json.dumps(tensor([2], 8, 9)).encode(), json.dumps(tensor([2], 0, 8)).encode())


def nest(levels):
    return b"[" * levels + b"]" * levels


# Accepted by the library safetensors too.
TAKEN = [
    ("no metadata, said as null", content({"__metadata__": None, **GOOD}, bytes(32))),
    ("blanks before", content(b" \n\t\r" + json.dumps(GOOD).encode(), bytes(32))),
    ("blanks behind", content(json.dumps(GOOD).encode() + b" \n\t\r", bytes(32))),
    ("a tensor twice, the last counts", content(b'{"a":%b,"a":%b}' % ONE_TWO, bytes(8))),
    ("a key of the metadata twice", content(b'{"__metadata__":{"a":"1","a":"2"}}')),
    ("other fields", content({"a": {**tensor([2], 0, 8), "x": [None, {"y": 1.5}]}}, bytes(8))),
    ("a long number that nobody reads", content({"a": {**tensor([2], 0, 8), "x": 10**30}}, bytes(8))),
    ("lists that are not too deep", content(BYTE % (b'"x":%b' % nest(125)), b"1")),
    ("nothing", content({})),
    ("no bytes", content({"a": tensor([0, 3], 0, 0), "b": tensor([0], 0, 0)})),
    *((f"type {d}", content({"a": tensor([3], 0, 3, d)}, bytes(3))) for d in ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2")),
    *((f"type {d}", content({"a": tensor([3], 0, 3, d)}, bytes(3))) for d in ("F8_E5M2FNUZ", "F8_E8M0", "BOOL")),
]


@pytest.mark.parametrize("bytes_", [t[1] for t in TAKEN], ids=[t[0].replace(" ", "-") for t in TAKEN])
def test_is_taken(bytes_, make_file):
    st.read_header(make_file(bytes_)).file.close()


# Refused although the library accepts them: torch cannot represent them.
STRICTER = {"no bytes, and strides without end", "a million dimensions"}


def test_the_library_itself_takes_and_refuses_the_same():
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    for _, bytes_ in TAKEN:
        safetensors.deserialize(bytes_)
    for name, bytes_, _ in REFUSED:
        if name not in STRICTER:
            with pytest.raises(safetensors.SafetensorError):
                safetensors.deserialize(bytes_)


def said_by(reader, bytes_):
    """Returns name -> (dtype, shape, bytes), or None if refused."""
    try:
        return reader(bytes_)
    except Exception as e:
        assert "SafetensorError" in str(type(e)) or isinstance(e, vmem.FormatError), e
        return None


ODD_VALUES = [0, 1, 2, 7, 8, -1, 1.0, True, None, "", "U8", [], [0], {}, 1 << 32, 1 << 63, (1 << 64) - 1, 1 << 64, 1e9]


def odd_header(random, data):
    """Returns a header of up to four tensors over `data` bytes, with a possible defect in one."""
    names = ["a", "b", "", "\x00", "é", "__metadata__", "a"]
    entries, at = {}, 0
    for _ in range(random.randrange(5)):
        dtype = random.choice(["U8", "BOOL", "I16", "BF16", "F32", "F64", "C64", "F8_E5M2FNUZ", "F8_E8M0", "f32"])
        shape = [random.randrange(4) for _ in range(random.randrange(4))]
        size = {"U8": 1, "BOOL": 1, "I16": 2, "BF16": 2, "F32": 4, "F64": 8, "C64": 8}.get(dtype, 1)
        for n in shape:
            size *= n
        begin = at + random.choice([0] * 12 + [1, -1])
        entries[random.choice(names)] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
        at += size
    if random.random() < 0.3:
        entries["__metadata__"] = random.choice([None, {}, {"a": "b"}, {"a": 1}, [], "x"])
    if entries and random.random() < 0.4:
        entry = entries[random.choice(list(entries))]
        if isinstance(entry, dict):
            field = random.choice(["dtype", "shape", "data_offsets", "other"])
            entry[field] = random.choice(ODD_VALUES)
    text = bytearray(json.dumps(entries, ensure_ascii=random.random() < 0.5).encode())
    if random.random() < 0.2:
        text[random.randrange(len(text))] = random.choice(b'{}[]",:0 9-e.\\\n\x00\xff')
    if random.random() < 0.2:
        text += random.choice([b" ", b"\n", b"\0", b"x", b"}"])
    length = len(text) + random.choice([0] * 20 + [1, -1, 8])
    return struct.pack("<Q", max(0, length)) + bytes(text) + data[: max(0, at + random.choice([0] * 12 + [1, -1]))]


def test_odd_headers_are_read_as_the_library_reads_them(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    path = str(tmp_path / "odd.safetensors")

    def theirs(bytes_):
        return {n: (v["dtype"], tuple(v["shape"]), bytes(v["data"])) for n, v in safetensors.deserialize(bytes_)}

    def ours(bytes_):
        with open(path, "wb") as file:
            file.write(bytes_)
        header = st.read_header(path)
        header.file.close()
        return {n: (e.dtype.safetensors, e.shape, bytes_[e.begin : e.end]) for n, e in header.tensors.items()}

    draw, taken = random.Random(7), 0
    data = bytes(draw.randrange(256) for _ in range(1 << 12))
    for _ in range(1500):
        bytes_ = odd_header(draw, data)
        want = said_by(theirs, bytes_)
        assert said_by(ours, bytes_) == want, bytes_
        taken += want is not None
    assert 250 < taken < 1250  # the test has met both kinds

REFUSED = [
    ("an empty file", b"", "0 bytes"),
    ("a file of seven bytes", b"1234567", "7 bytes"),
    ("a length beyond the file", content(GOOD, b"", length=5000), "5000 bytes"),
    ("a length beyond reason", content(GOOD, b"", length=1 << 60), str(1 << 60)),
    ("no JSON", content(b"{nonsense"), "not JSON"),
    ("no object", content(b"[1, 2, 3]"), "does not begin"),
    ("no UTF-8", content(b'{"\xff\xfe": 1}'), "not JSON"),
    ("JSON nested without end", content(b'{"a":' * 100000), "not JSON"),
    ("metadata twice", content(b'{"__metadata__":{},"__metadata__":{}}'), "__metadata__ twice"),
    ("a field twice", content(BYTE % b'"dtype":"I8"', b"1"), "dtype twice"),
    ("half of a surrogate pair", content(BYTE % b'"\\ud800":1', b"1"), "not JSON"),
    ("a number beyond doubles", content(BYTE % b'"x":1e999', b"1"), "range"),
    ("no number", content(BYTE % b'"x":NaN', b"1"), "NaN"),
    ("a tensor twice, one of them none", content(b'{"a":5,"a":%b}' % ONE_TWO[1], bytes(8)), "no dtype, shape"),
    ("a negative zero", content(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', b"1"), "[-0.0, 1]"),
    ("deep lists", content(BYTE % (b'"x":%b' % nest(126)), b"1"), "deeper"),
    ("metadata of null", content(b'{"__metadata__":{"a":null}}'), "__metadata__"),
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
    for given in (index, folder, os.fsencode(folder)):
        (header,) = st.headers(given)  # all tensors of the file, as transformers does
        assert header.path == file and list(header.tensors) == ["a", "b"]


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
        f.write('{"weight_map": {"a": "one.safetensors", "a": "one.safetensors"}}')
    with pytest.raises(vmem.FormatError, match="'a' twice"):
        st.headers(folder)
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
    assert st.headers(os.path.dirname(file))[0].path == file


def put(folder, name, text):
    with open(os.path.join(folder, name), "wb") as f:
        f.write(text if isinstance(text, bytes) else json.dumps(text).encode())


def test_a_folder_is_resolved_in_the_order_of_transformers(make_file):
    folder = os.path.dirname(make_file(content(GOOD, bytes(32)), "model-1.safetensors"))

    def found():
        headers = st.headers(folder)
        for header in headers:
            header.file.close()
        return [os.path.basename(header.path) for header in headers]

    assert found() == ["model-1.safetensors"]
    put(folder, "pytorch_model.bin", b"")
    with pytest.raises(vmem.Error, match="pytorch_model.bin, which cannot be mapped"):
        found()
    write_index(folder, {"a": "model-1.safetensors"})
    assert found() == ["model-1.safetensors"]
    os.mkdir(os.path.join(folder, "model.safetensors"))  # a folder, no file
    assert found() == ["model-1.safetensors"]
    os.rmdir(os.path.join(folder, "model.safetensors"))
    put(folder, "model.safetensors", content(GOOD, bytes(32)))
    assert found() == ["model.safetensors"]
    for chosen, wants in (("model-1.safetensors", "model-1.safetensors"), (None, "model.safetensors")):
        put(folder, "config.json", {"transformers_weights": chosen})
        assert found() == [wants]
    for chosen in ("../x.safetensors", "none.safetensors", "pytorch_model.bin", 5):
        put(folder, "config.json", {"transformers_weights": chosen})
        with pytest.raises(vmem.Error, match="transformers_weights"):
            found()
    os.unlink(os.path.join(folder, "config.json"))
    put(folder, "adapter_config.json", {})
    with pytest.raises(vmem.Error, match="adapter"):
        found()
    put(folder, "config.json", {})
    assert found() == ["model.safetensors"]
    put(folder, "shard-00001-model-00001-of-00002.safetensors", b"")
    with pytest.raises(vmem.Error, match="distributed checkpoint"):
        found()


def test_an_index_whose_files_hold_a_tensor_twice_is_refused(make_file):
    folder = os.path.dirname(make_file(content(GOOD, bytes(32)), "1.safetensors"))
    put(folder, "2.safetensors", content(GOOD, bytes(32)))
    write_index(folder, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(vmem.FormatError, match="tensor 'a' is in .*1.safetensors' and in .*2.safetensors'"):
        st.headers(folder)
