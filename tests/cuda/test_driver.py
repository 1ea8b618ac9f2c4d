"""What the driver is told of a launch."""

import pytest

pytest.importorskip("cuda.bindings")

from vllm_exl3.cuda.driver import _launch_config


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("dependent", [False, True])
def test_a_launch_is_described_once(dependent: bool, cluster: int) -> None:
    config = _launch_config((8, 3), 128, 4096, 7, dependent, cluster)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (8, 3, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream)) == (4096, 7)
    assert config.numAttrs == dependent + (cluster > 1)
    assert [attribute.value.clusterDim.x for attribute in config.attrs[dependent:]] == [cluster] * (cluster > 1)
    assert all(attribute.value.programmaticStreamSerializationAllowed == 1 for attribute in config.attrs[:dependent])
    assert _launch_config((8, 3), 128, 4096, 7, dependent, cluster) is config


def test_launches_on_other_streams_are_others() -> None:
    first, second = (_launch_config((1, 1), 32, 0, stream, True, 1) for stream in (1, 2))
    assert (int(first.hStream), int(second.hStream)) == (1, 2)
