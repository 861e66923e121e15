"""requirements.txt is what poetry.lock pins: `python3 bootstrap.py requirements` writes it."""

import importlib.util
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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
