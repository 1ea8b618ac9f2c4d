"""Damages that leave every file sound: what tools that merge, convert, resume or copy packs do to them.

They take `mutations.Files` as those do. Headers show some of them; others only a checksum or the numbers could.
"""

import json
import random
from collections.abc import Callable

from tests.fuzz.mutations import WEIGHTS, Files, read_tensors, write_tensors

__all__ = ["PLAUSIBLE"]

Tensor = tuple[str, list[int], bytes]
Tensors = dict[str, Tensor]
_MARKERS = {"mul1": -2082680531, "mcg": -877912083}


def _changed(edit: Callable[[Tensors, random.Random], None]) -> Callable[[Files, random.Random], None]:
    """A damage to the tensors of a file, from what it does to a dictionary of them."""

    def change(files: Files, chance: random.Random) -> None:
        tensors = read_tensors(files)
        if tensors:
            edit(tensors, chance)
            write_tensors(files, tensors)

    change.__name__, change.__doc__ = edit.__name__, edit.__doc__
    return change


def _named(tensors: Tensors, chance: random.Random, *suffixes: str) -> str:
    return chance.choice(sorted(name for name in tensors if name.endswith(suffixes)) or sorted(tensors))


def _like(tensors: Tensors, name: str, chance: random.Random) -> str:
    """Another tensor of the same dtype and shape, where there is one."""
    alike = [other for other in sorted(tensors) if other != name and tensors[other][:2] == tensors[name][:2]]
    return chance.choice(alike or [name])


def _module(tensors: Tensors, key: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(f"{key}.")}


def _kind(name: str) -> list[str]:
    """A module's name without the numbers of layers and experts."""
    return [part for part in name.split(".")[:-1] if not part.isdigit()]


@_changed
def exchange_alike(tensors: Tensors, chance: random.Random) -> None:
    """Two tensors of one dtype and shape change places."""
    first = _named(tensors, chance)
    second = _like(tensors, first, chance)
    tensors[first], tensors[second] = tensors[second], tensors[first]


@_changed
def exchange_modules(tensors: Tensors, chance: random.Random) -> None:
    """All tensors of two linears change places: q with k, or one layer's with another's."""
    keys = sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".trellis")})
    if len(keys) < 2:
        return
    first, second = chance.sample(keys, 2)
    a, b = _module(tensors, first), _module(tensors, second)
    for name in (*a, *b):
        del tensors[name]
    tensors.update({second + name.removeprefix(first): tensor for name, tensor in a.items()})
    tensors.update({first + name.removeprefix(second): tensor for name, tensor in b.items()})


@_changed
def tensor_of_another(tensors: Tensors, chance: random.Random) -> None:
    """A tensor is a copy of another of its dtype and shape, such as a suh of the next layer's."""
    name = _named(tensors, chance, ".suh", ".svh", "norm.weight", ".trellis")
    tensors[name] = tensors[_like(tensors, name, chance)]


@_changed
def marker_of_another(tensors: Tensors, chance: random.Random) -> None:
    """A linear carries the other codebook's marker, none, both, or a wrong value."""
    name = _named(tensors, chance, ".mul1", ".mcg")
    key, _, leaf = name.rpartition(".")
    other = "mcg" if leaf == "mul1" else "mul1"
    value = _MARKERS[other].to_bytes(4, "little", signed=True)
    match chance.randrange(4):
        case 0:
            del tensors[name]
            tensors[f"{key}.{other}"] = ("I32", [], value)
        case 1:
            del tensors[name]
        case 2:
            tensors[f"{key}.{other}"] = ("I32", [], value)
        case _:
            tensors[name] = ("I32", [], value)


@_changed
def other_rate(tensors: Tensors, chance: random.Random) -> None:
    """A trellis of as many bytes whose shape says another bit rate and another number of tiles."""
    name = _named(tensors, chance, ".trellis")
    dtype, shape, data = tensors[name]
    if len(shape) != 3:
        return
    rows, columns, words = shape
    shapes = [
        [rows * columns * words // (n * 16 * k), n, 16 * k]
        for k in range(1, 9)
        for n in (columns // 2, columns, columns * 2, rows)
        if n and rows * columns * words % (n * 16 * k) == 0
    ]
    tensors[name] = (dtype, chance.choice([*shapes, [columns, rows, words]]), data)


@_changed
def module_of_other_rate(tensors: Tensors, chance: random.Random) -> None:
    """A whole linear of another pack: sound in itself, of another bit rate than the files around it say."""
    name = _named(tensors, chance, ".trellis")
    dtype, shape, data = tensors[name]
    if len(shape) == 3:
        bits = chance.choice([k for k in range(1, 9) if 16 * k != shape[2]])
        size = shape[0] * shape[1] * 16 * bits * 2
        tensors[name] = (dtype, [*shape[:2], 16 * bits], (data * (size // max(1, len(data)) + 1))[:size])


@_changed
def lose_leaf(tensors: Tensors, chance: random.Random) -> None:
    """A norm, a marker, a scale or a bias that was never written."""
    del tensors[_named(tensors, chance, "norm.weight", ".suh", ".svh", ".mul1", ".bias")]


@_changed
def lose_all_alike(tensors: Tensors, chance: random.Random) -> None:
    """Every layer lacks the same norm or the same linear, as after a converter that did not know it."""
    kind = _kind(_named(tensors, chance, "norm.weight", ".trellis"))
    for name in [name for name in tensors if _kind(name) == kind]:
        del tensors[name]


@_changed
def hole(tensors: Tensors, chance: random.Random) -> None:
    """A piece of a tensor's data is zeros, as a download that was resumed at the wrong place leaves."""
    name = _named(tensors, chance, ".trellis", ".weight", ".suh", ".svh")
    dtype, shape, data = tensors[name]
    start = chance.randrange(max(1, len(data)))
    size = chance.choice((2, 64, 4096, len(data)))
    tensors[name] = (dtype, shape, data[:start] + bytes(len(data[start : start + size])) + data[start + size :])


@_changed
def bit_of_data(tensors: Tensors, chance: random.Random) -> None:
    """One bit of one tensor's data."""
    name = _named(tensors, chance)
    dtype, shape, data = tensors[name]
    if changed := bytearray(data):
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        tensors[name] = (dtype, shape, bytes(changed))


@_changed
def data_of_other_type(tensors: Tensors, chance: random.Random) -> None:
    """A tensor's bytes under another dtype of the same size."""
    name = _named(tensors, chance)
    dtype, shape, data = tensors[name]
    alike = {"F16": ("BF16", "I16"), "I16": ("F16", "U16"), "I32": ("F32", "U32")}
    tensors[name] = (chance.choice(alike.get(dtype, (dtype,))), shape, data)


def config_of_another(files: Files, chance: random.Random) -> None:
    """config.json of a sibling model: a number is another, and still possible."""
    try:
        config = json.loads(files["config.json"])
        key = chance.choice(sorted(key for key, value in config.items() if type(value) in (int, float, bool)))
    except (KeyError, ValueError, AttributeError, IndexError):
        return
    value = config[key]
    config[key] = not value if isinstance(value, bool) else chance.choice((value // 2, value * 2, value + 1, value - 1))
    files["config.json"] = json.dumps(config).encode()


def file_of_other_pack(files: Files, chance: random.Random) -> None:
    """config.json or the sidecar speaks of other bit rates and codebooks than the tensors are of."""
    name = chance.choice(("config.json", "quantization_config.json"))
    text = files.get(name, b"").decode(errors="replace")
    for old, new in chance.sample((('"mul1"', '"mcg"'), ('"bits": 3', '"bits": 5'), ("[8, 8, 48]", "[8, 8, 64]")), 2):
        text = text.replace(old, new)
    files[name] = text.encode()


def second_copy(files: Files, chance: random.Random) -> None:
    """The file beside a copy of it with other data, as an interrupted re-quantization leaves."""
    other: Files = {WEIGHTS: files.get(WEIGHTS, b"")}
    PLAUSIBLE[chance.choice(("bit_of_data", "lose_leaf", "module_of_other_rate"))](other, chance)
    files["model-00001-of-00001.safetensors"] = other[WEIGHTS]
    if chance.random() < 0.5:
        files.pop("model.safetensors.index.json", None)


PLAUSIBLE: dict[str, Callable[[Files, random.Random], None]] = {
    function.__name__: function
    for function in (
        *(exchange_alike, exchange_modules, tensor_of_another, marker_of_another, other_rate, module_of_other_rate),
        *(lose_leaf, lose_all_alike, hole, bit_of_data, data_of_other_type),
        *(config_of_another, file_of_other_pack, second_copy),
    )
}
"""Every kind of such damage by name."""
