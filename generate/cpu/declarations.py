"""C's declarations for ctypes, read from kernels.h and team.h, so that no signature or struct is written twice.

It must not know what the functions compute.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HEADERS = ("kernels.h", "team.h")
SCALARS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "void": None}
FUNCTION = re.compile(r"^(\w+) (\w+)\(([^()]*)\)\s*[;{]", re.MULTILINE)
FUNCTION_POINTER = re.compile(r"typedef void \(\*(\w+)\)")
STRUCT = re.compile(r"typedef struct \{(.*?)\} (\w+);", re.DOTALL)
CONSTANT = re.compile(r"(\w+) = (\d+)")


class Declarations(NamedTuple):
    """Functions as (result, arguments), structs and the constants of enums, all by name."""

    functions: dict[str, tuple[Any, list[Any]]]
    structs: dict[str, type[ctypes.Structure]]
    constants: dict[str, int]

    def apply(self, library: ctypes.CDLL) -> ctypes.CDLL:
        """Declare each function that `library` has; return it."""
        for name, (result, arguments) in self.functions.items():
            if hasattr(library, name):
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        return library


@functools.cache
def declarations() -> Declarations:
    """Return the declarations of this folder's headers. Raises KeyError for a type that is not declared in them."""
    texts = [Path(__file__).with_name(name).read_text() for name in HEADERS]
    text = re.sub(r"//.*", "", "\n".join(texts))
    types: dict[str, Any] = {**SCALARS, **dict.fromkeys(FUNCTION_POINTER.findall(text), ctypes.c_void_p)}
    structs: dict[str, type[ctypes.Structure]] = {}
    for body, name in STRUCT.findall(text):
        members = [field for line in body.split(";") if line.strip() for field in _fields(line, types)]
        types[name] = structs[name] = type(name, (ctypes.Structure,), {"_fields_": members})
    functions = {
        name: (types[result], [t for arg in args.split(",") if arg != "void" for _, t in _fields(arg, types)])
        for result, name, args in FUNCTION.findall(text)
    }
    return Declarations(functions, structs, {name: int(number) for name, number in CONSTANT.findall(text)})


def _fields(declaration: str, types: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and type of each variable of a C declaration, such as `const float *a, *b`."""
    first, *others = declaration.split(",")
    kind, variable = re.split(r"\s+(?=\**\w+$)", first.strip().removeprefix("const "))
    for name in (variable, *others):
        bare = name.strip().lstrip("*")
        yield bare, ctypes.c_void_p if "*" in name else types[kind]
