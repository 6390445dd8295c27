"""XProf's self times of ops beside ours: ``python tests/oracles/compare_xprof.py TRACE --python PYTHON``.

PYTHON is an interpreter that has the package ``xprof`` (2.24.2 is what was compared with): it needs none of ours.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from rooftop.explain.measured.report import explain

#: What XProf's interpreter runs: the table of its tool "HLO Stats".
CONVERT = """
import sys
from xprof.convert import raw_to_tool_data
data = raw_to_tool_data.xspace_to_tool_data([sys.argv[1]], "hlo_stats", {})
data = data[0] if isinstance(data, tuple) else data
print(data.decode() if isinstance(data, bytes) else data)
"""
_SAME = 1e-3


def xprof_times(trace: Path, python: str) -> dict[str, float]:
    """Self seconds of every op, by its name, as XProf has them."""
    with tempfile.TemporaryDirectory() as folder:
        # XProf leaves files beside a trace, and answers from them the next time.
        copy = Path(folder) / "plugins" / "profile" / "run" / "host.xplane.pb"
        copy.parent.mkdir(parents=True)
        shutil.copy(trace, copy)
        done = subprocess.run([python, "-c", CONVERT, str(copy)], capture_output=True, text=True, check=True)
    table = json.loads(done.stdout.splitlines()[-1])
    names = [column["id"] for column in table["cols"]]
    rows = [dict(zip(names, (cell["v"] for cell in row["c"]), strict=True)) for row in table["rows"]]
    return {row["hlo_op_name"]: row["total_self_time"] * 1e-6 for row in rows}


def main() -> None:
    """Print how many ops have the same time, the others, and both sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--python", required=True)
    options = parser.parse_args()
    measured = explain(options.trace).measured
    steps = sum(step.counted for step in measured.steps) * measured.devices
    ours = {op.name: op.time_s * steps for op in measured.ops}
    theirs = xprof_times(options.trace, options.python)
    other = {name: (ours.get(name, 0.0), time_s) for name, time_s in theirs.items()}
    other = {name: both for name, both in other.items() if abs(both[0] - both[1]) > _SAME * max(*both, 1e-6)}
    print(f"{len(theirs) - len(other)} of {len(theirs)} ops have the same self time")
    for name, (mine, own) in sorted(other.items(), key=lambda item: -item[1][1]):
        print(f"{name}: {mine * 1e6:.3f} us here, {own * 1e6:.3f} us there")
    print(f"{sum(theirs.values()):.9f} s there; busy for {measured.busy_s * steps:.9f} s here")


if __name__ == "__main__":
    main()
