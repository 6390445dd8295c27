"""Cycles in which the kernel of latents (``rooftop.programs.serving.row_kernel``) works on a token of the cache.

    python bench/evidence/row_kernel.py [CHIP ...]

The kernel is compiled for one chip after the other, without a TPU, and its final VLIW listing is read as in
bench/evidence/compiler_fractions.py: one bundle a cycle, in order. A block of pages takes the cycles that begin its
copies and wait for them, and those of its matmuls and of its softmax. The copies themselves run next to them. Prints
cycles per token of a core by query heads, those in which HBM delivers a token at its peak, and the line through the
fewest and the most heads. Latents of 576 elements (DeepSeek-V2 and V3), pages of 16 tokens.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from compiler_fractions import device_sharding, flops_per_cycle, issue_cycles, read_bundles

from rooftop.hardware import chip as find_chip

CHIPS = ("v4", "v5e", "v5p", "v6e")
HEADS = (8, 32, 64, 128)
SEQUENCES, CONTEXT, PAGE, SIZE, RANK = 64, 2048, 16, 640, 512


def cycles_per_token(chip_name: str, heads: int, dump: Path) -> float:
    """Cycles of a core, per token."""
    import jax
    import jax.numpy as jnp

    from rooftop.programs.attention.scores import Scores
    from rooftop.programs.serving.row_kernel import pages_of_block, row_attention

    place, pages = device_sharding(chip_name), CONTEXT // PAGE
    shapes = (
        ((SEQUENCES, 1, heads, SIZE), jnp.bfloat16),
        ((SEQUENCES, 1, SIZE), jnp.bfloat16),
        ((SEQUENCES * pages + 1, 1, 1, PAGE, SIZE), jnp.bfloat16),
        ((SEQUENCES, pages), jnp.int32),
        ((SEQUENCES,), jnp.int32),
    )
    before = set(dump.iterdir())
    jax.jit(lambda *arrays: row_attention(Scores(scale=0.1), *arrays, None, columns=RANK, least=-1e30)).lower(
        *(jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes)
    ).compile()
    (path,) = (
        path
        for path in set(dump.iterdir()) - before
        if re.search(r"-row_attention\w*\.\d+-\d+-final_bundles\.txt$", path.name)
    )
    bundles = read_bundles(path.read_text())
    begins = [at for at, (_, label, _) in enumerate(bundles) if label == "LB"]
    ends = [at for at, (_, _, text) in enumerate(bundles) if "sbr.rel" in text]
    loops = [(begin, next(end for end in ends if end >= begin)) for begin in begins]
    products = [at for at, (_, _, text) in enumerate(bundles) if "vmatmul" in text]
    text = {loop: "".join(bundles[at][2] for at in range(loop[0], loop[1] + 1)) for loop in loops}
    # Loops over pages, several at a time: of copies to VMEM, of which the last begin those of a block, and of waits.
    copies = [loop for loop in loops if text[loop].count("dma.hbm_to_vmem") > 1 and loop[0] < products[0]][-1]
    waits = [loop for loop in loops if "dma.done.wait" in text[loop] and loop[0] < products[0]]
    first = max(loop[1] for loop in waits) + 1
    last = next(end for end in ends if end > products[-1])
    chip = find_chip(chip_name)
    peak = flops_per_cycle(chip_name) * chip.devices / chip.cores
    block, together = pages_of_block(SIZE * PAGE * 2, pages), 8
    issued = sum(
        (end - begin + 1) * block / together
        for begin, end in (copies, max(waits, key=lambda of: text[of].count("dma.done")))
    )
    return (issued + issue_cycles(bundles[first:last], chip_name, peak)) / (block * PAGE)


def work(chip_name: str) -> None:
    """Print the row of a chip."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    with tempfile.TemporaryDirectory() as dump:
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
        )
        cycles = [cycles_per_token(chip_name, heads, Path(dump)) for heads in HEADS]
    chip = find_chip(chip_name)
    read = SIZE * 2 / chip.hbm_bytes_per_s * chip.cores * chip.clock_hz
    slope = (cycles[-1] - cycles[0]) / (HEADS[-1] - HEADS[0])
    line = f"{cycles[0] - slope * HEADS[0]:.2f} + {slope:.4f} heads"
    print(f"{chip_name:6}" + "".join(f"{figure:8.2f}" for figure in cycles) + f"{read:8.2f}   {line}", flush=True)


def main() -> None:
    """A row a chip, each in a process of its own: libtpu takes its flags once."""
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
        return
    print("chip  " + "".join(f"{heads:8}" for heads in HEADS) + "    read   cycles a token")
    for chip_name in sys.argv[1:] or CHIPS:
        subprocess.run([sys.executable, __file__, "--worker", chip_name], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
