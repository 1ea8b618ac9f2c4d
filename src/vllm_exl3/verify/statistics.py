"""Means over tokens with confidence intervals that respect that tokens of one sequence are not independent."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Estimate", "bootstrap_mean"]

_RESAMPLES = 2000
_SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % confidence interval.

    Attributes:
        mean: over all tokens.
        low: lower end.
        high: upper end.
    """

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    def exp(self) -> "Estimate":
        """The exponential of each: a perplexity from a mean negative log likelihood."""
        return Estimate(*(float(np.exp(value)) for value in (self.mean, self.low, self.high)))


def bootstrap_mean(values: npt.NDArray[Any]) -> Estimate:
    """The mean with a percentile bootstrap over sequences; equal values give equal intervals.

    Args:
        values: ``[sequences, tokens]``; sequences are resampled whole.

    Raises:
        ValueError: there are fewer than two sequences.
    """
    if values.ndim != 2 or len(values) < 2:
        raise ValueError(f"values: found shape {values.shape}, expected [sequences, tokens] with two sequences or more")
    each = values.astype(np.float64).mean(1)
    draws = np.random.default_rng(_SEED).integers(0, len(each), (_RESAMPLES, len(each)))
    low, high = np.quantile(each[draws].mean(1), (0.025, 0.975))
    return Estimate(float(each.mean()), float(low), float(high))
