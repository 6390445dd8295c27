"""The program of a request, compiled: a plan's, a function or a script."""

from __future__ import annotations

from collections.abc import Callable

from rooftop.library.programs.compiling import CompileResult, EmbedCompileResult, function_result, plan_result
from rooftop.library.programs.scripts import ScriptResult, script_result
from rooftop.requests.function import of_request
from rooftop.requests.programs import Compile


@of_request(Compile)
def compile(
    request: Compile, on_progress: Callable[[str, float], None] | None = None
) -> CompileResult | EmbedCompileResult | ScriptResult:
    """Compile a plan, your own function or your own script ahead of time with XLA:TPU or XLA:GPU.

    The program of a plan is set next to the plan. A script runs in a process of its own with the slice in the place of
    JAX's devices, and its large jits are compiled. ``on_progress`` is called with the phase, and seconds.

    A program that does not fit is returned: ``raise_if_infeasible`` raises Infeasible for it. Raises RooftopError for a
    plan that no program can run, for a field that means nothing with such a program, and for what the compiler refuses.
    """
    request.refuse_unused()
    if request.form == "script":
        return script_result(request, on_progress)
    if request.form == "function":
        return function_result(request, on_progress=on_progress)
    return plan_result(request, on_progress)
