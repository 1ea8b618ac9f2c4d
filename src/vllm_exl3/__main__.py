"""``python -m vllm_exl3``: the same as the command ``vllm-exl3``, for where that is not on the path."""

from vllm_exl3.cli import main

if __name__ == "__main__":
    main()
