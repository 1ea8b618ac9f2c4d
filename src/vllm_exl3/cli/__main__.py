"""``python -m vllm_exl3.cli``: the same as ``vllm-exl3``."""

from vllm_exl3.cli import main

if __name__ == "__main__":
    main()
