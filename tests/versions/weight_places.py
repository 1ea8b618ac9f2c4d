"""Finds every place in vLLM's model code that reads or changes a layer's weights itself, past its quantization method.

Such code knows tensors by their names and parameters by ``weight``: it skips an EXL3 layer's, or finds none. Each place
is reviewed once, in ``weight_places.json``; a release that brings another one fails the test that compares them.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

__all__ = ["places"]

FOLDERS = ("model_executor/models", "models", "model_executor/layers", "model_executor/model_loader", "lora", "v1")
_SKIPPED = re.compile(
    r"(^|/)(amd|xpu|rocm\w*|quantization|fused_moe|ops|rotary_embedding)(/|\.py$)|/(layernorm|conv)\.py$"
)
"""Other platforms, other formats' methods, kernels, and layers that are not linears."""

_READ = {"weight", "weight_packed", "weight_scale", "weight_scale_inv", "qweight"}
_NO_LINEAR = re.compile(r"norm|embed|conv|patch|position|query_\d|^ln_|^bn|sink")
"""Modules whose weight is no matrix of a linear."""

_LOADER = re.compile(r"load|weight|remap|permute|transform|convert|split|merge|fold|absorb")
_CHECKPOINT = {"weights", "loaded_weight", "state_dict", "loaded_weights", "named_weights"}
"""Names of parameters that are a checkpoint's tensors."""

_CHANGES = {
    *(
        "view",
        "reshape",
        "transpose",
        "permute",
        "chunk",
        "split",
        "narrow",
        "unflatten",
        "flatten",
        "t",
        "index_select",
    ),
    *("roll", "flip", "repeat_interleave", "repeat", "tensor_split", "mul_", "div_", "add_", "sub_", "neg", "exp"),
    *("cat", "stack", "normalize", "matmul", "einsum", "concat"),
}
_LOADED = re.compile(
    r"weight|tensor|^w$|^w_?[qkv]$|^[qkv]$|^qkv$|^data$|^loaded|^param|^t$|^values?$|^shard|^chunk|^packed|^scale"
)
"""Names of variables that hold a loaded tensor."""


def places(root: Path) -> dict[str, list[str]]:
    """What the functions of a vLLM's model code do to weights.

    Args:
        root: the ``vllm`` package.

    Returns:
        ``file::function`` to the expressions in it that read or change a weight, sorted.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not _SKIPPED.search(name):
                visitor = _Visitor(name, found)
                visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
    return {where: sorted(expressions) for where, expressions in sorted(found.items())}


class _Visitor(ast.NodeVisitor):
    """Collects the expressions of one file."""

    def __init__(self, file: str, found: defaultdict[str, set[str]]) -> None:
        self._file = file
        self._found = found
        self._names: list[str] = []
        self._bases: list[str] = []
        self._takes_weights: list[bool] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bases.append(" ".join(ast.unparse(base) for base in node.bases))
        self._inside(node.name, node)
        self._bases.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node.name, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _READ and self._may_be_linear(node.value):
            self._note(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES and self._is_loader():
            operands = [node.func.value, *node.args]
            if any(_holds_a_weight(operand) for operand in operands) and not _splits_a_name(node):
                self._note(node)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, (ast.Mult, ast.Div, ast.Add, ast.Sub, ast.MatMult)) and self._is_loader():
            sides = (node.left, node.right)
            if any(
                isinstance(side, ast.Name) and side.id in ("loaded_weight", "weight", "w", "tensor") for side in sides
            ):
                self._note(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._is_loader() and isinstance(node.target, ast.Name) and node.target.id in ("loaded_weight", "weight"):
            self._note(node)
        self.generic_visit(node)

    def _inside(self, name: str, node: ast.AST) -> None:
        self._names.append(name)
        self._takes_weights.append(_takes_weights(node))
        self.generic_visit(node)
        self._takes_weights.pop()
        self._names.pop()

    def _is_loader(self) -> bool:
        return any(self._takes_weights) or any(_LOADER.search(name) for name in self._names)

    def _may_be_linear(self, owner: ast.expr) -> bool:
        name = ast.unparse(owner).rpartition(".")[2]
        if name == "self":
            return bool(self._bases) and "Linear" in self._bases[-1]
        return _NO_LINEAR.search(ast.unparse(owner)) is None

    def _note(self, node: ast.AST) -> None:
        self._found[f"{self._file}::{'.'.join(self._names)}"].add(re.sub(r"\s+", " ", ast.unparse(node))[:100])


def _takes_weights(node: ast.AST) -> bool:
    """True if a function is given a checkpoint's tensors, whatever its own name is."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return any(argument.arg in _CHECKPOINT for argument in (*node.args.args, *node.args.kwonlyargs))


def _holds_a_weight(node: ast.expr) -> bool:
    """Whether an operand is, or is made of, a variable that holds a loaded tensor."""
    return any(_LOADED.search(name) for name in _names(node))


def _names(node: ast.expr) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id


def _splits_a_name(node: ast.Call) -> bool:
    """Whether this is `str.split`."""
    assert isinstance(node.func, ast.Attribute)
    owner = ast.unparse(node.func.value)
    return node.func.attr == "split" and (
        "name" in owner
        or any(isinstance(argument, ast.Constant) and isinstance(argument.value, str) for argument in node.args)
    )
