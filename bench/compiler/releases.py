"""The ledger of one program over releases of libtpu: what each makes of it, and what changed from the one before.

    python bench/compiler/releases.py [RELEASE...]

Each release is installed in an environment of its own (``rooftop check --with libtpu==RELEASE``), which compiles
``step`` below: two layers of an MLP with their gradients, 2 x 2 chips of v5e, rows over data and columns over model.
Writes bench/results/releases.csv and prints the table of docs/evidence/compiler.md. No TPU is needed; 200 MB for each
release.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RELEASES = ("0.0.38", "0.0.40", "0.0.42.1", "0.0.45", "0.0.48.1", "0.0.52")
RESULTS = Path(__file__).parents[1] / "results" / "releases.csv"
COLUMNS = (
    "libtpu", "jax", "expected_s", "exposed_s", "peak_bytes", "flops", "collectives", "findings", "changed", "date",
)  # fmt: skip
ON = "v5e:2x2"


def step() -> None:
    """Run the program, as a user's script does."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"up": P("data", "model"), "down": P("model", "data")}
    shapes = {"up": (2048, 8192), "down": (8192, 2048)}
    params = {
        name: [jax.device_put(jnp.zeros(shapes[name]), NamedSharding(mesh, spec)) for _ in range(2)]
        for name, spec in specs.items()
    }
    x = jax.device_put(jnp.zeros((8192, 2048), jnp.bfloat16), NamedSharding(mesh, P("data")))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for at in range(2):
            with jax.named_scope(f"layer_{at}"):
                up, down = (params[name][at].astype(jnp.bfloat16) for name in ("up", "down"))
                x = jax.lax.with_sharding_constraint(x + jax.nn.relu(x @ up) @ down, NamedSharding(mesh, P("data")))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    @jax.jit
    def update(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params, x))

    update(params, x)


def main(releases: tuple[str, ...]) -> None:
    """Compile with each release, write the results, and print the table."""
    rows = list[dict[str, str]]()
    with TemporaryDirectory() as folder:
        before: Path | None = None
        for release in releases:
            ledger = Path(folder) / f"{release}.json"
            command = [
                "check",
                "--with",
                f"libtpu=={release}",
                "--on",
                ON,
                "--top",
                "1",
                "--save",
                str(ledger),
                "--json",
            ]
            done = _rooftop(*command, "--", "python", __file__, "step")
            if done.returncode:
                print(f"libtpu {release}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", file=sys.stderr)
                continue
            data = json.loads(done.stdout)
            compiled = data["compiled"]
            changed = ""
            if before is not None:
                difference = json.loads(_rooftop("diff", str(before), str(ledger), "--json").stdout)
                changed = difference["verdict"]
            rows.append(
                {
                    "libtpu": release,
                    "jax": compiled["versions"]["jax"],
                    "expected_s": f"{data['expected_s']:.6g}",
                    "exposed_s": f"{compiled['step']['exposed_ici_s']:.6g}",
                    "peak_bytes": f"{data['peak_bytes']:.0f}",
                    "flops": f"{compiled['flops']:.0f}",
                    "collectives": _collectives(compiled["collectives"]),
                    "findings": str(len(data["findings"])),
                    "changed": changed,
                    "date": datetime.now(UTC).date().isoformat(),
                }
            )
            before = ledger
            print(rows[-1], file=sys.stderr)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    RESULTS.write_text(text.getvalue(), encoding="utf-8")
    print(table(rows))


def table(rows: list[dict[str, str]]) -> str:
    """The rows in Markdown."""
    lines = ["| libtpu | a step | waiting | peak | collectives | changed |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['libtpu']} | {float(row['expected_s']) * 1e3:.3f} ms | {float(row['exposed_s']) * 1e3:.3f} ms "
            f"| {float(row['peak_bytes']) / 1e6:.1f} MB | {row['collectives']} | {row['changed']} |"
        )
    return "\n".join(lines)


def _collectives(records: list[dict[str, Any]]) -> str:
    counts: dict[str, float] = {}
    for record in records:
        name = f"{record['kind']} {','.join(record['axes'])}"
        counts[name] = counts.get(name, 0) + record["count"]
    return ", ".join(f"{count:g} {name}" for name, count in sorted(counts.items()))


def _rooftop(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rooftop", *words], capture_output=True, text=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["step"]:
        step()
    else:
        main(tuple(sys.argv[1:]) or RELEASES)
