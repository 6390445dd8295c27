"""Names of files and models cannot command a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAME = "m\x1b[31mRED\x9b1m"
_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip


def test_the_name_of_a_folder_is_shown_as_text(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / _NAME
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    for arguments in (
        ("model", str(folder)),
        ("plan", "train", str(folder), "--on", "v5e:2x2", "--batch-tokens", "64k"),
    ):
        answer = rooftop(*arguments)
        assert "\x1b" not in answer.out + answer.err and "\x9b" not in answer.out + answer.err
        assert "m\\x1b[31mRED\\x9b1m" in answer.out + answer.err
        written = rooftop(*arguments, "--json")
        assert "\x1b" not in written.out and "\x9b" not in written.out
        assert "RED\x9b1m" in json.dumps(json.loads(written.out), ensure_ascii=False)
    page = tmp_path / "page.html"
    rooftop(*arguments, "--report", str(page))
    text = page.read_text(encoding="utf-8")
    assert "\x1b" not in text and "\x9b" not in text and "m\\x1b[31mRED\\x9b1m" in text
