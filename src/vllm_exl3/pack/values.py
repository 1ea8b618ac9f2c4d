"""Checks on values, for the moment they are read: marker scalars, and the scales of a linear.

Headers cannot show a NaN. `check_scales` is called while loading, before the engine serves.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.assemble import MARKERS
from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["check_marker", "check_scales"]


def check_marker(name: str, value: int, *, file: str = "") -> None:
    """Refuse a codebook marker that does not hold its codebook's multiplier.

    Args:
        name: full tensor name, ending in ``.mcg`` or ``.mul1``.
        value: the stored scalar, signed or unsigned.
        file: where it is stored, for the message.

    Raises:
        Exl3PackError: the value names no codebook that can be decoded.
    """
    codebook, multiplier = MARKERS[name.rpartition(".")[2]]
    if value & 0xFFFFFFFF != multiplier:
        raise Exl3PackError(
            found=f"0x{value & 0xFFFFFFFF:08X}",
            expected=f"0x{multiplier:08X}, the multiplier of {codebook.label}",
            where=_place(name, file),
            remedy="The pack was coded with another multiplier or is damaged: fetch it again or quantize it anew.",
        )


def check_scales(name: str, scales: npt.NDArray[Any], *, file: str = "") -> None:
    """Refuse ``suh`` or ``svh`` values that would make a layer's output meaningless.

    Single zeros are normal: a channel without weights has a zero scale.

    Args:
        name: full tensor name, for the message.
        scales: the values, F16 ``[channels]``; packed signs (integers) pass.
        file: where they are stored, for the message.

    Raises:
        Exl3PackError: a NaN or infinity occurs, or every value is zero.
    """
    if not np.issubdtype(scales.dtype, np.floating):
        return
    bad = np.flatnonzero(~np.isfinite(scales))
    if bad.size:
        found = f"{bad.size} values that are NaN or infinite, the first at channel {int(bad[0])}"
    elif scales.size and not scales.any():
        found = "zeros only"
    else:
        return
    raise Exl3PackError(
        found=found,
        expected="finite scales that are not all zero",
        where=_place(name, file),
        remedy="The file is damaged or the quantizer failed on this layer: fetch the pack again or quantize it anew.",
    )


def _place(name: str, file: str) -> str:
    return f"{name} in {file}" if file else name
