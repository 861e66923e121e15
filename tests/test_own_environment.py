"""Environments of the user's: docs/own_environment.md does what it says, in every way of starting a script."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from cleanmarl import ippo, ppo
from cleanmarl.envs import EnvError, make, make_gymnasium
from cleanmarl.run import load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
from mpe2 import simple_v3
from optional import need
from pettingzoo import ParallelEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "own_environment.md").read_text()
BLOCKS = re.findall(r"```(python|sh|diff)\n(.*?)```", PAGE, flags=re.DOTALL)
(MAKE_ENVS,) = (text for _, text in BLOCKS if text.startswith("def make_envs"))
FILES = {name[1]: text for _, text in BLOCKS if (name := re.match(r"# (\w+\.py)\n", text))}
SMALL = "--total-timesteps 3200 --num-envs 4 --eval-episodes 2"


class Corridor(gym.Env):
    """Two observations and five steps."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Unlike(Corridor):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)


class OfOldGym(Corridor):
    def reset(self):
        return np.zeros(2, np.float32)


@pytest.mark.parametrize("vectors", [True, False])
def test_an_observation_unlike_its_space_is_one_line(vectors):
    assert make_gymnasium(Corridor, 2, vectors=vectors).reset(seed=1)[0].shape == (2, 2)
    with pytest.raises(
        EnvError, match=r"Unlike: reset\(\) gave an observation \(2,\), and its observation_space has \(3,\)"
    ):
        make_gymnasium(Unlike, 2, vectors=vectors).reset(seed=1)


class WithoutOptions(Corridor):
    def reset(self, seed=None):
        return super().reset(seed=seed)


class OnlySees(Corridor):
    def reset(self, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0]


class OldStep(Corridor):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


class Grows(Corridor):
    def step(self, action):
        obs, *rest = super().step(action)
        return np.append(obs, obs), *rest


class Fails(Corridor):
    def __init__(self, kind):
        raise kind("no map\nin this folder")


def test_an_environment_of_the_old_gym_is_one_line():
    for cls, name in ((OfOldGym, "seed"), (WithoutOptions, "options")):
        line = rf"{cls.__name__}: its reset takes no {name}, as in the old Gym; Gymnasium's is reset\("
        with pytest.raises(EnvError, match=line):
            make_gymnasium(cls, 2)
    with pytest.raises(EnvError, match=r"OnlySees: reset\(\) must return \(observation, info\)"):
        make_gymnasium(OnlySees, 2, vectors=True).reset(seed=1)


def test_a_step_that_is_not_gymnasiums_is_one_line():
    for cls, line in (
        (OldStep, r"OldStep: step\(\) must return \(observation, reward, terminated, truncated, info\)"),
        (Grows, r"Grows: step\(\) gave an observation \(4,\), and its observation_space has \(2,\)"),
    ):
        envs = make_gymnasium(cls, 2)
        envs.reset(seed=1)
        with pytest.raises(EnvError, match=line):
            envs.step(np.zeros(2, np.int64))


class Odd(Corridor):
    """At step it returns what it is given in place of the observation, the reward or the info."""

    def __init__(self, space, obs=0, reward=0.0, info=None):
        self.observation_space, self.returned = space, (obs, reward, False, False, info)

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), {"_episode": 1, "episode": 2}

    def step(self, action):
        return self.returned


FOUR, BYTES = gym.spaces.Discrete(4), gym.spaces.Box(0, 9, (2,), np.uint8)


@pytest.mark.parametrize(
    "odd, line",
    [
        ({"info": None}, r"Odd: step\(\) must return \(observation, .*, info\), info a dict"),
        ({"info": []}, r"Odd: step\(\) must return \(observation, .*, info\), info a dict"),
        ({"reward": np.ones(1)}, r"Odd: the reward of step\(\) must be a number, not array\(\[1.\]\)"),
        ({"reward": None}, r"Odd: the reward of step\(\) must be a number, not None"),
        ({"reward": "1"}, r"Odd: the reward of step\(\) must be a number, not '1'"),
        ({"obs": 7}, r"Odd: an observation is not of its Discrete\(4\) \(ValueError: it is 7"),
        ({"obs": -1}, r"Odd: an observation is not of its Discrete\(4\) \(ValueError: it is -1\)"),
        (
            {"space": BYTES, "obs": np.zeros(2, np.int64)},
            r"Odd: step\(\) gave an observation int64, and its observation_space has uint8",
        ),
        (
            {"space": BYTES, "obs": [0.5, 0.5]},
            r"Odd: step\(\) gave an observation float64, and its observation_space has uint8",
        ),
        ({"info": {"_episode": 3}}, None),
        ({"info": {"episode": 3}}, None),
        ({"reward": np.float32(1)}, None),
        ({"reward": True}, None),
        ({"space": BYTES, "obs": np.zeros(2, np.uint8)}, None),
        ({"space": gym.spaces.Box(0, 9, (2,)), "obs": [1, 2]}, None),
    ],
)
def test_what_a_step_returns_in_another_form_is_one_line(odd, line):
    envs = make_gymnasium(Odd, 1, vectors=True, **{"space": FOUR, "info": {}} | odd)
    envs.reset(seed=1)
    with pytest.raises(EnvError, match=line) if line else nullcontext():
        assert not {"episode", "_episode"} & envs.step(np.zeros(1, np.int64))[-1].keys()


@pytest.mark.parametrize("kind", [ValueError, ImportError, gym.error.Error])
def test_a_constructor_that_fails_says_why(kind):
    """And is not taken for an environment that does not exist."""
    gym.register("Fails-v0", Fails)
    try:
        for which in (Fails, "Fails-v0"):
            with pytest.raises(EnvError, match=rf"Fails.* cannot be built: {kind.__name__}: no map$"):
                make_gymnasium(which, 2, kind=kind)
    finally:
        del gym.registry["Fails-v0"]


@pytest.fixture
def folder(tmp_path):
    """A folder with the environments of the page, in which a user works."""
    (tmp_path / "work").mkdir()
    for name, text in FILES.items():
        (tmp_path / "work" / name).write_text(text)
    return tmp_path / "work"


def shell(command: str, folder: Path) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-euc", command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_the_page_has_all_of_it():
    assert set(FILES) == {"corridor.py", "long_corridor.py", "meeting.py"}
    for name in ("corridor.py", "meeting.py"):
        of_class = FILES[name].partition("\nclass ")[2].splitlines()
        assert len([line for line in of_class if line.strip()]) <= 32


def test_the_blocks_of_the_page(folder):
    """As they stand, but for the length of the runs."""
    played = []
    for kind, text in BLOCKS:
        if kind == "sh":
            done = shell(re.sub(r"--total-timesteps \d+", "--total-timesteps 3200", text), folder)
            assert done.returncode == 0 and not done.stderr, done.stderr
            played += re.findall(r"^(\S+, \w+ at step .*)\nreturn", done.stdout, re.MULTILINE)
        elif kind == "python" and text not in [*FILES.values(), MAKE_ENVS]:
            (folder / "block.py").write_text(text)
            done = shell("python block.py", folder)
            assert done.returncode == 0 and not done.stderr, done.stderr
    assert [line.split(",")[0] for line in played] == ["corridor:Corridor", "pz/meeting:Meeting"]


def test_every_way_of_starting(folder, tmp_path):
    """By path, a copy with a class of its own, and `enjoy` from anywhere; `envs` may be the name of a user's module.

    As modules scripts are started, and their runs played, by the blocks of the page.
    """
    (folder / "envs.py").write_text(FILES["corridor.py"])
    (folder / "package").mkdir()
    (folder / "package" / "tasks.py").write_text(FILES["meeting.py"])
    for run in (
        f"python {ROOT}/cleanmarl/ppo.py --env-id envs:Corridor {SMALL}",
        f"python {ROOT}/cleanmarl/ippo.py --env-id pz/package.tasks:Meeting {SMALL}",
    ):
        trained = shell(run, folder)
        assert trained.returncode == 0 and not trained.stderr, trained.stderr
    run_dir = folder / re.search(r"run folder: (\S+)", trained.stdout)[1]
    played = shell(f"python -m cleanmarl.enjoy {run_dir} --episodes 1", tmp_path)
    assert played.returncode == 0 and "1 episodes" in played.stdout, played.stderr

    script, (_, diff) = (ROOT / "cleanmarl" / "ippo.py").read_text(), next(b for b in BLOCKS if b[0] == "diff")
    lines = [line[1:] for line in diff.splitlines()]
    for old, new in zip(lines[::2], lines[1::2]):
        assert script.count(old) == 1
        script = script.replace(old, new)
    script = script.replace("def make_envs", f"{FILES['meeting.py']}\n\ndef make_envs")
    (folder / "my_ippo.py").write_text(script)
    trained = shell(f"python my_ippo.py {SMALL}", folder)
    assert trained.returncode == 0 and not trained.stderr, trained.stderr
    run_dir = folder / re.search(r"run folder: (\S+)", trained.stdout)[1]
    assert run_dir.name.startswith("meeting__my_ippo__1__")  # a report must not take it for simple_spread
    (folder / "my_ippo.py").unlink()  # the one in the run folder is enough, for its workers too
    played = shell(f"python -m cleanmarl.enjoy {run_dir} --episodes 1", tmp_path)
    assert played.returncode == 0 and "1 episodes" in played.stdout, played.stderr


class Pictures(gym.Env):
    """Five steps in the dark, then in the light."""

    observation_space, action_space = gym.spaces.Box(0, 255, (40, 30, 3), np.uint8), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros((40, 30, 3), np.uint8), {}

    def step(self, action):
        self.time += 1
        return np.full((40, 30, 3), 200, np.uint8), float(action == 2), self.time == 5, False, {}


def test_pictures_of_ones_own(tmp_path, monkeypatch):
    need("cv2")
    script = (ROOT / "cleanmarl" / "ppo_atari.py").read_text()
    start, end = script.index("def make_envs"), script.index("def warp_frame")
    (tmp_path / "my_ppo.py").write_text(f"{script[:start]}{MAKE_ENVS}\n\n{script[end:]}")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_ppo")
    args = module.Args(env_id="test_own_environment:Pictures", num_envs=2, num_steps=16, total_timesteps=64)
    envs = module.make_envs(args, 2)
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
    obs = envs.step(np.array([2, 0]))[0]
    assert (obs[:, -1] == 200).all() and not obs[:, 0].any()
    folder = module.main(replace(args, eval_episodes=2, runs_dir=str(tmp_path)))
    assert (folder / "checkpoint.pt").exists()


class Narrow(ParallelEnv):
    """One agent, of whose two actions one is legal, another in each step."""

    def __init__(self):
        self.metadata, self.possible_agents = {"name": "narrow"}, ["a"]

    def observation_space(self, agent):
        return gym.spaces.Dict({"observation": gym.spaces.Box(0, 5, (1,)), "action_mask": gym.spaces.MultiBinary(2)})

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def observe(self):
        return {"a": {"observation": np.float32([self.time]), "action_mask": np.eye(2, dtype=np.int8)[self.time % 2]}}

    def reset(self, seed=None, options=None):
        self.agents, self.time = ["a"], 0
        return self.observe(), {"a": {}}

    def step(self, actions):
        reward, self.time = float(actions["a"] == self.time % 2), self.time + 1
        self.agents = [] if self.time == 5 else self.agents
        return self.observe(), {"a": reward}, {"a": self.time == 5}, {"a": False}, {"a": {}}


def test_legal_actions_of_one_agent(tmp_path):
    """As the page says: one agent in an environment for many, which earns 1 where its action is legal."""
    flags = {"num_envs": 2, "num_steps": 20, "total_timesteps": 80, "eval_episodes": 0, "runs_dir": str(tmp_path)}
    folder = ippo.main(ippo.Args(env_id="pz/test_own_environment:Narrow?num_workers=0", **flags))
    events = EventAccumulator(str(folder)).Reload()
    assert {point.value for point in events.Scalars("rollout/ep_reward")} == {5}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_classes_and_functions_from_python(folder, monkeypatch, num_workers):
    """The same episodes as by name, also of a function that no worker could import."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("meeting", "corridor"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    by_name = make("pz/meeting:Meeting?size=5", 2, num_workers=num_workers)
    from corridor import Corridor
    from meeting import Meeting

    by_class = make(Meeting, 2, discrete=True, num_workers=num_workers, size=5)
    by_function = make(lambda size: Meeting(size=size), 2, num_workers=num_workers, size=5)
    expected = by_name.reset(seed=3)[0]
    for envs in (by_class, by_function):
        np.testing.assert_array_equal(envs.reset(seed=3)[0], expected)
        assert envs.team_reward and not envs.may_die and envs.time_limit == 20
    for step in range(30):
        action = np.full((2, 2), step % 3)
        expected = by_name.step(action)
        for envs in (by_class, by_function):
            np.testing.assert_array_equal(envs.step(action)[0], expected[0])
    assert by_class.env_id == "Meeting"
    for envs in (by_name, by_class, by_function):
        envs.close()

    envs = make_gymnasium(Corridor, 3, discrete=True, vectors=True, length=4)
    named = make_gymnasium("corridor:Corridor", 3, discrete=True, vectors=True, length=4)
    np.testing.assert_array_equal(envs.reset(seed=1)[0], named.reset(seed=1)[0])
    with pytest.raises(EnvError, match="Meeting has discrete actions and this script needs continuous ones"):
        make(Meeting, 1, discrete=False, num_workers=0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_environment_says_by_an_attribute_whether_it_was_a_success(folder, monkeypatch, num_workers):
    """As battles do; a team that has met is terminated."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "meeting", raising=False)
    said = (folder / "meeting.py").read_text().replace("    metadata =", "    battle_won = False\n    metadata =")
    said = said.replace(
        "        met, late = apart == 0,", "        self.battle_won = apart == 0\n        met, late = self.battle_won,"
    )
    (folder / "meeting.py").write_text(said)
    envs, rng, won = make("pz/meeting:Meeting?max_steps=6", 4, num_workers=num_workers), np.random.default_rng(1), []
    envs.reset(seed=1)
    for _ in range(60):
        *_, termination, _, info = envs.step(rng.integers(3, size=(4, 2)))
        if "_episode" in info:
            ended = info["_episode"]
            np.testing.assert_array_equal(info["episode"]["battle_won"][ended], termination[ended])
            won += termination[ended].tolist()
    envs.close()
    assert {*won} == {True, False}


def test_a_run_goes_on_with_new_episodes(folder, monkeypatch):
    """As docs/continue.md says: nobody asks an environment of the user's for a snapshot."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("meeting.py", "corridor.py"):
        monkeypatch.delitem(sys.modules, name[:-3], raising=False)
        asked = "\n    def snapshot(self):\n        raise RuntimeError\n"
        (folder / name).write_text(FILES[name] + asked)
    flags = {"total_timesteps": 64, "num_envs": 2, "num_steps": 32, "eval_episodes": 0, "runs_dir": str(folder)}
    for script, env_id in ((ppo, "corridor:Corridor"), (ippo, "pz/meeting:Meeting?num_workers=0")):
        run = script.main(script.Args(env_id=env_id, **flags))
        assert load_checkpoint(run)["playing"] is None
    page = (ROOT / "docs" / "continue.md").read_text()
    assert re.search(
        r"^\| your own by `my_module:MyEnv` or `pz/my_module:MyEnv`, .* \| new episodes \|$", page, re.MULTILINE
    )


def test_a_run_is_played_in_its_own_environment_whatever_the_folder_of_the_shell_has(folder, tmp_path):
    """Two versions of a project, each with its corridor.py; in the other one every step costs 1."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    text = (other / "corridor.py").read_text()
    (other / "corridor.py").write_text(text.replace("arrived - 0.1", "arrived - 1.0"))
    shell(f"python {ROOT}/cleanmarl/ppo.py --env-id corridor:Corridor {SMALL}", folder)
    shell(f"python {ROOT}/cleanmarl/ppo.py --env-id corridor:Corridor {SMALL}", other)
    play = f"python -m cleanmarl.enjoy {folder}/runs/* --episodes 3 --greedy | grep return"
    returns = [shell(play, place).stdout for place in (folder, other)]
    assert returns[0] and returns[0] == returns[1]
    assert shell(play.replace(str(folder), str(other)), folder).stdout != returns[0]
    load = "import cleanmarl, glob; [cleanmarl.load(glob.glob(f'{x}/runs/*')[0]) for x in ('work', 'other')]"
    done = shell(f'python -c "{load}"', tmp_path)
    assert done.returncode == 1 and "play the run in a process of its own" in done.stderr.splitlines()[-1]


def test_what_no_worker_can_have():
    lock, parallel_env = threading.Lock(), simple_v3.parallel_env

    def locked():
        with lock:
            return parallel_env()

    with pytest.raises(EnvError, match=r"locked cannot be sent to workers \(.*lock.*\); num_workers=0 does without"):
        make(locked, 1, num_workers=1)
    make(locked, 1, num_workers=0).close()


def test_what_only_a_worker_cannot_build_is_one_line_too(folder, monkeypatch):
    """A film's render_mode does not reach the environment that shows its spaces; nor what goes wrong elsewhere."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    reason = (
        r"pz/meeting:Meeting cannot be built with \{'render_mode': 'rgb_array'\}: TypeError: Meeting.__init__\(\) got"
    )
    for num_workers in (0, 1, 2):
        with pytest.raises(EnvError, match=reason) as caught:
            make("pz/meeting:Meeting", 2, num_workers=num_workers, render_mode="rgb_array").reset(seed=1)
        assert "\n" not in str(caught.value)
    here, parallel_env = os.getpid(), simple_v3.parallel_env

    def one_place():
        if os.getpid() != here:
            raise FileNotFoundError("there is no licence here")
        return parallel_env()

    with pytest.raises(EnvError, match=r"one_place cannot be built with \{\}: FileNotFoundError: there is no"):
        make(one_place, 2, num_workers=2).reset(seed=1)


@pytest.mark.parametrize(
    ("script", "env_id", "line"),
    [
        ("ppo", "coridor:Corridor", "coridor:Corridor: there is no module coridor, neither in {folder} nor on the"),
        ("ppo", "corridor:Coridor", "the module corridor has no Coridor; did you mean Corridor?"),
        ("ippo", "pz/meting:Meeting", "pz/meting:Meeting: there is no module meting, neither in {folder} nor on the"),
        ("ippo", "pz/meeting:Meting", "pz/meeting:Meting: the module meeting has no Meting; did you mean Meeting?"),
        ("ippo", "meeting:Meeting", "did you mean pz/meeting:Meeting?"),
        ("ippo", "pz/meeting:Meeting?sise=5", "cannot be built with {{'sise': 5}}: TypeError: Meeting.__init__() got"),
        ("ppo", "pz/meeting:Meeting", "pz/meeting:Meeting is for many agents and this script is for one: try ippo.py"),
        ("ppo", "bad:Env", "the module bad cannot be imported: NameError: name 'gim' is not defined (bad.py, line 3)"),
        ("ippo", "pz/bad:Env", "bad cannot be imported: NameError: name 'gim' is not defined (bad.py, line 3)"),
        ("ppo", "worse:Env", "worse cannot be imported: SyntaxError: '(' was never closed (worse.py, line 1)"),
        ("ippo", "pz/lacking:Env", "lacking cannot be imported: ModuleNotFoundError: No module named 'no_such'"),
    ],
)
def test_a_mistake_is_one_line(folder, monkeypatch, script, env_id, line):
    write_broken_modules(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("meeting", "corridor", "bad", "worse", "lacking"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(EnvError) as caught:
        (make if script == "ippo" else make_gymnasium)(env_id)
    assert line.format(folder=folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_mistake_ends_a_script_before_anything_is_written(folder):
    write_broken_modules(folder)
    done = shell(f"python {ROOT}/cleanmarl/ppo.py --env-id bad:Env", folder)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("ppo: bad:Env: the module bad cannot be imported: NameError")
    assert not (folder / "runs").exists()


def write_broken_modules(folder: Path) -> None:
    (folder / "bad.py").write_text("import gymnasium as gym\n\nclass Env(gim.Env):\n    pass\n")
    (folder / "worse.py").write_text("print(\n")
    (folder / "lacking.py").write_text("import no_such\n")
