"""X steps, and then X more by --resume, are 2X steps bit for bit; and the checkpoints that a run keeps.

For every script whose environments' state can be had, in the midst of episodes: parameters, optimizers, buffers, random
numbers, environments and all that was logged.
"""

import dataclasses
import importlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import cleanmarl
from cleanmarl import enjoy, ippo, ppo
from cleanmarl import run as run_module
from cleanmarl.cli import UsageError
from cleanmarl.envs import make
from cleanmarl.run import NonFiniteError, Run, load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from optional import need
from toys import Toy, curves, scalars, wait_for

FOLDER = Path(cleanmarl.__file__).parent
SCRIPTS = [path.stem for path in sorted(FOLDER.glob("*.py")) if "run.start(envs" in path.read_text()]
OF_AGENTS = [name for name in SCRIPTS if "MultiAgentVectorEnv" in (FOLDER / f"{name}.py").read_text()]

# Each script takes those that it has: rollouts of 10 steps and batches of 3 episodes from a buffer of 12, in 3
# environments with episodes of 5, 6 and 7 steps, or of 25.
SMALL = {"total_timesteps": 180, "num_envs": 3, "num_steps": 10, "num_minibatches": 1, "update_epochs": 2}
SMALL |= {"batch_size": 3, "buffer_size": 12, "log_every": 2, "eval_steps": 4, "num_eval_ep": 2, "train_freq": 1}
SMALL |= {"normalize_reward": True, "normalize_obs": True, "normalize_state": True, "normalize_value": True}
SMALL |= {
    "epsilon_timesteps": 120,
    "on_policy_episodes": 3,
    "hidden_dim": 8,
    "actor_hidden_dim": 8,
    "critic_hidden_dim": 8,
    "target_network_update_freq": 1,
    "eval_episodes": 1,
    "anneal_lr": True,
}


def arguments(name: str, env_id: str, runs_dir: Path, **changes):
    script = importlib.import_module(f"cleanmarl.{name}")
    fields = {field.name for field in dataclasses.fields(script.Args)}
    flags = {key: value for key, value in SMALL.items() if key in fields}
    return script.Args(**flags | {"env_id": env_id, "runs_dir": str(runs_dir)} | changes)


def train(name: str, args) -> Path:
    return importlib.import_module(f"cleanmarl.{name}").main(args)


def stop(monkeypatch, step: int, how) -> None:
    """Let the next run call `how` before it logs at this step."""
    log = Run.log

    def log_and_stop(run, *metrics):
        if run.step >= step:
            monkeypatch.setattr(Run, "log", log)
            how()
        run.log(*metrics) if Run.log is log else log(run, *metrics)

    monkeypatch.setattr(Run, "log", log_and_stop)


def kill() -> None:
    """Nothing is saved any more, as after a kill -9: test_run.py has one of those."""
    raise KeyboardInterrupt


def state(folder: Path) -> dict:
    return {key: x for key, x in load_checkpoint(folder).items() if key != "best"}


def logged(folder: Path) -> dict[str, list[float]]:
    return {tag: values for tag, values in curves(folder).items() if tag != "time/SPS"}


def difference(a, b, name: str = "") -> str | None:
    """The name of the first part of two nested states that is not the same, to the last bit; or None."""
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return None if same else name
    if type(a) is not type(b):
        return name
    if isinstance(a, dict | list | tuple):
        if len(a) != len(b) or (isinstance(a, dict) and a.keys() != b.keys()):
            return name
        keys = a if isinstance(a, dict) else range(len(a))
        return next(filter(None, (difference(a[key], b[key], f"{name}.{key}") for key in keys)), None)
    return None if a == b else name


def env_id(name: str, family: str) -> str:
    continuous = "continuous" in name
    return {
        "mpe": "mpe/simple_spread_v3?max_cycles=7" + "&continuous_actions=True" * continuous,
        "toy": "toy/team?see=past&varied=True" + "&continuous=True" * continuous,
        "matrix": "matrix/penalty-free?max_cycles=7",
        "lbf": "lbf/Foraging-5x5-2p-1f-v3?max_episode_steps=7",
        "rware": "rware/rware-tiny-4ag-easy-v2?max_steps=7",
    }[family]


CASES = [(name, "toy") for name in OF_AGENTS]
CASES += [
    (name, "mpe") for name in ("ippo_continuous_action", "mappo_lstm", "coppo", "maddpg", "maddpg_lstm_multienvs")
]
CASES += [(name, "matrix") for name in ("ippo", "maddpg_multienvs", "coppo_matrix")]
CASES += [(name, "lbf") for name in ("vdn", "mappo")] + [("ippo", "rware")]


@pytest.mark.parametrize("name, family", CASES)
def test_a_resumed_run_equals_one_that_was_not_stopped(name, family, toy, tmp_path, monkeypatch):
    """Stopped by SIGTERM, or killed while its events run ahead of its last checkpoint."""
    need(*["lbforaging"] * (family == "lbf"), *["rware"] * (family == "rware"))
    monkeypatch.setattr(run_module, "CURVE_POINTS", 4)  # so that it stops between two points, too
    args = arguments(name, env_id(name, family), tmp_path, checkpoint_interval=40)
    whole = train(name, args)
    is_killed = CASES.index((name, family)) % 2 == 1
    stop(monkeypatch, 110, kill if is_killed else lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt if is_killed else SystemExit):
        train(name, args)
    (folder,) = set(tmp_path.iterdir()) - {whole}
    assert 40 <= load_checkpoint(folder)["step"] < 180
    train(name, dataclasses.replace(args, resume=folder))
    assert difference(state(whole), state(folder)) is None
    assert logged(whole) == logged(folder)


class Shaped(gym.vector.VectorWrapper):
    """Another reward, by a wrapper of Gymnasium that does what docs/change.md asks of one around many agents."""

    def __getattr__(self, name):
        return getattr(self.env, name)

    def step(self, actions):
        obs, reward, *rest = self.env.step(actions)
        return obs, reward - 0.1 * np.abs(obs[..., 0]), *rest


@pytest.mark.parametrize("name", ["vdn", "maddpg", "mappo", "coma_lstm"])
def test_environments_in_a_wrapper_of_gymnasium_go_on_where_they_stopped(name, tmp_path, monkeypatch):
    page = (FOLDER.parent / "docs" / "change.md").read_text()
    assert "`def __getattr__(self, name): return getattr(self.env, name)`" in page
    script = importlib.import_module(f"cleanmarl.{name}")
    plain = train(name, args := arguments(name, env_id(name, "mpe"), tmp_path))
    make_envs = script.make_envs
    monkeypatch.setattr(script, "make_envs", lambda *how, **options: Shaped(make_envs(*how, **options)))
    whole = train(name, args)
    stop(monkeypatch, 110, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        train(name, args)
    (folder,) = set(tmp_path.iterdir()) - {plain, whole}
    train(name, dataclasses.replace(args, resume=folder))
    assert difference(state(whole), state(folder)) is None and logged(whole) == logged(folder)
    assert difference(state(whole), state(plain)) is not None


GROUP = "list(agent.critic.parameters())"


@pytest.mark.parametrize("name", ["ippo", "mappo", "coma", "mappo_lstm"])
@pytest.mark.parametrize("dim", [3, 8], ids="{} units".format)
def test_a_group_of_an_optimizer_may_have_another_order_after_a_resume(name, dim, toy, tmp_path):
    """As if made of a set: moments go to their parameters, where torch goes by places, and crashed or mixed them up."""
    text = (FOLDER / f"{name}.py").read_text()
    assert text.count(GROUP) == 1
    (tmp_path / f"set_{name}.py").write_text(text.replace(GROUP, f"{GROUP}[:: -1 if args.resume else 1]"))
    spec = importlib.util.spec_from_file_location(f"set_{name}", tmp_path / f"set_{name}.py")
    sys.modules[spec.name] = script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    args = vars(arguments(name, env_id(name, "toy"), tmp_path / "runs", critic_hidden_dim=dim, eval_episodes=0))
    args = script.Args(**args | ({"anneal_lr": False} if "anneal_lr" in args else {}))  # the total is raised
    whole, half = script.main(args), script.main(dataclasses.replace(args, total_timesteps=90))
    script.main(dataclasses.replace(args, resume=half))
    ours, theirs = (load_checkpoint(folder)["modules"] for folder in (whole, half))
    assert difference(ours["agent"], theirs["agent"]) is None
    assert difference(ours["optimizer"], theirs["optimizer"]) is not None  # which has another order


@pytest.mark.parametrize("other, lacks", [("SGD", "dampening, momentum"), ("RMSprop", "alpha")])
def test_the_state_of_another_optimizer_is_refused(other, lacks, toy, tmp_path):
    """torch takes it, and would fail at the first step with a KeyError."""
    text = (FOLDER / "mappo.py").read_text()
    assert text.count("torch.optim.Adam(groups, eps=1e-5, fused=True)") == 1
    text = text.replace("torch.optim.Adam(groups, eps=1e-5, fused=True)", f"torch.optim.{other}(groups)")
    (tmp_path / "mappo.py").write_text(text)
    spec = importlib.util.spec_from_file_location("other_mappo", tmp_path / "mappo.py")
    sys.modules[spec.name] = script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    args = arguments("mappo", env_id("mappo", "toy"), tmp_path / "runs", eval_episodes=0)
    folder = train("mappo", args)
    before = (folder / "checkpoint.pt").read_bytes()
    resumed = script.Args(**vars(args) | {"resume": folder, "total_timesteps": args.total_timesteps + 90})
    with pytest.raises(
        UsageError, match=f"the optimizer of .*checkpoint.pt is of another class, without {lacks}: take .* new run$"
    ):
        script.main(resumed)
    assert (folder / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("name", [name for name in OF_AGENTS if "self.moments" in (FOLDER / f"{name}.py").read_text()])
def test_a_loaded_buffer_has_the_same_moments_of_rewards(name):
    """To the last bit: they were added and subtracted one after another, and another order has other roundings."""
    script, generator = importlib.import_module(f"cleanmarl.{name}"), np.random.default_rng(1)
    args = script.Args(buffer_size=20, batch_size=1)
    buffer, loaded = (script.Buffer(Toy(1), args) for _ in range(2))
    ones = dict.fromkeys(script.Batch._fields, np.ones((4, 1), np.float32))
    for scale in 10.0 ** generator.uniform(-3, 3, 100):
        buffer.append(script.Batch(**ones | {"reward": generator.normal(0, scale, (4, 1)).astype(np.float32)}))
    loaded.load_state_dict(buffer.state_dict())
    assert (loaded.moments == buffer.moments).all()
    assert (sum(map(script.reward_moments, buffer.episodes)) != buffer.moments).any()


def test_every_script_starts_its_environments_through_the_run():
    """But for those whose environments are in actors, or seeded by each learner."""
    without = {path.stem for path in FOLDER.glob("*.py") if "with Run(" in path.read_text()} - set(SCRIPTS)
    assert all(name.startswith("impala") or name in ("run", "ppo_atari_multigpu") for name in without), without


@pytest.mark.parametrize("name", ["ippo", "mappo_lstm", "maddpg_lstm_multienvs"])
def test_an_evaluation_changes_nothing_of_the_training(name, toy, tmp_path):
    args = arguments(name, "toy/team?see=past&varied=True", tmp_path)
    without, evaluated = train(name, args), train(name, dataclasses.replace(args, eval_interval=50, eval_episodes=3))
    ours, theirs = (load_checkpoint(folder) for folder in (without, evaluated))
    for part in ("modules", "random", "playing", "episodes"):
        assert difference(ours[part], theirs[part]) is None
    assert len(curves(evaluated)["eval/ep_reward"]) > len(curves(without)["eval/ep_reward"])


def test_a_complete_run_goes_on_like_a_longer_one(toy, tmp_path):
    """Whatever the evaluation at its end has drawn. The points of its curves are others: they depend on the total."""
    args = arguments("ippo", toy, tmp_path, anneal_lr=False)
    whole, half = train("ippo", args), train("ippo", dataclasses.replace(args, total_timesteps=90))
    train("ippo", dataclasses.replace(args, resume=half))
    for part in ("modules", "random", "playing"):
        assert difference(load_checkpoint(whole)[part], load_checkpoint(half)[part]) is None


class Episodes:
    """Environments whose state cannot be had; `seeds` of the resets."""

    def __init__(self):
        self.seeds = []

    def reset(self, seed):
        self.seeds.append(seed)
        return torch.zeros(1), {}


def test_environments_without_a_state_start_new_episodes(tmp_path):
    args = ppo.Args(runs_dir=str(tmp_path), total_timesteps=100, eval_episodes=0, seed=7)
    envs, begin = Episodes(), [0.0]
    with Run(args, ppo.__file__) as run:
        assert run.start(envs, begin) == (*envs.reset(None), begin)
        run.carried = ([3.0],)
        run.step = 30
    with Run(dataclasses.replace(args, resume=run.folder, total_timesteps=200), ppo.__file__) as run:
        assert run.start(envs, begin)[2] is begin
    assert envs.seeds == [7, None, 37]


def test_a_named_tuple_is_carried_as_a_tuple(tmp_path):
    class Memory(NamedTuple):
        h: np.ndarray
        step: int

    args = ippo.Args(runs_dir=str(tmp_path), total_timesteps=100, eval_episodes=0)
    memory = Memory(np.arange(3.0), 4)
    with Run(args, ippo.__file__) as run:
        run.start(make("mpe/simple_spread_v3", 2, max_cycles=10), memory)
        run.carried, run.step = (memory,), 30
    with Run(dataclasses.replace(args, resume=run.folder, total_timesteps=200), ippo.__file__) as run:
        *_, (h, step) = run.start(make("mpe/simple_spread_v3", 2, max_cycles=10), Memory(np.zeros(3), 0))
        np.testing.assert_array_equal(h, memory.h)
        assert step == 4


def test_environments_that_are_made_later_start_new_episodes(tmp_path):
    """As those of a curriculum's next stage: what the checkpoint has is of the stage before."""
    args = ippo.Args(runs_dir=str(tmp_path), total_timesteps=100, eval_episodes=0)
    with Run(args, ippo.__file__) as run:
        run.start(make("mpe/simple_spread_v3", 2, max_cycles=10))
        run.step = 30
    with Run(dataclasses.replace(args, resume=run.folder, total_timesteps=200), ippo.__file__) as run:
        run.start(make("mpe/simple_spread_v3", 2, max_cycles=10))
        run.step = 60
        stage = make("mpe/simple_spread_v3", 2, max_cycles=25)
        obs, _ = run.start(stage)
        np.testing.assert_array_equal(obs, stage.reset(seed=args.seed + 60)[0])


# what docs/change.md says of each kind of script: what goes with the environments begins anew with them
NEXT_STAGE = {
    "ippo": "now = run.start(envs)",
    "mappo_lstm": "now = run.start(envs, tuple(np.zeros_like(x) for x in now[2]))",
    "vdn": "*now, buffer.playing = run.start(envs, [[] for _ in buffer.playing])",
    "vdn_lstm": "*now, buffer.playing = run.start(envs, np.zeros_like(now[2]), [[] for _ in buffer.playing])",
}


@pytest.mark.parametrize("name", NEXT_STAGE)
def test_a_curriculum_is_resumed_in_the_stage_of_its_step(name, toy, tmp_path, monkeypatch):
    """Stopped at the very step of the next stage, too; no episode of the old environments goes on in the new ones."""
    stage = "envs = make_envs(args, args.num_envs, **({} if run.step >= 90 else {'varied': True}))"
    begin = rf"        envs.close()\n        {stage}\n\g<0>"
    step = rf"            if run.step >= 90 > step:\n                {stage}\n                {NEXT_STAGE[name]}\n"
    source = (FOLDER / f"{name}.py").read_text()
    for place, edited in (
        (r" {8}\*?now.* = run\.start\(envs.*\n", begin),
        (r" {12}now = collect\(", r"            step = run.step\n\g<0>"),
        (r" {12}run\.log\(", rf"{step}\g<0>"),
    ):
        source, count = re.subn(place, edited, source)
        assert count == 1
    path = tmp_path / f"my_{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, copy)
    spec.loader.exec_module(copy)
    fields = {field.name for field in dataclasses.fields(copy.Args)}
    flags = {key: value for key, value in (SMALL | {"buffer_size": 100}).items() if key in fields}
    args = copy.Args(**flags, env_id=toy, runs_dir=str(tmp_path / "runs"))
    whole = copy.main(args)
    for last in (60, 90, 130):
        stop(monkeypatch, last, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit):
            copy.main(args)
        (folder,) = set((tmp_path / "runs").iterdir()) - {whole}
        copy.main(dataclasses.replace(args, resume=folder))
        assert difference(state(whole), state(folder)) is None, last
        shutil.rmtree(folder)
    lengths = load_checkpoint(whole)["modules"].get("buffer", {}).get("lengths", torch.tensor([[5], [6]]))
    assert {5, 6} <= {*lengths.amin(1).tolist()} <= {5, 6, 7}  # of the fields with as many rows as steps


def test_after_an_error_all_episodes_begin_anew(toy, tmp_path, monkeypatch):
    """Those of the environments that did not fail are in the midst of a rollout that is lost."""
    step, calls = Toy.step, []

    def breaks(envs, action):
        calls.append(action)
        if len(calls) == 25:
            raise ZeroDivisionError
        return step(envs, action)

    monkeypatch.setattr(Toy, "step", breaks)
    args = arguments("mappo_lstm", toy, tmp_path)
    with pytest.raises(ZeroDivisionError):
        train("mappo_lstm", args)
    (folder,) = tmp_path.iterdir()
    assert (load_checkpoint(folder)["step"], load_checkpoint(folder)["playing"]) == (60, None)
    train("mappo_lstm", dataclasses.replace(args, resume=folder))
    assert load_checkpoint(folder)["step"] == 180


def test_numbers_of_environments_and_memories_are_finite_too(toy, tmp_path):
    args = ippo.Args(env_id=toy, runs_dir=str(tmp_path))
    line = r"environments\.carried\.0\.1 is not finite"
    with pytest.raises(NonFiniteError, match=line), Run(args, ippo.__file__) as run:
        run.start(Toy(2))
        run.carried = ((np.zeros(2), np.array([0, np.nan])),)


# ------------------------------------------------------------------------------------------- checkpoints that are kept


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.pt")} | {path.name for path in folder.glob("*.tmp")}


def test_kept_checkpoints_and_the_best_one(toy, tmp_path, capsys):
    """Each is a checkpoint like any other: it can be played, and a run that goes on from it ends like the first."""
    changes = {"checkpoint_interval": 30, "keep_checkpoints": 3, "eval_interval": 60, "eval_episodes": 2}
    args = arguments("ippo", "mpe/simple_spread_v3", tmp_path, **changes)
    folder = train("ippo", args)
    whole = load_checkpoint(folder)
    assert kept(folder) == {"checkpoint.pt", "checkpoint-120.pt", "checkpoint-150.pt", "best.pt"}
    assert [load_checkpoint(folder / f"checkpoint-{step}.pt")["step"] for step in (120, 150)] == [120, 150]
    evaluations = dict(scalars(folder)["eval/ep_reward"])
    assert list(evaluations) == [60, 120, 180]  # the last one is not played again at the end
    best = load_checkpoint(folder / "best.pt")
    assert best["step"] == max(evaluations, key=evaluations.get)
    assert best["best"] == whole["best"] == pytest.approx(max(evaluations.values()))

    capsys.readouterr()
    enjoy.main(enjoy.Args(folder, checkpoint="checkpoint-120.pt", episodes=1))
    assert "ippo at step 120, 1 episodes" in capsys.readouterr().out
    train("ippo", dataclasses.replace(args, resume=folder / "checkpoint-120.pt"))
    assert difference(whole, load_checkpoint(folder)) is None
    assert dict(scalars(folder)["eval/ep_reward"]) == evaluations  # each once
    assert kept(folder) == {"checkpoint.pt", "checkpoint-120.pt", "checkpoint-150.pt", "best.pt"}


def test_who_kills_the_return_to_an_earlier_checkpoint_loses_no_point(toy, tmp_path):
    """The best checkpoint is read then, which may hold a replay buffer: here for ever, as nobody writes this pipe."""
    changes = {"checkpoint_interval": 30, "keep_checkpoints": 5, "eval_interval": 60, "eval_episodes": 1}
    args = arguments("ippo", "mpe/simple_spread_v3", tmp_path, **changes)
    folder = train("ippo", args)
    steps = [step for step, _ in scalars(folder)["train/policy_loss"]]
    (folder / "best.pt").unlink()
    os.mkfifo(folder / "best.pt")

    process = subprocess.Popen([sys.executable, ippo.__file__, "--resume", folder / "checkpoint-60.pt"])
    try:
        wait_for(lambda: not (folder / "done.json").exists())  # the last thing before
    finally:
        process.kill()
        process.wait()
    (folder / "best.pt").unlink()
    assert [step for step, _ in scalars(folder)["train/policy_loss"]] == steps
    assert load_checkpoint(folder)["step"] == steps[-1]


def test_a_checkpoint_of_later_steps_is_dropped_and_the_best_one_stays(tmp_path):
    """Where an earlier checkpoint is resumed, what came after it has not happened."""
    args = ippo.Args(runs_dir=str(tmp_path), keep_checkpoints=2, checkpoint_interval=10, eval_episodes=0)

    def go_on(run, *returns):
        for return_ in returns:
            run.step += 10
            run._log_evaluation({"eval/ep_reward": return_, "eval/std_ep_reward": 0, "eval/ep_length": 1})
            run.log({})

    with pytest.raises(KeyboardInterrupt), Run(args, ippo.__file__) as run:
        go_on(run, 1, 5, 2)
        raise KeyboardInterrupt
    assert kept(run.folder) == {"checkpoint.pt", "checkpoint-20.pt", "best.pt"}
    args = dataclasses.replace(args, resume=run.folder / "checkpoint-20.pt")
    with pytest.raises(KeyboardInterrupt), Run(args, ippo.__file__) as run:
        assert load_checkpoint(run.folder)["step"] == 20  # what --resume goes on from, from now on
        run.step = 25
        run.save()
        assert kept(run.folder) == {"checkpoint.pt", "checkpoint-20.pt", "best.pt"}
        go_on(run, 4)
        assert load_checkpoint(run.folder / "best.pt")["step"] == 20  # 5 is more than 4
        go_on(run, 6)
        assert load_checkpoint(run.folder / "best.pt")["step"] == 45
        raise KeyboardInterrupt
    assert kept(run.folder) == {"checkpoint.pt", "checkpoint-35.pt", "best.pt"}


def test_an_evaluation_that_is_stopped_is_played_later(toy, tmp_path, monkeypatch):
    """And the run goes on from where it was, as if there had been none."""
    args = arguments("ippo", toy, tmp_path, eval_interval=60)
    whole = train("ippo", args)
    evaluate = run_module.evaluate

    def stops(*args, **options):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*args, **options)

    monkeypatch.setattr(run_module, "evaluate", stops)
    with pytest.raises(SystemExit):
        train("ippo", args)
    monkeypatch.setattr(run_module, "evaluate", evaluate)
    (folder,) = set(tmp_path.iterdir()) - {whole}
    assert load_checkpoint(folder)["step"] == 60 and "eval/ep_reward" not in scalars(folder)
    train("ippo", dataclasses.replace(args, resume=folder))
    for part in ("modules", "random", "playing"):
        assert difference(load_checkpoint(whole)[part], load_checkpoint(folder)[part]) is None
    assert [step for step, _ in scalars(folder)["eval/ep_reward"]] == [90, 120, 180]


@pytest.mark.parametrize(
    "flags", [{"eval_interval": 60}, {"eval_interval": 60, "video_interval": 180}, {"video_interval": 90}]
)
def test_what_is_due_at_the_end_comes_though_the_run_was_stopped_in_its_last_update(
    flags, toy, tmp_path, monkeypatch, capsys
):
    """And nobody says of it that it learned nothing."""
    filmed = []

    def film(run, make_envs, policy):
        run.last_film = run.step
        filmed.append(run.step)

    monkeypatch.setattr(Run, "_film", film)  # whose pictures tests/test_enjoy.py looks at
    args = arguments("ippo", toy, tmp_path, capture_video=True, **flags)
    whole = train("ippo", args)
    of_whole = filmed.copy()
    filmed.clear()
    stop(monkeypatch, 180, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        train("ippo", args)
    (folder,) = set(tmp_path.iterdir()) - {whole}
    capsys.readouterr()
    train("ippo", dataclasses.replace(args, resume=folder))
    assert filmed == of_whole and filmed[-1] == 180
    assert logged(folder) == logged(whole) and difference(state(folder), state(whole)) is None
    assert scalars(folder)["eval/ep_reward"][-1][0] == 180 and (folder / "best.pt").exists()
    assert "nothing was learned" not in capsys.readouterr().out


def test_an_evaluation_says_how_far_it_is(toy, tmp_path, monkeypatch, capsys):
    """It makes no more environments than it has episodes: in the others nobody would look at what is played."""
    monkeypatch.setattr(run_module, "LINE_SECONDS", 0)
    num_made = []
    make_envs = ippo.make_envs
    monkeypatch.setattr(ippo, "make_envs", lambda args, n: num_made.append(n) or make_envs(args, n))
    train("ippo", arguments("ippo", "toy/each?varied=True", tmp_path, eval_episodes=2))
    assert num_made == [3, 2]
    assert "evaluation at step 180: 1 of 2 episodes" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["better.pt", "checkpoint-7.pt"])
def test_a_checkpoint_that_is_not_there(name, toy, tmp_path):
    args = arguments("ippo", toy, tmp_path, total_timesteps=30, eval_episodes=0)
    folder = train("ippo", args)
    line = f"{folder} has no {name}: it has checkpoint.pt"
    with pytest.raises(UsageError, match=re.escape(line)):
        train("ippo", dataclasses.replace(args, resume=folder / name, total_timesteps=60))
    with pytest.raises(UsageError, match=re.escape(line)):
        enjoy.main(enjoy.Args(folder, checkpoint=name))
    with pytest.raises(UsageError, match="is no name such as"):
        enjoy.main(enjoy.Args(folder, checkpoint=f"../{name}"))
