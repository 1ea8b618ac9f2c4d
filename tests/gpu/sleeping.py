"""One engine that sleeps, wakes up and reloads; vLLM's allocator for that serves one engine a process."""

import sys
from pathlib import Path

from vllm.device_allocator.cumem import CuMemAllocator

from tests.gpu.engines import serving
from tests.serving.engine import PROMPTS, generate


def main(pack: Path, *, eager: bool) -> None:
    """Level 1 keeps the weights on the host; level 2 forgets them."""
    with serving(pack, enable_sleep_mode=True, enforce_eager=eager) as llm:
        expected = generate(llm, PROMPTS)
        assert CuMemAllocator.get_instance().get_current_usage() > 256 << 20
        for _ in range(2):
            llm.sleep(level=1)
            llm.wake_up()
            assert generate(llm, PROMPTS) == expected, "after level 1"
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        assert generate(llm, PROMPTS) == expected, "after level 2"


if __name__ == "__main__":
    main(Path(sys.argv[1]), eager=sys.argv[2] == "eager")
