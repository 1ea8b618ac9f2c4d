"""What users set of the attention over the int4 KV cache."""

from dataclasses import dataclass

from vllm_exl3 import env
from vllm_exl3.attention.shape import KernelShape

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What the user set.

    Attributes:
        decode: how decoding is cut; None takes what was measured.
        prefill: how Triton prefill is cut; None takes what was measured.
        flash_prefill: whether FlashAttention may prefill.
        batch_invariant: whether a request's bits must not depend on the rest of its batch.
        native: whether CUDA kernels may decode; they do not where the user set ``decode``.
    """

    decode: KernelShape | None
    prefill: KernelShape | None
    flash_prefill: bool
    batch_invariant: bool
    native: bool = True

    @classmethod
    def from_environment(cls, batch_invariant: bool) -> "Settings":
        """The environment variables' values.

        Raises:
            ValueError: one is set to something it does not take.
        """
        return cls(env.INT4_DECODE.get(), env.INT4_TILES.get(), env.INT4_FA_PREFILL.get(), batch_invariant)
