"""The table of families. A row's kind is what may go wrong; the first of each kind runs in every ``make test``."""

from tests.families.deepseek_v4_rows import DEEPSEEK_V4
from tests.families.dense_rows import DENSE
from tests.families.moe_rows import MOE
from tests.families.vision_rows import VISION

__all__ = ["FAMILIES"]

FAMILIES = (*MOE, *DENSE, *VISION, *DEEPSEEK_V4)
