"""Seconds in which XLA:TPU reads and converts a weight of a matmul, by its format, as it compiles the matmul here.

    python bench/evidence/quantised_weights.py

An engine's weights [8192, 3584] with 64 rows, which a matrix unit multiplies in less time. Picoseconds a weight; those
of bf16 and of reading the format's bytes at the peak of HBM are next to them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rooftop
from rooftop.hardware import Slice
from rooftop.programs.quantised import Quantised
from rooftop.programs.serving.formats import FORMATS
from rooftop.roofline.rates import Rates

ROWS, INPUTS, OUTPUTS = 64, 8192, 3584
SLICES = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1")


def multiply(x: jax.Array, weight: Quantised) -> jax.Array:
    """x times a weight of an engine."""
    return x @ weight.in_full(x.dtype)


def main() -> None:
    """Print a table."""
    print(f"{'slice':12} {'weights':12} {'compiled':>8} {'read':>6} {'bf16':>6}  ps a weight")
    x, count = jax.ShapeDtypeStruct((ROWS, INPUTS), jnp.bfloat16), INPUTS * OUTPUTS
    for on in SLICES:
        hbm = Rates.of(Slice.parse(on).chip).hbm_bytes_per_s
        for name, format_ in FORMATS.items():
            groups = INPUTS // (format_.group or INPUTS)
            weight = Quantised(
                values=jax.ShapeDtypeStruct((INPUTS, OUTPUTS), jnp.dtype(format_.dtype)),  # type: ignore[arg-type]
                scales=jax.ShapeDtypeStruct((groups, OUTPUTS), jnp.dtype(format_.scales("bfloat16"))),  # type: ignore[arg-type]
            )
            compiled = rooftop.inspect(multiply, x, weight, on=on)
            seconds = sum(row["expected_s"] for row in compiled.rows)
            read = format_.weight_bytes(count, INPUTS, "tpu", "bfloat16") / hbm
            figures = (seconds / count * 1e12, read / count * 1e12, 2e12 / hbm)
            print(f"{on:12} {name:12} {figures[0]:8.2f} {figures[1]:6.2f} {figures[2]:6.2f}", flush=True)


if __name__ == "__main__":
    main()
