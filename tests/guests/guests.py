"""Programs that nobody here wrote a line of rooftop into, their own count of FLOPs, and what rooftop says of each.

``python -m tests.guests.guests [NAME...]`` measures guests and keeps the answers in build/guests; with ``--table`` it
writes the table of docs/guests.md from them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rooftop.core.quantities import format_bytes, format_count, format_seconds

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "guests"
SCRIPTS = Path(__file__).with_name("scripts")
PAGE = ROOT / "docs" / "guests.md"


@dataclass(frozen=True, kw_only=True)
class Guest:
    """A program of another library on ``slice``.

    ``environment`` is its folder in build/guests ('' for rooftop's own), ``words`` what follows ``python``. ``flops``
    are those of its costliest program on one device, counted from its shapes below, kernels included. ``path`` names
    the environment variable of a checkout that it needs, and ``packages`` those whose versions count.
    """

    name: str
    title: str
    slice: str
    words: tuple[str, ...]
    flops: float
    tolerance: float = 1e-9
    environment: str = ""
    path: str = ""
    packages: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        """The interpreter."""
        return str(ENVIRONMENTS / self.environment / "bin" / "python") if self.environment else sys.executable

    @property
    def missing(self) -> str | None:
        """The reason why it cannot run here."""
        if self.environment and not Path(self.python).exists():
            return f"build/guests/{self.environment} is missing: make test-guests"
        if self.path and not Path(os.environ.get(self.path, "")).joinpath(".").is_dir():
            return f"{self.path} is no folder"
        if self.path and not os.environ.get(self.path):
            return f"{self.path} is not set"
        return None


def script(name: str) -> tuple[str, ...]:
    return (str(SCRIPTS / f"{name}.py"),)


def transformer(
    *, tokens: int, seq: int, width: int, hidden: int, layers: int, vocab: int, recomputed: float = 0.0
) -> float:
    """FLOPs of a training step on ``tokens`` of one device: of weights, of whole attention matrices, of logits.

    ``recomputed`` are FLOPs of a layer's forward pass that are done again.
    """
    weights = 4 * width**2 + 2 * width * hidden
    attention = 4 * tokens * seq * width
    layer = 2 * tokens * weights + attention
    return layers * (3 * layer + recomputed) + 3 * 2 * tokens * width * vocab


def haiku() -> float:
    tokens, seq, width, hidden = 64 // 16 * 256, 256, 512, 2048
    # hk.remat repeats a layer but for its last matmul, whose result nothing needs.
    again = 2 * tokens * (4 * width**2 + width * hidden) + 4 * tokens * seq * width
    return transformer(tokens=tokens, seq=seq, width=width, hidden=hidden, layers=4, vocab=4096, recomputed=again)


def keras() -> float:
    first = 64 * 64 * 128 * 9 * 3
    strided = 32 * 32 * 128 * 4 * 128 + 16 * 16 * 256 * 4 * 128 + 8 * 8 * 512 * 4 * 256
    dense = 512 * 1024 + 1024 * 1000
    # Nothing needs the gradient of the images.
    return 512 // 16 * 2 * (3 * (strided + dense) + 2 * first)


def flax() -> float:
    # 8 sequences on each of 4 parts of the batch; heads, F and V over 4. Keys and values are one head: whole on each.
    tokens, seq, width, hidden, heads, size, vocab = 8 * 256, 256, 1024, 4096, 4, 256, 8192
    weights = (2 * width * heads * size + 3 * width * hidden + vocab * width) / 4 + 2 * width * size
    return 3 * (2 * tokens * weights + 4 * tokens * seq * heads * size / 4)


GUESTS: tuple[Guest, ...] = (
    Guest(
        name="flax",
        title="Flax NNX, Gemma-like, AdamW",
        slice="v5e:4x4",
        words=script("flax_gemma"),
        flops=flax(),
        environment="flax",
        packages=("flax", "optax"),
    ),
    Guest(
        name="equinox",
        title="Equinox GPT, `filter_jit`",
        slice="v5e:4x4",
        words=script("equinox_gpt"),
        flops=transformer(tokens=64 // 16 * 256, seq=256, width=1024, hidden=4096, layers=1, vocab=8192),
        environment="equinox",
        packages=("equinox", "optax"),
    ),
    Guest(
        name="haiku",
        title="Haiku, scanned layers, remat",
        slice="v5e:4x4",
        words=script("haiku_lm"),
        flops=haiku(),
        environment="haiku",
        packages=("dm-haiku", "optax"),
    ),
    Guest(
        name="keras",
        title="Keras, convolutions, `fit`",
        slice="v5e:4x4",
        words=script("keras_fit"),
        flops=keras(),
        environment="keras",
        packages=("keras",),
    ),
    Guest(
        name="splash",
        title="splash attention, forward and backward",
        slice="v5p:2x2x4",
        words=script("splash"),
        # 9 matmuls of 128 x 128 x 128 in the 136 blocks on and below the diagonal, for 16 heads.
        flops=9 * 2 * 128**3 * 136 * 16,
        packages=("jax",),
    ),
    Guest(
        name="megablox",
        title="megablox grouped matmul",
        slice="v5p:2x2x4",
        words=script("megablox"),
        flops=2 * 8192 * 2048 * 7168,
        packages=("jax",),
    ),
)


@contextmanager
def surroundings(guest: Guest) -> Iterator[None]:
    """Environment variables of a user, with those of the guest, and not those of these tests."""
    before = dict(os.environ)
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR"):
        os.environ.pop(name, None)
    if guest.path:
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ[guest.path], os.environ.get("PYTHONPATH", "")])
    os.environ.update(guest.variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(guest: Guest) -> dict[str, Any]:
    """Compile a guest as it is, without the cache; the figures of the table."""
    import rooftop

    with surroundings(guest):
        start = time.monotonic()
        result = rooftop.compile_script([guest.python, *guest.words], on=guest.slice, steps=1, cache=False)
        checked = rooftop.check(result)
        seconds = time.monotonic() - start
    programs = [shown.report for shown in result.report.programs if shown.report is not None]
    report = checked.to_json(top=1)
    compiled: Any = report["compiled"]
    answer = {
        "name": guest.name,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": dict(compiled["versions"]) | _versions(guest),
        "programs": [
            {"name": shown.program.name, "differs": list(shown.program.differs)} for shown in result.report.programs
        ],
        "flops": compiled["flops"] + compiled["kernel_flops"],
        "own_flops": guest.flops,
        "mfu": report["mfu"],
        "expected_s": report["expected_s"],
        "exposed_s": compiled["step"]["exposed_ici_s"],
        "findings": [
            {name: finding[name] for name in ("rule", "seconds", "bytes", "source")} for finding in report["findings"]
        ],
        "seconds": seconds,
        "xla_s": sum(program.compiled.compile_s for program in programs),
        "verdict": report["verdict"],
    }
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    (ENVIRONMENTS / f"{guest.name}.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    return answer


def _versions(guest: Guest) -> dict[str, str]:
    """Versions of a guest's own packages, in its environment."""
    folders = [str(folder) for folder in (ENVIRONMENTS / guest.environment / "lib").glob("python*/site-packages")]
    folders = folders if guest.environment else []
    versions = {}
    for name in guest.packages:
        own = next(iter(importlib.metadata.distributions(name=name, path=[*folders, *sys.path])), None)
        if own is not None:
            versions[name] = own.version
    return versions


_BEGIN, _END = "<!-- measured: python -m tests.guests.guests --table -->", "<!-- end -->"


def table(answers: list[dict[str, Any]]) -> str:
    """The measured guests in Markdown."""
    lines = [
        "| guest | on | lines | FLOPs, own count | reported | a step | MFU | findings, the largest | XLA | beyond it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    titles = {guest.name: guest for guest in GUESTS}
    for answer in answers:
        guest = titles[answer["name"]]
        findings = answer["findings"]
        largest = ", ".join(_priced(finding) for finding in findings[:2])
        own = [f"{name} {version}" for name, version in answer["versions"].items() if name in guest.packages]
        lines.append(
            f"| {guest.title} ({', '.join(own)}) | {guest.slice} | 0 | {format_count(answer['own_flops'])} | "
            f"{format_count(answer['flops'])} | {format_seconds(answer['expected_s'])} | {answer['mfu']:.1%} | "
            f"{len(findings)}{': ' if findings else ''}{largest} | {answer['xla_s']:.0f} s | "
            f"{answer['seconds'] - answer['xla_s']:.1f} s |"
        )
    return "\n".join(lines)


def _priced(finding: dict[str, Any]) -> str:
    price = format_seconds(finding["seconds"]) if finding["seconds"] else format_bytes(finding["bytes"])
    return f"`{finding['rule']}` {price} ({finding['source'].rpartition('/')[2]})"


def main(words: list[str]) -> None:
    if words == ["--table"]:
        paths = [ENVIRONMENTS / f"{guest.name}.json" for guest in GUESTS]
        answers = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
        versions = answers[0]["versions"]
        dates = sorted({answer["date"] for answer in answers})
        stamp = f"jax {versions['jax']}, libtpu {versions['libtpu']}, {' and '.join(dates)}."
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        tail = rest.partition(_END)[2]
        PAGE.write_text(f"{head}{_BEGIN}\n{table(answers)}\n\n{stamp}\n{_END}{tail}", encoding="utf-8")
        return
    for guest in GUESTS:
        if guest.name in words or not words:
            answer = guest.missing or measure(guest)["verdict"]
            print(f"{guest.name}: {answer}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
