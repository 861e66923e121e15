"""Make .venv hold what poetry.lock pins, with nothing but Python 3.11+ and its pip: `python3 bootstrap.py [GROUP ...]`.

Takes the packages of the wanted groups whose markers fit this machine, installs them with their hashes checked and
without resolving, then torch, then this project in editable form. A second call with nothing new returns at once.
TORCH_INDEX names the package index that torch comes from, VENV another folder than .venv (see `make help`).

`python3 bootstrap.py requirements` writes the same pins, with torch, into requirements.txt, for pip and uv.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

if not (3, 11) <= sys.version_info[:2] < (3, 14):
    version = sys.version.split()[0]
    sys.exit(f"bootstrap: this is Python {version}, 3.11 to 3.13 is needed: name one with `make PYTHON=python3.12 ...`")

import tomllib  # new in Python 3.11

ROOT = Path(__file__).resolve().parent
VENV = Path(os.path.normpath(ROOT / os.environ.get("VENV", ".venv")))  # as sys.prefix is; a link stays one
STAMP = VENV / "cleanmarl.json"
PYTHON = VENV / "bin/python"
CUDA = ("nvidia-", "cuda-", "triton")  # torch asks for these itself where its build needs them


def wanted_state(groups: set[str]) -> dict:
    """What the stamp must hold for the environment to count as up to date."""
    digest = hashlib.sha256((ROOT / "poetry.lock").read_bytes()).hexdigest()
    return {"lock": digest, "torch_index": os.environ.get("TORCH_INDEX", ""), "groups": sorted(groups)}


def locked(groups: set[str]) -> list[tuple[str, str, list[str | None], list[str]]]:
    """(name, version, markers, hashes) of every package in the lock that one of the groups has."""
    found = []
    for package in tomllib.loads((ROOT / "poetry.lock").read_text())["package"]:
        markers = package.get("markers")
        marks = [
            markers.get(g) if isinstance(markers, dict) else markers for g in sorted(groups & {*package["groups"]})
        ]
        if marks:
            found.append((package["name"], package["version"], marks, [file["hash"] for file in package["files"]]))
    return found


def requirements() -> str:
    """What every script needs, and torch, as a requirements file with hashes."""
    lines = [
        "# Made from poetry.lock by `python3 bootstrap.py requirements`; install it, then `pip install --no-deps .`"
    ]
    for name, version, marks, hashes in locked({"main", "torch"}):
        marker = "" if None in marks else " ; " + " or ".join(f"({mark})" for mark in dict.fromkeys(marks))
        lines.append(" \\\n    ".join([f"{name}=={version}{marker}", *(f"--hash={hash_}" for hash_ in sorted(hashes))]))
    return "\n".join(lines) + "\n"


def install(groups: set[str]) -> None:
    """Runs inside VENV: install the pinned packages of `groups`, torch, and the project."""
    try:
        from pip._vendor.packaging.markers import Marker  # pip carries the grammar of markers
    except ModuleNotFoundError:
        sys.exit(f"bootstrap: {VENV} has no pip: make it with `uv venv --seed`, or delete it")

    torch_version, pins = "", []
    for name, version, marks, hashes in locked(groups):
        if name == "torch":
            torch_version = version
        elif not name.startswith(CUDA) and any(mark is None or Marker(mark).evaluate({"extra": ""}) for mark in marks):
            pins.append(" ".join([f"{name}=={version}", *(f"--hash={hash_}" for hash_ in hashes)]))

    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    index = os.environ.get("TORCH_INDEX")
    file = VENV / "requirements.txt"
    file.write_text("\n".join(pins))
    subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", str(file)], check=True)
    subprocess.run([*pip, f"torch=={torch_version}", *(["--index-url", index] if index else [])], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)


def main() -> None:
    if sys.argv[1:] == ["requirements"]:
        (ROOT / "requirements.txt").write_text(requirements())
        return
    groups = {"main", "torch", *sys.argv[1:]}
    known = {"main", *tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]}
    if unknown := groups - known:
        sys.exit(f"bootstrap: unknown group {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    if STAMP.exists():
        have = json.loads(STAMP.read_text())
        groups |= set(have["groups"])  # groups add up: `make test` after `make train` keeps what train needed
        if have == wanted_state(groups):
            return

    if Path(sys.prefix) != VENV:
        if not PYTHON.exists() and subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode != 0:
            sys.exit("bootstrap: this Python cannot make virtual environments (on Debian: apt install python3-venv)")
        print(
            f"bootstrap: installing {', '.join(sorted(groups))} into {VENV.name}, which takes a few minutes", flush=True
        )
        sys.exit(subprocess.run([str(PYTHON), __file__, *sorted(groups)]).returncode)

    if STAMP.exists() and json.loads(STAMP.read_text())["torch_index"] != os.environ.get("TORCH_INDEX", ""):
        # pip would keep a torch of this version, whatever it is built for
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-qq", "-y", "torch"], check=True)
    STAMP.write_text(json.dumps(wanted_state(groups) | {"lock": "an install that was begun"}))
    try:
        install(groups)
    except subprocess.CalledProcessError as error:
        sys.exit(f"bootstrap: pip failed with exit status {error.returncode}; its message is above")
    STAMP.write_text(json.dumps(wanted_state(groups)))


if __name__ == "__main__":
    main()
