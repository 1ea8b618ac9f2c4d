"""Every linear of a pack against the 16-bit model's of the same name, one at a time.

Expected errors are those of the format's Viterbi search on Gaussian weights (mean squared error 0.0677, 0.0184 and
0.0045 at K = 2, 3, 4: a factor of four for each bit). Calibrated packs trade some of it for the layer's output.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack import Exl3PackError, Pack, StoredLinear
from vllm_exl3.verify.finding import Finding
from vllm_exl3.verify.weights import DenseFolder, Floats, decoded, find_weight

__all__ = ["LayerError", "compare_weights", "expected_error"]

_SLACK = 2.0
"""How many times the expected error a linear may have; the packs looked at have at most 1.35 times."""

_ROWS, _COLUMNS = 8, 128
"""The corner of a weight by which it is recognised; of unrelated ones, a cosine has a standard deviation of 1/32."""

_RELATED = 0.5


@dataclass(frozen=True)
class LayerError:
    """One linear beside its source.

    Attributes:
        key: the module's name.
        bits: K.
        error: norm of the difference over the norm of the source's weight, without padding; NaN or infinite where the
            pack's weight is.
        expected: the same for Gaussian weights at this K.
        weights: weights compared.
    """

    key: str
    bits: float
    error: float
    expected: float
    weights: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON, which has null for an error that is not finite."""
        return {**asdict(self), "error": self.error if math.isfinite(self.error) else None}


def expected_error(bits: float) -> float:
    """Relative error of Gaussian weights at K, interpolated between the format's measured ones."""
    squared = np.interp(bits, (1, 2, 3, 4), np.log2([0.25, 0.0677, 0.0184, 0.0045])) - 2 * max(0.0, bits - 4)
    return float(2.0 ** (squared / 2))


def compare_weights(
    pack: Pack, source: DenseFolder, progress: Callable[[float], None] = lambda weights: None
) -> tuple[list[LayerError], list[Finding], list[str]]:
    """Decode and compare every linear.

    Args:
        pack: the pack.
        source: the 16-bit model.
        progress: called with the number of weights that were compared since the last call.

    Returns:
        The errors, the faults, and the linears for which the source has no tensor.

    Raises:
        Exl3PackError: a weight of the source is not finite, or the source is quantized itself.
    """
    errors, findings, missing = [], [], []
    twins = _Twins(pack, source)
    for key, linear in pack.linears.items():
        original = find_weight(source, f"{key}.weight", lambda name: _rows(pack, name))
        if original is None:
            missing.append(key)
        elif not _fits(original, linear):
            findings.append(_misfit(key, original, linear))
        else:
            layer, values = _compare(pack, linear, original, source.label)
            errors.append(layer)
            if not layer.error < _SLACK * layer.expected:
                findings.append(_outlier(layer, values, original, twins))
        progress(linear.in_features * linear.out_features)
    return errors, findings, missing


def _compare(pack: Pack, linear: StoredLinear, original: Floats, label: str) -> tuple[LayerError, Floats]:
    """The error of one linear, and its weight without padding."""
    values = decoded(pack, linear).T[: original.shape[0], : original.shape[1]]
    norm = float(np.linalg.norm(original))
    if not math.isfinite(norm):
        raise Exl3PackError(
            found="values that are not finite",
            expected="the unquantized model's weights",
            where=f"{linear.key}.weight in {label}",
            remedy="Fetch the 16-bit model again: nothing can be compared with it as it is.",
        )
    error = float(np.linalg.norm(values - original)) / (norm or 1.0)
    return LayerError(linear.key, linear.bits, error, expected_error(linear.bits), original.size), values


def _rows(pack: Pack, name: str) -> int | None:
    linear = pack.linears.get(name.removesuffix(".weight"))
    return None if linear is None else linear.out_features


def _fits(original: Floats, linear: StoredLinear) -> bool:
    stored = linear.out_features, linear.in_features
    return original.ndim == 2 and all(
        0 <= large - small < 128 for small, large in zip(original.shape, stored, strict=True)
    )


def _misfit(key: str, original: Floats, linear: StoredLinear) -> Finding:
    found = f"a linear of {linear.out_features} x {linear.in_features}"
    return Finding("weights", key, found, f"{list(original.shape)} padded to multiples of 128, as the source has it")


def _outlier(layer: LayerError, values: Floats, original: Floats, twins: "_Twins") -> Finding:
    """A fault with its likeliest cause."""
    found = f"relative error {layer.error:.3g}"
    if (flipped := _flipped(values, original)) is not None:
        found += f"; {flipped}"
    elif (name := twins.find(layer.key, values)) is not None:
        found += f"; these are the weights of {name}"
    return Finding("weights", layer.key, found, f"about {layer.expected:.2g} at K = {layer.bits:g}")


def _flipped(values: Floats, original: Floats) -> str | None:
    """Input or output channels whose weights are the source's with the other sign: each has its own in suh or svh."""
    for axis, kind in ((1, "output"), (0, "input")):
        norms = np.linalg.norm(values, axis=axis) * np.linalg.norm(original, axis=axis)
        cosine = (values * original).sum(axis) / np.maximum(norms, 1e-30)
        flipped = int((cosine < -_RELATED).sum())
        if flipped and np.median(np.abs(cosine[norms > 0])) > _RELATED:
            return f"the signs of {flipped} of {len(cosine)} {kind} channels are flipped"
    return None


class _Twins:
    """Finds whose weights a linear has, by a corner of every weight of that shape in the 16-bit model.

    Corners of one shape are read once, when a linear of it is first looked for: a pack in which every linear is wrong,
    such as one of another model, takes no longer than one reading of them.
    """

    def __init__(self, pack: Pack, source: DenseFolder) -> None:
        self._source = source
        self._names: dict[tuple[int, ...], list[str]] = {}
        known = source.names()
        for key in pack.linears:
            if f"{key}.weight" in known:
                self._names.setdefault(source.shape(f"{key}.weight"), []).append(key)
        self._corners: dict[tuple[int, ...], npt.NDArray[np.float16]] = {}

    def find(self, key: str, values: Floats) -> str | None:
        """The linear other than ``key`` whose weights are most like ``values``, or None where none is like them."""
        names = self._names.get(values.shape, [])
        if len(names) < 2:
            return None
        if values.shape not in self._corners:
            read = self._source.read_rows
            self._corners[values.shape] = np.stack([_corner(read(f"{name}.weight", 0, _ROWS)) for name in names])
        cosines = self._corners[values.shape].astype(np.float32) @ _corner(values).astype(np.float32)
        best = max((cosine, name) for cosine, name in zip(cosines, names, strict=True) if name != key)
        return best[1] if best[0] > _RELATED else None


def _corner(values: Floats) -> npt.NDArray[np.float16]:
    """The first rows and columns as a unit vector; zeros where they are zero or not finite."""
    flat = values[:_ROWS, :_COLUMNS].reshape(-1).astype(np.float64)
    norm = float(np.linalg.norm(flat))
    scale = 1 / norm if norm and math.isfinite(norm) else 0.0
    return np.nan_to_num(flat * scale, posinf=0.0, neginf=0.0).astype(np.float16)
