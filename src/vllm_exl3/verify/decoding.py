"""A sample of a pack's linears decoded by every implementation of this machine, and compared bit for bit.

The sample has linears of every (K, codebook) of the pack, because each such pair has a kernel of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack import Pack, StoredLinear
from vllm_exl3.pack.stored import BLOCK, TILE
from vllm_exl3.verify.decoders import Decoder
from vllm_exl3.verify.finding import Finding

__all__ = ["Decoding", "compare_decoders", "sample_linears"]

_EACH = 3
"""Linears of each (K, codebook): the first, one from the middle and the last."""

_LARGEST = 2048
"""Channels of either side that are decoded; what is beyond is decoded by the same instructions."""


@dataclass
class Decoding:
    """The result of the comparison.

    Attributes:
        findings: one for each linear and decoder that differs from the first decoder.
        decoders: names of what was compared.
        linears: keys of the sample.
        weights: weights that each decoder decoded.
    """

    findings: list[Finding] = field(default_factory=list)
    decoders: list[str] = field(default_factory=list)
    linears: list[str] = field(default_factory=list)
    weights: int = 0

    def figures(self) -> dict[str, Any]:
        """Entries of the report beside the findings."""
        return {"decoders": self.decoders, "linears": self.linears, "weights": self.weights}


def sample_linears(pack: Pack) -> list[StoredLinear]:
    """Up to three linears of every (K, codebook), in the order of the pack."""
    kinds: dict[tuple[int, int], list[StoredLinear]] = {}
    for linear in pack.linears.values():
        kinds.setdefault((linear.half_bits, int(linear.codebook)), []).append(linear)
    places = [
        (members, sorted({step * (len(members) - 1) // (_EACH - 1) for step in range(_EACH)}))
        for members in kinds.values()
    ]
    return [members[place] for members, chosen in places for place in chosen]


def compare_decoders(
    pack: Pack, decoders: Mapping[str, Decoder], progress: Callable[[float], None] = lambda linears: None
) -> Decoding:
    """Decode the sample with every decoder.

    Args:
        pack: an opened pack.
        decoders: by name; the first is what the others are compared with.
        progress: called after each linear, with 1.

    Returns:
        The comparison. A decoder that raises is a finding, too.
    """
    result = Decoding(decoders=list(decoders))
    (specification, expected_from), *others = decoders.items()
    for linear in sample_linears(pack):
        words = _corner(pack.read(linear.trellis.name))
        expected = expected_from(words, linear.half_bits, linear.codebook)
        result.linears.append(linear.key)
        result.weights += expected.size
        for name, decoder in others:
            try:
                found = decoder(words, linear.half_bits, linear.codebook)
            except (RuntimeError, ValueError) as error:
                result.findings.append(Finding("decode", linear.key, f"{name}: {error}", "decoded weights"))
                continue
            if difference := _difference(expected, found):
                says = f"{name} decodes {difference}"
                result.findings.append(Finding("decode", linear.key, says, f"the bits that {specification} decodes"))
        progress(1)
    return result


def _corner(words: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """The first rows and columns of tiles, in whole blocks of 128 channels."""
    most = _LARGEST // BLOCK * (BLOCK // TILE)
    return np.ascontiguousarray(words[:most, :most])


def _difference(expected: npt.NDArray[np.float16], found: npt.NDArray[np.float16]) -> str | None:
    if expected.shape != found.shape:
        return f"a matrix {list(found.shape)} instead of {list(expected.shape)}"
    # As integers, so that a zero of the other sign counts and a NaN equals itself.
    differing = np.argwhere(expected.view(np.uint16) != found.view(np.uint16))
    if not len(differing):
        return None
    row, column = differing[0]
    return (
        f"{len(differing)} of {expected.size} weights differently, first [{row}, {column}]: "
        f"{float(found[row, column]):.6g} instead of {float(expected[row, column]):.6g}"
    )
