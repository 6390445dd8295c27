"""Programs that nobody here wrote a line of rooftop into, their own count of FLOPs, and what rooftop says of each.

``python -m tests.guests.guests [--cached] [NAME...]`` measures guests and keeps the answers in build/guests; with
``--table`` it writes the table of docs/evidence/guests.md from them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rooftop.core.quantities import format_bytes, format_count, format_seconds

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "guests"
SCRIPTS = Path(__file__).with_name("scripts")
PAGE = ROOT / "docs" / "evidence" / "guests.md"


@dataclass(frozen=True, kw_only=True)
class Guest:
    """A program of another library on ``slice``.

    ``environment`` is its folder in build/guests ('' for rooftop's own), ``words`` what follows ``python``, in which
    '{packages}' is the folder of its packages. ``flops`` are those of its costliest program on one device, counted from
    its shapes below, kernels included, and ``repeated`` those that the partitioner may do on several devices.
    ``variable`` names the environment variable of a Python that has the library, for one that is not pinned here, and
    ``packages`` those whose versions count.
    """

    name: str
    title: str
    slice: str
    words: tuple[str, ...]
    flops: float
    repeated: float = 0.0
    environment: str = ""
    variable: str = ""
    packages: tuple[str, ...] = ()

    @property
    def python(self) -> str:
        """The interpreter."""
        if self.variable:
            return os.environ.get(self.variable, "")
        return str(ENVIRONMENTS / self.environment / "bin" / "python") if self.environment else sys.executable

    @property
    def folders(self) -> list[Path]:
        """The folders of its own packages."""
        return sorted(Path(self.python).parents[1].glob("lib/python*/site-packages"))

    @property
    def command(self) -> list[str]:
        """The command line."""
        return [self.python, *(word.replace("{packages}", str(self.folders[0])) for word in self.words)]

    @property
    def missing(self) -> str | None:
        """The reason why it cannot run here."""
        if self.environment and not Path(self.python).exists():
            return f"build/guests/{self.environment} is missing: make test-guests"
        if self.variable and not Path(self.python or "nowhere").exists():
            return f"{self.variable} names no Python that has {self.packages[0]} and what rooftop needs"
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
    tokens, seq, width, hidden, heads, size, vocab = 32 * 256, 256, 1024, 4096, 4, 256, 8192
    weights = 2 * width * heads * size + 3 * width * hidden + vocab * width + 2 * width * size
    return 3 * (2 * tokens * weights + 4 * tokens * seq * heads * size) / 16


def flax_repeated() -> float:
    # Keys and values have one head, which tensor does not split: its 4 devices may each compute all of it.
    tokens, width, size = 32 * 256, 1024, 256
    return 3 * 2 * tokens * 2 * width * size / 16 * 3


def maxtext() -> float:
    # 2 sequences of 512 on each of 16 devices; a gated MLP, and logits from weights of their own.
    tokens, seq, width, hidden, vocab = 32 * 512, 512, 1024, 4096, 8192
    weights = 4 * width**2 + 3 * width * hidden + vocab * width
    return 3 * (2 * tokens * weights + 4 * tokens * seq * width) / 16


def maxtext_gemma2() -> float:
    # Two pairs of a local and a global layer in a scan, whose body is repeated but for its last matmul.
    tokens, seq, width, hidden, vocab = 32 * 512, 512, 1024, 4096, 8192
    layers = 4 * (2 * tokens * (4 * width**2 + 3 * width * hidden) + 4 * tokens * seq * width)
    return (4 * layers - 2 * 2 * tokens * width * hidden + 3 * 2 * tokens * vocab * width) / 16


def sparsecore() -> float:
    # A tower of two matmuls on 4 devices; the product with its one last column is no matmul.
    return 3 * 2 * 16384 / 4 * (2 * 128 * 1024 + 1024 * 1024)


#: MaxText's train.py with its own configuration, and these changes of it.
MAXTEXT = (
    "-m",
    "maxtext.trainers.pre_train.train",
    "{packages}/maxtext/configs/base.yml",
    "run_name=guest",
    "base_output_directory=build/guests",
    "dataset_type=synthetic",
    "enable_checkpointing=False",
    "steps=5",
    "base_emb_dim=1024",
    "base_mlp_dim=4096",
    "base_num_query_heads=8",
    "base_num_kv_heads=8",
    "head_dim=128",
    "vocab_size=8192",
    "max_target_length=512",
    "per_device_batch_size=2",
    "ici_fsdp_parallelism=4",
    "ici_tensor_parallelism=4",
    "attention=dot_product",
    "hardware=tpu",
)


def llama3() -> float:
    # The prefill: 16 prompts of 1,024 against a cache of 2,048, over 16 devices; 8 heads of keys and values over 4.
    tokens, cache, width, hidden, vocab, layers = 16 * 1024, 2048, 4096, 14336, 128256, 2
    keys = layers * 2 * width * 1024
    weights = layers * (2 * width**2 + 3 * width * hidden) + vocab * width
    return (2 * tokens * weights + layers * 4 * tokens * cache * width) / 16 + 2 * tokens * keys / 4


GUESTS: tuple[Guest, ...] = (
    Guest(
        name="flax",
        title="Flax NNX, Gemma-like, AdamW",
        slice="v5e:4x4",
        words=script("flax_gemma"),
        flops=flax(),
        repeated=flax_repeated(),
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
        name="maxtext",
        title="MaxText's own `train.py`",
        slice="v5e:4x4",
        words=(*MAXTEXT, "base_num_decoder_layers=1"),
        flops=maxtext(),
        variable="ROOFTOP_MAXTEXT_PYTHON",
        packages=("maxtext", "jax", "libtpu"),
    ),
    Guest(
        name="maxtext-gemma2",
        title="The same with Gemma 2, local and global layers in pairs",
        slice="v5e:4x4",
        words=(*MAXTEXT, "base_num_decoder_layers=2", "decoder_block=gemma2", "logits_via_embedding=True"),
        flops=maxtext_gemma2(),
        variable="ROOFTOP_MAXTEXT_PYTHON",
        packages=("maxtext", "jax", "libtpu"),
    ),
    Guest(
        name="llama3",
        title="jax-llm-examples, Llama 3, prefill and decode",
        slice="v5e:4x4",
        words=script("llama3_serve"),
        flops=llama3(),
        variable="ROOFTOP_LLM_EXAMPLES_PYTHON",
        packages=("llama3_jax", "jax"),
    ),
    Guest(
        name="sparsecore",
        title="jax-tpu-embedding, lookup, tower and update",
        slice="v5p:2x2x1",
        words=script("sparsecore_step"),
        flops=sparsecore(),
        environment="sparsecore",
        packages=("jax-tpu-embedding", "jax"),
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
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(guest: Guest, *, cache: bool = False) -> dict[str, Any]:
    """Compile a guest as it is; the figures of the table."""
    import rooftop

    with surroundings(guest):
        start = time.monotonic()
        result = rooftop.compile_script(guest.command, on=guest.slice, steps=1, cache=cache)
        checked = rooftop.check(result)
        seconds = time.monotonic() - start
    programs = [(shown.report, shown.program.cached) for shown in result.report.programs if shown.report is not None]
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
        "mfu": report["mfu"],
        "expected_s": report["expected_s"],
        "exposed_s": compiled["step"]["exposed_ici_s"],
        "findings": [
            {name: finding[name] for name in ("rule", "seconds", "bytes", "source")} for finding in report["findings"]
        ],
        "xla_s": sum(program.compiled.compile_s for program, _ in programs),
        "beyond_s": seconds - sum(program.compiled.compile_s for program, cached in programs if not cached),
        "verdict": report["verdict"],
    }
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    (ENVIRONMENTS / f"{guest.name}.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    return answer


def _versions(guest: Guest) -> dict[str, str]:
    """Versions of a guest's own packages, in its environment."""
    folders = [str(folder) for folder in guest.folders] if guest.environment or guest.variable else []
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
            f"| {guest.title} ({', '.join(own)}) | {guest.slice} | 0 | {format_count(guest.flops)} | "
            f"{format_count(answer['flops'])} | {format_seconds(answer['expected_s'])} | {answer['mfu']:.1%} | "
            f"{len(findings)}{': ' if findings else ''}{largest} | {answer['xla_s']:.0f} s | "
            f"{answer['beyond_s']:.1f} s |"
        )
    return "\n".join(lines)


def _priced(finding: dict[str, Any]) -> str:
    price = format_seconds(finding["seconds"]) if finding["seconds"] else format_bytes(finding["bytes"])
    return f"`{finding['rule']}` {price}"


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
    # Compilations that are known take no time of XLA, and are enough for all other figures.
    cache = "--cached" in words
    names = [word for word in words if word != "--cached"]
    for guest in GUESTS:
        if guest.name in names or not names:
            answer = guest.missing or measure(guest, cache=cache)["verdict"]
            print(f"{guest.name}: {answer}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
