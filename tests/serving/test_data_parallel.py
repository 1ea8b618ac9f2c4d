"""Experts over ranks that share nothing else: data parallelism, and files of which each rank needs a part.

With two replicas vLLM gathers tokens before the experts and scatters sums after them. Its communicator
for CPUs has no collectives for that (NotImplementedError in 0.30 to 0.33); `gloo` lends them.
"""

import pytest

from tests.serving.conftest import PACKS
from tests.serving.engine import PROMPTS, engine, generate, generate_on_two_ranks

pytestmark = pytest.mark.slow

QWEN, MIXTRAL = "qwen3_moe-3.0-mul1", "mixtral-4.0-3inst"
"""Experts of one block of 128 channels, and of three."""


def test_ranks_that_do_not_read_others_experts() -> None:
    """vLLM's filter passes by dense experts only: the trellises of others arrive, and are dropped."""
    with engine(PACKS / QWEN) as llm:
        alone = generate(llm, PROMPTS, 24)
    options = {"enable_expert_parallel": True, "enable_ep_weight_filter": True}
    assert generate_on_two_ranks(PACKS / QWEN, **options) == alone


@pytest.mark.parametrize(("name", "expert_parallel"), [(QWEN, True), (MIXTRAL, True), (MIXTRAL, False)])
def test_two_replicas_give_one_s_tokens(name: str, expert_parallel: bool) -> None:
    """Without expert parallelism, both hold part of every expert. One has a prompt more, and the other waits for it."""
    with engine(PACKS / name) as llm:
        alone = generate(llm, PROMPTS, 24)
    options = {"data_parallel_size": 2, "enable_expert_parallel": expert_parallel}
    assert generate_on_two_ranks(PACKS / name, **options) == alone
