"""requirements.txt is what poetry.lock pins: `python3 bootstrap.py requirements` writes it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_an_environment_without_pip_is_one_line(tmp_path):
    """As uv makes it, in which `make test` is given then."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    env = {**os.environ, "VENV": str(tmp_path / "bare")}
    done = subprocess.run([sys.executable, ROOT / "bootstrap.py"], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "has no pip: make it with `uv venv" in done.stderr


@pytest.mark.parametrize("place", ["../bare", "link", "sub/../link/"])
def test_the_environment_knows_itself(place, tmp_path):
    """By whatever path it is named: one that did not would start itself again for ever."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (project := tmp_path / "project").mkdir()
    (project / "link").symlink_to("../bare")
    for name in ("bootstrap.py", "poetry.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, project)
    code = "import bootstrap, sys; print(bootstrap.PYTHON); sys.exit(sys.prefix != str(bootstrap.VENV))"
    env = {**os.environ, "VENV": place}
    run = {"cwd": project, "env": env, "capture_output": True, "text": True}
    first = subprocess.run([sys.executable, "-c", code], **run)
    python = first.stdout.strip()
    assert first.returncode == 1 and subprocess.run([python, "-c", code], **run).returncode == 0, first.stderr
    done = subprocess.run([sys.executable, "bootstrap.py"], **run)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "has no pip" in done.stderr


def test_the_export_is_current():
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "bootstrap.py")
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    text = (ROOT / "requirements.txt").read_text()
    assert text == bootstrap.requirements(), "run `python3 bootstrap.py requirements`"

    packages = tomllib.loads((ROOT / "poetry.lock").read_text())["package"]
    expected = {(p["name"], p["version"]) for p in packages if {"main", "torch"} & {*p["groups"]}}
    assert {*re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)} == expected
    assert "torch" in {name for name, _ in expected}
    for pin in text.split("\n")[1:]:
        assert not pin or pin.startswith("    --hash=sha256:") or pin.endswith("\\")  # each has its hashes
