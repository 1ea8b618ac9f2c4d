"""``python -m vllm_exl3.tools.embed_quant``: the same as ``vllm-exl3 embed-quant``."""

import sys

from vllm_exl3.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["embed-quant"]
    main()
