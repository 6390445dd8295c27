"""Options that make XLA's compiler for CPUs fast: tiny programs take longer to compile than to run."""

from __future__ import annotations

from importlib.metadata import version

#: For ``jax.jit(..., compiler_options=QUICKLY)``. XLA's own emitters of fusions cost more than all else.
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# jaxlib 0.12 lacks the first flag, and refuses flags that it does not know.
if version("jaxlib").startswith("0.10."):
    QUICKLY["xla_cpu_use_fusion_emitters"] = False
    # A module of LLVM for each thread costs a tenth more, and the workers of pytest-xdist use all cores as they are.
    QUICKLY["xla_cpu_parallel_codegen_split_count"] = 1
#: The same for XLA_FLAGS.
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICKLY.items())
