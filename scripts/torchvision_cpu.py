"""Lets PyPI's torchvision be imported beside a CPU build of torch: ``python scripts/torchvision_cpu.py``.

PyPI has torchvision for CUDA only. Beside a CPU torch its library ``_C.so`` cannot be loaded, which torchvision takes
for a build without compiled operators, but for two of them: `_meta_registrations` describes ``nms`` and ``qnms`` all
the same, and fails as they do not exist. This declares the two in the installed ``extension.py``, without an
implementation: what vLLM and transformers use of torchvision (resizing and normalizing images) is Python. A
torchvision that can be imported is left as it is.
"""

import argparse
import importlib.metadata
import subprocess
import sys
from pathlib import Path

__all__ = ["declare_operators", "imports"]

_MARK = "# Declared by vllm-exl3's scripts/torchvision_cpu.py"
_DECLARATION = f"""

{_MARK}: _C.so is for CUDA.
if not _has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def imports() -> bool:
    """True if a new process can import torchvision's transforms."""
    command = [sys.executable, "-c", "import torchvision.transforms.v2.functional"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def declare_operators(extension: Path) -> None:
    """Add the declaration to ``extension.py``, in a file of its own: the installed one may be shared by hard links.

    Args:
        extension: the installed file.
    """
    text = extension.read_text(encoding="utf-8")
    if _MARK not in text:
        extension.unlink()
        extension.write_text(text + _DECLARATION, encoding="utf-8")


def main() -> int:
    """Declare the operators if torchvision is installed and cannot be imported."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    try:
        distribution = importlib.metadata.distribution("torchvision")
    except importlib.metadata.PackageNotFoundError:
        print("torchvision is not installed")
        return 1
    if not imports():
        declare_operators(Path(str(distribution.locate_file("torchvision/extension.py"))))
    if not imports():
        print(f"torchvision {distribution.version} cannot be imported beside the installed torch")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
