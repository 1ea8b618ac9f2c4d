"""GPUs that the kernels do not run on are refused by name."""

from typing import Any

import pytest
from vllm.platforms.interface import DeviceCapability

from vllm_exl3.serving import capability
from vllm_exl3.serving.config import Exl3Config


class Platform:
    """Stands for vLLM's platform with these GPUs."""

    def __init__(self, *gpus: tuple[str, int, int] | None, cuda: bool = True) -> None:
        self.gpus, self.cuda = gpus, cuda

    def is_cuda(self) -> bool:
        return self.cuda

    def get_device_capability(self, index: int) -> DeviceCapability | None:
        gpu = self.gpus[index]
        return None if gpu is None else DeviceCapability(*gpu[1:])

    def get_device_name(self, index: int) -> str:
        gpu = self.gpus[index]
        assert gpu is not None
        return gpu[0]


H200, A100, T4 = ("NVIDIA H200", 9, 0), ("NVIDIA A100", 8, 0), ("Tesla T4", 7, 5)


@pytest.mark.parametrize(
    ("platform", "named"),
    [
        (Platform(H200, A100), None),
        (Platform(None), None),
        (Platform(), None),
        (Platform(T4, cuda=False), None),
        (Platform(T4), "cuda:0 Tesla T4 of compute capability 7.5, expected 8.0"),
        (Platform(H200, T4), "cuda:1 Tesla T4 of compute capability 7.5, expected 8.0"),
    ],
    ids=["new", "unknown", "none", "no CUDA", "old", "old beside new"],
)
def test_old_gpus_are_refused_by_name(platform: Platform, named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "current_platform", platform)
    monkeypatch.setattr(capability.torch.cuda, "device_count", lambda: len(platform.gpus))
    declared: dict[str, Any] = {"quant_method": "exl3"}
    if named is None:
        assert Exl3Config.from_config(declared).raw == declared
    else:
        with pytest.raises(RuntimeError, match=named) as refusal:
            Exl3Config.from_config(declared)
        assert "CUDA_VISIBLE_DEVICES" in str(refusal.value)
