"""Ways to damage a pack, each decided by a random generator alone, so that a number stands for a damaged pack.

A pack is held in memory as the bytes of its files: a case costs no more than what reads it.
"""

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

__all__ = ["MUTATIONS", "WEIGHTS", "Files", "mutate", "read_tensors", "write_tensors"]

Files = dict[str, bytes]

WEIGHTS = "model.safetensors"
_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, 10**12, 10**400, float("nan"), "", "exl3", "[/x]", "\ud800", "9" * 5000),
    *([], [1], ["a"], [[1]], {}, {"a": 1}, {"bits": {}}),
)
_DTYPES = ("F16", "BF16", "F32", "F64", "I8", "U8", "I16", "I32", "I64", "BOOL", "F8_E4M3", "F4", "C64", "", "f16")


def mutate(files: Files, number: int) -> tuple[str, Files]:
    """The damaged pack that a number stands for, and the name of the damage (of the first, where there are several)."""
    chance = random.Random(number)
    damaged = dict(files)
    names = [chance.choice(sorted(MUTATIONS)) for _ in range(1 + (chance.random() < 0.2))]
    for name in names:
        MUTATIONS[name](damaged, chance)
    return names[0], damaged


def _file(files: Files, chance: random.Random) -> str:
    return chance.choice(sorted(files))


def flip_bit(files: Files, chance: random.Random) -> None:
    """One bit anywhere."""
    name = _file(files, chance)
    if data := bytearray(files[name]):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        files[name] = bytes(data)


def overwrite(files: Files, chance: random.Random) -> None:
    """A run of bytes with noise, or with another part of the file."""
    name = _file(files, chance)
    data, size = bytearray(files[name]), chance.choice((1, 2, 4, 8, 64, 512))
    if len(data) > size:
        start, source = chance.randrange(len(data) - size), chance.randrange(len(data) - size)
        data[start : start + size] = chance.choice((chance.randbytes(size), bytes(size), data[source : source + size]))
        files[name] = bytes(data)


def cut(files: Files, chance: random.Random) -> None:
    """The end of a file, or a piece of its middle."""
    name = _file(files, chance)
    data = files[name]
    if data:
        start = chance.randrange(len(data))
        files[name] = data[:start] if chance.random() < 0.5 else data[:start] + data[start + chance.randint(1, 64) :]


def insert(files: Files, chance: random.Random) -> None:
    """Bytes where there were none."""
    name = _file(files, chance)
    start = chance.randint(0, len(files[name]))
    files[name] = files[name][:start] + chance.randbytes(chance.choice((1, 8, 100))) + files[name][start:]


def header_length(files: Files, chance: random.Random) -> None:
    """The number that says how long the header is."""
    length = chance.choice((0, 1, 2**31, 2**63, 2**64 - 1, chance.randrange(1 << 20)))
    files[WEIGHTS] = struct.pack("<Q", length) + files.get(WEIGHTS, b"")[8:]


def lose_file(files: Files, chance: random.Random) -> None:
    """A file that is gone, empty, or under another name."""
    name = _file(files, chance)
    data = files.pop(name)
    match chance.randrange(4):
        case 0:
            files[name] = b""
        case 1:
            files[f"._{name}"] = data
        case 2:
            files[chance.choice(("model-00001-of-00002.safetensors", "x.safetensors", "config.json"))] = data


def second_file(files: Files, chance: random.Random) -> None:
    """The same tensors twice, or a file that is none."""
    name = chance.choice(("copy.safetensors", "._model.safetensors", "consolidated.safetensors", "z.safetensors"))
    files[name] = chance.choice(
        (files.get(WEIGHTS, b""), b"<html>", b"version https://git-lfs.github.com/spec/v1\n", b"")
    )


def json_value(files: Files, chance: random.Random) -> None:
    """A value of config.json, the sidecar or the index, or a key's name."""
    names = [name for name in sorted(files) if name.endswith(".json")]
    if names:
        name = chance.choice(names)
        if (value := _parsed(files[name])) is not None:
            files[name] = json.dumps(_spoilt(value, chance)).encode()


def header_value(files: Files, chance: random.Random) -> None:
    """A value of the header, or a tensor's name."""
    _edit_header(files, lambda header: _spoilt(header, chance))


def tensor_dtype(files: Files, chance: random.Random) -> None:
    """What one tensor says that it is made of."""

    def edit(header: dict[str, Any]) -> Any:
        entry = header.get(chance.choice(sorted(header) or [""]))
        if isinstance(entry, dict):
            entry["dtype"] = chance.choice(_DTYPES)
        return header

    _edit_header(files, edit)


def tensor_shape(files: Files, chance: random.Random) -> None:
    """The shape of one tensor, of as many bytes or not."""

    def edit(header: dict[str, Any]) -> Any:
        entry = header.get(chance.choice(sorted(header) or [""]))
        if isinstance(entry, dict) and isinstance(entry.get("shape"), list) and entry["shape"]:
            shape = entry["shape"]
            match chance.randrange(4):
                case 0:
                    shape.reverse()
                case 1:
                    shape.append(1)
                case 2 if len(shape) > 1 and all(type(size) is int for size in shape):
                    shape[:2] = [shape[0] * shape[1]]
                case _:
                    shape[chance.randrange(len(shape))] = chance.choice((0, -1, 1, 2**40, 128, 1.0))
        return header

    _edit_header(files, edit)


def exchange(files: Files, chance: random.Random) -> None:
    """Two tensors under each other's names: of one size, the headers alone cannot show it."""

    def edit(header: dict[str, Any]) -> Any:
        names = sorted(name for name in header if isinstance(header[name], dict) and "dtype" in header[name])
        if len(names) > 1:
            first, second = chance.sample(names, 2)
            header[first], header[second] = header[second], header[first]
        return header

    _edit_header(files, edit)


def lose_tensor(files: Files, chance: random.Random) -> None:
    """A tensor, or all of a module, that was never written: the file is sound otherwise."""
    tensors = read_tensors(files)
    if tensors:
        name = chance.choice(sorted(tensors))
        key = name.rpartition(".")[0]
        whole = chance.random() < 0.5
        write_tensors(
            files, {n: t for n, t in tensors.items() if n != name and not (whole and n.startswith(f"{key}."))}
        )


def rename_tensor(files: Files, chance: random.Random) -> None:
    """A tensor under the name of another layer, another module, or none."""
    tensors = read_tensors(files)
    if tensors:
        name = chance.choice(sorted(tensors))
        other = chance.choice(
            (name.replace("layers.0", "layers.1"), name.replace("q_proj", "k_proj"), f"{name}.x", "x")
        )
        tensors[other] = tensors.pop(name)
        write_tensors(files, tensors)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _spoilt(value: Any, chance: random.Random) -> Any:
    """The value with one of its parts replaced by junk, or one key renamed; a walk down finds the part."""
    value = copy.deepcopy(value)
    holder: Any = None
    key: Any = None
    part = value
    while isinstance(part, dict | list) and part and (holder is None or chance.random() < 0.7):
        holder = part
        key = chance.choice(sorted(part)) if isinstance(part, dict) else chance.randrange(len(part))
        part = holder[key]
    if holder is None:
        return chance.choice(_JUNK)
    if isinstance(holder, dict) and chance.random() < 0.25:
        holder[chance.choice(("", ".", "x.trellis", f"model.layers.{10**12}.mlp.down_proj.trellis"))] = holder.pop(key)
    else:
        holder[key] = chance.choice(_JUNK)
    return value


def _split(data: bytes) -> tuple[Any, bytes]:
    """Header and body of a file; no header where it is none."""
    if len(data) < 8:
        return None, b""
    (length,) = struct.unpack("<Q", data[:8])
    return _parsed(data[8 : 8 + length]) if length <= len(data) else None, data[8 + length :]


def _edit_header(files: Files, edit: Callable[[dict[str, Any]], Any]) -> None:
    header, body = _split(files.get(WEIGHTS, b""))
    if isinstance(header, dict):
        text = json.dumps(edit(header)).encode()
        files[WEIGHTS] = struct.pack("<Q", len(text)) + text + body


def read_tensors(files: Files) -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of a sound file: dtype, shape, bytes."""
    header, body = _split(files.get(WEIGHTS, b""))
    found = {}
    for name, entry in header.items() if isinstance(header, dict) else ():
        try:
            start, end = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], body[start:end])
        except (KeyError, TypeError, ValueError):
            continue
    return found


def write_tensors(files: Files, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    files[WEIGHTS] = struct.pack("<Q", len(text)) + text + body


MUTATIONS: dict[str, Callable[[Files, random.Random], None]] = {
    function.__name__: function
    for function in (
        *(flip_bit, overwrite, cut, insert, header_length, lose_file, second_file, json_value, header_value),
        *(tensor_dtype, tensor_shape, exchange, lose_tensor, rename_tensor),
    )
}
"""Every kind of damage by name. A number stands for the same pack only as long as these stay the same."""
