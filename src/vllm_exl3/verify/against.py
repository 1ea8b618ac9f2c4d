"""Every linear of a pack against the 16-bit model's of the same name, one at a time.

Expected errors are those of the format's Viterbi search on Gaussian weights (mean squared error 0.0677, 0.0184 and
0.0045 at K = 2, 3, 4: a factor of four for each bit). Calibrated packs trade some of it for the layer's output.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_exl3.pack import Pack, StoredLinear
from vllm_exl3.verify.finding import Finding
from vllm_exl3.verify.weights import DenseFolder, Floats, decoded, find_weight

__all__ = ["LayerError", "compare_weights", "expected_error"]

_SLACK = 2.0
"""How many times the expected error a linear may have; the packs looked at have at most 1.35 times."""

_SAMPLED_ROWS = 128
_RELATED = 0.5


@dataclass(frozen=True)
class LayerError:
    """One linear beside its source.

    Attributes:
        key: the module's name.
        bits: K.
        error: norm of the difference over the norm of the source's weight, without padding.
        expected: the same for Gaussian weights at this K.
        weights: weights compared.
    """

    key: str
    bits: float
    error: float
    expected: float
    weights: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


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
    """
    errors, findings, missing = [], [], []
    for key, linear in pack.linears.items():
        original = find_weight(source, f"{key}.weight", lambda name: _rows(pack, name))
        if original is None:
            missing.append(key)
            continue
        found = decoded(pack, linear).T
        if not _fits(original, linear):
            findings.append(_misfit(key, original, linear))
            continue
        values = found[: original.shape[0], : original.shape[1]]
        norm = float(np.linalg.norm(original))
        error = float(np.linalg.norm(values - original)) / norm if norm else float(np.linalg.norm(values))
        layer = LayerError(key, linear.bits, error, expected_error(linear.bits), original.size)
        errors.append(layer)
        if not error < _SLACK * layer.expected:
            findings.append(_outlier(layer, values, original, _twins(pack, source, key, original)))
        progress(linear.in_features * linear.out_features)
    return errors, findings, missing


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


def _outlier(layer: LayerError, values: Floats, original: Floats, others: Iterator[tuple[str, Floats]]) -> Finding:
    """A fault with its likeliest cause."""
    found = f"relative error {layer.error:.3g}"
    if (flipped := _flipped(values, original)) is not None:
        found += f"; {flipped}"
    else:
        rows = values[:_SAMPLED_ROWS]
        name = next((name for name, other in others if _cosine(rows, other) > _RELATED), None)
        found += f"; these are the weights of {name}" if name else ""
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


def _cosine(one: Floats, other: Floats) -> float:
    rows = min(len(one), len(other))
    one, other = one[:rows], other[:rows]
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float((one * other).sum()) / norms if norms else 0.0


def _twins(pack: Pack, source: DenseFolder, key: str, original: Floats) -> Iterator[tuple[str, Floats]]:
    """Other weights of the source with the same shape, first rows only."""
    for name in pack.linears:
        if name != key and f"{name}.weight" in source.names():
            other = source.read(f"{name}.weight")
            if other.shape == original.shape:
                yield name, other[:_SAMPLED_ROWS]
