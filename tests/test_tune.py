"""The search of settings: spaces from annotations, studies of real processes, early stops, going on after a kill."""

import dataclasses
import gc
import json
import re
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import optional
import pytest

optuna = pytest.importorskip("optuna", reason=optional.reason("optuna"))
pytest.importorskip("pandas", reason=optional.reason("pandas"))
pytest.importorskip("matplotlib", reason=optional.reason("matplotlib"))
pytest.importorskip("scipy", reason=optional.reason("scipy"))

from cleanmarl.cli import NonNegativeFloat, PositiveInt, UnitFloat, UsageError  # noqa: E402

from annotated_types import Interval  # noqa: E402
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402
from optuna.trial import TrialState  # noqa: E402

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
sys.path.insert(0, str(BENCHMARK))
import tune  # noqa: E402

sys.path.remove(str(BENCHMARK))  # its run.py must not stand in for another module of that name


class Fields:
    learning_rate: NonNegativeFloat = 1e-3
    gamma: UnitFloat = 0.99
    clip: UnitFloat | None = None
    angle: Annotated[float, Interval(gt=-1, lt=1)] = 0.0
    epochs: PositiveInt = 4
    norm_adv: bool = True
    cell: Literal["gru", "lstm"] = "gru"
    env_id: str = "e"
    sizes: tuple[int, ...] = (64, 64)
    rates: float | Literal["auto"] = "auto"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("learning_rate=1e-5..1e-2", FloatDistribution(1e-5, 1e-2, log=True)),
        ("learning_rate=0..0.1", FloatDistribution(0, 0.1)),
        ("gamma=0.9..0.999", FloatDistribution(0.9, 0.999)),  # less than a factor of ten: linear
        ("gamma", FloatDistribution(0, 1)),
        ("clip", FloatDistribution(0, 1)),
        ("angle", FloatDistribution(-1, 1)),
        ("epochs=1..8", IntDistribution(1, 8)),
        ("epochs=1..32", IntDistribution(1, 32, log=True)),
        ("epochs=2,4", CategoricalDistribution([2, 4])),
        ("norm_adv", CategoricalDistribution([False, True])),
        ("cell", CategoricalDistribution(["gru", "lstm"])),
        ("cell=lstm", CategoricalDistribution(["lstm"])),
    ],
)
def test_space_follows_the_annotation(text, want):
    assert tune.read_param(text, Fields) == want


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rate=0..1", "has no --rate"),
        ("gamma=0.9..1.1", r"--gamma must be in \[0, 1\], not 1.1"),
        ("epochs=0..3", "--epochs must be greater than 0, not 0"),
        ("epochs=2,-1", "not -1"),
        ("epochs=1.5..3", "invalid literal"),
        ("epochs", "needs a range"),
        ("gamma=0.9..0.9", "range is empty"),
        ("cell=rnn", "there are only"),
        ("env_id=a,b", "no number, bool or Literal"),
        ("sizes", "no number, bool or Literal"),
        ("rates=0.1..1", "no number, bool or Literal"),
    ],
)
def test_space_outside_the_annotation_is_refused(text, why):
    with pytest.raises(UsageError, match=why):
        tune.read_param(text, Fields)


def test_scores_of_several_environments_are_scaled():
    assert tune.scales(["any/thing"], "eval/ep_reward") == {"any/thing": (0, 1)}
    scales = tune.scales(["CartPole-v1", "mpe/simple_spread_v3"], "eval/ep_reward")
    assert scales == {"CartPole-v1": (22, 500), "mpe/simple_spread_v3": (-79.3, -21.8)}
    with pytest.raises(UsageError, match="no random and best eval/ep_reward of x/y"):
        tune.scales(["CartPole-v1", "x/y"], "eval/ep_reward")
    with pytest.raises(UsageError, match="no random and best eval/elo of Othello-v1, ConnectFour-v1"):
        tune.scales(["Othello-v1", "ConnectFour-v1"], "eval/elo")


def test_study_of_a_real_script(tmp_path):
    argv = [
        sys.executable,
        BENCHMARK / "tune.py",
        "--command",
        "python cleanmarl/mappo.py",
        "--env-ids",
        "matrix/penalty",
    ]
    argv += ["--params", "learning_rate=1e-4..1e-2", "norm_adv", "--num-trials", "2", "--runs-dir", tmp_path]
    argv += ["--", "--total-timesteps", "1000", "--num-envs", "16", "--eval-interval", "400", "--eval-episodes", "2"]
    result = subprocess.run(list(map(str, argv)), cwd=BENCHMARK.parent, capture_output=True, text=True, timeout=550)
    assert result.returncode == 0, result.stderr
    assert "1 of 2: complete" in result.stdout and "--learning-rate 0.0007 --norm-adv" in result.stdout  # the defaults
    best = result.stdout.splitlines()[-1]
    assert best.startswith("best: ") and "mappo.py --env-id matrix/penalty --total-timesteps 1000" in best
    table = (tmp_path / "trials.csv").read_text().splitlines()
    assert len(table) == 3 and table[1].startswith("0,COMPLETE,")
    study = optuna.load_study(study_name="tune", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert all(len(trial.intermediate_values) >= 2 for trial in study.trials)  # on the way, and at the end
    entries = json.loads((tmp_path / "manifest.json").read_text()).values()
    assert len(entries) == 2 and all(entry["status"] == "finished" for entry in entries)


SCRIPT = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from annotated_types import Interval

@dataclass
class Args:
    x: Annotated[float, Interval(ge=0, le=1)] = 0.9

def main():
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    arg = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    folder = Path(arg["--runs-dir"]) / str(time.time_ns())
    folder.mkdir()
    print(f"run folder: {folder}", flush=True)
    if Path("broken").exists():
        raise RuntimeError("the environment died")
    with (folder / "events.out.tfevents.1.h.1.0").open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
        for k in (1, 2):
            value = Summary.Value(tag="eval/ep_reward", simple_value=k * float(arg["--x"]))
            writer.write(Event(wall_time=1.0, step=k, summary=Summary(value=[value])).SerializeToString())
            file.flush()
            (folder / "started").touch()
            if k == 1:
                time.sleep(60 if float(arg["--x"]) < 0.5 else float(Path("seconds").read_text()))
    (folder / "done.json").write_text("{}")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder with a script whose run evaluates to x and, at its end, to 2 x; with an x below 0.5 it has no end."""
    (tmp_path / "toy.py").write_text(SCRIPT)
    (tmp_path / "seconds").write_text("0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(tune, "START_UP", 2)
    return tmp_path


def test_the_small_evaluations_of_off_policy_scripts_stop_no_trial(tmp_path, capsys):
    """Nor does a search stay silent on that its ranges leave out the defaults."""
    args = tune.Args("python cleanmarl/vdn.py", ["matrix/penalty"], ["learning_rate=1e-5..1e-4"], num_trials=1)
    args = dataclasses.replace(args, command=f"python {BENCHMARK.parent}/cleanmarl/vdn.py", runs_dir=tmp_path)
    flags = "--total-timesteps 120 --batch-size 4 --eval-interval 60 --eval-episodes 2"
    search = tune.Search(args, flags.split(), lambda: 0)
    assert "no trial has the defaults" in capsys.readouterr().out
    search.work()
    (trial,) = search.study.trials
    (entry,) = json.loads((tmp_path / "manifest.json").read_text()).values()
    assert entry["flags"][: len(flags.split()) + 2] == [*flags.split(), "--eval-steps", "0"]
    assert len(trial.intermediate_values) == 2  # those of --eval-interval, every 60 steps
    given = tune.Search(dataclasses.replace(args, runs_dir=tmp_path / "other"), ["--eval-steps", "10"], lambda: 0)
    assert given.fixed == []


def toy_args(num_trials: int, **changes) -> tune.Args:
    return tune.Args("python toy.py", ["e"], ["x"], num_trials=num_trials, runs_dir=Path("runs"), **changes)


def test_a_trial_worse_than_the_median_is_stopped_early(toy, capsys):
    search = tune.Search(toy_args(3), [], lambda: 0)
    for x in (0.8, 0.1):
        search.study.enqueue_trial({"x": x})
    search.work()
    states = [trial.state for trial in search.study.trials]
    assert states == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED]
    assert [trial.value for trial in search.study.trials[:2]] == pytest.approx([1.8, 1.6])
    assert search.study.trials[2].intermediate_values == pytest.approx({1: 0.1})
    assert "3 of 3: pruned at 0.1" in capsys.readouterr().out
    *_, pruned = (search.args.runs_dir / "trials.csv").read_text().splitlines()
    assert pruned.startswith("2,PRUNED,,")  # no score to compare with theirs


def test_trials_are_compared_at_the_same_steps(toy):
    """However many of them a rollout has, and whichever run of a trial it is."""
    script = SCRIPT.replace("for k in (1, 2):", 'for k in (10, 23, 40) if float(arg["--x"]) > 0.8 else (20, 40):')
    about = '    (folder / "args.json").write_text(\'{"args": {"eval_interval": 10, "total_timesteps": 40}}\')\n'
    begin = "    with (folder"
    (toy / "toy.py").write_text(script.replace(begin, about + begin).replace("k * float", "float"))
    search = tune.Search(toy_args(2, num_seeds=2), [], lambda: 0)
    search.study.enqueue_trial({"x": 0.7})
    search.work()
    (fine, coarse), second = [trial.intermediate_values for trial in search.study.trials], tune.RUN_PLACES
    assert [*fine] == [1, 2, 4, second + 1, second + 2, second + 4]  # after 10, 23 and 40 steps of each
    assert [*coarse] == [2, 4, second + 2, second + 4]


def test_trials_without_evaluations_on_the_way_are_compared_at_their_ends(toy):
    """The last rollouts of which end at different steps."""
    script = SCRIPT.replace("for k in (1, 2):", 'for k in (3900 if float(arg["--x"]) > 0.8 else 3990,):')
    about = '    (folder / "args.json").write_text(\'{"args": {"eval_interval": 0, "total_timesteps": 4000}}\')\n'
    begin = "    with (folder"
    (toy / "toy.py").write_text(script.replace(begin, about + begin).replace("k * float", "float"))
    search = tune.Search(toy_args(2, num_seeds=2), [], lambda: 0)
    search.study.enqueue_trial({"x": 0.7})
    search.work()
    assert [[*trial.intermediate_values] for trial in search.study.trials] == [[0, tune.RUN_PLACES]] * 2


def test_a_trial_that_fails_counts_and_is_explained(toy, capsys):
    (toy / "broken").touch()
    tune.Search(toy_args(1), [], lambda: 0).work()
    output = capsys.readouterr().out
    assert "1 of 1: fail" in output and "the environment died" in output
    (toy / "broken").unlink()


def test_a_search_that_was_killed_goes_on_where_it_was(toy):
    (toy / "seconds").write_text("3")
    argv = [sys.executable, BENCHMARK / "tune.py", "--command", "python toy.py", "--env-ids", "e", "--params", "x"]
    searching = subprocess.Popen([*argv, "--runs-dir", "runs", "--num-trials", "2"], cwd=toy)
    while not list((toy / "runs").glob("*/started")) and searching.poll() is None:
        time.sleep(0.05)
    searching.kill()
    assert searching.wait() < 0  # in the midst of its first trial
    search = tune.Search(toy_args(2), [], lambda: 0)
    with pytest.raises(UsageError, match="another program is searching"):
        tune.Search(toy_args(2), [], lambda: 0)
    search.study.enqueue_trial({"x": 0.7})
    search.work()
    assert [t.params["x"] for t in search.study.get_trials(states=[TrialState.COMPLETE])] == [0.9, 0.7]
    assert len(list((toy / "runs").glob("*/done.json"))) == len(list((toy / "runs").glob("*/started"))) == 2


def test_a_later_call_tries_other_parameters(toy):
    """And not the first ones again, which would be no trials: their runs are there."""
    (toy / "toy.py").write_text(SCRIPT.replace("60 if", "0 if"))
    for num_trials in (3, 6):
        search = tune.Search(toy_args(num_trials, num_seeds=1), [], lambda: 0)
        search.work()
        search.file.close()  # as at the end of a program
    tried = [trial.params["x"] for trial in tune.Search(toy_args(6), [], lambda: 0).study.trials]
    assert len(tried) == len(set(tried)) == 6


def test_an_edited_script_is_told_apart(toy, capsys):
    told = "the script has changed since the trials before: their scores are of another version\n"
    for edit, lines in (("", 0), ("", 0), ("# another\n", 1), ("", 0)):
        (toy / "toy.py").write_text((toy / "toy.py").read_text() + edit)
        tune.Search(toy_args(2), [], lambda: 0).file.close()
        assert capsys.readouterr().out.count(told) == lines


def test_trials_that_end_at_once_are_counted_one_by_one(toy, capsys):
    (toy / "toy.py").write_text(SCRIPT.replace("60 if", "0 if"))
    search = tune.Search(toy_args(4, num_seeds=1), [], lambda: 0)
    tell = search.study.tell
    search.study.tell = lambda *told: (tell(*told), time.sleep(0.5))  # time for another to end
    with ThreadPoolExecutor(2) as pool:
        for worker in [pool.submit(search.work) for _ in range(2)]:
            worker.result()
    assert re.findall(r"^(\d) of 4: ", capsys.readouterr().out, re.M) == ["1", "2", "3", "4"]


def test_a_score_that_is_no_number_is_explained_and_counts(toy, capsys):
    (toy / "toy.py").write_text(SCRIPT.replace('k * float(arg["--x"])', 'float("nan")'))
    for told in ("1 of 1: fail", ""):  # the second time there is nothing to do
        search = tune.Search(toy_args(1), [], lambda: 0)
        search.work()
        search.file.close()
        output = capsys.readouterr().out
        assert told in output and ("eval/ep_reward is nan in runs/" in output) == bool(told)


def test_a_study_that_another_program_has_locked_is_waited_for(toy):
    """SQLite by itself would give up after five seconds, and the search would end in the midst of its trials."""
    search = tune.Search(toy_args(1), [], lambda: 0)
    with closing(sqlite3.connect("runs/study.db", isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        release = threading.Timer(7, other.execute, ["COMMIT"])
        release.start()
        search.work()
        release.join()
    assert [trial.state for trial in search.study.trials] == [TrialState.COMPLETE]


def test_a_folder_goes_on_with_its_own_search_alone(toy, capsys):
    """Scores of another environment, metric or budget must not be ranked with those of the first."""
    tune.Search(toy_args(1), [], lambda: 0).work()
    search = tune.Search(toy_args(2), [], lambda: 0)  # more trials of the same
    assert search.num_open == 1
    search.file.close()  # as at the end of its process
    changes = {"env_ids": ["f"], "params": ["x=0.5..0.9"], "num_seeds": 2, "metric": "rollout/ep_reward"}
    for name, value in changes.items():
        assert tune.main(dataclasses.replace(toy_args(2), **{name: value}), []) == 2
        gc.collect()
        (line,) = capsys.readouterr().err.splitlines()
        assert f"runs holds a search with --{name.replace('_', '-')} '" in line
    assert tune.main(toy_args(2), ["--num-envs", "2"]) == 2
    line = "tune: runs holds a search with flags after -- '', not '--num-envs 2'; choose another --runs-dir\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("command", ["python -m cleanmarl.ppoo", "python -m nowhere.ppo", "python -m", "python no.py"])
def test_a_script_that_is_not_there_is_one_line(command, toy, capsys):
    assert tune.main(dataclasses.replace(toy_args(1), command=command), []) == 2
    assert capsys.readouterr().err == f"tune: there is no script in: {command}\n"


@pytest.mark.parametrize("command", ["python scripts/own.py", "python -m own"])
def test_a_script_may_import_what_lies_beside_it(command, toy, monkeypatch):
    before = [path for path in sys.path if path]
    monkeypatch.setattr(sys, "path", before[:])
    folder = Path("scripts" if "scripts" in command else ".")
    folder.mkdir(exist_ok=True)
    name = f"nets_of_{folder.name or 'here'}"
    (folder / f"{name}.py").write_text("WIDTH = 7")
    (folder / "own.py").write_text(f"from {name} import WIDTH\nclass Args:\n    width: int = WIDTH\n")
    assert tune.script_of(command).Args.width == 7 and sys.path == before


def test_a_script_that_cannot_be_imported_is_one_line(toy, capsys):
    Path("broken.py").write_text("import no_such_package")
    assert tune.main(dataclasses.replace(toy_args(1), command="python broken.py"), []) == 2
    error = "ModuleNotFoundError: No module named 'no_such_package'"
    assert capsys.readouterr().err == f"tune: {toy / 'broken.py'} cannot be imported: {error}\n"


def test_a_parameter_is_written_as_in_python_or_as_a_flag():
    assert tune.name_of("learning_rate=1..2") == tune.name_of("--learning-rate=1..2") == "learning_rate"
    assert tune.read_param("--norm-adv", Fields) == tune.read_param("norm_adv", Fields)


def test_what_is_the_searchs_own_is_refused(toy, capsys):
    assert tune.main(toy_args(1), ["--seed=7", "--env_id", "x"]) == 2
    given = "is the search's: give --num-seeds, --env-ids, --runs-dir, before --"
    line = f"tune: --env-id --seed {given}; the same call again resumes what was interrupted\n"
    assert capsys.readouterr().err == line
    searched = toy_args(1).params[0].partition("=")[0]
    assert tune.main(toy_args(1), [f"--{searched}=0.5"]) == 2
    assert capsys.readouterr().err == f"tune: --{searched} is given, and --params searches it\n"
    seeds = dataclasses.replace(toy_args(1), params=("seed=7,8",))
    assert tune.main(seeds, []) == 2 and capsys.readouterr().err == line.replace("--env-id --seed", "--seed")
    Path("no_args.py").write_text("x = 1")
    Path("no_import.py").write_text("raise SystemExit('usage')")
    for name, why in (("no_args", "has no Args"), ("no_import", "cannot be imported: SystemExit: usage")):
        assert tune.main(dataclasses.replace(toy_args(1), command=f"python {name}.py"), []) == 2
        assert capsys.readouterr().err == f"tune: {Path(f'{name}.py').resolve()} {why}\n"


def test_a_study_lies_in_its_folder_whatever_its_name(toy):
    folder = Path("a%20b #?")
    assert tune.main(dataclasses.replace(toy_args(1), runs_dir=folder), []) == 0
    assert (folder / "study.db").exists() and not Path("a b #?").exists()


def test_what_a_search_lacks_or_has_twice_is_one_line(toy, capsys):
    assert tune.main(dataclasses.replace(toy_args(1), env_ids=[]), []) == 2
    assert capsys.readouterr().err == "tune: --env-ids has no environment\n"
    assert tune.main(dataclasses.replace(toy_args(1), params=["x=0..1", "--x=0..2"]), []) == 2
    assert capsys.readouterr().err == "tune: --params has --x twice\n"
    assert tune.main(dataclasses.replace(toy_args(1), env_ids=["e", "e"]), []) == 0  # once
    assert "--env-id e " in capsys.readouterr().out


def test_a_damaged_study_is_one_line(toy):
    (toy / "runs").mkdir()
    (toy / "runs" / "study.db").write_text("no database, but long enough to be taken for one" * 100)
    line = [sys.executable, BENCHMARK / "tune.py", "--command", "python toy.py", "--env-ids", "e", "--params", "x"]
    done = subprocess.run([*line, "--runs-dir", "runs"], cwd=toy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("tune: study.db cannot be read or written ("), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["num_seeds", "workers", "num_trials"])
def test_a_search_of_nothing_is_one_line(name, toy, capsys):
    assert tune.main(dataclasses.replace(toy_args(1), **{name: 0}), []) == 2
    assert capsys.readouterr().err == "tune: --num-seeds, --workers and --num-trials must be at least 1\n"
    assert not (toy / "runs").exists()


def test_a_trial_is_pruned_by_the_mean_of_its_seeds_so_far(toy):
    (toy / "toy.py").write_text(SCRIPT.replace("k * float", 'int(arg["--seed"]) * k * float'))
    search = tune.Search(toy_args(1, num_seeds=2), [], lambda: 0)
    search.work()
    [trial] = search.study.trials  # scores 0.9 and 1.8 of seed 1, then 1.8 and 3.6 of seed 2
    means = {1: 0.9, 2: 1.8, tune.RUN_PLACES + 1: 1.8, tune.RUN_PLACES + 2: 2.7}
    assert trial.intermediate_values == pytest.approx(means) and trial.value == pytest.approx(2.7)


def test_a_search_over_two_environments_takes_the_mean_of_their_scaled_scores(toy):
    args = dataclasses.replace(toy_args(1, num_seeds=1), env_ids=["CartPole-v1", "mpe/simple_spread_v3"])
    search = tune.Search(args, [], lambda: 0)
    search.work()
    scaled = (1.8 - 22) / (500 - 22), (1.8 + 79.3) / (79.3 - 21.8)
    assert search.study.trials[0].value == pytest.approx(sum(scaled) / 2)
