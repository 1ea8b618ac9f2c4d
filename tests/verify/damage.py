"""Damages copies of golden packs in place: their headers stay as they are, so that every copy still parses."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.conftest import DATA
from vllm_exl3.pack import Pack, StoredLinear, StoredTensor
from vllm_exl3.tools.pack_writer import PackTensor, write_safetensors
from vllm_exl3.verify.against import expected_error
from vllm_exl3.verify.weights import decoded


def copy_of(name: str, folder: Path) -> Path:
    """A copy of a golden pack that may be damaged."""
    return Path(shutil.copytree(DATA / "packs" / name, folder / name))


def overwrite(pack: Path, tensor: StoredTensor, data: bytes, at: int = 0) -> None:
    """Replace bytes of one tensor, from its byte ``at`` on."""
    assert at + len(data) <= tensor.nbytes
    with (pack / tensor.file).open("r+b") as file:
        file.seek(tensor.start + at)
        file.write(data)


def raw(pack: Path, tensor: StoredTensor) -> bytes:
    """The bytes of one tensor."""
    return Pack.open(pack).read_many([tensor])[0]


def linear(pack: Path, ending: str) -> StoredLinear:
    """The first linear whose name ends so."""
    return next(found for key, found in Pack.open(pack).linears.items() if key.endswith(ending))


def set_scale(leaf: str, value: float, count: int = 1) -> Callable[[Path], str]:
    """A damage that sets the first ``count`` (-1: all) of the scales in ``suh`` or ``svh``."""

    def damage(pack: Path) -> str:
        tensor = getattr(linear(pack, "0.self_attn.q_proj"), leaf)
        overwrite(pack, tensor, np.full(count if count >= 0 else tensor.shape[0], value, "<f2").tobytes())
        return tensor.name

    return damage


def fill(value: bytes, start: float = 0.0) -> Callable[[Path], str]:
    """A damage that fills a trellis with one byte value, from a share of it on."""

    def damage(pack: Path) -> str:
        tensor = linear(pack, "1.self_attn.o_proj").trellis
        at = int(start * tensor.nbytes) // 512 * 512
        overwrite(pack, tensor, value * (tensor.nbytes - at), at)
        return tensor.name

    return damage


def randomize(pack: Path) -> str:
    """Random bytes for a trellis."""
    tensor = linear(pack, "1.self_attn.q_proj").trellis
    overwrite(pack, tensor, np.random.default_rng(0).bytes(tensor.nbytes))
    return tensor.name


def bytes_of_embedding(pack: Path) -> str:
    """16-bit weights where a trellis should be."""
    tensor = linear(pack, "1.self_attn.q_proj").trellis
    embedding = next(value for key, value in Pack.open(pack).dense.items() if key.endswith("embed_tokens"))
    overwrite(pack, tensor, raw(pack, embedding)[: tensor.nbytes])
    return tensor.name


def bytes_of_head(pack: Path) -> str:
    """The head's trellis, which has another K, in another linear's place."""
    tensor, head = linear(pack, "1.self_attn.q_proj").trellis, linear(pack, "lm_head").trellis
    overwrite(pack, tensor, raw(pack, head)[: tensor.nbytes])
    return tensor.name


def duplicate(pack: Path) -> str:
    """One layer's trellis written over another's."""
    source, target = (linear(pack, f"{layer}.self_attn.q_proj").trellis for layer in (0, 1))
    overwrite(pack, target, raw(pack, source))
    return target.name


def swap(pack: Path) -> str:
    """Two linears of one shape in each other's place."""
    one, other = (linear(pack, f"{layer}.mlp.up_proj") for layer in (0, 1))
    for leaf in ("trellis", "suh", "svh"):
        left, right = getattr(one, leaf), getattr(other, leaf)
        data = raw(pack, left), raw(pack, right)
        overwrite(pack, left, data[1])
        overwrite(pack, right, data[0])
    return one.key


def flip_signs(pack: Path) -> str:
    """The signs of one scale vector, half of them flipped."""
    flipped = linear(pack, "1.self_attn.v_proj")
    scales = np.frombuffer(raw(pack, flipped.suh), "<f2").copy()
    scales[::2] *= -1
    overwrite(pack, flipped.suh, scales.tobytes())
    return flipped.key


def foreign_head(pack: Path) -> str:
    """A head that belongs to no such model: its columns in another order."""
    head = linear(pack, "lm_head")
    trellis = np.frombuffer(raw(pack, head.trellis), "<i2").reshape(head.trellis.shape)
    overwrite(pack, head.trellis, np.roll(trellis, 3, axis=1).tobytes())
    return head.key


def neighbour_k(pack: Path) -> str:
    """A trellis of the head's K in place of a linear's own, with a header to match."""
    head, target = linear(pack, "lm_head"), linear(pack, "1.self_attn.q_proj")
    trellis = np.frombuffer(raw(pack, head.trellis), "<i2").reshape(head.trellis.shape)
    trellis = trellis[:, : target.trellis.shape[1]]
    tensors = []
    for tensor in Pack.open(pack).tensors.values():
        data = raw(pack, tensor)
        shape = tensor.shape
        words = f"u{tensor.nbytes // int(np.prod(shape, dtype=int))}"
        make = functools.partial(np.frombuffer, data, words)
        if tensor.name == target.trellis.name:
            make, shape = functools.partial(np.array, trellis), trellis.shape
        tensors.append(PackTensor(tensor.name, tensor.dtype, shape, make))
    write_safetensors(pack / target.trellis.file, tensors)
    return target.key


def source_of(pack: Path, folder: Path) -> Path:
    """A 16-bit model that the pack could have been made from: its decoded weights and the error of its K."""
    random = np.random.default_rng(0)
    opened = Pack.open(pack)
    tensors = []
    for key, found in opened.linears.items():
        weight = decoded(opened, found).T
        noise = random.standard_normal(weight.shape, np.float32) * weight.std() * expected_error(found.bits)
        weight = (weight + noise).astype(np.float16)
        tensors.append(PackTensor(f"{key}.weight", "F16", weight.shape, functools.partial(np.array, weight)))
    for key, dense in opened.dense.items():
        values = opened.read(dense.name).astype(np.float16)
        tensors.append(PackTensor(f"{key}.weight", "F16", values.shape, functools.partial(np.array, values)))
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((pack / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
