"""Compiles a kernel to object code: numba translates Python functions to LLVM IR, and LLVM compiles all of them together, once.

Plain numba would optimise and load each function that a kernel calls, then link them into the kernel and optimise that again. This
would take twice the time, and nothing would call the separate functions. Here numba compiles functions with `_TextCompiler`, a
pipeline (numba's documented `pipeline_class`) whose result is a `_Text`: the function's IR as text, and the list of what to link
with it.
"""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core.codegen import CodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.errors import NumbaRuntimeError
from numba.extending import typeof_impl

from transom_kernels.cpu import numba_types as numba_types  # shows numba the functions whose code is emitted
from transom_kernels.cpu.language import Helper
from transom_kernels.cpu.target import CpuTarget

_ENTRY = types.void(types.int64, types.int64)  # arguments, thread
_RULE = "A kernel and the functions that it calls must neither raise exceptions nor allocate."


# Passes for what kernels do not use: `with`, closures made inside a kernel, array expressions, overloads that are inlined. Without
# them a kernel compiles in 8 % less time, to the same code.
_UNUSED_PASSES = {
    *("WithLifting", "InlineClosureLikes", "MakeFunctionToJitFunction", "InlineInlinables", "InlineOverloads"),
    *("GenericRewrites", "NopythonRewrites", "FindLiterallyCalls", "LiteralUnroll"),
    *("LiteralPropagationSubPipelinePass", "DumpParforDiagnostics"),
}


class _TextCompiler(CompilerBase):
    """Numba's usual pipeline without `_UNUSED_PASSES`; a function's code goes into a `_Text`."""

    def define_pipelines(self) -> list[Any]:
        """Return the passes of a function that is about to be compiled."""
        self.state.library = _Text(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [one for one in pipeline.passes if one[0].__name__ not in _UNUSED_PASSES]
        return [pipeline]


class _Text(CodeLibrary):
    """The LLVM IR of one function, as text, and the libraries of the functions that it calls."""

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.modules: list[str] = []
        self.libraries: list[CodeLibrary] = []

    def add_ir_module(self, ir_module: ir.Module) -> None:
        """Keep a part of the function's code."""
        self.modules.append(str(ir_module))

    def add_linking_library(self, library: CodeLibrary) -> None:
        """Keep the library of a function that this one calls."""
        self.libraries.append(library)

    def get_llvm_str(self) -> str:
        """Return the text of this function, without the functions that it calls."""
        return "\n".join(self.modules)

    def finalize(self) -> None:
        """Refuse to be linked by numba: `_linked` links the texts of a whole kernel."""
        raise TypeError(f"A function under numba's `njit` calls {self.name}; decorate it with `language.helper`, too.")

    def get_function(self, name: str) -> Any:
        """Refuse: functions cannot be looked up in a text."""
        raise NotImplementedError(name)

    def get_asm_str(self) -> str:
        """Refuse: a text has no machine code."""
        raise NotImplementedError(self.name)

    @property
    def codegen(self) -> Any:
        """The object on which numba calls `set_env` for a loaded function: this text, since the function is not loaded."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: kernels use no Python objects."""

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address by which Python would call the function. Python never does, so any number but 0 will do."""
        return id(self)


# With numpy's error model a division by zero gives inf or NaN; Python's would raise an exception. `_nrt` is numba's reference
# counting: kernels have nothing to count, and without it they compile in a ninth less time, to the same code.
_translate = partial(
    njit,
    nogil=True,
    _nrt=False,
    boundscheck=False,
    error_model="numpy",
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
    pipeline_class=_TextCompiler,
)


@typeof_impl.register(Helper)
def _type_of_helper(function: Helper, context: Any) -> types.Type:
    return types.Dispatcher(_translated(function))


@cache
def _translated(function: Helper) -> Any:
    return _translate(forceinline=function.is_inlined)(function.function)


def compile_kernel(function: Callable[[Any, Any], None], symbol: str, target: CpuTarget) -> bytes:
    """Return object code for a processor, with one visible function: `symbol(arguments, thread)`.

    Raises:
        ValueError: the kernel, or a function that it calls, raises exceptions or allocates.
    """
    try:
        with _without_collections():
            dispatcher = _translate(_ENTRY)(function)
    except NumbaRuntimeError as error:  # says which line needs memory of numba's
        raise ValueError(f"{_RULE} {error}") from error
    compiled = dispatcher.overloads[_ENTRY.args]
    module = _linked(compiled.library)
    # Numba's own wrapper would call functions of numba, which processes that only load cached code do not import.
    wrapper = (
        f"declare i32 @{compiled.fndesc.llvm_func_name}(ptr, ptr, i64, i64)\n"
        f"define void @{symbol}(i64 %arguments, i64 %thread) {{\n"
        "  %result = alloca ptr\n  %error = alloca ptr\n"
        f"  call i32 @{compiled.fndesc.llvm_func_name}(ptr %result, ptr %error, i64 %arguments, i64 %thread)\n  ret void\n}}\n"
    )
    machine = _machine(target)
    _optimise(module, machine)
    module.link_in(llvm.parse_assembly(wrapper))
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    _check_calls(module)
    return bytes(machine.emit_object(module))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Switch Python's garbage collector off within this context, because a collection takes long in a process with torch."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _linked(library: CodeLibrary) -> llvm.ModuleRef:
    """Return one module with a function and all functions that it calls; `linkonce_odr` lets LLVM drop those that it inlines."""
    first, *others = _libraries(library)
    module = llvm.parse_assembly(first.get_llvm_str())
    for other in others:
        part = llvm.parse_assembly(other.get_llvm_str())
        for function in part.functions:
            if not function.is_declaration and function.linkage == llvm.Linkage.external:
                function.linkage = "linkonce_odr"
        module.link_in(part)
    return module


def _libraries(library: CodeLibrary) -> Iterator[CodeLibrary]:
    """Yield a function's library, then those of the functions that it calls, each once.

    A library of numba itself already contains what it calls.
    """
    seen, pending = set[CodeLibrary](), [library]
    while pending:
        next_library = pending.pop(0)
        if next_library not in seen:
            seen.add(next_library)
            yield next_library
            if isinstance(next_library, _Text):
                pending = next_library.libraries + pending


@cache
def _initialise() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def _machine(target: CpuTarget) -> llvm.TargetMachine:
    _initialise()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.name,
        features=target.features,
        opt=3,
        reloc="static",
        codemodel="jitdefault" if target.x86 else "small",
        jit=True,
    )


def _optimise(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    """Run LLVM's passes of level 3, after three that bring loops into the form that its vectoriser recognises."""
    options = llvm.create_pipeline_tuning_options(speed_level=0)
    builder = llvm.create_pass_builder(machine, options)
    passes = builder.getModulePassManager()
    passes.add_loop_rotate_pass()
    passes.add_instruction_combine_pass()
    passes.add_jump_threading_pass()
    passes.run(module, builder)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization, options.slp_vectorization = True, False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def _check_calls(module: llvm.ModuleRef) -> None:
    """Refuse code that calls numba's own functions: in a process without numba all calls of the kernel would jump to address 0.

    Raises:
        ValueError: the kernel, or a function that it calls, raises exceptions or allocates.
    """
    process = ctypes.CDLL(None)  # finds the functions of the C library, of libm and of Python
    declared = [function.name for function in module.functions if function.is_declaration]
    foreign = [name for name in declared if not name.startswith("llvm.") and not hasattr(process, name)]
    if foreign:
        raise ValueError(f"{_RULE} It calls {', '.join(foreign)}, which no library of the process has.")
