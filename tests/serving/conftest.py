"""What the serving tests share: the golden packs, and copies of them with one fault."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

PACKS = Path(__file__).parents[1] / "data" / "packs"
MOE = ("mixtral-4.0-3inst", "qwen3_moe-3.0-mul1")
DENSE = sorted(path.name for path in PACKS.iterdir() if "emb4" not in path.name and path.name not in MOE)

Tensors = dict[str, torch.Tensor]


def golden_logits(name: str) -> tuple[list[int], np.ndarray]:
    """Token ids and exllamav3's own logits ``[tokens, vocabulary]`` of a pack."""
    golden = np.load(PACKS / name / "golden.npz")
    return [int(token) for token in golden["ids"]], golden["logits"].astype(np.float64)


def relative_error(ours: torch.Tensor, theirs: np.ndarray) -> float:
    """Frobenius norm of the difference over that of the reference."""
    values = ours.double().numpy()[:, : theirs.shape[1]]
    return float(np.linalg.norm(values - theirs) / np.linalg.norm(theirs))


def write_variant(
    parent: Path,
    name: str,
    tensors: Callable[[Tensors], None] | None = None,
    config: Callable[[dict], None] | None = None,
) -> Path:
    """A copy of a golden pack in a new folder of ``parent``, with its tensors and config.json changed by functions."""
    folder = parent / f"{name}-{len(list(parent.iterdir()))}"
    shutil.copytree(PACKS / name, folder)
    if tensors is not None:
        with safe_open(folder / "model.safetensors", "pt") as stored:
            loaded = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118  not a dict
        tensors(loaded)
        save_file(loaded, folder / "model.safetensors", {"format": "pt"})
        # The ledger describes the file as it was; without it the headers speak alone.
        (folder / "quantization_config.json").unlink(missing_ok=True)
    if config is not None:
        content = json.loads((folder / "config.json").read_text())
        config(content)
        (folder / "config.json").write_text(json.dumps(content))
    return folder


def drop_the_head(tensors: Tensors) -> None:
    """Leave a pack's head out, as where it is tied to the embedding."""
    for name in [name for name in tensors if name.startswith("lm_head.")]:
        del tensors[name]


@pytest.fixture
def variant(tmp_path: Path) -> Callable[..., Path]:
    """`write_variant` in a folder of the test's own."""
    return partial(write_variant, tmp_path)
