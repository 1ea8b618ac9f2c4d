"""Reading safetensors headers: what is read, and that nothing but `Exl3PackError` comes of damage."""

import contextlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_pack import write_safetensors
from vllm_exl3.pack import Exl3PackError
from vllm_exl3.pack.headers import FIRST_READ, ITEM_BITS, FileHeader, read_header


def _read(data: bytes) -> FileHeader:
    return read_header("x.safetensors", len(data), lambda start, length: data[start : start + length])


def _file(header: dict | bytes, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    padding=st.integers(0, 9),
)
def test_every_tensor_is_found_where_it_lies(shapes: list[list[int]], metadata: dict[str, str], padding: int) -> None:
    header: dict = {"__metadata__": metadata} if metadata else {}
    body = b""
    for index, shape in enumerate(shapes):
        data = bytes([index]) * (2 * int(np.prod(shape)))
        offsets = [len(body), len(body) + len(data)]
        header[f"t{index}"] = {"dtype": "F16", "shape": shape, "data_offsets": offsets}
        body += data
    file = _file(json.dumps(header).encode() + b" " * padding, body)
    found = _read(file)
    assert found.metadata == metadata
    assert list(found.tensors) == [f"t{index}" for index in range(len(shapes))]
    for index, tensor in enumerate(found.tensors.values()):
        assert tensor.shape == tuple(shapes[index])
        assert file[tensor.start : tensor.start + tensor.nbytes] == bytes([index]) * tensor.nbytes


def test_header_longer_than_the_first_read_takes_one_more(tmp_path) -> None:
    path = tmp_path / "big.safetensors"
    write_safetensors(path, {f"tensor.{index:06d}": ("F16", np.zeros(1)) for index in range(2000)})
    data = path.read_bytes()
    reads = []

    def read(start: int, length: int) -> bytes:
        reads.append((start, length))
        return data[start : start + length]

    assert len(read_header("big.safetensors", len(data), read).tensors) == 2000
    (length,) = struct.unpack("<Q", data[:8])
    assert reads == [(0, FIRST_READ), (FIRST_READ, 8 + length - FIRST_READ)]


def test_file_without_tensors_is_no_fault_of_the_header() -> None:
    assert _read(_file({})).tensors == {}


@pytest.mark.parametrize("dtype", ITEM_BITS)
def test_sizes_follow_the_dtype(dtype: str) -> None:
    size = (8 * ITEM_BITS[dtype] + 7) // 8
    header = {"t": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, size]}}
    assert _read(_file(header, bytes(size))).tensors["t"].nbytes == size


@given(cut=st.integers(0, 400))
def test_any_cut_is_refused(cut: int) -> None:
    header = {"a": {"dtype": "F16", "shape": [64], "data_offsets": [0, 128]}}
    file = _file(header, bytes(128))
    with pytest.raises(Exl3PackError, match=r"x\.safetensors"):
        _read(file[: min(cut, len(file) - 1)])


@given(position=st.integers(0, 300), value=st.integers(0, 255))
def test_any_flipped_byte_is_read_or_refused(position: int, value: int) -> None:
    header = {
        "a": {"dtype": "F16", "shape": [4, 16], "data_offsets": [0, 128]},
        "b": {"dtype": "I16", "shape": [1], "data_offsets": [128, 130]},
    }
    file = bytearray(_file(header, bytes(130)))
    file[position % len(file)] = value
    with contextlib.suppress(Exl3PackError):
        _read(bytes(file))


_JUNK = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(entry=_JUNK, dtype=_JUNK, shape=_JUNK, offsets=_JUNK, metadata=_JUNK)
def test_any_json_is_read_or_refused(entry, dtype, shape, offsets, metadata) -> None:
    for header in (
        {"t": entry},
        {"t": {"dtype": dtype, "shape": [1], "data_offsets": [0, 2]}},
        {"t": {"dtype": "F16", "shape": shape, "data_offsets": [0, 2]}},
        {"t": {"dtype": "F16", "shape": [1], "data_offsets": offsets}},
        {"__metadata__": metadata},
        metadata,
    ):
        with contextlib.suppress(Exl3PackError):
            _read(_file(header, b"ab"))
