"""Names inside JAX that this folder uses or replaces, and the check that the installed JAX has them as expected.

JAX has no public way to run a program on devices that are not there. Every private name that does the work stands in
``NAMES``; a release in which one is missing or takes other parameters is refused in one line, before anything is
replaced.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rooftop.core.errors import RooftopError

#: Releases of JAX on which the tests of this folder pass.
KNOWN = "0.10.2 and 0.12.0"


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """``name`` of the module ``jax._src.MODULE``, a dotted path; a function takes at least these ``parameters``."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    @property
    def problem(self) -> str | None:
        """The reason why the installed JAX does not have it as expected; None if it does."""
        written = f"jax._src.{self.module}.{self.name}"
        try:
            value: Any = importlib.import_module(f"jax._src.{self.module}")
            for part in self.name.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            return f"{written} is missing"
        if not self.parameters:
            return None
        try:
            taken = inspect.signature(value).parameters
        except (TypeError, ValueError):
            return f"{written} has no signature"
        absent = [name for name in self.parameters if name not in taken]
        return f"{written} does not take {', '.join(absent)}" if absent else None


_JIT = (
    "jaxpr", "in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars", "ctx_mesh", "name",
    "keep_unused", "inline", "compiler_options_kvs",
)  # fmt: skip
NAMES: tuple[PrivateName, ...] = (
    PrivateName(module="pjit", name="_pjit_call_impl_python", parameters=_JIT),
    PrivateName(
        module="pjit",
        name="_resolve_and_lower",
        parameters=(*_JIT, "args", "lowering_platforms", "lowering_parameters", "pgle_profiler"),
    ),
    PrivateName(module="pjit", name="convert_to_metaty", parameters=("arg",)),
    PrivateName(
        module="compiler",
        name="compile_or_get_cached",
        parameters=("backend", "computation", "devices", "compile_options", "host_callbacks", "executable_devices"),
    ),
    PrivateName(
        module="compiler",
        name="backend_compile_and_load",
        parameters=("backend", "module", "executable_devices", "options", "host_callbacks"),
    ),
    PrivateName(module="dispatch", name="_device_put_impl", parameters=("x", "device", "src", "copy", "aval")),
    PrivateName(
        module="interpreters.pxla",
        name="batched_device_put",
        parameters=("aval", "sharding", "xs", "devices", "committed"),
    ),
    PrivateName(module="interpreters.pxla", name="MeshExecutable.call", parameters=("self", "args")),
    PrivateName(module="interpreters.pxla", name="MeshExecutable.create_cpp_call", parameters=("self", "params")),
    PrivateName(module="interpreters.pxla", name="MeshExecutable._kept_var_idx"),
    PrivateName(
        module="interpreters.pxla",
        name="UnloadedMeshExecutable",
        parameters=("backend", "input_avals", "output_avals", "output_shardings", "committed"),
    ),
    PrivateName(module="interpreters.pxla", name="shard_arg_handlers"),
    PrivateName(module="interpreters.pxla", name="shard_args"),
    PrivateName(module="ad_util", name="raw_jaxval_adders"),
    PrivateName(module="interpreters.mlir", name="register_constant_handler"),
    PrivateName(module="interpreters.mlir", name="ir_constant"),
    PrivateName(module="interpreters.mlir", name="LoweringParameters"),
    PrivateName(module="interpreters.mlir", name="module_to_bytecode", parameters=("module",)),
    PrivateName(module="interpreters.partial_eval", name="dce_jaxpr", parameters=("jaxpr", "used_outputs")),
    PrivateName(module="api_util", name="fun_sourceinfo", parameters=("fun",)),
    PrivateName(module="core", name="pytype_aval_mappings"),
    PrivateName(module="core", name="update_aval_with_sharding", parameters=("aval", "sharding")),
    PrivateName(module="core", name="shaped_abstractify", parameters=("x",)),
    PrivateName(module="core", name="physical_aval", parameters=("aval",)),
    PrivateName(module="core", name="jaxprs_in_params", parameters=("params",)),
    PrivateName(module="core", name="MemorySpace"),
    PrivateName(module="dtypes", name="register_canonicalize_value_handler"),
    PrivateName(module="numpy.array_methods", name="_set_array_base_attributes", parameters=("array_impl", "exclude")),
    PrivateName(module="numpy.array_methods", name="_set_array_attributes", parameters=("array_impl",)),
    PrivateName(module="numpy.array_methods", name="_JAX_ARRAY_TYPES"),
    PrivateName(module="numpy.indexing", name="rewriting_take"),
    PrivateName(module="array", name="Shard", parameters=("device", "sharding", "global_shape", "data")),
    PrivateName(
        module="array", name="make_array_from_callback", parameters=("shape", "sharding", "data_callback", "dtype")
    ),
    PrivateName(
        module="array", name="make_array_from_single_device_arrays", parameters=("shape", "sharding", "arrays", "dtype")
    ),
    PrivateName(module="random.prng", name="PRNGKeyArray"),
    PrivateName(module="sharding_impls", name="physical_sharding", parameters=("aval", "sharding")),
    PrivateName(module="sharding_impls", name="make_single_device_sharding", parameters=("device",)),
    PrivateName(module="named_sharding", name="UnspecifiedValue"),
    PrivateName(module="config", name="default_device"),
    PrivateName(module="mesh", name="use_abstract_mesh"),
    PrivateName(module="mesh", name="empty_abstract_mesh"),
    PrivateName(module="mesh", name="empty_concrete_mesh"),
    PrivateName(module="lax.lax", name="array.ArrayImpl"),
    PrivateName(module="numpy.indexing", name="array.ArrayImpl"),
    PrivateName(module="xla_bridge", name="_backends"),
    PrivateName(module="xla_bridge", name="_default_backend"),
    PrivateName(module="xla_bridge", name="_backend_lock"),
    PrivateName(module="xla_bridge", name="get_backend.cache_clear"),
    PrivateName(module="xla_bridge", name="devices", parameters=("backend",)),
    PrivateName(module="xla_bridge", name="local_devices", parameters=("process_index", "backend", "host_id")),
    PrivateName(module="xla_bridge", name="local_device_count", parameters=("backend",)),
    PrivateName(module="traceback_util", name="register_exclusion", parameters=("path",)),
)


def require_known_jax(names: Iterable[PrivateName] = NAMES) -> None:
    """Raise RooftopError if the installed JAX lacks one of ``names``, or has it with other parameters."""
    problems = [problem for name in names if (problem := name.problem) is not None]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        accepted = f"a release whose internals this rooftop knows, such as {KNOWN} ({problems[0]}{more})"
        raise RooftopError("jax", importlib.metadata.version("jax"), accepted)
