"""What registering leaves behind in a fresh process: no name that vLLM refuses, and nothing heavy imported.

vLLM's ``--fail-on-environ-validation`` refuses unknown names that begin with ``VLLM_``.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

REGISTER = """
import json
import os
import sys
import vllm_exl3
from vllm import envs
from vllm.platforms import current_platform
from vllm_exl3 import env
vllm_exl3.register()
modules = sorted(name for name in sys.modules if name.startswith("vllm_exl3."))
unknown = {name for name in os.environ if name.startswith("VLLM_")} - envs.environment_variables.keys()
if hasattr(type(current_platform), "validate_environ"):  # since vLLM 0.31
    current_platform.validate_environ(True)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
attention = AttentionBackendEnum.TRITON_ATTN.get_path()
folder = env.METRICS_FOLDER.get()
print(json.dumps({"unknown": sorted(unknown), "modules": modules, "attention": attention, "folder": folder}))
"""


@pytest.fixture(scope="module")
def registered() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "EXL3_"))}
    found = subprocess.run(
        [sys.executable, "-c", REGISTER], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout.splitlines()[-1])


def test_registering_sets_no_variable_that_vllm_refuses(registered: dict[str, Any]) -> None:
    assert registered["unknown"] == [] and registered["folder"]


def test_registering_imports_no_attention(registered: dict[str, Any]) -> None:
    assert registered["attention"] == "vllm_exl3.serving.kv.Backend"
    heavy = {"vllm_exl3.serving.kv", "vllm_exl3.attention.attend", "vllm_exl3.serving.kv_cpu"}
    assert not heavy & set(registered["modules"])
