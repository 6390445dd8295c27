"""Engines over two hosts: one mesh, two parts of which one is lost with the cable between them, and both at once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hosts import FIRST, FIRST_OUTSIDE, SECOND, Host, two_hosts
from tests.support.serving_process import ENGINE, ENVIRONMENT, ROOFTOP, Served, started, texts, write_served_model

PORT = "9000"
ANSWERS = ["--host", FIRST_OUTSIDE, "--port", "0", "--json"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as both:
        yield both


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[str]:
    """Answers of one process on one host."""
    with started([ROOFTOP, "serve", str(tiny), *ENGINE, "--port", "0", "--json"], tiny.parent, env=ENVIRONMENT) as one:
        return texts(one)


@contextmanager
def other(host: Host, command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not answer."""
    process = subprocess.Popen(
        host.command(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kv_split"), [("tensor=2,context=2", "seq"), ("tensor=2,context=2", "batch"), ("data=2,tensor=2", "seq")]
)
def test_one_engine_over_two_hosts(
    tiny: Path, hosts: tuple[Host, Host], expected: list[str], mesh: str, kv_split: str
) -> None:
    first, second = hosts
    command = [
        ROOFTOP, "serve", str(tiny), *ENGINE, "--mesh", mesh, "--kv-split", kv_split, "--devices", "2", "--batch-seqs",
        "4", "--pages", "40", "--coordinator", f"{FIRST}:{PORT}", "--processes", "2", "--json",
    ]  # fmt: skip
    with (
        other(second, [*command, "--process", "1"]) as follower,
        started(first.command([*command, "--process", "0", *ANSWERS]), tiny.parent, env=ENVIRONMENT) as served,
    ):
        assert texts(served) == expected
        assert served.metric("rooftop_compilations_total") == 0
        served.wait_until_idle()
        assert served.stop()[0] == 0
        assert follower.wait(60) == 0


@pytest.mark.slow
def test_two_parts_over_two_hosts_each(tiny: Path, hosts: tuple[Host, Host], expected: list[str]) -> None:
    """Each part has its first process on another host; KV goes from the one to the other."""
    first, second = hosts
    base = [
        ROOFTOP, "serve", str(tiny), *ENGINE, "--mesh", "tensor=2,context=2", "--devices", "2", "--processes", "2",
        "--json", "--coordinator",
    ]  # fmt: skip
    prefills = [*base, f"{FIRST}:{PORT}", "--generate-at", f"{SECOND}:9002", "--process"]
    generates = [*base, f"{SECOND}:9001", "--role", "generate", "--host", SECOND, "--port", "9002", "--process"]
    with other(first, [*generates, "1"]) as third, other(second, [*generates, "0"]) as generator:
        assert generator.stdout is not None
        assert json.loads(generator.stdout.readline())["address"] == f"{SECOND}:9002"
        with (
            other(second, [*prefills, "1"]) as follower,
            started(first.command([*prefills, "0", *ANSWERS]), tiny.parent, env=ENVIRONMENT) as served,
        ):
            assert texts(served) == expected
            assert served.metric("rooftop_compilations_total") == 0
            served.wait_until_idle()
            assert served.stop()[0] == 0
            assert follower.wait(60) == 0
        generator.terminate()
        assert [process.wait(60) for process in (generator, third)] == [0, 0]


@pytest.mark.slow
def test_a_cut_cable_costs_no_answer(tiny: Path, hosts: tuple[Host, Host], expected: list[str]) -> None:
    """KV goes from host to host; what is lost with the cable is done again when it is back."""
    first, second = hosts
    command = [ROOFTOP, "serve", str(tiny), *ENGINE, "--json"]
    generates = [*command, "--role", "generate", "--host", SECOND, "--port", PORT]
    with other(second, generates) as generator:
        assert generator.stdout is not None
        assert json.loads(generator.stdout.readline())["address"] == f"{SECOND}:{PORT}"
        prefills = first.command([*command, "--generate-at", f"{SECOND}:{PORT}", *ANSWERS])
        with started(prefills, tiny.parent, env=ENVIRONMENT) as served, ThreadPoolExecutor(1) as pool:
            assert texts(served) == expected
            asked = pool.submit(texts, served)
            while served.metric("rooftop_kv_pages_used") == 0:
                pass
            first.cut()
            while not lost(served):
                pass
            first.join()
            assert asked.result(120) == expected
            served.wait_until_idle()
            assert served.metric("rooftop_compilations_total") == 0
            assert served.metric("rooftop_kv_pages_used") == 0
            assert served.stop()[0] == 0


def lost(served: Served) -> bool:
    """True if the server has noticed that the other host is gone."""
    lines = [json.loads(line) for line in served._log.read_text(encoding="utf-8").splitlines()]
    return any(line["event"].startswith("link lost") for line in lines)
