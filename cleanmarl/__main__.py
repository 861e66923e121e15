"""The front: `cleanmarl list`, `cleanmarl train ippo --env-id ...`, `cleanmarl enjoy RUN_DIR`, `cleanmarl report RUNS`.

`train` is `python cleanmarl/ippo.py ...` and nothing else; `enjoy` is `python -m cleanmarl.enjoy ...`, `report` is
`python benchmark/report.py ...`.
"""

import ast
import difflib
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
USAGE = """cleanmarl list                    the scripts, a line each
cleanmarl train SCRIPT [FLAGS]    run a script: cleanmarl train ippo --help
cleanmarl enjoy RUN_DIR [FLAGS]   play what a run has learned: cleanmarl enjoy --help
cleanmarl report RUNS [FLAGS]     curves and tables of many runs: cleanmarl report --help"""


def scripts() -> dict[str, str]:
    """Name -> first sentence of the docstring, of every script of this package: what has Args, Agent and main."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_bytes())  # not imported, which would take seconds
        names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        if {"Args", "Agent", "main"} <= names:
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def say(text: str) -> None:
    """Print, and end quietly if the reader has seen enough: `cleanmarl list | head -1`."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:  # the locale does not have all letters
        say(text.encode("ascii", "backslashreplace").decode())
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its exit


def run(argv: list[str]) -> None:
    """Take the place of this process: signals, exit status and terminal are then those of a script run by path."""
    os.execv(sys.executable, [sys.executable, *argv])


def fail(message: str) -> None:
    """One line and exit status 2."""
    print(f"cleanmarl: {message}", file=sys.stderr)
    sys.exit(2)


def train(argv: list[str]) -> None:
    if not argv or argv[0].startswith("-"):
        fail("train needs a script: cleanmarl train ippo --help")
    name, known = argv[0].removesuffix(".py"), scripts()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        fail(f"there is no script {name}; " + (f"did you mean {near[0]}?" if near else "`cleanmarl list` shows them"))
    run([str(FOLDER / f"{name}.py"), *argv[1:]])


def report(argv: list[str]) -> None:
    script = FOLDER.parent / "benchmark" / "report.py"
    if not script.exists():
        fail("report is benchmark/report.py of the repository, of which only the package is installed here")
    run([str(script), *argv])


def main() -> None:
    """The command line."""
    command, *argv = sys.argv[1:] or ["--help"]
    if command == "list":
        say("\n".join(f"{name:26} {sentence}" for name, sentence in scripts().items()))
    elif command == "train":
        train(argv)
    elif command == "enjoy":
        run(["-m", "cleanmarl.enjoy", *argv])
    elif command == "report":
        report(argv)
    elif command in ("--help", "-h"):
        say(USAGE)
    else:
        near = difflib.get_close_matches(command, ("list", "train", "enjoy", "report"), n=1)
        near = [f"train {command}"] if command.removesuffix(".py") in scripts() else near
        meant = f"; did you mean `{near[0]}`?" if near else ""
        fail(f"there is no command {command}: list, train, enjoy or report{meant}")


if __name__ == "__main__":
    main()
