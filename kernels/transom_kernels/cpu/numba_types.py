"""Teaches numba the language of kernels (`language.py`): a vector type with operators, and functions that emit LLVM code."""

import operator
from functools import cache
from typing import Any

from numba import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model, typeof_impl

from transom_kernels.cpu.language import Emitted, Kind, Kinds
from transom_kernels.cpu.vector_code import F32_16, I32_16


class Vector(types.Type):
    """Numba's type of a vector of 16 lanes of float32 or int32."""


f32x16, i32x16 = Vector("float32x16"), Vector("int32x16")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Vector) -> None:
        super().__init__(manager, numba_type, F32_16 if numba_type == f32x16 else I32_16)


_OF_KIND = {
    Kind.NOTHING: types.void,
    Kind.BOOL: types.boolean,
    Kind.INT: types.int64,
    Kind.FLOAT: types.float32,
    Kind.DOUBLE: types.float64,
    Kind.FLOATS: f32x16,
    Kind.INTS: i32x16,
}


def type_of(kinds: Kinds) -> types.Type:
    """Return numba's type of a kind, or of a tuple of values of one kind."""
    return types.UniTuple(_OF_KIND[kinds[0]], len(kinds)) if isinstance(kinds, tuple) else _OF_KIND[kinds]


def _add_operator(key: Any, method: str) -> None:
    """Let numba translate an operator between vectors of float32 to a method of LLVM's builder."""

    def generic(self: Any, arguments: Any, keywords: Any) -> Any:
        return signature(f32x16, f32x16, f32x16) if arguments == (f32x16, f32x16) else None

    infer_global(key)(type(f"Vector_{method}", (AbstractTemplate,), {"key": key, "generic": generic}))
    lower_builtin(key, f32x16, f32x16)(lambda context, b, signature, values: getattr(b, method)(*values))


for _key, _method in {
    operator.add: "fadd",
    operator.sub: "fsub",
    operator.mul: "fmul",
    operator.truediv: "fdiv",
}.items():
    _add_operator(_key, _method)


@typeof_impl.register(Emitted)
def _type_of_emitted(function: Emitted, context: Any) -> types.Type:
    return _function_type(function)


@cache
def _function_type(function: Emitted) -> types.Type:
    arguments = [type_of(kinds) for kinds in function.arguments]

    def generic(self: Any, given: Any, keywords: Any) -> Any:
        # numba converts the given arguments, such as int64 to float32
        return signature(type_of(function.result), *arguments) if len(given) == len(arguments) else None

    def lower(context: Any, b: Any, signature: Any, values: Any) -> Any:
        result = function.emit(b, *values)
        return context.get_dummy_value() if result is None else result

    lower_builtin(function, *arguments)(lower)
    return types.Function(type("EmittedTemplate", (AbstractTemplate,), {"key": function, "generic": generic}))
