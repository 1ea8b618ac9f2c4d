"""A decode path of vLLM's that multiplies by the matrices of a model itself, which an EXL3 layer does not have.

``--additional-config '{"decode_backend": "latency_specialized"}'`` gives Kimi K3 and DeepSeek V4.1 a decode step that
reads ``weight`` of most of their layers, in the format of their own checkpoints. Decoding all of them would give up
what a pack is for.
"""

from vllm.config import VllmConfig

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["refuse_specialized_decode"]


def refuse_specialized_decode(config: VllmConfig | None, where: str) -> None:
    """Refuse this path for an EXL3 pack.

    Args:
        config: vLLM's current configuration, where there is one.
        where: the pack, for the error.

    Raises:
        Exl3PackError: the option is set.
    """
    extra = getattr(config, "additional_config", None)
    backend = extra.get("decode_backend", "auto") if isinstance(extra, dict) else "auto"
    if backend != "auto":
        raise Exl3PackError(
            found=f"decode_backend {backend!r} in --additional-config",
            expected="'auto': the other decode step multiplies by dense weights of attention and MLPs itself, which "
            "EXL3 layers do not have",
            where=where,
            remedy="Leave decode_backend out of --additional-config.",
        )
