"""Folders of safetensors: lazy reading, atomic writing, and refusal of inconsistent files."""

import errno
import json
import mmap
import os
import re
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvad.checkpoint import safetensors_header, safetensors_io
from kvad.checkpoint.safetensors_header import read_headers
from kvad.checkpoint.safetensors_io import find_nonfinite, open_tensors, write_sharded
from kvad.errors import CheckpointError, SaveError
from kvad.storage import atomic
from kvad.storage.atomic import new_folder

DTYPES = [getattr(torch, name) for name, _ in safetensors_header.DTYPES.values()]
TWO = {"a": torch.arange(6, dtype=torch.int16).view(2, 3), "b": torch.tensor([1.5, -2.0])}


def raw_file(path, header, data=b""):
    """Write a file with a header that is bytes or an object."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_tensor(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def write_model(folder):
    """Write five tensors t0 ... of 200 bytes each into three shards."""
    tensors = {f"t{i}": torch.full((10, 5), float(i)) for i in range(5)}
    write_sharded(folder, tensors, max_shard_bytes=400)
    return tensors


# ---------------------------------------------------------------- reading


def test_a_header_gives_names_shapes_and_sizes(tmp_path):
    save_file(TWO, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = open_tensors(tmp_path)
    assert set(tensors) == {"a", "b"} and len(tensors) == 2 and "c" not in tensors and tensors.get("c") is None
    assert tensors.shape("a") == (2, 3) and tensors.dtype("a") == torch.int16
    assert tensors.bytes("a") == 12 and tensors.bytes("b") == 8 and tensors.total_bytes == 20
    assert tensors.file_name("b") == tmp_path / "model.safetensors"
    assert all(same(tensors[name], TWO[name]) for name in TWO)
    for function in (tensors.__getitem__, tensors.shape, tensors.bytes, tensors.file_name):
        with pytest.raises(KeyError):
            function("c")


def test_every_dtype_and_shape(tmp_path):
    shapes = [(), (1,), (3,), (0,), (2, 0, 3), (3, 1, 5)]
    pairs = [(dtype, shape) for dtype in DTYPES for shape in shapes]
    saved = {f"{dtype}{list(shape)}": random_tensor(dtype, *shape) for dtype, shape in pairs}
    save_file(saved, tmp_path / "model.safetensors")
    tensors = open_tensors(tmp_path)
    for name, tensor in saved.items():
        assert same(tensors[name], tensor), name
        chunks = [chunk.clone() for chunk in tensors.chunks(name)]
        assert same(torch.cat([torch.empty(0, dtype=tensor.dtype), *chunks]), tensor.flatten()), name


def test_shards_and_their_index(tmp_path):
    saved = write_model(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json"]
    tensors = open_tensors(tmp_path)
    assert list(tensors) == list(saved) and all(same(tensors[name], saved[name]) for name in saved)
    assert tensors.file_name("t4").name == "model-00003-of-00003.safetensors" and tensors.total_bytes == 1000


def test_the_single_file_takes_precedence(tmp_path):
    write_model(tmp_path)
    save_file(TWO, tmp_path / "model.safetensors")
    assert set(open_tensors(tmp_path)) == {"a", "b"}


def test_chunks(tmp_path, monkeypatch):
    saved = random_tensor(torch.int16, 7, 5)
    save_file({"w": saved}, tmp_path / "model.safetensors")
    monkeypatch.setattr(safetensors_io, "READ_CHUNK", 16)
    chunks = [chunk.clone() for chunk in open_tensors(tmp_path).chunks("w")]
    assert [len(chunk) for chunk in chunks] == [8, 8, 8, 8, 3]
    assert same(torch.cat(chunks), saved.flatten())


def test_a_write_to_a_view_stays_private(tmp_path):
    save_file(TWO, tmp_path / "model.safetensors")
    tensors = open_tensors(tmp_path)
    view = tensors["b"]
    view.fill_(9)
    assert same(torch.cat(list(tensors.chunks("b"))), TWO["b"]) and view.tolist() == [9, 9]
    assert same(open_tensors(tmp_path)["b"], TWO["b"])


def test_a_view_outlives_its_folder(tmp_path):
    save_file(TWO, tmp_path / "model.safetensors")
    view = open_tensors(tmp_path)["b"]
    (tmp_path / "model.safetensors").unlink()
    assert same(view, TWO["b"])


def test_tensors_after_a_header_of_odd_length_are_aligned(tmp_path):
    text = json.dumps({"w": entry("F32", (2,), (0, 8))}).encode()
    for pad in range(8):
        data = TWO["b"].numpy().tobytes()
        raw_file(tmp_path / "model.safetensors", text + b" " * pad, data)
        tensors = open_tensors(tmp_path)
        assert same(tensors["w"], TWO["b"]) and same(torch.cat(list(tensors.chunks("w"))), TWO["b"])
        assert tensors["w"].data_ptr() % 4 == 0


def test_nothing_is_read_before_it_is_used(tmp_path):
    """A sparse file of 64 GiB exceeds the memory; two of its rows do not."""
    rows = 1 << 24
    path = raw_file(tmp_path / "model.safetensors", {"w": entry("F32", (rows, 1024), (0, rows * 4096))})
    os.truncate(path, path.stat().st_size + rows * 4096)
    tensors = open_tensors(tmp_path)
    assert tensors.total_bytes == 64 << 30
    before = resident()
    assert not tensors["w"][rows - 2 :].any() and resident() - before < 32 << 20


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_check_leaves_no_page_in_memory(tmp_path):
    save_file({"w": torch.zeros(40 << 20, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    tensors = open_tensors(tmp_path)
    before = resident()
    assert find_nonfinite(tensors) == [] and resident() - before < 24 << 20
    assert not tensors["w"].any() and resident() - before > 64 << 20  # a mapped tensor is measured


def test_a_file_truncated_while_it_is_read(tmp_path):
    save_file({"w": torch.zeros(4 << 20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    tensors = open_tensors(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 1 << 20)
    with pytest.raises(CheckpointError, match="was truncated at byte 1,048,576 while it was being read"):
        list(tensors.chunks("w"))


# ---------------------------------------------------------------- broken files

WHOLE = {"a": entry(), "b": entry(shape=(2, 2), offsets=(4, 8))}
LONG = "x" * 5000

# Name: (header, bytes of data, part of the message).
BROKEN = {
    "not JSON": (b"{]", 0, "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', 0, "not JSON"),
    "UTF-16": (json.dumps(WHOLE).encode("utf-16"), 8, "not JSON"),
    "a list": (b"[1]", 0, "not a JSON object"),
    "nested": (b'{"a":' * 30_000, 0, "not JSON"),
    "nested lists": (b"[" * 100_000, 0, "not JSON"),
    "a number of many digits": (b'{"a": ' + b"9" * 9000 + b"}", 0, "not JSON"),
    "an entry of another kind": ({"a": 7}, 0, "tensor 'a': its entry"),
    "a missing field": ({"a": {"dtype": "U8", "shape": [4]}}, 4, "tensor 'a': its entry"),
    "a field more": ({"a": entry(strides=[1])}, 4, "tensor 'a': its entry"),
    "an unknown dtype": ({"a": entry("F4")}, 4, "tensor 'a' has dtype 'F4', which kvad does not read"),
    "a dtype that is a list": ({"a": entry(["U8"])}, 4, "has dtype a list"),
    "a negative size": ({"a": entry(shape=(-4,))}, 4, "tensor 'a': its shape"),
    "two negative sizes": ({"a": entry(shape=(-2, -2))}, 4, "tensor 'a': its shape"),
    "a size of 4.0": ({"a": entry(shape=(4.0,))}, 4, "tensor 'a': its shape"),
    "a size of true": ({"a": entry(shape=(4, True))}, 4, "tensor 'a': its shape"),
    "a size of NaN": (b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 4]}}', 4, "column 33: NaN is not"),
    "sizes beyond counting": ({"a": entry(shape=(2**62, 2**62, 0), offsets=(0, 0))}, 0, "its shape"),
    "a size beyond counting": ({"a": entry(shape=(2**64,))}, 4, "its shape"),
    "many huge sizes": ({"a": entry(shape=[10**4000] * 50)}, 4, "an integer of 4,001 digits"),
    "many axes": ({"a": entry(shape=[1] * 100_000, offsets=(0, 1))}, 1, "its shape"),
    "a shape that is none": ({"a": {**entry(), "shape": None}}, 4, "its shape"),
    "offsets that are none": ({"a": {**entry(), "data_offsets": "04"}}, 4, "its data_offsets"),
    "three offsets": ({"a": entry(offsets=(0, 2, 4))}, 4, "its data_offsets"),
    "a negative offset": ({"a": entry(offsets=(-4, 0))}, 4, "its data_offsets"),
    "the end before the beginning": ({"a": entry(offsets=(4, 0))}, 4, "its data_offsets"),
    "too few bytes": ({"a": entry("F32")}, 4, "F32 [4] has 16 bytes, its data_offsets span 4"),
    "an overlap": ({"a": entry(), "b": entry(offsets=(3, 7))}, 8, "tensor 'b' begins at byte"),
    "the same bytes twice": ({"a": entry(), "b": entry()}, 4, "inside tensor 'a'"),
    "nothing, inside another": ({"a": entry(), "b": entry(shape=(0,), offsets=(2, 2))}, 4, "inside tensor 'a'"),
    "a gap": ({"a": entry(), "b": entry(offsets=(5, 9))}, 9, "before tensor 'b', belong to no tensor"),
    "a gap at the start": ({"a": entry(offsets=(1, 5))}, 5, "before tensor 'a', belong to no tensor"),
    "too short": (WHOLE, 7, "is truncated: "),
    "too long": (WHOLE, 9, "is too long: "),
    "a tensor of 2**62 bytes": ({"a": entry(shape=(2**58,), offsets=(0, 2**58))}, 4, "is truncated: "),
    "metadata of another kind": ({"__metadata__": [1], **WHOLE}, 8, "__metadata__"),
    "metadata of numbers": ({"__metadata__": {"format": 1}, **WHOLE}, 8, "__metadata__"),
    "a name twice": (b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), 4, "contains 'a' twice"),
    "a field twice": (b'{"a": {"dtype": "U8", "dtype": "U8"}}', 4, "contains 'dtype' twice"),
    "a name of two lines": ({"a\nb": entry()}, 4, r"tensor 'a\nb' is not printable"),
    "half a character": (b'{"\\ud800": %b}' % json.dumps(entry()).encode(), 4, r"'\ud800' is not printable"),
    "a long name": ({LONG: entry("?")}, 4, "has dtype '?'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_is_refused_in_one_line(tmp_path, name):
    header, data, expected = BROKEN[name]
    path = raw_file(tmp_path / "model.safetensors", header, bytes(data))
    message = refusal(tmp_path)
    assert str(path) in message and expected in message
    assert "\n" not in message and len(message) < len(str(path)) + 500 and message.encode()


def test_each_broken_file_has_one_fault(tmp_path):
    header = {**WHOLE, "__metadata__": {"format": "pt"}, LONG: entry(offsets=(8, 12))}
    raw_file(tmp_path / "model.safetensors", header, bytes(12))
    assert len(open_tensors(tmp_path)) == 3


def open_frugally(folder):
    """Open tensors within 8 MiB of Python's memory."""
    tracemalloc.start()
    try:
        return open_tensors(folder)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20, f"{peak:,} bytes"


def refusal(folder):
    """Return the one-line error for a folder."""
    with pytest.raises(CheckpointError) as caught:
        open_frugally(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("length", [1, 2, 1000, 2**27, 2**31, 2**62, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file(tmp_path, length):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}"[: min(2, length - 1)])
    assert re.search(f"truncated, or not a safetensors file.*has {length:,}", refusal(tmp_path))


def test_a_header_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001) + b"{")
    os.truncate(path, 200_000_000)
    assert "the header must have at most 100,000,000 bytes, got 100,000,001" in refusal(tmp_path)


def test_every_truncation_and_every_longer_file(tmp_path):
    save_file(TWO, tmp_path / "whole")
    whole, path = (tmp_path / "whole").read_bytes(), tmp_path / "model.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert f"{size} " in refusal(tmp_path)
    path.write_bytes(whole + b"\0")
    assert f"too long: {len(whole) + 1} bytes, its tensors end at {len(whole)}" in refusal(tmp_path)
    path.write_bytes(whole)
    assert len(open_tensors(tmp_path)) == 2


def is_accepted(folder):
    """Return whether a file is opened; if so, the safetensors library must read the same tensors."""
    try:
        tensors = dict(open_frugally(folder))
    except CheckpointError:
        return False
    reference = load_file(folder / "model.safetensors")
    assert reference.keys() == tensors.keys() and all(same(tensors[name], reference[name]) for name in tensors)
    return True


def test_flipped_bytes_at_every_position_of_the_header(tmp_path):
    """Each byte is set to 16 other values; the library must read what kvad accepts."""
    save_file(TWO, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    passed = 0
    flips = [1 << bit for bit in range(8)] + [3, 21, 52, 85, 111, 170, 222, 255]
    for position in range(end):
        for flip in flips:
            broken = bytearray(whole)
            broken[position] ^= flip
            path.write_bytes(broken)
            passed += is_accepted(tmp_path)
    assert 0 < passed < end * len(flips) / 4  # other names and other words in the metadata


@pytest.mark.parametrize("name", ["an overlap", "a gap", "too short", "too long"])
def test_a_missing_check_is_detected(tmp_path, monkeypatch, name):
    header, data, _ = BROKEN[name]
    raw_file(tmp_path / "model.safetensors", header, bytes(data))
    assert not is_accepted(tmp_path)
    monkeypatch.setattr(safetensors_header, "_check_offsets", lambda *arguments: None)
    with pytest.raises((SafetensorError, ValueError)):  # of the library, or of torch at the end of the file
        is_accepted(tmp_path)


@given(st.data())
def test_a_header_of_any_json(tmp_path_factory, data):
    """Plausible headers, most of which are wrong."""
    number = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16, -1, 2**31, 2**63, 1.0, True, None, "4"])
    code = st.sampled_from([*safetensors_header.DTYPES, "F4", "f32", "", None, 3])
    one = st.fixed_dictionaries(
        {"dtype": code, "shape": st.lists(number, max_size=3), "data_offsets": st.lists(number, max_size=3)},
        optional={"extra": number},
    )
    header = data.draw(st.dictionaries(st.sampled_from(["a", "b", "", "__metadata__"]), one | number, max_size=3))
    folder = tmp_path_factory.mktemp("any")
    raw_file(folder / "model.safetensors", header, bytes(data.draw(st.integers(0, 16))))
    is_accepted(folder)


@given(st.data())
def test_splices_of_a_whole_file(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("spliced")
    save_file(TWO, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    (folder / "model.safetensors").write_bytes(content[:low] + data.draw(st.binary(max_size=12)) + content[high:])
    is_accepted(folder)


def test_pointers_folders_and_pipes_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 4\n")
    assert re.search(r"Git LFS pointer.*git lfs pull", refusal(tmp_path))
    path.unlink()
    path.mkdir()
    assert "not a regular file" in refusal(tmp_path)
    path.rmdir()
    os.mkfifo(path)  # opening one for reading would block
    assert "not a regular file" in refusal(tmp_path)
    with pytest.raises(CheckpointError, match="is missing"):
        read_headers(tmp_path / "other.safetensors")


# ---------------------------------------------------------------- broken folders


def edit_index(folder, removed="", **files):
    """Change the files of tensors, remove a tensor, and write a wrong total size."""
    path = folder / "model.safetensors.index.json"
    weight_map = {**json.loads(path.read_text())["weight_map"], **files}
    weight_map.pop(removed, None)
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_a_missing_shard_is_named_with_one_of_its_tensors(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refusal(tmp_path) and "'t2'" in refusal(tmp_path)


def test_index_and_shards_that_disagree(tmp_path):
    second = "model-00002-of-00003.safetensors"
    for change, message in (
        ({"t9": second}, f"{second} lacks tensor 't9'"),
        ({"removed": "t3"}, f"{second} has tensor 't3', which model.safetensors.index"),
        ({"t0": second}, f"{second} lacks tensor 't0'"),
    ):
        folder = tmp_path / "".join(change) / str(len(message))
        write_model(folder)
        assert len(open_tensors(folder)) == 5
        edit_index(folder, **change)
        assert message in refusal(folder)
    write_model(tmp_path / "twice")
    save_file({"t0": torch.ones(1)}, tmp_path / "twice" / "model-00003-of-00003.safetensors")
    assert "tensor 't0' is in model-00001-of-00003.safetensors too" in refusal(tmp_path / "twice")


@pytest.mark.parametrize(
    "name",
    [
        *("../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "C:x.safetensors", ".."),
        *("x.bin", "x\0.safetensors", "\ud800.safetensors", "x\n.safetensors", "x" * 300 + ".safetensors"),
        *("", 7, None, ["x"], True),
    ],
)
def test_file_names_in_other_folders_are_refused(tmp_path, name):
    write_model(tmp_path / "m")
    save_file(TWO, tmp_path / "x.safetensors")
    edit_index(tmp_path / "m", t0=name)
    message = refusal(tmp_path / "m")
    assert "tensor 't0': must be in a file of the same folder" in message and message.encode()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b"[" * 99_999, b"\xff\xfe{}"]
)
def test_a_malformed_index(tmp_path, content):
    write_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    assert "model.safetensors.index.json" in refusal(tmp_path)


def test_an_index_with_a_tensor_twice(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    assert "contains 'a' twice" in refusal(tmp_path)


def test_a_wrong_total_size_is_ignored(tmp_path):
    write_model(tmp_path)
    edit_index(tmp_path)
    assert len(open_tensors(tmp_path)) == 5


# ---------------------------------------------------------------- writing


def test_one_file_equals_that_of_the_library(tmp_path):
    files = write_sharded(tmp_path / "m", TWO)
    save_file(TWO, tmp_path / "reference", metadata={"format": "pt"})
    assert files == [tmp_path / "m" / "model.safetensors"]
    assert files[0].read_bytes() == (tmp_path / "reference").read_bytes()


def test_an_iterable_is_consumed_shard_by_shard(tmp_path):
    num_files = []

    def tensors_in_order():
        for i in range(10):
            num_files.append(len(list((tmp_path / "m").iterdir())))
            yield f"t{i}", torch.full((10, 5), float(i))

    write_sharded(tmp_path / "m", tensors_in_order(), max_shard_bytes=450)
    assert num_files == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]  # files written before each tensor
    content = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert content["metadata"] == {"total_size": 2000} and list(content["weight_map"]) == sorted(content["weight_map"])
    tensors = open_tensors(tmp_path / "m")
    assert all(torch.equal(tensors[f"t{i}"], torch.full((10, 5), float(i))) for i in range(10))


def test_a_tensor_larger_than_a_shard_and_no_tensor_at_all(tmp_path):
    write_sharded(tmp_path / "m", {"a": torch.ones(2), "b": torch.ones(900), "c": torch.ones(2)}, max_shard_bytes=100)
    tensors = open_tensors(tmp_path / "m")
    assert len({tensors.file_name(name) for name in tensors}) == 3
    assert [path.name for path in write_sharded(tmp_path / "none", {})] == ["model.safetensors"]
    assert len(open_tensors(tmp_path / "none")) == 0


def test_views_are_written_and_tied_tensors_are_refused(tmp_path):
    fused = torch.arange(24.0).view(6, 4)
    write_sharded(tmp_path / "m", {"q": fused[:3], "k": fused[3:], "t": torch.arange(6.0).view(2, 3).t()})
    tensors = open_tensors(tmp_path / "m")
    assert same(tensors["q"], fused[:3]) and same(tensors["k"], fused[3:])
    assert tensors["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    for max_shard_bytes in (10**9, 10):  # in one shard, and in two
        tied = ((name, fused.detach()) for name in ("embed", "head"))
        with pytest.raises(AssertionError, match="head is tied to another"):
            write_sharded(tmp_path / "tied", tied, max_shard_bytes=max_shard_bytes)
    with pytest.raises(AssertionError, match="a occurs twice"):
        write_sharded(tmp_path / "tied", [("a", torch.ones(1)), ("a", torch.ones(1))])
    assert list((tmp_path / "tied").iterdir()) == []


def test_a_folder_with_weights_is_not_written_into(tmp_path):
    write_sharded(tmp_path / "m", TWO)
    with pytest.raises(SaveError, match=r"already has weights: model\.safetensors"):
        write_model(tmp_path / "m")
    with new_folder(tmp_path / "m") as new:
        saved = write_model(new)
        (new / "config.json").write_text("{}")
    assert set(open_tensors(tmp_path / "m")) == set(saved)


class FailingDisk:
    """Fails the k-th operation."""

    def __init__(self, patch, at):
        self.count = 0
        operations = [(Path, name) for name in ("rename", "replace", "mkdir")]
        for owner, name in [(os, "fsync"), (safetensors_io, "save_file"), *operations]:
            patch.setattr(owner, name, self.wrap(getattr(owner, name), at))

    def wrap(self, real, at):
        def operation(*arguments, **options):
            self.count += 1
            if self.count != at:
                return real(*arguments, **options)
            if real is save_file:
                arguments[1].write_bytes(b"half")
                raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return operation


def test_no_weights_remain_after_any_failed_operation(tmp_path):
    for at in range(1, 100):
        folder = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, at)
            message = ""
            try:
                write_model(folder)
            except SaveError as error:
                message = str(error)
        if disk.count < at:
            break
        assert "No space left" in message, f"operation {at}"
        assert not folder.exists() or list(folder.iterdir()) == [], f"operation {at}"
    assert at > 12 and len(open_tensors(tmp_path / str(at))) == 5


def test_files_of_a_killed_writer_are_removed(tmp_path, monkeypatch):
    partial = tmp_path / ".model.safetensors.999999999.0123abcd.tmp"
    partial.write_bytes(b"half")
    monkeypatch.setattr(atomic.os, "kill", lambda pid, signal: (_ for _ in ()).throw(ProcessLookupError))
    write_sharded(tmp_path, TWO)
    assert not partial.exists() and len(open_tensors(tmp_path)) == 2


# ---------------------------------------------------------------- non-finite values


@pytest.mark.parametrize("lazy", [True, False])
def test_nonfinite_values_are_counted(tmp_path, monkeypatch, lazy):
    tensors = {
        "good": torch.randn(1000),
        "huge": torch.full((100,), 3e38),  # finite, though its sum is not
        "huger": torch.full((10,), 1e308, dtype=torch.float64),
        "ids": torch.arange(10),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0),
        "bad": torch.randn(1000),
        "half": torch.full((30,), 6e4, dtype=torch.float16),
        "tiny": torch.ones(8).to(torch.float8_e4m3fn),
        "brain": torch.ones(5, dtype=torch.bfloat16),
        "waves": torch.ones(4, dtype=torch.complex64),
    }
    tensors["bad"][[0, 7, 999]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    tensors["tiny"][3] = float("nan")
    tensors["brain"][0] = float("inf")
    tensors["waves"][2] = complex(0, float("nan"))
    monkeypatch.setattr(safetensors_io, "READ_CHUNK", 64)
    if lazy:
        write_sharded(tmp_path, tensors)
    counts = find_nonfinite(open_tensors(tmp_path) if lazy else tensors)
    assert sorted(counts) == [("bad", 3), ("brain", 1), ("tiny", 1), ("waves", 1)]
    if not lazy:
        assert find_nonfinite({"transposed": tensors["bad"].view(10, 100).t()}) == [("transposed", 3)]


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path("it-ran"),))


def test_a_pytorch_model_bin_is_read_as_tensors_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"a.weight": torch.randn(5, 3).bfloat16(), "b": torch.arange(7), "t": torch.randn(4, 6).t()}
    for old in (False, True):
        torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
        tensors = open_tensors(tmp_path)
        assert list(tensors) == list(state) and all(torch.equal(tensors[name], state[name]) for name in state)
        assert tensors.shape("t") == (6, 4) and tensors.dtype("a.weight") == torch.bfloat16
        assert torch.equal(torch.cat(list(tensors.chunks("t"))), state["t"].flatten())
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert list(open_tensors(tmp_path)) == list(state)


@pytest.mark.parametrize(
    "content", [{"a": Payload()}, {"a": torch.ones(2), "step": 3}, [torch.ones(2)], b"not a pickle"]
)
def test_a_pickle_of_anything_else_is_refused_and_does_not_run(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"cannot be read as tensors|must be a mapping of names to tensors"):
        open_tensors(tmp_path)
    assert not (tmp_path / "it-ran").exists()
