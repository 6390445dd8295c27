"""Write rooftop/plan/engine_evidence.csv, and print the overheads of engines for kernels.toml.

Run it after each change of a figure of an engine's steps: ``python bench/evidence/engine_evidence.py``. Each benchmark
is predicted with the overheads that the runs of other models have. The overheads that are printed are those of all
runs; plans take them from ``rooftop/plan/serving/engines/kernels.toml``.
"""

from pathlib import Path

from rooftop.plan import evidence
from rooftop.validation.engine_runs import load_engine_runs
from rooftop.validation.engines import engine_comparisons, engine_ratios, overheads_of_engines


def main() -> None:
    """Predict the benchmarks, write their ratios, and print what fits all of them."""
    runs, _ = load_engine_runs()
    ratios = engine_ratios(engine_comparisons(runs))
    path = Path(evidence.__file__).with_name("engine_evidence.csv")
    evidence.write_ratios(evidence.with_strays(ratios), path)
    print(f"{len(ratios)} latencies in {path}")
    for engine, overheads in overheads_of_engines(runs).items():
        figures = ", ".join(
            f"{name.replace('_s', '_us')} = {1e6 * value:.1f}" for name, value in vars(overheads).items()
        )
        print(f"{engine} = {{ {figures} }}")


if __name__ == "__main__":
    main()
