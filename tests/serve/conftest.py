"""A tiny served model, and the answers of one process to compare those of several with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.serving_process import ENGINE, ENVIRONMENT, ROOFTOP, adjusted, started, texts, write_served_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def expected(model: Path) -> tuple[list[str], list[str]]:
    """Texts of one process, and its answers under penalties, biases and a grammar."""
    command = [ROOFTOP, "serve", str(model), *ENGINE, "--port", "0", "--json"]
    with started(command, model.parent, env=ENVIRONMENT) as server:
        return texts(server), adjusted(server)
