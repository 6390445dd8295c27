"""How XLA's compiler for CPUs hurries: tiny programs take longer to compile than to run."""

from __future__ import annotations

from importlib.metadata import version

#: For ``jax.jit(..., compiler_options=QUICKLY)``. XLA's own emitters of fusions cost more than all else.
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# jaxlib 0.12 has no such flag, and refuses flags that it does not know.
if version("jaxlib").startswith("0.10."):
    QUICKLY["xla_cpu_use_fusion_emitters"] = False
#: The same for XLA_FLAGS.
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICKLY.items())
