"""vLLM's ``--fail-on-environ-validation`` refuses unknown names that begin with ``VLLM_``: registering sets none."""

import os
import subprocess
import sys

REGISTER = """
import os
import vllm_exl3
from vllm.platforms import current_platform
from vllm_exl3 import env
vllm_exl3.register()
current_platform.validate_environ(True)
assert env.METRICS_FOLDER.get()
"""


def test_registering_sets_no_variable_that_vllm_refuses() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "EXL3_"))}
    subprocess.run([sys.executable, "-c", REGISTER], env=environment, check=True)
