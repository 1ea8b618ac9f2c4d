"""vLLM's ``--fail-on-environ-validation`` refuses unknown names that begin with ``VLLM_``: registering sets none."""

import os
import subprocess
import sys

REGISTER = """
import os
import vllm_exl3
from vllm import envs
from vllm.platforms import current_platform
from vllm_exl3 import env
vllm_exl3.register()
unknown = {name for name in os.environ if name.startswith("VLLM_")} - envs.environment_variables.keys()
assert not unknown, unknown
if hasattr(type(current_platform), "validate_environ"):  # since vLLM 0.31
    current_platform.validate_environ(True)
assert env.METRICS_FOLDER.get()
"""


def test_registering_sets_no_variable_that_vllm_refuses() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "EXL3_"))}
    subprocess.run([sys.executable, "-c", REGISTER], env=environment, check=True)
