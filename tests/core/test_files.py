"""Files that a user names: read up to a limit, and refused in one line if they are none; by one reader, everywhere."""

from __future__ import annotations

import ast
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rooftop.core import files
from rooftop.core.errors import RooftopError
from rooftop.core.files import open_file, parse_json, read_bytes, read_json_object, read_text
from rooftop.models import load_model
from tests.support.training_runs import CONFIG

ROOT = Path(__file__).parents[2]

#: Functions that open what rooftop itself has written, or what the system has: caches, data of the package, answers of
#: child processes, /proc. A header of safetensors is read after ``require_file``. All others use ``core.files``.
OWN = {
    "rooftop/checkpoints/huggingface_files.py": {"_header"},
    "rooftop/compiler/cache.py": {"digest", "find"},
    "rooftop/compiler/compiling.py": {"_phase", "ask_worker"},
    "rooftop/compiler/executables.py": {"read_reports"},
    "rooftop/compiler/partitioner.py": {"read", "rematerializations"},
    "rooftop/compiler/worker.py": {"main"},
    "rooftop/explain/demo.py": {"demo_run"},
    "rooftop/models/huggingface.py": {"_preset"},
    "rooftop/present/glossary.py": {"entries"},
    # The source of the package itself.
    "rooftop/requests/request.py": {"_classes"},
    "rooftop/runs/checkpoints.py": {"_publish"},
    "rooftop/frameworks/tables.py": {"data_table"},
    "rooftop/frameworks/recipes.py": {"recipes"},
    "rooftop/runs/restarts.py": {"run"},
    "rooftop/runs/supervise.py": {"is_stopped"},
    "rooftop/serve/api/compiling.py": {"main"},
    "rooftop/serve/engine/programs.py": {"require_mappings"},
    "rooftop/target/child.py": {"main"},
    "rooftop/target/environments.py": {"_libtpu_of"},
    "rooftop/target/running.py": {"_cut_short", "run_script"},
    "rooftop/train/data/tokens.py": {"_opened"},
    "rooftop/ui/server.py": {"page"},
    "rooftop/validation/accuracy.py": {"load_reasons"},
    "rooftop/validation/serving_runs.py": {"serving_readings"},
}


def functions(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the name of the innermost function around it."""

    def visit(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.Call]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = node.name
        if isinstance(node, ast.Call):
            yield inside, node
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return visit(tree, "")


def reads(call: ast.Call) -> bool:
    """True for a call that reads a file whole, or opens one to read it, without the limit of ``core.files``."""
    function = call.func
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    text = ast.unparse(call)
    if "__file__" in owner or owner.startswith("files(") or "importlib" in owner:
        return False  # data that comes with the package
    if name in ("read_text", "read_bytes"):
        return isinstance(function, ast.Attribute)
    if (owner, name) in (("json", "load"), ("tomllib", "load"), ("np", "fromfile"), ("np", "loadtxt"), ("np", "load")):
        return True
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    if name == "open" and (owner == "" or owner not in ("tarfile", "os", "webbrowser", "cls", "Checkpoint")):
        return not any(isinstance(mode, str) and set(mode) & set("wax+") for mode in modes) and "path" in text.lower()
    return False


def test_every_file_that_a_user_names_has_one_reader() -> None:
    readers = dict[str, set[str]]()
    for path in sorted((ROOT / "rooftop").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name == "rooftop/core/files.py":
            continue
        for function, call in functions(ast.parse(path.read_text(encoding="utf-8"))):
            if reads(call):
                readers.setdefault(name, set()).add(function)
    assert readers == OWN, "read files by rooftop.core.files"


# ---- the reader ------------------------------------------------------------------------------------------------------


def test_devices_folders_and_large_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\r\nb\xe9")
    assert read_bytes(tmp_path / "file") == b"a\r\nb\xe9"
    assert read_text(tmp_path / "file", encoding="latin-1") == "a\nbé"
    with open_file(tmp_path / "file") as opened:
        assert opened.read(1) == b"a"
    for path, says in ((Path("/dev/zero"), "a device and no file"), (tmp_path, "Is a directory")):
        for read in (read_bytes, open_file):
            with pytest.raises(OSError, match=says):
                read(path)
    with pytest.raises(OSError, match="more than 0 MiB"):
        read_bytes(tmp_path / "file", most=4)
    assert len(read_bytes(tmp_path / "file", most=5)) == 5
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than 256 MiB"):
        read_bytes(tmp_path / "sparse")


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """As ``rooftop launch <(rooftop plan ...)`` gives one; the writer may be slow."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = threading.Event()

    def write() -> None:
        with pipe.open("wb") as file:
            opened.set()
            file.write(b'{"a": ' + b" " * 300_000)
            file.flush()
            file.write(b"1}")

    writer = threading.Thread(target=write)
    writer.start()
    assert read_json_object(pipe, field="plan", accepted="a plan") == {"a": 1}
    writer.join()
    assert opened.is_set()
    with pytest.raises(OSError, match="a pipe and no file"):
        open_file(pipe)


def test_a_pipe_without_a_writer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(files, "PIPE_S", 0.0)
    with pytest.raises(OSError, match="nothing came in 0 s"):
        read_bytes(tmp_path / "pipe")


def test_json_has_each_key_once_and_no_nan() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == parse_json('\ufeff{"a": 1}') == {"a": 1}
    for text, says in (
        ('{"b": 1, "a": 2, "a": 2}', "the key 'a' twice"),
        ('{"a": 1,\n // of b\n "b": 2}', "a comment in line 2, which JSON does not have"),
        ('/* of a */ {"a": 1}', "a comment in line 1, which JSON does not have"),
        ('{"a": NaN}', "NaN"),
        ("[-Infinity]", "-Inf"),
    ):
        with pytest.raises(ValueError, match=says):
            parse_json(text)


def test_a_configuration_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = json.dumps(CONFIG)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_model(str(path)).d_model == CONFIG["hidden_size"]
    path.write_text(f'{text[:-1]}, "hidden_size": 64}}')
    with pytest.raises(RooftopError, match=r"the key 'hidden_size' twice"):
        load_model(str(path))


# ---- the verbs -------------------------------------------------------------------------------------------------------

#: Verbs and options that take a file.
LINES = (
    "model {file}",
    "simulate {file}",
    "diff {file} {file}",
    "validate --runs {file}",
    "explain {file}",
    "explain {file} --on v5e",
    "explain --diff {file} {file}",
    "plan train llama3-8b --on v5e:4x4 --calibration {file}",
    "plan embed {file} --on v5p:2x2x1 --batch-samples 1024",
    "launch {file} --to jobset",
    "compile {file}",
    "check {file} --on v5e",
    "check llama.json --against {file}",
    "train {file} --data {file}",
    "train llama:2M --data {file} --steps 1",
    "train llama:2M --data text.txt --steps 1 --tokenizer {file}",
    "embed {file} --on v5p:2x2x1",
)
#: A process runs them one after the other, with so little memory that what reads without a limit ends at once.
_CHILD = """
import contextlib, io, json, resource, signal, sys
import numpy, jax
from rooftop.cli.main import main
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 29),) * 2)
answers = []
for line in json.load(sys.stdin):
    said = io.StringIO()
    signal.alarm(120)
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(line)
            status = 0
        except SystemExit as ended:
            status = ended.code
        except BaseException as error:
            status = type(error).__name__
    signal.alarm(0)
    answers.append([status, said.getvalue()])
print(json.dumps(answers))
"""


def test_verbs_refuse_devices_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "zero.hlo").symlink_to("/dev/zero")
    (tmp_path / "zero.xplane.pb").symlink_to("/dev/zero")
    names = ("/dev/zero", "zero.json", "zero.hlo", "zero.xplane.pb")
    lines = [line.format(file=name).split() for line in LINES for name in names[: 4 if "explain" in line else 2]]
    ran = subprocess.run(
        [sys.executable, "-c", _CHILD], input=json.dumps(lines), capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    answers = dict(zip(map(" ".join, lines), json.loads(ran.stdout.splitlines()[-1]), strict=True))
    wrong = {line: answer for line, answer in answers.items() if answer[0] != 2 or answer[1].count("\n") != 1}
    assert not wrong, wrong
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 << 20
