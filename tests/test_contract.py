"""What holds for the code as a whole: who may import whom, what is written down once, which Pythons run it."""

import ast
import glob
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from codegen import recompile
from codegen.archive import executor_archive
from executor import protocol

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("executor", "codegen", "driver_templates", "gangrun")
MODULES = [path for package in PACKAGES for path in sorted((CHECKOUT / package).rglob("*.py"))]
TEMPLATES = sorted((CHECKOUT / "driver_templates").glob("*.j2"))
# What each package may import beside the standard library and itself.
ALLOWED: dict[str, set[str]] = {
    "executor": {"colorama", "hostlist", "ray"},
    "codegen": {"executor.protocol", "executor.group_pack", "jinja2", "yaml"},
    "driver_templates": set(),
    "gangrun": {"executor.protocol", "executor.group_pack", "codegen", "click", "filelock", "hostlist", "rich"},
}
HEAVY = "argparse asyncio dataclasses inspect jinja2 logging pathlib subprocess tempfile threading yaml"
# One list of node-side interpreters: what the machine has.
PYTHONS = sorted({*glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin/python")), "/usr/bin/python3", sys.executable})


def name(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


def imports(path: Path) -> Iterator[str]:
    """Every module that is imported anywhere in a file; of `from executor import protocol` the inner one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: a relative import"
            inner = [module_of(f"{node.module}.{alias.name}") for alias in node.names]
            yield from {module or node.module or "" for module in inner}


def module_of(dotted: str) -> str:
    return dotted if (CHECKOUT / (dotted.replace(".", "/") + ".py")).exists() else ""


def is_covered(module: str, allowed: set[str]) -> bool:
    return any(module == entry or module.startswith(entry + ".") for entry in allowed)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="the list of standard modules is there from Python 3.10 on")
@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(CHECKOUT).parts[0]
    allowed = {*ALLOWED[package], package, *sys.stdlib_module_names}
    assert [module for module in imports(path) if not is_covered(module, allowed)] == []


def test_the_contract_imports_nothing() -> None:
    assert set(imports(CHECKOUT / "executor" / "protocol.py")) <= {"__future__"}


def test_a_rank_imports_nothing_heavy_before_it_runs() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import executor.slurm; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-I", "-S", "-c", code, str(CHECKOUT)], text=True).split()
    assert "executor.member" in loaded
    assert sorted(set(HEAVY.split()) & set(loaded)) == []


def test_the_command_line_loads_a_verbs_code_when_the_verb_is_called() -> None:
    loaded = subprocess.check_output(
        [sys.executable, "-c", "import sys, gangrun.cli; print(*sys.modules)"], text=True, cwd=CHECKOUT
    ).split()
    assert "click" in loaded and {"jinja2", "yaml", "codegen", "gangrun.here"}.isdisjoint(loaded)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "no docstring"


# --- what is written down once


def texts(path: Path) -> list[str]:
    """Every string of a module that is no docstring; the parts of an f-string, too."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node.value for node in constants if isinstance(node.value, str)]


def contract_words() -> set[str]:
    """Names of variables and files that the contract holds: they look like nothing else."""
    variable = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+")
    file_name = re.compile(r"\.?[a-z][\w-]*\.[a-z]+(?:\.[a-z]+)?|\.gangrun|setup_done|setup-ranks")
    found: set[str] = set()
    for text in texts(CHECKOUT / "executor" / "protocol.py"):
        found.update(variable.findall(text), file_name.findall(text))
    return found


def test_the_words_of_the_contract_are_the_ones_we_mean() -> None:
    some = {"SLURM_PROCID", "SKYPILOT_NODE_IPS", "GANGRUN_ATTEMPT", "FAILED_SETUP", ".gangrun"}
    assert some | {"status.json", "events.jsonl", "driver.py", "run.env.json", "setup_done"} <= contract_words()


def typed_again(text: str) -> list[str]:
    whole = [state for state in (protocol.PENDING, protocol.RUNNING, *protocol.TERMINAL_STATES) if text == state]
    words = sorted(contract_words())
    return whole + [word for word in words if re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", text)]


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "protocol.py"], ids=name)
def test_no_module_types_a_word_of_the_contract_again(path: Path) -> None:
    assert {word: text for text in texts(path) for word in typed_again(text)} == {}


@pytest.mark.parametrize("path", TEMPLATES, ids=name)
def test_no_template_types_a_word_of_the_contract_again(path: Path) -> None:
    assert typed_again(path.read_text()) == []


# --- which Pythons run it


def version_of(python: str) -> tuple[int, ...]:
    try:
        said = subprocess.check_output([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return (0, 0)
    return tuple(int(part) for part in said.split("."))


VERSIONS = {version_of(python): python for python in PYTHONS}
NEW_ENOUGH = [python for version, python in sorted(VERSIONS.items()) if version >= protocol.OLDEST_PYTHON]
TOO_OLD = [python for version, python in sorted(VERSIONS.items()) if (3, 4) <= version < protocol.OLDEST_PYTHON]


def hello(
    python: str, directory: Path, script: str = "echo hello", **environ: str
) -> "subprocess.CompletedProcess[str]":
    archive = directory / "executor.pyz"
    archive.write_bytes(executor_archive())
    rank = {protocol.SLURM_PROCID: "0", protocol.SLURM_STEP_NODELIST: "n1", protocol.SLURMD_NODENAME: "n1"}
    flags = ["--script=" + script, f"--log-dir={directory}/logs", "--cluster-num-nodes=1", "--cluster-ips=n1"]
    return subprocess.run(
        [python, "-I", "-S", str(archive), *flags],
        env={**os.environ, **rank, **environ},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize("python", NEW_ENOUGH)
def test_a_node_needs_only_this_python(python: str, tmp_path: Path) -> None:
    done = hello(python, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "logs" / "run.log").read_text() == "hello\n"


@pytest.mark.parametrize("python", NEW_ENOUGH)
def test_all_node_side_code_compiles_without_a_warning(python: str) -> None:
    code = "import sys\nfor path in sys.argv[1:]: compile(open(path, 'rb').read(), path, 'exec')"
    paths = [str(path) for path in MODULES if path.relative_to(CHECKOUT).parts[0] == "executor"]
    subprocess.run([python, "-I", "-W", "error", "-c", code, *paths], check=True)


@pytest.mark.parametrize("python", TOO_OLD)
def test_a_python_that_is_too_old_is_told_by_its_path(python: str, tmp_path: Path) -> None:
    done = hello(python, tmp_path)
    assert done.returncode == protocol.EXIT_INFRASTRUCTURE
    assert len(done.stderr.splitlines()) == 1 and python in done.stderr and "Python 3.9 or newer" in done.stderr


# --- the archive


def test_a_rank_from_the_archive_is_shadowed_by_nothing(tmp_path: Path) -> None:
    """PYTHONPATH and the work directory hold modules with our names; the script gets PYTHONPATH as it was."""
    (tmp_path / "executor").mkdir()
    for module in "executor/__init__ signal socket json hostlist".split():
        (tmp_path / (module + ".py")).write_text("raise SystemExit('shadowed')\n")
    done = hello(sys.executable, tmp_path, script="echo $PYTHONPATH", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "logs" / "run.log").read_text() == f"{tmp_path}\n"


def test_the_archive_is_the_same_wherever_it_is_made() -> None:
    code = "import hashlib, codegen.archive as a; print(hashlib.sha256(a.executor_archive()).hexdigest())"
    made = set()
    for seed, mask in (("1", "022"), ("2", "077")):
        command = ["sh", "-c", 'umask %s; exec "$@"' % mask, "sh", sys.executable, "-c", code]
        made.add(subprocess.check_output(command, cwd=CHECKOUT, env={**os.environ, "PYTHONHASHSEED": seed}))
    assert len(made) == 1


IS_OURS = """
import marshal, sys, zipfile
from importlib.util import MAGIC_NUMBER
print(marshal.loads(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))[0] == MAGIC_NUMBER)
"""


def test_an_archive_is_compiled_anew_by_another_python(tmp_path: Path) -> None:
    others = [python for python in NEW_ENOUGH if version_of(python) != sys.version_info[:2]]
    if not others:
        pytest.skip("only one Python here")
    archive = tmp_path / protocol.ARCHIVE_NAME
    archive.write_bytes(executor_archive())
    subprocess.run([others[0], "-I", "-S", "-c", recompile.CODE, str(archive)], check=True)
    for python, expected in ((others[0], "True\n"), (sys.executable, "False\n")):
        argv = [python, "-c", IS_OURS, str(archive), recompile.BUNDLE]
        assert subprocess.check_output(argv, text=True) == expected
    before = archive.read_bytes()
    subprocess.run([others[0], "-I", "-S", "-c", recompile.CODE, str(archive)], check=True)
    assert archive.read_bytes() == before, "compiled again for nothing"
