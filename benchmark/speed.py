"""Measure a script's speed beside a peer's: environment steps per second, training included, in alternating runs.

    python benchmark/speed.py --steps 163840 --peer-steps 40960 \\
        --ours "python cleanmarl/ppo.py --total-timesteps {steps} --seed {seed} --runs-dir {tmp} --eval-episodes 0" \\
        --peer "bash benchmark/peers/cleanrl.sh FOLDER {tmp} ppo {steps} {seed}"

    python benchmark/speed.py --table --peers FOLDER [--only mappo]

measures the pairs that stand in benchmark/speed_pairs.py, or some of them, in the root of the repository. It adds what
it found to docs/results/data/speed.csv, of which the tables in docs/speed.md and README.md are made. FOLDER is what
benchmark/peers/setup.sh filled.

In a command {steps} stands for the number of environment steps, {seed} for the number of the repeat, and {tmp} for a
folder that is deleted afterwards. A measurement runs a command twice, for `steps` and for `short * steps`, and divides
the difference of the steps by the difference of the times: start-up (imports, building environments) cancels out. Raise
the steps until that difference is several seconds. The end-to-end rate of the longer run is reported beside it. Both
lengths must be whole rollouts: a script that makes fewer steps than it was told to seems faster than it is.

CPU time is user + system time of the process and of every descendant that was waited for. On a shared machine compare
steps per CPU-second; both sides run with OMP_NUM_THREADS=1 unless it is set already.
"""

import csv
import json
import os
import platform
import runpy
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import tyro
from speed_pairs import PAIRS, Pair  # benchmark/speed_pairs.py


@dataclass
class Args:
    ours: str | None = None
    """command of the script to measure, with {steps}"""
    peer: str | None = None
    """command to compare it with, with {steps}"""
    steps: int = 40960
    """environment steps of our longer run"""
    peer_steps: int | None = None
    """environment steps of the peer's longer run (default: as many as ours)"""
    short: float = 0.25
    """length of the shorter run as a fraction of the longer one, in (0, 1)"""
    repeats: int = 3
    """measurements of each side; the order of the two sides alternates"""
    table: bool = False
    """measure the pairs of benchmark/speed_pairs.py, and write docs/results/data/speed.csv and README.md's table"""
    peers: Path | None = None
    """with --table: folder that benchmark/peers/setup.sh filled"""
    only: tuple[str, ...] = ()
    """with --table: scripts or peers whose pairs are measured (default: all)"""
    profile: bool = False
    """also report how our time splits into env, forward, update and the rest (one more run)"""


def machine() -> dict:
    """What a reader must know of the machine to place a timing."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux only: elsewhere the architecture has to do
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def refuse(line: str) -> NoReturn:
    """End as a wrong command line does; the line stands behind the name of the program that was called."""
    print(f"{Path(sys.argv[0]).stem}: {line}", file=sys.stderr)
    sys.exit(2)


def to_argv(command: str, **values) -> list[str]:
    """Split a command, fill in its {names}, and let `python` mean the interpreter that runs this script."""
    try:
        argv = shlex.split(command)
    except ValueError as error:
        refuse(f"no command: {command} ({error})")
    if not argv:
        refuse("the command is empty")
    for name, value in values.items():
        argv = [word.replace(f"{{{name}}}", str(value)) for word in argv]
    return [sys.executable if argv[0] == "python" else argv[0], *argv[1:]]


def run(argv: list[str]) -> tuple[float, float]:
    """Run one command to its end; returns its wall time and its CPU time in seconds. A failure ends the program."""
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        env = {"OMP_NUM_THREADS": "1", "PEERS_PYTHON": sys.executable, **os.environ}
        try:
            process = subprocess.Popen(argv, stdout=log, stderr=log, env=env)
        except OSError as error:
            refuse(f"{argv[0]} cannot be run: {error.strerror}")
        try:
            _, status, usage = os.wait4(process.pid, 0)  # its children are in the usage, once it has waited for them
        except BaseException:
            process.terminate()
            process.wait()
            raise
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            log.seek(0)
            tail = log.read().decode(errors="replace")[-2000:]
            sys.exit(f"exit status {process.returncode} from: {shlex.join(argv)}\n{tail}")
    return wall, usage.ru_utime + usage.ru_stime


def measure(command: str, steps: int, short: float, seed: int) -> dict[str, float]:
    """Steps per second of one command: marginal (start-up cancelled) and end to end, by wall clock and by CPU time."""
    few = max(1, round(short * steps))
    with tempfile.TemporaryDirectory() as tmp:
        argvs = [to_argv(command, steps=n, seed=seed, tmp=tmp) for n in (few, steps)]
        (short_wall, short_cpu), (wall, cpu) = map(run, argvs)
    if min(wall - short_wall, cpu - short_cpu) <= 0:
        sys.exit(f"{steps} steps took no longer than {few}: start-up hides the work, raise the number of steps")
    return {
        "wall second": (steps - few) / (wall - short_wall),
        "CPU-second": (steps - few) / (cpu - short_cpu),
        "wall second, end to end": steps / wall,
        "CPU-second, end to end": steps / cpu,
    }


def sample(out: str, script: list[str]) -> None:
    """Run a Python script and write to `out` how many seconds each part of its `main` took.

    A timer interrupts it every 2 ms, and the time since the last interrupt goes to the part that the stack shows:
    update = below the function `update`; env = below any `step` but torch's, within `collect`; forward = the rest of
    `collect`; other = the rest of `main`. In a script without `collect`, env is any such step and forward is in other.
    Unlike a tracing profiler this does not slow Python down against native code.
    """
    spent = {"env": 0.0, "forward": 0.0, "update": 0.0, "other": 0.0}
    last = time.perf_counter()

    def tick(_signum, frame):
        nonlocal last
        phase, in_step = None, False
        while frame is not None:  # from the innermost call outwards
            module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            if module == "__main__" and name == "main":
                if in_step and (phase == "forward" or "collect" not in frame.f_globals):
                    phase = "env"
                spent[phase or "other"] += time.perf_counter() - last
                break
            if module == "__main__" and name in ("collect", "update"):
                phase = "forward" if name == "collect" else name
            in_step |= name.startswith("step") and not module.startswith("torch")
            frame = frame.f_back
        last = time.perf_counter()

    sys.argv = script
    sys.path[0] = str(Path(script[0]).resolve().parent)
    signal.signal(signal.SIGALRM, tick)
    signal.siginterrupt(signal.SIGALRM, False)  # let native code go on where it was
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        runpy.run_path(script[0], run_name="__main__")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        Path(out).write_text(json.dumps(spent))


def split_time(command: str, steps: int) -> dict[str, float]:
    """Seconds that one run of a Python command spends in env, forward, update and the rest; see `sample`."""
    with tempfile.TemporaryDirectory() as tmp:
        argv = to_argv(command, steps=steps, seed=1, tmp=tmp)
        out = Path(tmp) / "split.json"
        run([argv[0], __file__, "--sample", str(out), *argv[1:]])
        return json.loads(out.read_text())


COLUMNS = ["script", "beside", "ours", "ours_min", "ours_max", "peer", "peer_min", "peer_max"]
COLUMNS += ["ratio", "ratio_min", "ratio_max", "n", "goal", "settings", "ours_differs", "peer_differs"]
COLUMNS += ["ours_command", "peer_command", "machine"]
ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "results" / "data" / "speed.csv"
README = ROOT / "README.md"


def measure_table(args: Args) -> None:
    """Measure the pairs, and write a row for each as soon as it is done; an earlier row of the same pair goes."""
    pairs = [pair for pair in PAIRS if not args.only or {pair.script, pair.beside} & set(args.only)]
    if not pairs or args.peers is None:
        names = dict.fromkeys([pair.script for pair in PAIRS] + [pair.beside for pair in PAIRS])
        refuse(f"--table needs --peers, and --only some of: {', '.join(names)}")
    if not args.peers.is_dir():
        refuse(f"there is no folder --peers {args.peers}")
    read_table()  # before hours of measurements
    about = "{cpu}, {cores} cores, Python {python}, torch {torch}".format(**machine())
    for pair in pairs:
        peer = pair.peer.replace("{peers}", shlex.quote(str(args.peers.resolve())))
        sides = {"ours": (pair.ours, pair.steps), "peer": (peer, pair.peer_steps)}
        rates = {name: [] for name in sides}
        for repeat in range(args.repeats):
            for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
                rates[name].append(measure(*sides[name], args.short, seed=repeat + 1)["CPU-second"])
        row = table_row(pair, rates, about)
        print(f"{pair.script} / {pair.beside}: {row['ours']} / {row['peer']} = {with_range(row)}", file=sys.stderr)
        write_table([r for r in read_table() if place(r) != place(row)] + [row])


def table_row(pair: Pair, rates: dict[str, list[float]], about: str) -> dict:
    """What was measured of a pair: medians and ranges of the rates, and of the ratios repeat by repeat."""
    ratios = [a / b for a, b in zip(rates["ours"], rates["peer"])]
    numbers = [round(f(x)) for x in rates.values() for f in (statistics.median, min, max)]
    numbers += [round(f(ratios), 2) for f in (statistics.median, min, max)] + [len(ratios)]
    texts = [pair.settings, pair.ours_differs, pair.peer_differs, pair.ours, pair.peer, about]
    return dict(zip(COLUMNS, [pair.script, pair.beside, *numbers, pair.goal, *texts]))


def place(row: dict) -> int | None:
    """Where a row stands in the table; None if its pair is no longer measured."""
    places = [(pair.script, pair.beside) for pair in PAIRS]
    name = row["script"], row["beside"]
    return places.index(name) if name in places else None


def read_table() -> list[dict]:
    if not TABLE.exists():
        return []
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not all(row.keys() == set(COLUMNS) and None not in row.values() for row in rows):
        refuse(f"{TABLE} is damaged")
    return rows


def write_table(rows: list[dict]) -> None:
    """Write the rows in the order of the pairs, and README.md's table; docs/generate.py makes the one of the docs."""
    temporary = TABLE.with_suffix(".tmp")  # a kill leaves what was there before
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted((row for row in rows if place(row) is not None), key=place))
    temporary.replace(TABLE)
    before, _, rest = README.read_text().partition(README_START)
    README.write_text(before + README_START + readme_table(read_table()) + README_END + rest.partition(README_END)[2])


README_START = "<!-- made by benchmark/speed.py --table of docs/results/data/speed.csv -->\n"
README_END = "<!-- end of it -->\n"


def readme_table(rows: list[dict]) -> str:
    """The short form of the table, for README.md: a script with --compile stands beside itself without."""
    cells = {}
    for row in rows:
        script, _, flag = row["script"].partition(" ")
        cells.setdefault((script, row["beside"]), {})[flag] = with_range(row)
    lines = ["| script | beside | ratio (range) | with `--compile` |", "|---|---|---:|---:|"]
    for (script, beside), of_flags in cells.items():
        lines.append(f"| `{script}.py` | {beside} | {of_flags.get('', '')} | {of_flags.get('--compile', '')} |")
    return "\n".join(lines) + "\n"


def with_range(row: dict) -> str:
    """28.1 (27.5-28.9), in three digits."""
    ratio, low, high = (float(row[key]) for key in ("ratio", "ratio_min", "ratio_max"))
    digits = 1 if ratio >= 9.95 else 2
    return f"{ratio:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def main(args: Args) -> None:
    if not 0 < args.short < 1 or args.repeats < 1:
        refuse("--short must lie between 0 and 1, and --repeats be at least 1")
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _frame: sys.exit(128 + signum))  # so that `run` ends its child
    if args.table:
        return measure_table(args)
    if args.ours is None:
        refuse("--ours or --table is needed")
    program, script = (*to_argv(args.ours, steps=1, seed=1, tmp=""), "")[:2]
    if args.profile and not (Path(program).name.startswith("python") and script.endswith(".py")):
        refuse(f"--profile needs `python SCRIPT.py ...`, not: {args.ours}")
    if not all("{steps}" in command for command in (args.ours, args.peer) if command):
        refuse("--ours and --peer need {steps}: two lengths of a run tell its steps from its start-up")
    about = machine()
    sides = {"ours": (args.ours, args.steps)}
    if args.peer:
        sides["peer"] = (args.peer, args.peer_steps or args.steps)
    rates = {name: [] for name in sides}
    for repeat in range(args.repeats):
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            rates[name].append(measure(*sides[name], args.short, seed=repeat + 1))
            print(
                f"repeat {repeat + 1}, {name}: {rates[name][-1]['CPU-second']:.0f} steps per CPU-second",
                file=sys.stderr,
            )

    kinds = list(rates["ours"][0])
    print("| steps per | steps | " + " | ".join(kinds) + " |\n|---" + "|---:" * (len(kinds) + 1) + "|")
    for name, (_, steps) in sides.items():
        columns = [[rate[kind] for rate in rates[name]] for kind in kinds]
        cells = [f"{statistics.median(c):,.0f} ({min(c):,.0f}-{max(c):,.0f})" for c in columns]
        print(f"| {name} | {steps} | " + " | ".join(cells) + " |")
    if args.peer:
        pairs = [[a[kind] / b[kind] for a, b in zip(rates["ours"], rates["peer"])] for kind in kinds]
        cells = [f"{statistics.median(p):.2f} ({min(p):.2f}-{max(p):.2f})" for p in pairs]
        print("| ours / peer | | " + " | ".join(cells) + " |")
    print(f"\nMedian (min-max) of {args.repeats} alternating repeats, ratios repeat by repeat, training included.")
    for name, (command, _) in sides.items():
        print(f"{name}: `{command}`")
    print("{cpu}, {cores} cores, load average {load} at the start, Python {python}, torch {torch}".format(**about))
    if args.profile:
        spent = split_time(args.ours, args.steps)
        total = sum(spent.values()) or 1.0
        print("\ntime of ours: " + ", ".join(f"{part} {100 * s / total:.0f} %" for part, s in spent.items()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sample"]:  # the profiled process, started by split_time
        sample(sys.argv[2], sys.argv[3:])
    else:
        main(tyro.cli(Args, description=__doc__))
