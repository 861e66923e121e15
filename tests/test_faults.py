"""Faults with real files, processes and signals: nothing is lost, nothing is poisoned, one line for everything."""

import dataclasses
import http.server
import importlib
import json
import math
import mmap
import os
import pty
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from cleanmarl import enjoy, impala_replay, ippo, ippo_per_agent, ppo
from cleanmarl.cli import RunArgs, UsageError, launch, tell
from cleanmarl.envs import EnvError
from cleanmarl.envs.mpe import Spread
from cleanmarl.finite import find_bad
from cleanmarl.run import (
    FORMAT,
    NonFiniteError,
    Run,
    WriteError,
    check_replay_size,
    check_rollout_size,
    load_checkpoint,
    not_finite,
    write_checkpoint,
)

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from toys import gone, largest_file, scalars, wait_for

FOLDER = Path(ppo.__file__).parent
SHORT = {"total_timesteps": 256, "num_envs": 2, "num_steps": 32, "num_minibatches": 2, "eval_episodes": 0}


@dataclass
class Small(RunArgs):
    """The arguments that Run itself reads."""

    env_id: str = "none"
    total_timesteps: int = 1000
    checkpoint_interval: int = 100
    eval_episodes: int = 0


def small_run(runs_dir: Path, resume: Path | None = None, **modules) -> Run:
    return Run(Small(runs_dir=str(runs_dir), resume=resume), __file__, **modules)


class State:
    """A module of a checkpoint with any state."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


@contextmanager
def started(*command, cwd=None, **options):
    """A process as a user starts it; whatever the test does, it is gone afterwards."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": hear_signals} | options
    process = subprocess.Popen(list(map(str, command)), cwd=cwd, env=env, text=True, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hear_signals():
    """Whoever runs the tests, in the background or under nohup, may ignore signals: what they start must not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def endless(runs_dir: Path) -> list:
    """The command of a run that ends only if something ends it."""
    return [sys.executable, FOLDER / "ppo.py", "--total-timesteps", 10**7, "--runs-dir", runs_dir]


def run_folder(runs_dir: Path) -> Path:
    return wait_for(lambda: list(runs_dir.glob("*/events*")), 180).pop().parent


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run that is complete."""
    return ppo.main(ppo.Args(runs_dir=str(tmp_path_factory.mktemp("runs")), **SHORT))


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """The same, to be spoiled."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in finished.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def refusals(folder: Path) -> set[str]:
    """What --resume and enjoy say of a folder that they refuse."""
    lines = set()
    for play in (
        lambda: ppo.main(ppo.Args(**SHORT | {"resume": folder, "total_timesteps": 512})),
        lambda: enjoy.main(enjoy.Args(folder, episodes=1)),
    ):
        with pytest.raises(UsageError) as error:
            play()
        assert "\n" not in str(error.value)
        lines.add(str(error.value))
    return lines


# ---------------------------------------------------------------------------------------- only finite numbers are kept


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(bad):
    sound = {"a": [torch.ones(3), 1.0, {"b": torch.arange(3), "c": (None, "x", True, 2)}], "d": torch.zeros(0)}
    assert not_finite(sound, "agent") is None
    assert not_finite({"huge": torch.full((10,), 3e38), "half": torch.full((9,), 6e4).half()}, "agent") is None
    assert not_finite(sound | {"d": torch.tensor([[0, bad]])}, "agent") == "agent.d"
    assert not_finite(sound | {"e": {"f": [0.0, bad]}}, "agent") == "agent.e.f.1"
    assert not_finite(sound | {"f": np.array([0, bad]), "g": np.array("x")}, "agent") == "agent.f"
    assert not_finite(sound | {"f": np.float32(bad)}, "agent") == "agent.f"
    assert not_finite({"both": torch.tensor([bad, -bad])}, "agent") == "agent.both"


@pytest.mark.parametrize("place", ["a buffer", "the optimizer", "extra state", "any other module"])
def test_no_checkpoint_with_a_number_that_is_not_finite(place, tmp_path):
    network = torch.nn.BatchNorm1d(2)
    optimizer, other = torch.optim.Adam(network.parameters()), State(numbers=[1.0])
    network(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    name = {"a buffer": "agent.running_var", "the optimizer": "optimizer.state.0.exp_avg_sq"}
    name |= {"extra state": "optimizer.param_groups.0.lr", "any other module": "other.numbers.0"}
    with (
        pytest.raises(
            NonFiniteError, match=f"^{name[place]} is not finite at step 200; last good checkpoint: step 100"
        ),
        small_run(tmp_path, agent=network, optimizer=optimizer, other=other) as run,
    ):
        run.step = 100
        run.log({"train/policy_loss": 1.0})
        match place:
            case "a buffer":
                network.running_var[1] = math.inf
            case "the optimizer":
                optimizer.state[network.weight]["exp_avg_sq"][0] = math.nan
            case "extra state":
                optimizer.param_groups[0]["lr"] = math.nan
            case "any other module":
                other.state["numbers"][0] = -math.inf
        run.step = 200
        run.log({"train/policy_loss": 1.0})
    checkpoint = load_checkpoint(run.folder)
    assert checkpoint["step"] == 100 and not_finite(checkpoint["modules"], "") is None
    assert not (run.folder / "checkpoint.tmp").exists() and not (run.folder / "done.json").exists()


class Sick(gym.Env):
    """Episodes of 10 steps; the 155th reward or observation of every second environment is not a number."""

    observation_space = spaces.Box(-1, 1, (2,))
    number = 0

    def __init__(self, what: str, continuous: bool):
        self.action_space = spaces.Box(-1, 1, (1,)) if continuous else spaces.Discrete(2)
        self.what, self.age, self.t = what, 0, 0
        self.is_sick, Sick.number = Sick.number % 2 == 1, Sick.number + 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.age, self.t = self.age + 1, self.t + 1
        bad = {self.what: math.nan} if self.age == 155 and self.is_sick else {}
        return np.full(2, bad.get("obs", 0), np.float32), bad.get("reward", 1.0), self.t == 10, False, {}


for what in ("reward", "obs"):
    gym.register(f"Sick-{what}-v0", lambda what=what: Sick(what, False))
    gym.register(f"SickContinuous-{what}-v0", lambda what=what: Sick(what, True))


class SickFromTheStart(Sick):
    """Only its very first observation is none."""

    def reset(self, *, seed=None, options=None):
        sound, info = super().reset(seed=seed)
        return sound if self.age else sound + math.nan, info


gym.register("SickFromTheStart-v0", lambda: SickFromTheStart("", False))
gym.register("SickFromTheStartContinuous-v0", lambda: SickFromTheStart("", True))


class SickInTheEnd(Sick):
    """What its truncated episodes of 10 steps end in is none."""

    def step(self, action):
        obs, reward, ends, _, info = super().step(action)
        is_bad = ends and self.age > 100 and self.is_sick
        return obs + (math.nan if is_bad else 0), reward, False, ends, info


gym.register("SickInTheEnd-v0", lambda: SickInTheEnd("", False))


@pytest.mark.parametrize("script, flags", [("impala", {}), ("impala_replay", {"priority": True})])
def test_what_a_truncated_episode_ends_in_is_named_if_it_is_no_number(script, flags, tmp_path, monkeypatch):
    module = importlib.import_module(f"cleanmarl.{script}")
    flags |= {"num_actors": 0, "unroll_length": 16, "num_envs": 2, "eval_episodes": 0, "env_id": "SickInTheEnd-v0"}
    monkeypatch.setattr(Sick, "number", 1)  # the learner builds one, too
    message = "^the last observation of an episode is nan in environment 1 of actor 0 at step 220;"
    with pytest.raises(NonFiniteError, match=message):
        module.main(module.Args(runs_dir=str(tmp_path), total_timesteps=2000, **flags))


def test_a_network_that_diverges_is_told_of_with_priorities_as_without(tmp_path):
    """The priorities of its unrolls are none, and no places can be drawn by them."""
    flags = {"priority": True, "num_actors": 0, "unroll_length": 16, "num_envs": 2, "eval_episodes": 0}
    flags |= {"total_timesteps": 2000, "learning_rate": 1e30, "runs_dir": str(tmp_path)}
    with pytest.raises(NonFiniteError, match=r"^train/policy_loss is nan, train/value_loss is nan"):
        impala_replay.main(impala_replay.Args(**flags))


class Strict(Sick):
    """It rejects an action that is no number, before a rollout with the observation behind it could be looked at."""

    def step(self, action):
        assert np.isfinite(action).all(), action
        return super().step(action)


gym.register("Strict-v0", lambda: Strict("obs", True))


@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppo_continuous_action", {"num_steps": 32, "num_minibatches": 2}),
        ("impala_continuous_action", {"num_actors": 0, "unroll_length": 16}),
        ("impala_continuous_action", {"num_actors": 1, "unroll_length": 16}),
    ],
)
def test_the_observation_behind_an_action_that_is_none_is_named(script, flags, tmp_path, monkeypatch):
    module = importlib.import_module(f"cleanmarl.{script}")
    flags |= {"num_envs": 2, "eval_episodes": 0, "env_id": "test_faults:Strict-v0", "checkpoint_interval": 32}
    monkeypatch.setattr(Sick, "number", 0)
    with pytest.raises(NonFiniteError, match=r": the observation is nan in environment [01], and an ") as error:
        module.main(module.Args(runs_dir=str(tmp_path), total_timesteps=2000, **flags))
    (folder,) = tmp_path.iterdir()
    steps = load_checkpoint(folder)["step"]
    assert str(error.value).endswith(f"; last good checkpoint: step {steps} in {folder}")


WORDS = {"reward": "reward", "obs": "observation"}
ROLLOUTS = {"num_steps": 32, "num_minibatches": 2}


@pytest.mark.parametrize("script, kind", [("ppo", ""), ("ppo_continuous_action", "Continuous")])
def test_a_first_observation_that_is_none_is_found_in_the_first_rollout(script, kind, tmp_path):
    module = importlib.import_module(f"cleanmarl.{script}")
    flags = ROLLOUTS | {"num_envs": 2, "env_id": f"SickFromTheStart{kind}-v0", "eval_episodes": 0}
    with pytest.raises(NonFiniteError, match="the observation is nan in environment 0 at step 0"):
        module.main(module.Args(runs_dir=str(tmp_path), total_timesteps=2000, **flags))


@pytest.mark.parametrize("what", ["reward", "obs"])
def test_a_number_that_is_none_ends_an_evaluation(what, tmp_path, monkeypatch):
    """Of actions for an observation that is NaN there would be a return, of no policy."""
    monkeypatch.setattr(Sick, "number", 0)
    flags = {"num_envs": 2, "env_id": f"Sick-{what}-v0", "eval_episodes": 40, "runs_dir": str(tmp_path)}
    line = f"the {WORDS[what]} is nan in environment 1 at step 155 of the evaluation"
    with pytest.raises(NonFiniteError, match=line):
        ppo.main(ppo.Args(total_timesteps=256, **ROLLOUTS, **flags))
    (folder,) = tmp_path.iterdir()
    assert load_checkpoint(folder)["step"] == 256 and not (folder / "done.json").exists()


@pytest.mark.parametrize("what", ["reward", "obs"])
@pytest.mark.parametrize(
    "script, kind, sizes",
    [
        ("ppo", "Sick", ROLLOUTS),
        ("ppo_continuous_action", "SickContinuous", ROLLOUTS),  # which normalises both
        ("impala", "Sick", {"num_actors": 0, "unroll_length": 16}),
        ("impala_continuous_action", "SickContinuous", {"num_actors": 0, "unroll_length": 16}),
    ],
)
def test_a_number_from_an_environment_that_is_none_ends_the_run(script, kind, sizes, what, tmp_path, monkeypatch):
    """It is said which step of which environment it was: the 155th step of the second of two."""
    module = importlib.import_module(f"cleanmarl.{script}")
    flags = sizes | {"num_envs": 2, "checkpoint_interval": 64, "env_id": f"{kind}-{what}-v0", "eval_episodes": 0}
    monkeypatch.setattr(Sick, "number", 1 if script.startswith("impala") else 0)  # whose learner builds one, too
    with pytest.raises(NonFiniteError) as error:
        module.main(module.Args(runs_dir=str(tmp_path), total_timesteps=2000, **flags))
    (folder,) = tmp_path.iterdir()
    checkpoint = load_checkpoint(folder)
    actor = " of actor 0" if script.startswith("impala") else ""
    assert str(error.value) == (
        f"the {WORDS[what]} is nan in environment 1{actor} at step 310; "
        f"last good checkpoint: step {checkpoint['step']} in {folder}"
    )
    assert 256 <= checkpoint["step"] <= 310 and not_finite(checkpoint["modules"], "") is None


def test_a_number_that_is_none_is_one_line_and_exit_status_1(tmp_path, monkeypatch, capsys):
    flags = ["--env-id", "Sick-reward-v0", "--num-envs", "2", "--num-steps", "32", "--runs-dir", str(tmp_path)]
    monkeypatch.setattr(Sick, "number", 0)
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        launch(ppo.main, ppo.Args)
    err = capsys.readouterr().err
    line = "ppo: the reward is nan in environment 1 at step 310; there is no checkpoint yet in "
    assert stopped.value.code == 1 and err.startswith(line) and err.count("\n") == 1


def test_an_observation_comes_before_the_reward_that_its_value_is_in():
    """Where an episode was truncated the value of its last observation is added to the reward."""
    obs, reward, next_obs = np.zeros((3, 2, 4)), np.zeros((3, 2)), np.zeros((2, 4))
    reward[2, 1] = np.nan
    assert find_bad(obs, reward, next_obs) == ("the reward is nan", 1, 3)
    next_obs[1] = np.inf
    assert find_bad(obs, reward, next_obs) == ("the observation is inf", 1, 3)
    reward[0, 0] = obs[1, 0, 2] = np.nan
    assert find_bad(obs, reward, next_obs) == ("the observation is nan", 0, 1)
    obs[:] = 0
    assert find_bad(obs, reward, next_obs) == ("the reward is nan", 0, 1)
    for own, name in ((True, "reward"), (False, "reward, or the last observation,")):
        assert find_bad(obs, reward, suspects=lambda shape, own=own: np.full(shape, own))[0] == f"the {name} is nan"


@pytest.mark.parametrize("what", ["reward", "obs"])
@pytest.mark.parametrize(
    "script, family",
    [("ippo", "each"), ("mappo", "team"), ("mappo_lstm", "each"), ("maddpg", "each"), ("qmix", "team")],
)
def test_a_number_of_an_agent_that_is_none_ends_the_run(script, family, what, tmp_path, toy, monkeypatch):
    """The third agent's, in the second of three environments, with the 17th step of all, in the midst of an episode."""
    import toys

    def steps(envs):
        return len(envs.actions) + (what == "reward")  # which is asked for before the action is kept

    def sick(method):
        def look(self, *alive):
            result = method(self, *alive)
            if self.num_envs == num_envs and steps(self) == 17:
                (result if what == "reward" else result[0])[num_envs // 2, 2] = math.nan
            return result

        return look

    num_envs = 1 if script == "maddpg" else 3
    name = "reward" if what == "reward" else "look"
    monkeypatch.setattr(toys.Toy, name, sick(getattr(toys.Toy, name)))
    module = importlib.import_module(f"cleanmarl.{script}")
    fields = {field.name for field in dataclasses.fields(module.Args)}
    sizes = {
        "num_steps": 12,
        "num_envs": 3,
        "num_minibatches": 3,
        "batch_size": 2,
        "num_eval_ep": 2,
        "eval_steps": 10**6,
    }
    sizes = {name: size for name, size in sizes.items() if name in fields}
    with pytest.raises(NonFiniteError) as error:
        module.main(
            module.Args(
                env_id=f"toy/{family}", runs_dir=str(tmp_path), total_timesteps=720, **sizes, checkpoint_interval=1
            )
        )
    where = f"environment {num_envs // 2} at step {17 * num_envs}; last good checkpoint: step "
    assert str(error.value).startswith(f"the {WORDS[what]} of agent 2 is nan in {where}")


def test_a_reward_of_an_agent_in_a_particle_environment_that_is_none_ends_the_run(tmp_path, monkeypatch):
    reward, calls = Spread.reward, []

    def sick(self):
        calls.append(None)
        result = np.array(reward(self)) + np.zeros((3, self.num_envs))
        result[2, 1] += math.nan if len(calls) == 17 else 0
        return result

    monkeypatch.setattr(Spread, "reward", sick)
    with pytest.raises(NonFiniteError, match=r"^the reward of agent 2 is nan in environment 1 at step 68; "):
        ippo.main(ippo.Args(runs_dir=str(tmp_path), total_timesteps=400, num_envs=4, num_steps=20, num_minibatches=1))


def test_environments_without_statistics_of_episodes_are_all_suspects():
    run = SimpleNamespace(envs=object(), bad_returns=False)
    assert Run._suspects(run, (2, 3)).shape == (2, 3)


def test_every_script_looks_at_what_its_environments_say():
    scripts = [path for path in FOLDER.glob("*.py") if "    env_id: str = " in path.read_text()]
    assert len(scripts) > 30
    for path in scripts:
        calls = re.findall(r"run\.check_rollout\(|run\.check_unrolls\(|, buffer\.episodes\)", path.read_text())
        assert len(calls) == 1, path


def test_a_replay_of_unrolls_is_looked_at_too(tmp_path):
    args = impala_replay.Args(replay_size=4, num_envs=2, unroll_length=3)
    envs = impala_replay.make_envs(args, 1)
    replay = impala_replay.Replay(args, impala_replay.unroll_dtype(envs, args))
    assert not_finite(replay.state_dict(), "replay") is None
    line = "^replay.unrolls.obs is not finite at step 0; there is no checkpoint yet"
    with pytest.raises(NonFiniteError, match=line), small_run(tmp_path, replay=replay) as run:
        replay.unrolls["obs"][2, 1, 0] = math.inf
        run.save()


def test_infinite_observations_do_not_poison_the_statistics_of_a_checkpoint(tmp_path, toy, monkeypatch):
    """The losses may stay finite, since normalised observations are clipped: the statistics alone are spoiled."""
    import toys

    look = toys.Toy.look

    def infinite(self):
        obs, info = look(self)
        if self.clock.sum() > 0 and len(self.actions) > 40:
            obs[0, 0, 0] = np.inf
        return obs, info

    monkeypatch.setattr(toys.Toy, "look", infinite)
    sizes = {"num_envs": 2, "num_steps": 12, "total_timesteps": 480, "checkpoint_interval": 24, "eval_episodes": 0}
    with pytest.raises(NonFiniteError):
        ippo_per_agent.main(ippo_per_agent.Args(env_id=toy, runs_dir=str(tmp_path), normalize_obs=True, **sizes))
    (folder,) = tmp_path.iterdir()
    assert not_finite(load_checkpoint(folder)["modules"], "") is None


# ---------------------------------------------------------------------------------------- a checkpoint is what it says


def test_every_flipped_byte_is_noticed(copy):
    path = copy / "checkpoint.pt"
    content, rng = path.read_bytes(), random.Random(1)
    places = {0, 1, len(content) // 2, len(content) - 33, len(content) - 32, len(content) - 1}
    places |= {rng.randrange(len(content)) for _ in range(300)}
    for place in sorted(places):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
        with pytest.raises(UsageError, match=r"checkpoint.pt is damaged"):
            load_checkpoint(copy)
    assert all("checkpoint.pt is damaged" in line for line in refusals(copy))
    for size in (0, 1, 31, 32, 33, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(UsageError, match=r"checkpoint.pt is damaged"):
            load_checkpoint(copy)
    path.write_bytes(content)
    assert load_checkpoint(copy)["step"] == 256
    assert torch.load(path, weights_only=True)["script"] == "ppo"  # the sum at its end is in nobody's way


@pytest.mark.parametrize("content", [{}, [1, 2], "text", {"format": FORMAT + 1, "step": 1}])
def test_other_things_with_a_good_checksum(content, copy):
    write_checkpoint(content, copy / "checkpoint.pt")
    assert refusals(copy) == {f"{copy}/checkpoint.pt is no checkpoint of this version of cleanmarl"}


def test_checkpoints_of_others(copy, finished):
    checkpoint = load_checkpoint(finished)
    torch.save(checkpoint, copy / "checkpoint.pt")  # as before there were checksums
    assert refusals(copy) == {f"{copy}/checkpoint.pt is damaged, or of another version of cleanmarl"}

    write_checkpoint(checkpoint | {"script": "ppo_shared"}, copy / "checkpoint.pt")
    assert refusals(copy) == {f"{copy}/checkpoint.pt is a checkpoint of ppo_shared.py, not of ppo.py"}

    agent = {name: x[:-1] if x.ndim else x for name, x in checkpoint["modules"]["agent"].items()}
    write_checkpoint(checkpoint | {"modules": checkpoint["modules"] | {"agent": agent}}, copy / "checkpoint.pt")
    for line in refusals(copy):
        assert line.startswith(
            f"the agent of {copy}/checkpoint.pt does not fit the script as it is (Error(s) in loading"
        )

    write_checkpoint(checkpoint | {"modules": {}}, copy / "checkpoint.pt")
    which = "it is of another version of the script, or was kept (keep.py) to be played"
    assert refusals(copy) == {f"{copy}/checkpoint.pt has no agent: {which}"}


@pytest.mark.parametrize("place", ["a file in the way", "a folder"])
def test_a_video_that_cannot_be_written_is_refused_before_it_is_played(place, finished, tmp_path, capsys):
    pytest.importorskip("moviepy")
    (tmp_path / "file").touch()
    (tmp_path / "folder.gif").mkdir()
    video = tmp_path / ("file/a.gif" if place == "a file in the way" else "folder.gif")
    with pytest.raises(
        UsageError, match=f"^--video {video} (is a folder|cannot be written \\((File exists|Not a dir))"
    ):
        enjoy.main(enjoy.Args(finished, episodes=1, video=video))
    assert not capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- one writer a run


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path):
    with started(*endless(tmp_path)) as process:
        folder = run_folder(tmp_path)
        with started(sys.executable, FOLDER / "ppo.py", "--resume", folder) as second:
            before = (folder / "args.json").read_bytes()
            out, err = second.communicate(timeout=60)
        assert second.returncode == 2 and not out and process.poll() is None
        assert err == f"ppo: {folder} is being written by another process: wait until it ends, or stop it\n"
        assert (folder / "args.json").read_bytes() == before
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        step = load_checkpoint(folder)["step"]
    total = {"total_timesteps": step + 512, "resume": folder, "eval_episodes": 0}
    stored = json.loads((folder / "args.json").read_text())["args"]
    assert ppo.main(ppo.Args(**stored | total)) == folder
    assert load_checkpoint(folder)["step"] == step + 512


def test_a_lock_ends_with_its_process_however_it_ends(tmp_path):
    with started(*endless(tmp_path), "--checkpoint-interval", 512) as process:
        folder = run_folder(tmp_path)
        wait_for(lambda: (folder / "checkpoint.pt").exists())
        process.kill()
        process.wait()
    step = load_checkpoint(folder)["step"]
    stored = json.loads((folder / "args.json").read_text())["args"]
    ppo.main(ppo.Args(**stored | {"total_timesteps": step + 512, "resume": folder, "eval_episodes": 0}))
    assert load_checkpoint(folder)["step"] == step + 512


def test_whoever_is_refused_leaves_no_lock(copy):
    for _ in range(2):
        with pytest.raises(UsageError, match="is complete at step 256"):
            ppo.main(ppo.Args(**SHORT, resume=copy))
    ppo.main(ppo.Args(**SHORT | {"resume": copy, "total_timesteps": 512}))
    assert load_checkpoint(copy)["step"] == 512


# ------------------------------------------------------------------------------------------- terminals that are closed


def on_a_terminal(*command, before=lambda: None):
    """A process that is alone on a terminal, and our end of it: when that is closed, the kernel sends SIGHUP."""
    ours, theirs = pty.openpty()

    def take_the_terminal():
        hear_signals()
        before()
        os.setsid()
        os.close(os.open(os.ttyname(1), os.O_RDWR))  # the first one that is opened is the session's

    process = started(*command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_the_terminal)
    return process, ours, theirs


def test_a_closed_terminal_saves_and_ends(tmp_path):
    context, ours, theirs = on_a_terminal(*endless(tmp_path), "--checkpoint-interval", 10**9)
    with context as process:
        os.close(theirs)
        folder = run_folder(tmp_path)
        wait_for(lambda: "train/policy_loss" in scalars(folder))
        assert not (folder / "checkpoint.pt").exists()
        os.close(ours)
        assert process.wait(60) == 128 + signal.SIGHUP
    assert load_checkpoint(folder)["step"] >= scalars(folder)["train/policy_loss"][-1][0] > 0


def test_under_nohup_a_run_outlives_its_terminal(tmp_path):
    """It goes on to its end, although nobody hears it: neither lines nor a progress bar raise."""
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731 (what nohup does)
    command = [sys.executable, FOLDER / "ppo.py", "--total-timesteps", 8192, "--runs-dir", tmp_path]
    context, ours, theirs = on_a_terminal(*command, "--eval-episodes", 2, before=ignore)
    with context as process:
        os.close(theirs)
        folder = run_folder(tmp_path)
        os.close(ours)
        assert process.wait(60) == 0
    assert (folder / "done.json").exists() and load_checkpoint(folder)["step"] == 8192


def test_a_pipe_that_nobody_reads_any_more(tmp_path):
    """As in `python ppo.py | head -1`."""
    command = [sys.executable, FOLDER / "ppo.py", "--total-timesteps", 2048, "--eval-episodes", 1]
    with started(*command, "--runs-dir", tmp_path) as process:
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 0 and not err
    assert (run_folder(tmp_path) / "done.json").exists()


def test_a_standard_error_that_was_closed_before_the_start(tmp_path):
    """As in `python ppo.py 2>&-`: there is none to ask whether it is a terminal."""
    command = [sys.executable, FOLDER / "ppo.py", "--total-timesteps", 2048, "--eval-episodes", 0]
    with started(*command, "--runs-dir", tmp_path, preexec_fn=lambda: os.close(2)) as process:
        out, _ = process.communicate(timeout=180)
        assert process.returncode == 0 and "done: 2,048 steps" in out


def test_a_standard_input_that_was_closed_before_the_start():
    """As in `nohup python ippo.py <&- &`: the shared memory of workers got its number, and their own input took it."""
    code = "import os; from cleanmarl import cli; cli.parse = lambda *_: None; "
    code += "cli.launch(lambda _: print(os.open(os.devnull, os.O_RDONLY)), None)"
    with started(sys.executable, "-c", code, preexec_fn=lambda: os.close(0)) as process:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0 and not err and int(out) > 2


def test_a_locale_that_has_ascii_alone(tmp_path, monkeypatch):
    """No "±" for an evaluation, and not the letters of a folder's name or of a script's comment."""
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONUTF8", "0")
    script, runs_dir = tmp_path / "ppo.py", tmp_path / "\u00fc"
    script.write_bytes((FOLDER / "ppo.py").read_bytes() + "# \u00fcber\n".encode())
    command = [sys.executable, script, "--total-timesteps", 2048, "--eval-episodes", 1]
    with started(*command, "--runs-dir", runs_dir) as process:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0 and not err and r" \xb1 0.00, length " in out
    folder = run_folder(runs_dir)
    assert (folder / "ppo.py").read_bytes() == script.read_bytes()
    with started(sys.executable, "-m", "cleanmarl.enjoy", folder, "--episodes", 1) as process:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0 and not err and r"\xb1" in out


def test_a_line_in_the_midst_of_another_is_dropped(capsys):
    class Busy:
        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    tell("lost", Busy())
    tell("heard")
    assert capsys.readouterr().out == "heard\n"


# -------------------------------------------------------------------------------------------------- processes that hang

IMPATIENT = """
from cleanmarl import {script}
from cleanmarl.cli import launch
from cleanmarl.envs import workers

workers.SILENCE = 1.0

if __name__ == "__main__":
    launch({script}.main, {script}.Args)
"""


def children(pid: int) -> list[int]:
    """Of a process, but for what multiprocessing starts to clean up after it."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.skipif(not Path("/proc").exists(), reason="only Linux says that a process is stopped")
@pytest.mark.parametrize(
    "script, flags, name",
    [
        ("ippo", ["--env-id", "pz/mpe2/simple_spread_v3?num_workers=2", "--num-envs", 4], r"pz/.*: worker 1"),
        ("impala", ["--num-actors", 2], "actor 1"),
        ("impala", ["--num-actors", 2, "--deterministic"], "actor 1"),
    ],
)
def test_a_stopped_process_is_reported_after_a_silence(script, flags, name, tmp_path):
    """SIGSTOP, which no signal but SIGKILL ends, while the others could go on. A minute is a second here."""
    path = tmp_path / f"{script}.py"
    path.write_text(IMPATIENT.format(script=script))
    flags = [*flags, "--total-timesteps", 10**8, "--runs-dir", tmp_path / "runs", "--checkpoint-interval", 400]
    with started(sys.executable, path, *flags) as process:
        folder = run_folder(tmp_path / "runs")
        wait_for(lambda: (folder / "checkpoint.pt").exists(), 180)
        pids = children(process.pid)
        os.kill(pids[-1], signal.SIGSTOP)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1 and "Traceback" not in err
        *_, saved, line = err.splitlines()
        step = load_checkpoint(folder)["step"]
        assert saved == f"saved step {step:,} in {folder} before the error below"
        assert re.match(rf"{script}: {name} \(pid {pids[-1]}.* is stopped and was silent for \d+ seconds: ", line)
        assert len(pids) == 2 and all(map(gone, pids)) and not (folder / "done.json").exists()


# ---------------------------------------------------------------------------------------------------- several learners

ONE_OF_TWO = """
import os, signal
from cleanmarl import cli, ppo_atari_multigpu

# after the run, as during it: that of torchrun, which has seen the other one's end, must not come before the last line
signal.signal(signal.SIGTERM, signal.SIG_IGN)
learn, cli.OTHERS_WAIT = ppo_atari_multigpu.update, 1

def update(*args):
    if os.environ["RANK"] == "1":
        {fate}
    return learn(*args)

ppo_atari_multigpu.update = update
cli.launch(ppo_atari_multigpu.main, ppo_atari_multigpu.Args)
"""
SMALL_GAME = "--num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 10000000 --eval-episodes 0"


def mentioned(word) -> list[str]:
    """Processes with the word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [path.parent.name] if str(word).encode() in path.read_bytes() else []
    return found


def said_under_torchrun(*command) -> tuple[list[str], int]:
    """Our lines without those of torchrun, which tells its own story of processes that have failed; its exit status."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with started(*torchrun, *command, stderr=subprocess.STDOUT) as process:
        out, _ = process.communicate(timeout=300)
        lines = [line for line in out.splitlines() if line.startswith(("ppo_atari_multigpu: ", "saved step "))]
        assert out.count("Traceback") == 1  # torchrun's
        assert not mentioned(command[-1])
        return lines, process.returncode


def test_a_mistake_that_all_processes_find_is_told_once(tmp_path):
    pytest.importorskip("envpool")
    flags = ["-m", "cleanmarl.ppo_atari_multigpu", "--env-id", "Brekout-v5", "--runs-dir", tmp_path]
    lines, status = said_under_torchrun(*flags)
    assert lines == [
        "ppo_atari_multigpu: envpool has no environment 'Brekout-v5'; did you mean Breakout-v5 or Berzerk-v5?"
    ]
    assert status == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fate, line",
    [
        ("raise cli.RunError('the second process has had enough')", "the second process has had enough"),
        ("os.kill(os.getpid(), 9)", "another process of this run has ended, and so does this one"),
    ],
)
def test_one_process_that_fails_ends_all(fate, line, tmp_path):
    pytest.importorskip("envpool")
    script = tmp_path / "ppo_atari_multigpu.py"
    script.write_text(ONE_OF_TWO.format(fate=fate))
    lines, status = said_under_torchrun(script, *SMALL_GAME.split(), "--runs-dir", tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"ppo_atari_multigpu: {line}" in lines and status == 1
    assert load_checkpoint(folder)["step"] == 0 and not (folder / "done.json").exists()  # its update failed


# ------------------------------------------------------------------------------------------------------------ the disk


@contextmanager
def small_disk(folder: Path, size: str):
    """A file system of its own; needs root, and a kernel that lets it mount."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("cannot mount a file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, capsys):
    disk = tmp_path / "disk"
    with small_disk(disk, "1m"):
        flags = ["--total-timesteps", 10**6, "--checkpoint-interval", 512, "--eval-episodes", 0, "--runs-dir", disk]
        with started(sys.executable, FOLDER / "ppo.py", *flags) as process:
            folder = run_folder(disk)
            wait_for(lambda: (folder / "checkpoint.pt").exists())
            with suppress_full(disk / "filler") as filler:
                filler.write(bytes(2_000_000))
            _, err = process.communicate(timeout=60)
        assert process.returncode == 1 and err.count("\n") == 1, err
        step = load_checkpoint(folder)["step"]
        assert err.startswith(f"ppo: {folder} cannot be written (No space left on device) at step ")
        assert err.endswith(f"; last good checkpoint: step {step:,} in {folder}\n")
        assert not (folder / "checkpoint.tmp").exists() and not (folder / "done.json").exists()

        (disk / "filler").unlink()  # there is room again
        stored = json.loads((folder / "args.json").read_text())["args"]
        ppo.main(ppo.Args(**stored | {"total_timesteps": step + 1024, "resume": folder}))
        steps = [step for step, _ in scalars(folder)["train/policy_loss"]]
        assert steps == sorted(set(steps)) and steps[-1] == step + 1024


@contextmanager
def suppress_full(path: Path):
    """A file to fill a disk with."""
    try:
        with path.open("wb", buffering=0) as file:
            yield file
    except OSError:
        pass


def test_events_that_cannot_be_written_are_one_line(tmp_path):
    with pytest.raises(WriteError) as error, small_run(tmp_path, counter=State(value=1)) as run:
        run.step = 100
        run.save()
        run.step = 200
        events = next(run.folder.glob("events*")).stat().st_size
        with largest_file(events + 10):
            run.write({"train/policy_loss": 1.0})
    reason = f"{run.folder} cannot be written (File too large) at step 200"
    assert str(error.value) == f"{reason}; last good checkpoint: step 100 in {run.folder}"
    assert load_checkpoint(run.folder)["step"] == 100  # not tried again


def test_an_error_is_told_even_if_the_disk_is_full(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), small_run(tmp_path, bulk=State(x=torch.zeros(100_000))) as run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            1 / 0  # noqa: B018
        finally:
            limit, run.save = run.save, lambda: limited(limit)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "cannot be written (File too large) at step 0; there is no checkpoint yet" in capsys.readouterr().err


def limited(save):
    with largest_file(100_000):
        save()


@pytest.mark.parametrize("fate", ["deleted", "renamed"])
def test_a_folder_that_is_gone_is_one_line(fate, tmp_path):
    with pytest.raises(WriteError) as error, small_run(tmp_path, counter=State(value=1)) as run:
        run.step = 100
        run.log({})
        moved = run.folder.rename(tmp_path / "moved")
        if fate == "deleted":
            for path in moved.iterdir():
                path.unlink()
            moved.rmdir()
        run.step = 200
        run.log({})
    line = f"{run.folder} cannot be written (No such file or directory) at step 200; there is no checkpoint yet in "
    assert str(error.value) == f"{line}{run.folder}"
    assert not run.folder.exists()
    if fate == "renamed":
        assert load_checkpoint(moved)["step"] == 100


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path, monkeypatch):
    for size in (0, 200):  # of args.json, or of the copy of the script
        with largest_file(size), pytest.raises(UsageError, match=r"cannot write the run folder .* \(File too large\)"):
            small_run(tmp_path)
        assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("command", [["-m", "cleanmarl.ppo"], ["-m", "cleanmarl.enjoy", "nowhere"], [ppo.__file__]])
def test_interrupt_at_any_moment(command, tmp_path):
    """To the whole process group, as from a terminal: no traceback, and a checkpoint if there was anything to save."""
    for moment in ("torch is imported", 1.0, 2.0, 4.0):
        flags = [] if "nowhere" in command else ["--total-timesteps", 10**9]
        (folder := tmp_path / str(moment)).mkdir()
        with started(sys.executable, *command, *flags, cwd=folder, process_group=0) as process:
            if moment == "torch is imported":
                maps = Path(f"/proc/{process.pid}/maps")
                wait_for(lambda maps=maps: "libtorch" in maps.read_text())
            else:
                time.sleep(moment)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert "Traceback" not in err and err.count("\n") <= 1, (moment, err)
            assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 2), (moment, err)
        runs = [run for run in folder.glob("runs/*/") if list(run.glob("events*"))]
        # the signal itself ends one that has its events, and not its handler yet
        assert process.returncode == -signal.SIGINT or all((run / "checkpoint.pt").exists() for run in runs), moment


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--torch-threads", "100000000"], "--torch-threads 100000000 would crash torch; this machine has "),
        (["--device", "meta"], "--device meta is not there (Tensor.item() cannot be called on meta tensors)"),
        (["--device", "cpu:7"], "--device cpu:7 is not there; --device cpu always is"),
        (["--runs-dir", ""], "--runs-dir is empty; the folder of now is --runs-dir ."),
        (["--env-id", "LunarLander-v2"], "unknown environment 'LunarLander-v2'; did you mean LunarLander-v3"),
        (
            ["--track"],
            "--track: No API key configured. Use `wandb login` to log in. (WANDB_MODE=offline needs no login",
        ),
    ],
)
def test_refused_with_one_line_before_anything_is_written(flags, line, tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    env |= {"HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "none"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, FOLDER / "ppo.py", *flags]
    (tmp_path / "here").mkdir()
    done = subprocess.run(command, cwd=tmp_path / "here", env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"ppo: {line}") and done.stderr.count("\n") == 1
    assert not list((tmp_path / "here").iterdir())


class LoginOnly(http.server.BaseHTTPRequestHandler):
    """A server of Weights & Biases that knows who you are, and then fails."""

    def do_POST(self):
        query = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        viewer = {"id": "1", "username": "me", "email": "", "admin": False, "entity": "me", "flags": "{}"}
        is_login = b"query Viewer" in query
        answer = {"data": {"viewer": viewer | {"teams": {"edges": []}}, "serverInfo": None}}
        text = json.dumps(answer if is_login else {"errors": [{"message": "it burns"}]}).encode()
        self.send_response(200 if is_login else 400)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


def test_a_tracker_that_is_told_nonsense_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "off")
    line = "--track: 1 validation error for Settings mode Input should be 'online', 'offline'"
    with pytest.raises(UsageError, match=line):
        ppo.main(ppo.Args(track=True, total_timesteps=512, runs_dir=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_fails_after_the_login_leaves_no_folder(tmp_path):
    pytest.importorskip("wandb")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), LoginOnly) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
        env |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0" * 40}
        env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
        command = [sys.executable, FOLDER / "ppo.py", "--track", "--runs-dir", tmp_path / "runs"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        server.shutdown()
    assert done.returncode == 2 and "run folder" not in done.stdout and not list((tmp_path / "runs").iterdir())
    ours = [line for line in done.stderr.splitlines() if line.startswith("ppo: ")]
    assert len(ours) == 1 and ours[0].startswith("ppo: --track: ") and "it burns" in ours[0]
    assert ours[0].endswith(" (WANDB_MODE=offline needs no network)") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "fail, reason",
    [
        (lambda: np.empty(2**55, np.float32), "Unable to allocate 128. PiB"),
        (lambda: np.empty(2**63, np.float32), "Maximum allowed dimension exceeded"),
        (lambda: torch.empty(2**55), "unable to allocate 134,217,728.0 GiB"),
        (lambda: torch.empty(2**40, 2**40), "Storage size calculation overflowed"),
        (lambda: np.dtype([("a", np.float32, (2**31,))]), "invalid shape in fixed-type tuple"),
        (lambda: mmap.mmap(-1, 2**47), "[Errno 12] Cannot allocate memory"),
    ],
)
def test_memory_that_is_not_there_is_one_line(fail, reason, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppo.py"])
    with pytest.raises(SystemExit) as stopped:
        launch(lambda args: fail(), ppo.Args)
    err = capsys.readouterr().err
    assert stopped.value.code == 1 and err.startswith(f"ppo: not enough memory: {reason}")
    assert err.count("\n") == 1


def test_other_errors_are_not_taken_for_it(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppo.py"])
    for error in (ValueError("a mistake of the script's"), RuntimeError("shapes differ"), OSError(2, "no such file")):

        def main(args, error=error):
            raise error

        with pytest.raises(type(error), match=str(error.args[-1])):
            launch(main, ppo.Args)


def huge(*shape: int) -> np.ndarray:
    """Zeros that would take much, if they were not all the same one."""
    return np.broadcast_to(np.float32(0), shape)


def test_rollouts_that_no_memory_holds_are_named_with_their_gigabytes():
    check_rollout_size((np.zeros(9), torch.zeros(9)))
    with pytest.raises(EnvError, match=r"^a rollout of --num-envs x --num-steps would take 7,450,580\.6 GiB"):
        check_rollout_size((huge(10**9, 10**6), np.zeros(9)))


def test_replays_that_no_memory_holds_are_named_with_their_gigabytes(capsys):
    """Pursuit's 8 agents see 147 numbers and its state has 768: 18.9 GiB for 5000 episodes of 500 steps."""
    box = spaces.Box(0, 1, (8, 147), np.float32), spaces.Box(0, 1, (768,), np.float32)
    envs = SimpleNamespace(single_observation_space=box[0], single_state_space=box[1], real_actions=np.ones((8, 5)))
    envs.time_limit = 500
    args = SimpleNamespace(buffer_size=5000 * 10**6, batch_size=9, total_timesteps=10**15, save_buffer=False)
    with pytest.raises(EnvError, match=r"episodes of 500 steps would take 18,868,\d+\.\d GiB of memory, and "):
        check_replay_size(envs, args)
    args.save_buffer = True
    with pytest.raises(EnvError, match=r"--no-save-buffer needs none\) would take 37,737,\d+\.\d GiB"):
        check_replay_size(envs, args)
    args.total_timesteps = 10**4  # more will never be in it
    check_replay_size(envs, args)
    with pytest.raises(UsageError, match=r"^--total-timesteps 8 ends before there are --batch-size 9 episodes$"):
        check_replay_size(envs, SimpleNamespace(**vars(args) | {"total_timesteps": 8}))
    assert not capsys.readouterr().err
    check_replay_size(envs, SimpleNamespace(**vars(args) | {"total_timesteps": 4499}))
    line = "--total-timesteps 4,499 may end before the first update: --batch-size 9 episodes of up to 500 steps are"
    assert capsys.readouterr().err == f"{line} 4,500\n"
    envs.time_limit, args.total_timesteps = None, 10**15  # nobody knows: a warning
    check_replay_size(envs, args)
    unknown, too_large = capsys.readouterr().err.splitlines()
    assert unknown == "how long an episode may be is not known: the run learns, saves and stops between episodes"
    assert too_large.startswith("if episodes were as long as the run, a replay buffer of --buffer-size ")
    args.on_policy_episodes = 64  # of DOP, which waits for these, too
    with pytest.raises(UsageError, match=r"^--total-timesteps 9 ends before there are --on-policy-episodes 64 "):
        check_replay_size(envs, SimpleNamespace(**vars(args) | {"total_timesteps": 9}))


@pytest.mark.parametrize(
    "script, flags, line",
    [
        ("ppo", "--num-steps 50000000 --total-timesteps 1000000000", "a rollout of --num-envs x --num-steps would"),
        ("ppo", "--num-envs 1000000000 --total-timesteps 1000000000000", "CartPole-v1: 1,000,000,000 environments"),
        ("impala", "--unroll-length 5000000 --num-envs 100 --total-timesteps 1000000000", "unrolls of --num-actors x"),
        ("impala", "--num-actors 100000", "the processes of --num-actors 100000 would"),
        (
            "ippo",
            "--env-id pz/mpe2/simple_spread_v3?num_workers=100000 --num-envs 100000 --total-timesteps 1000000000",
            "pz/mpe2/simple_spread_v3: 100,000 worker processes would",
        ),
        ("impala_replay", "--replay-size 100000000", "unrolls of --num-actors x --num-envs x --unroll-length and a"),
        ("maddpg", "--buffer-size 10000000 --total-timesteps 1000000000", "a replay buffer of --buffer-size 10000000"),
        ("ippo", "--env-id mpe/simple_spread_v3?N=100000", "mpe/simple_spread_v3: the contacts of 100,000 agents"),
    ],
)
def test_sizes_are_refused_before_a_folder_exists(script, flags, line, tmp_path):
    """With 12 GiB of addresses, wherever the tests run."""

    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, resource.RLIM_INFINITY))

    command = [sys.executable, FOLDER / f"{script}.py", *flags.split()]
    with started(*command, cwd=tmp_path, preexec_fn=limited) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and not out and not list(tmp_path.iterdir())
    assert err.startswith(f"{script}: {line}") and err.count("\n") == 1 and err.endswith(" GiB are free\n")


def test_every_script_asks_whether_there_is_memory():
    scripts = [path for path in FOLDER.glob("*.py") if "    env_id: str = " in path.read_text()]
    assert len(scripts) > 30
    for path in scripts:
        calls = re.findall(r"^    check_(rollout|replay|unrolls)_size\(", path.read_text(), re.MULTILINE)
        assert len(calls) == 1, path
