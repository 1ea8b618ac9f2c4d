"""Damages copies of golden packs in place: their headers stay as they are, so that every copy still parses."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.conftest import DATA
from vllm_exl3.pack import Pack, StoredLinear, StoredTensor


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
