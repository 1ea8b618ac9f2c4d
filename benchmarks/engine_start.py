"""What shortens the start of engines that are only measured."""

__all__ = ["leave_out_top_k"]


def leave_out_top_k() -> None:
    """Let vLLM's warm-up sort for its top-k and top-p instead of compiling a Triton kernel for 128k tokens.

    That takes a minute of a start. Greedy decoding, which is what is timed, calls neither.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
