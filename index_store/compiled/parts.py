"""How functions are compiled that other compiled functions call: to code that becomes part of theirs, and no further.

numba optimises every function and makes machine code of it, with all that it calls, before it becomes part of the next
one, where all of that happens again. Here it happens once, in the loop that Python calls.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import AnalysisPass, register_pass
from numba.core.typed_passes import NativeLowering


class PartCompiler(CompilerBase):  # type: ignore[misc]
    """The usual passes, but the code is only kept for those that call the function."""

    def define_pipelines(self) -> list[Any]:
        state = self.state
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        passes = DefaultPassBuilder.define_nopython_pipeline(state)
        passes.add_pass_after(_OfferPart, NativeLowering)
        passes.finalize()
        return [passes]


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """Code that is neither optimised nor made machine code by itself."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=False, analysis_only=True)
class _OfferPart(AnalysisPass):  # type: ignore[misc]
    """Lets compiled functions call this one."""

    _name = "offer_part"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        never: dict[str, str] = {}
        entry = (
            never.popitem
        )  # numba knows functions by what Python calls; this raises KeyError, should somebody do so
        state["cr"] = state["cr"]._replace(cfunc=entry)
        state.targetctx.insert_user_function(entry, state["cr"].fndesc, [state.library])
        return False
