"""What is on disk: EXL3 packs read through their headers. Neither torch nor vLLM is imported here."""

from vllm_exl3.pack.errors import Exl3PackError, Exl3PackWarning
from vllm_exl3.pack.names import NameResolver
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.parts import Part, Resolution
from vllm_exl3.pack.stored import (
    BLOCK,
    TILE,
    Codebook,
    ExpertGroup,
    StoredLinear,
    StoredNgramTable,
    StoredRowTable,
    StoredScaledTable,
    StoredTensor,
)

__all__ = [
    "BLOCK",
    "TILE",
    "Codebook",
    "Exl3PackError",
    "Exl3PackWarning",
    "ExpertGroup",
    "NameResolver",
    "Pack",
    "Part",
    "Resolution",
    "StoredLinear",
    "StoredNgramTable",
    "StoredRowTable",
    "StoredScaledTable",
    "StoredTensor",
]
