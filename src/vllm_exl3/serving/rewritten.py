"""Tensors that a model class of vLLM computes anew while loading, which it cannot do to a trellis; refused by name.

Such a class finds tensors by names that end in ``weight`` and leaves an EXL3 one as it is: the model would answer
wrongly and say nothing.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.metadata import architectures, text_config
from vllm_exl3.pack.pack import Pack

__all__ = ["REWRITTEN", "refuse_rewritten"]


class _Rewrite(NamedTuple):
    """``keys`` matches what is rewritten, where ``condition`` (if any) is true in config.json."""

    keys: str
    condition: str
    what: str


_NORMALIZED = _Rewrite(r"(^|\.)lm_head$", "norm_head", "normalizes the columns of the head")
_INTERLEAVED = _Rewrite(r"\.experts\.", "", "interleaves gate and up of its experts")

REWRITTEN: Mapping[str, _Rewrite] = {
    "BailingMoeForCausalLM": _NORMALIZED,
    "BailingMoeV2ForCausalLM": _NORMALIZED,
    "OpenAIPrivacyFilterForTokenClassification": _INTERLEAVED,
}
"""Class name of ``config.json`` to what vLLM's class does. A test holds the list against vLLM's code."""


def refuse_rewritten(pack: Pack) -> None:
    """Refuse a pack whose EXL3 tensors vLLM's class would compute anew.

    Raises:
        Exl3PackError: naming the tensor and the class.
    """
    text = text_config(pack.config)
    for name in architectures(pack.config):
        rewrite = REWRITTEN.get(name)
        if rewrite is None or (
            rewrite.condition and not (text.get(rewrite.condition) or pack.config.get(rewrite.condition))
        ):
            continue
        key = next((key for key in pack.linears if re.search(rewrite.keys, key)), None)
        if key is not None:
            raise Exl3PackError(
                found=f"{key} in EXL3, and vLLM's class {name}, which {rewrite.what} while loading",
                expected="this tensor in 16 bits, to which vLLM can do that",
                where=pack.source,
                remedy="Use a pack that keeps it in 16 bits.",
            )
