"""What shortens the start of engines that are only measured."""

__all__ = ["inspect_models_here", "leave_out_top_k"]


def leave_out_top_k() -> None:
    """Let vLLM's warm-up sort for its top-k and top-p instead of compiling a Triton kernel for 128k tokens.

    That takes a minute of a start. Greedy decoding, which is what is timed, calls neither.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False


def inspect_models_here() -> None:
    """Let vLLM look at a model's class in this process instead of one of its own, which imports all of vLLM again.

    That takes half a minute of a first start. vLLM does it so that forked workers find CUDA untouched; engines of
    benchmarks and tests run in the process that starts them.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
