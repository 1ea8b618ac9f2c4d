"""Structures of launch arguments and constants, read from the kernels' sources, which alone declare them.

A structure's declaration is a list of members of fixed width, so its C text says all that ctypes needs. Without torch,
a compiler or a GPU.
"""

import ast
import contextlib
import ctypes
import functools
import operator
import re
from collections.abc import Callable
from typing import Any

from vllm_exl3.cuda.compiler import INCLUDE, kernel_sources

__all__ = ["constants", "enumerators", "members"]

_TYPES: dict[str, Any] = {
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "int": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "float": ctypes.c_float,
}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_MEMBER = re.compile(r"(?:const )?(?P<type>\w+)(?P<pointer>\*?) (?P<names>.+)", re.DOTALL)
_CONSTANT = re.compile(r"^constexpr (?:u32|int) (?P<list>\w+ = [^;]+);", re.MULTILINE)


@functools.cache
def _text(file: str) -> str:
    """A header of the kernels without its comments."""
    return _COMMENT.sub("", kernel_sources()[file])


def members(file: str, name: str, *nested: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """``_fields_`` of a structure that a kernel takes as it is declared.

    Args:
        file: of the declaration, such as ``moe/arguments.cuh``.
        name: the structure's.
        nested: the ctypes structures of its members that are structures, under the names that they have there.

    Raises:
        ValueError: the declaration has a member that is neither a number, a pointer nor one of ``nested``.
    """
    found = re.search(rf"^struct {name} {{(.*?)^}};", _text(file), re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{file} declares no structure {name}")
    types = {**_TYPES, **{kind.__name__: kind for kind in nested}}
    fields = []
    for statement in filter(None, map(str.strip, found[1].split(";"))):
        member = _MEMBER.fullmatch(statement)
        kind = None if member is None else ctypes.c_uint64 if member["pointer"] else types.get(member["type"])
        if member is None or kind is None:
            raise ValueError(f"{name} of {file}: found {statement!r}, expected a number, a pointer or a structure")
        for declared in map(str.strip, member["names"].split(",")):
            field, _, count = declared.rstrip("]").partition("[")
            fields.append((field, kind * _value(count, constants(file)) if count else kind))
    return fields


@functools.cache
def constants(file: str) -> dict[str, int]:
    """Integral constants that a header of the kernels declares at namespace scope, those of its includes among them."""
    found: dict[str, int] = {}
    for included in INCLUDE.findall(_text(file)):
        found |= constants(included)
    for declaration in _CONSTANT.finditer(_text(file)):
        for item in re.split(r",\s*(?=\w+ = )", declaration["list"]):
            name, _, expression = item.partition(" = ")
            with contextlib.suppress(KeyError, SyntaxError):  # of what macros say, or of sizes of types
                found[name] = _value(expression, found)
    return found


def enumerators(file: str, name: str) -> list[str]:
    """Names of an enumeration's values, which count from zero.

    Raises:
        ValueError: the file declares no such enumeration.
    """
    found = re.search(rf"^enum {name} : u32 {{(.*?)}};", _text(file), re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{file} declares no enumeration {name}")
    return [item.partition("=")[0].strip() for item in found[1].split(",")]


_OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.USub: operator.neg,
}


def _value(expression: str, known: dict[str, int]) -> int:
    """The value of a constant expression of integers."""

    def of(node: ast.expr) -> int:
        match node:
            case ast.Constant(int(value)):
                return value
            case ast.Name(name):
                return known[name]
            case ast.UnaryOp(op, operand):
                return _OPERATORS[type(op)](of(operand))
            case ast.BinOp(left, op, right):
                return _OPERATORS[type(op)](of(left), of(right))
        raise KeyError(ast.unparse(node))

    return of(ast.parse(re.sub(r"\b(0x[0-9a-fA-F]+|\d+)u\b", r"\1", expression), mode="eval").body)
