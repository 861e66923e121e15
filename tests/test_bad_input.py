"""Bad input: one line on stderr that says what to do, exit status 2, and nothing written."""

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import typing
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cleanmarl import ippo, ppo, vdn
from cleanmarl.cli import UsageError, flag, launch, limits
from cleanmarl.run import Run, load_checkpoint

import gymnasium as gym
import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from optional import need

FOLDER = Path(ppo.__file__).parent
gym.register("NoModule-v0", "no_such_package:Env")

CONTINUOUS = """
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

class Push(ParallelEnv):
    metadata = {"name": "push"}
    possible_agents = ["a", "b"]

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (2,))

    def action_space(self, agent):
        return spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return {agent: np.zeros(2) for agent in self.agents}, {agent: {} for agent in self.agents}

parallel_env = Push
"""


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """The script on the command line given, which must be refused; returns the line it prints."""

    monkeypatch.setattr(Run, "__enter__", lambda run: pytest.fail("it was not refused"))

    def refused(script: str, *flags) -> str:
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", [f"{script}.py", "--runs-dir", str(tmp_path / "runs"), *map(str, flags)])
        capfd.readouterr()
        module = importlib.import_module(f"cleanmarl.{script}")
        with pytest.raises(SystemExit) as stopped:
            launch(module.main, module.Args)
        out, err = capfd.readouterr()
        assert stopped.value.code == 2 and not out
        assert err.startswith(f"{script}: ") and err.count("\n") == 1 and err.endswith("\n")
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return refused


@pytest.mark.parametrize(
    "script, flags, text",
    [
        # environments
        ("ppo", "--env-id CartPol-v1", "unknown environment 'CartPol-v1'; did you mean CartPole-v1"),
        ("ppo", "--env-id CartPole-v9", "did you mean CartPole-v1"),
        ("ppo", "--env-id xyzzy", "unknown environment 'xyzzy'"),
        ("ppo", "--env-id NoModule-v0", "NoModule-v0 cannot be built: "),
        ("ppo", "--env-id HalfCheetah-v2", "HalfCheetah-v2"),
        ("ippo", "--env-id mpe/simple_spread_v3?num_envs=5", "num_envs is no option of an environment"),
        ("ippo", "--env-id mpe/simple_spread_v3?name=x", "name is no option of an environment"),
        ("ippo", "--env-id pz/mpe2/simple_spread_v3?num_workers=two", "num_workers must be an integer, 0 (no worker"),
        (
            "ippo",
            "--env-id pz/mpe2/simple_spread_v3?max_cycles=0",
            "max_cycles must be an integer of at least 1",
        ),
        (
            "ippo",
            "--env-id lbf/Foraging-8x8-2p-2f-coop-v3?max_episode_steps=-1",
            "max_episode_steps must be an",
        ),
        ("ippo", "--env-id rware/rware-tiny-2ag-v2?max_steps=0", "max_steps must be an integer of at least 1, not 0"),
        (
            "ippo",
            "--env-id lbf/Foraging-8x8-2p-2f-coop-v3?max_episode_steps=None",
            "max_episode_steps must be an integer of at least 1, not None",
        ),
        ("ippo", "--env-id smax/3m?max_steps=None", "max_steps must be an integer of at least 1, not None"),
        ("ppo", "--target-kl 0", "--target-kl must be greater than 0, not 0"),
        ("ppo", "--eval-episodes -5", "--eval-episodes must be at least 0, not -5"),
        ("ppo", "--env-id no_such_package:Game-v0", "no_such_package:Game-v0: there is no module no_such_package"),
        ("ippo", "--env-id mpe/simple_sprad_v3", "did you mean mpe/simple_spread_v3"),
        ("ippo", "--env-id pz/mpe2/simple_sprad_v3", "did you mean pz/mpe2/simple_spread_v3"),
        ("ippo", "--env-id mpe/simple_spread_v3?N={[]:1}", "mpe/simple_spread_v3: N must be an integer"),
        ("ippo", "--env-id mpe/simple_spread_v3?N", "the options of an id are name=value, joined by &"),
        ("ippo", "--env-id mpe/simple_spread_v3?", "the options of an id are name=value, joined by &"),
        ("ippo", "--env-id mpe/simple_spread_v3?N=3&N=4", "an option can be given once"),
        ("ippo", "--env-id pz/mpe2/simple_spread_v3?num_workers=True", "num_workers must be an integer, 0 (no worker"),
        ("ippo", "--env-id mpe/simple_spread_v3?N=100000", "the contacts of 100,000 agents would take "),
        ("maddpg", "--total-timesteps 9", "--total-timesteps 9 ends before there are --batch-size 10 episodes"),
        ("maddpg", "--clip-gradients nan", "--clip-gradients must be finite, not nan"),
        ("ippo", "--env-id mpe/simple_spread_v3?continuous_actions=no", "must be True or False, not 'no'"),
        (
            "ippo_continuous_action",
            "--env-id mpe/simple_spread_v3?continuous_actions=false",
            "has discrete actions and this script needs continuous ones: try the script without _continuous_action",
        ),
        ("ippo", "--env-id mpee/simple_spread_v3", "did you mean mpe/simple_spread_v3?"),
        ("ippo", "--env-id simple_spread_v3", "did you mean mpe/simple_spread_v3?"),
        ("ippo", "--env-id nowhere/nothing", "multi-agent ids are family/name"),
        ("ippo", "--env-id CartPole-v1", "CartPole-v1 is for one agent and this script is for many: try ppo.py"),
        # spaces
        ("ppo", "--env-id Pendulum-v1", "needs Discrete actions and Pendulum-v1 has Box(-2.0, 2.0"),
        ("ppo", "--env-id Blackjack-v1", "needs Box or Discrete observations and Blackjack-v1 has Tuple("),
        # sizes
        ("ppo", "--num-envs 3 --num-steps 5", "15 steps of a rollout must be a multiple (2+) of --num-minibatches 4"),
        ("ppo", "--num-minibatches 512", "512 steps of a rollout must be a multiple (2+) of --num-minibatches 512"),
        ("ippo", "--num-envs 3 --num-steps 5", "15 steps of a rollout are not divisible by --num-minibatches 4"),
        ("ppo", "--total-timesteps 511", "--total-timesteps 511 is less than one rollout"),
        ("ppo", "--total-timesteps -5", "--total-timesteps must be greater than 0, not -5"),
        ("ippo", "--total-timesteps 3199", "--total-timesteps 3199 is less than one rollout"),
        ("ippo", "--total-timesteps 0", "--total-timesteps must be greater than 0, not 0"),
        ("ippo", "--actor-hidden-dim 0", "--actor-hidden-dim must be greater than 0, not 0"),
        ("ippo", "--gamma 1.5", "--gamma must be in [0, 1]"),
        ("ippo_per_agent", "--gae-lambda 0.9 -0.1 0.9", "--gae-lambda must be in [0, 1]"),
        ("ippo_per_agent", "--learning-rate 0.1 0.1 0", "--learning-rate must be greater than 0, not 0"),
        ("ppo", "--learning-rate nan", "--learning-rate must be finite, not nan"),
        ("ppo", "--seed -1", "--seed must be in [0, 4294967296), not -1"),
        ("ippo", "--seed 4294967296", "--seed must be in [0, 4294967296), not 4294967296"),
        # devices
        ("ppo", "--device nonsense", "--device nonsense is not there"),
        ("ippo", "--device cuda:63", "--device cuda:63 is not there"),
        ("ppo", "--device xpu", "--device xpu is not there"),
        ("ppo", "--device hpu", "--device hpu is not there"),  # which torch has no module for
        # other runs
        ("ppo", "--resume nowhere", "nowhere is not a run folder"),
    ],
)
def test_refused(script, flags, text, refused):
    assert text in refused(script, *flags.split())


@pytest.mark.parametrize(
    "script, package, flags, text",
    [
        # actions of another kind
        ("ppo_shared", "", "--env-id Pendulum-v1", "needs Discrete actions and Pendulum-v1 has Box(-2.0, 2.0"),
        ("ppo_continuous_action", "", "--env-id CartPole-v1", "(K,) of floats and CartPole-v1 has Discrete(2)"),
        ("ppo_multidiscrete", "envpool", "--env-id Breakout-v5", "needs actions of several integers"),
        ("ppo_multidiscrete", "", "--env-id Pendulum-v1", "ppo_continuous_action.py Box"),
        ("ppo_multidiscrete_mask", "envpool", "--env-id Breakout-v5", "needs actions of several integers"),
        # games of another kind
        ("ppo_atari", "ale_py", "--env-id Pendulum-v1", "needs an Atari game, such as ALE/Breakout-v5"),
        ("ppo_atari_lstm", "ale_py", "--env-id CartPole-v1", "needs an Atari game, such as ALE/Breakout-v5"),
        ("ppo_atari_envpool", "envpool", "--env-id Pendulum-v1", "needs an Atari game, such as Breakout-v5"),
        ("ppo_atari_multigpu", "envpool", "--env-id CartPole-v1", "needs an Atari game, such as Breakout-v5"),
        ("ppo_procgen", "envpool", "--env-id Breakout-v5", "needs a Procgen game, such as StarpilotEasy-v0"),
        ("ppo_selfplay", "envpool", "--env-id Pendulum-v1", "needs a zero-sum two-player game of perfect information"),
        # no such game
        ("ppo_shared", "", "--env-id CartPol-v1", "did you mean CartPole-v1"),
        ("ppo_continuous_action", "", "--env-id HalfCheeta-v5", "did you mean HalfCheetah-v5"),
        ("ppo_atari_lstm", "ale_py", "--env-id ALE/Brekout-v5", "did you mean ALE/Breakout-v5"),
        ("ppo_atari_multigpu", "envpool", "--env-id Brekout-v5", "did you mean Breakout-v5"),
        ("ppo_multidiscrete_mask", "envpool", "--env-id Cleane-v0", "did you mean Cleaner-v0"),
        # sizes
        (
            "ppo_atari_lstm",
            "",
            "--num-envs 2 --num-steps 1 --num-minibatches 2",
            "minibatches of one, whose",
        ),
        ("ppo_atari_lstm", "", "--num-envs 6", "--num-envs 6 is not divisible by --num-minibatches 4: a minibatch is"),
        ("ppo_procgen", "", "--num-minibatches 7", "16384 steps of a rollout must be a multiple (2+) of"),
        ("ppo_multidiscrete", "", "--num-envs 3 --num-steps 5", "15 steps of a rollout must be a multiple (2+) of"),
    ],
)
def test_refused_by_variants_of_ppo(script, package, flags, text, refused):
    if package:
        need(package)
    assert text in refused(script, *flags.split())


class FromOne(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3, start=1)


gym.register("FromOne-v0", FromOne)


@pytest.mark.parametrize("script", ["ppo", "ppo_shared", "impala", "impala_ray"])
def test_actions_that_do_not_start_at_0_are_refused(script, refused):
    assert "needs actions counted from 0 and FromOne-v0 has Discrete(3, start=1)" in refused(
        script, "--env-id", "FromOne-v0"
    )


@pytest.mark.parametrize(
    "script, package, text",
    [
        ("ppo_continuous_action", "mujoco", "HalfCheetah-v5 needs a package that is missing"),
        ("ppo_atari", "ale_py", "ALE/Breakout-v5 needs the package ale-py: python bootstrap.py atari"),
        ("ppo_atari_lstm", "ale_py", "ALE/Breakout-v5 needs the package ale-py: python bootstrap.py atari"),
        ("ppo_atari_envpool", "envpool", "Breakout-v5 needs a package that is missing"),
        ("ppo_atari_multigpu", "envpool", "Breakout-v5 needs a package that is missing"),
        ("ppo_procgen", "envpool", "StarpilotEasy-v0 needs a package that is missing"),
        ("ppo_multidiscrete", "envpool", "Cleaner-v0 needs a package that is missing"),
        ("ppo_multidiscrete_mask", "envpool", "Cleaner-v0 needs a package that is missing"),
        ("ppo_selfplay", "envpool", "ConnectFour-v1 needs a package that is missing"),
    ],
)
def test_missing_package_of_a_variant(script, package, text, refused, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package or ".mujoco" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    line = refused(script)
    assert text in line and ("pip install" in line or "bootstrap.py" in line)


SIZES = ["num-envs", "num-steps", "num-minibatches", "update-epochs", "learning-rate", "torch-threads"]
SIZES += ["checkpoint-interval", "max-grad-norm", "clip-coef"]


@pytest.mark.parametrize("script", ["ppo", "ippo"])
@pytest.mark.parametrize("flag", SIZES)
def test_zero_and_negative_sizes(script, flag, refused):
    for value in ("0", "-3"):
        assert f"--{flag} must be greater than 0, not {value}" in refused(script, f"--{flag}", value)


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--gamma 0.9 0.9", "--gamma takes one value or one for each of 3 agents, not 2"),
        ("--learning-rate 1 1 1 1", "--learning-rate takes one value or one for each of 3 agents, not 4"),
        ("--lr-schedule linear constant", "--lr-schedule takes one value or one for each of 3 agents, not 2"),
        ("--update-epochs 1 2", "--update-epochs takes one value or one for each of 3 agents, not 2"),
        ("--share-parameters --clip-coef 0.1 0.2 0.3", "--clip-coef takes one value with --share-parameters"),
        ("--share-parameters --ent-coef 0 0 0", "--ent-coef takes one value with --share-parameters, not 3"),
    ],
)
def test_settings_per_agent_refused(flags, text, refused):
    assert text in refused("ippo_per_agent", *flags.split())


@pytest.mark.parametrize("flag", ["learning-rate", "gamma", "update-epochs", "lr-schedule", "reward-scale"])
def test_no_value_for_any_agent(flag, refused):
    assert f"--{flag} takes one value or one for each" in refused("ippo_per_agent", f"--{flag}")


def test_per_agent_settings_of_two_unlike_agents(refused):
    flags = ["--env-id", "mpe/simple_speaker_listener_v4", "--gamma", 0.9, 0.9, 0.9]
    assert "--gamma takes one value or one for each of 2 agents, not 3" in refused("ippo_per_agent", *flags)


def test_continuous_actions_for_ippo(tmp_path_factory, refused, monkeypatch):
    module = tmp_path_factory.mktemp("package") / "pushing"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "push_v0.py").write_text(CONTINUOUS)
    monkeypatch.syspath_prepend(module.parent)
    line = refused("ippo", "--env-id", "pz/pushing/push_v0", "--num-envs", 4)
    assert "pz/pushing/push_v0 has continuous actions and this script needs discrete ones" in line


@pytest.mark.parametrize("script", ["ppo", "ippo"])
def test_a_file_where_the_runs_should_be(script, tmp_path, refused):
    (tmp_path / "runs").write_text("in the way")
    line = refused(script)
    assert "cannot write the run folder" in line and "choose another place with --runs-dir" in line
    assert (tmp_path / "runs").read_text() == "in the way"


def test_a_link_to_nowhere_where_the_runs_should_be(tmp_path, refused):
    (tmp_path / "runs").symlink_to("/gone")
    line = refused("ppo")
    assert "/CartPole-v1__ppo" in line and "again" not in line and "(File exists)" in line


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs a place where not even root may write")
def test_a_place_where_nobody_may_write(refused):
    assert "cannot write the run folder /proc/runs/CartPole-v1__ppo" in refused("ppo", "--runs-dir", "/proc/runs")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["ppo", "ippo"])
def test_no_gpu(script, refused):
    line = refused(script, "--device", "cuda")
    assert "--device cuda is not there" in line and "--device cpu always is" in line


# ------------------------------------------------------------------------------------------------------- the long list

SCRIPTS = [path.stem for path in sorted(FOLDER.glob("*.py")) if "\nclass Args(" in path.read_text()]
OF_ENVPOOL = (
    "ppo_atari_envpool",
    "ppo_atari_multigpu",
    "ppo_procgen",
    "ppo_multidiscrete_mask",
    "impala_atari_envpool",
)


def module_of(script: str):
    return importlib.import_module(f"cleanmarl.{script}")


def hints_of(script: str, inherited: bool) -> dict[str, list]:
    """name -> annotations of the fields of a script's Args; of those of RunArgs too, if `inherited`."""
    found = {}
    for cls in module_of(script).Args.__mro__[: -1 if inherited else 1]:
        for name in cls.__annotations__:
            found.setdefault(name, []).append(typing.get_type_hints(cls, include_extras=True)[name])
    return found


def kinds(hint) -> list:
    """The types in an annotation: UnitFloat | None -> [float, NoneType]."""
    if typing.get_origin(hint) is Literal:
        return [Literal]
    return [kind for inner in typing.get_args(hint) for kind in kinds(inner)] or [hint]


def ranges_of(script: str) -> list[tuple[str, str]]:
    """(flags, words) just outside each end of the range of each number of a script; floats must be numbers besides."""
    cases = []
    for name, hints in hints_of(script, inherited=script == "ppo").items():
        values = ["nan"] if any(float in kinds(hint) for hint in hints) else []
        for limit in (limit for hint in hints for limit in limits(hint)):
            match limit:
                case Gt(end) | Lt(end):
                    values.append(end)
                case Ge(end):
                    values.append(end - 1)
                case Le(end):
                    values.append(end + 1)
        cases += [(f"{flag(name)} {x}", f"{flag(name)} must be ") for x in values if x != math.inf]
    return cases


def types_of(script: str) -> list[tuple[str, str]]:
    """Words where an integer, a number or one of some words is wanted, a flag with a slip, one without its value."""
    cases, wanted = [], {int: "1.5", float: "some", Literal: "Nothing"}
    for name, hints in hints_of(script, inherited=script == "ppo").items():
        kind = kinds(hints[0])[0]
        if kind in wanted:
            cases.append((f"{flag(name)} {wanted[kind]}", flag(name)))
    first, *_, last = cases
    misspelt = last[1][:-1] + "x"
    return [
        *cases,
        (misspelt, f"Unrecognized options: {misspelt}"),
        (first[1], f"Missing value for argument '{first[1]}'"),
    ]


def mistakes_of(script: str) -> list[tuple[str, str]]:
    """What no script takes, and what its flags among each other forbid."""
    names = set(hints_of(script, inherited=True))
    cases = [
        ("stray", "Unrecognized options: stray"),
        ("--device gpu", "--device gpu is not there"),
        ("--device cpu:1", "--device cpu:1 is not there; --device cpu always is"),
        ("--torch-threads 1000000", "--torch-threads 1000000 would crash torch"),
        ("--resume nowhere", "nowhere is not a run folder: it has no readable args.json"),
        ("--resume nowhere/best.pt", "nowhere is not a run folder: it has no readable args.json"),
    ]
    if names & {"num_steps", "unroll_length"}:
        cases.append(("--total-timesteps 1", "--total-timesteps 1 is less than "))
    if "num_minibatches" in names:
        cases.append(("--num-envs 3 --num-steps 5 --num-minibatches 7", "--num-minibatches 7"))
    if {"batch_size", "buffer_size"} <= names:
        cases.append(("--batch-size 9 --buffer-size 8", "--buffer-size 8"))
    if "rho_clip" in names:
        cases.append(("--rho-clip 0.5", "--rho-clip 0.5 must be at least --c-clip 1.0"))
    if "/" in module_of(script).Args.env_id and not script.startswith("ppo_atari"):  # several agents
        cases += [("--env-id CartPole-v1", "is for one agent and this script is for many: try ppo.py")]
        cases += [("--env-id mpe/simple_sprad_v3", "did you mean mpe/simple_spread_v3")]
        wrong = "has continuous actions and this script needs discrete ones"
        env_id, continuous = "mpe/simple_spread_v3", script.endswith("continuous_action")
        if continuous:
            wrong = "has discrete actions and this script needs continuous ones"
        cases += [(f"--env-id {env_id}?continuous_actions={not continuous}", wrong)]
    elif script not in OF_ENVPOOL:
        cases += [("--env-id mpe/simple_spread_v3", "mpe/simple_spread_v3")]
    return cases


def all_of(script: str) -> list[tuple[str, str]]:
    return ranges_of(script) + types_of(script) + mistakes_of(script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_mistakes_of_every_script(script, refused):
    """Generated from the annotations: a script that is added is tested with its flags."""
    if script == "impala_ray":
        need("ray")
    for flags, text in all_of(script):
        assert text in refused(script, *flags.split()), flags


def test_the_list_is_long():
    """Of the issue that asked for it: at least 250, over all scripts, and by hand what a generator cannot know."""
    generated = {script: all_of(script) for script in SCRIPTS}
    assert min(map(len, generated.values())) >= 20 and sum(map(len, generated.values())) >= 250
    assert len(BY_HAND) == len(set(BY_HAND)) >= 80


N, TWO = "--env-id mpe/simple_spread_v3", "--env-id pz/mpe2/simple_spread_v3"
FORAGING = "--env-id lbf/Foraging-8x8-2p-2f-coop-v3"
BY_HAND = [
    # words of another family
    ("mappo", "--learning-rate-critic 0.001", "; did you mean --critic-learning-rate?"),
    ("maddpg", "--critic-learning-rate 0.001", "; did you mean --learning-rate-critic?"),
    ("maddpg", "--max-grad-norm 1", "; did you mean --clip-gradients?"),
    ("mappo", "--clip-gradients 1", "; did you mean --max-grad-norm?"),
    ("mappo", "--epochs 1", "; did you mean --update-epochs?"),
    ("vdn", "--update-epochs 1", "; did you mean --epochs?"),
    ("mappo", "--lr 1", "; did you mean --learning-rate?"),
    ("maddpg", "--lr 1", "; did you mean --learning-rate-actor?"),
    # options of ids
    ("ippo", f"{N}?", "the options of an id are name=value, joined by &"),
    ("ippo", f"{N}?N=3&", "the options of an id are name=value, joined by &"),
    ("ippo", f"{N}?N=3&N=4", "an option can be given once"),
    ("ippo", f"{N}?=3", "has no option ''; it has N, local_ratio"),
    ("ippo", f"{N}?colour=red", "has no option 'colour'; it has N, local_ratio"),
    ("ippo", f"{N}?N=0", "N must be an integer of at least 1, not 0"),
    ("ippo", f"{N}?N=-1", "N must be an integer of at least 1, not -1"),
    ("ippo", f"{N}?N=1.5", "N must be an integer of at least 1, not 1.5"),
    ("ippo", f"{N}?N=True", "N must be an integer of at least 1, not True"),
    ("ippo", f"{N}?N=many", "N must be an integer of at least 1, not 'many'"),
    ("ippo", f"{N}?N=", "N must be an integer of at least 1, not ''"),
    ("ippo", f"{N}?local_ratio=2", "local_ratio must be a number from 0 to 1, not 2"),
    ("ippo", f"{N}?local_ratio=half", "local_ratio must be a number from 0 to 1, not 'half'"),
    ("ippo", f"{N}?max_cycles=2.5", "max_cycles must be an integer of at least 1, not 2.5"),
    ("ippo", f"{N}?render_mode=human", "render_mode must be None or 'rgb_array', not 'human'"),
    ("ippo", f"{N}?continuous_actions=1", "continuous_actions must be True or False, not 1"),
    ("ippo", f"{N}?num_workers=2", "has no option 'num_workers'"),
    ("ippo", f"{N}?pictures=True", "pictures is no option of an environment"),
    ("ippo", "--env-id mpe/simple_tag_v3?num_good=0", "num_good must be an integer of at least 1, not 0"),
    ("ippo", "--env-id mpe/simple_tag_v3?num_adversaries=-1", "num_adversaries must be an integer of at least 1"),
    ("mappo", "--env-id matrix/penalty?k=-1", "has no option 'k'; it has max_cycles"),
    ("mappo", "--env-id matrix/penalty-2p?k=1", "k must be a number of at most 0, not 1"),
    ("mappo", "--env-id matrix/penalty-2p?k=big", "k must be a number of at most 0, not 'big'"),
    ("mappo", "--env-id matrix/penalty?max_cycles=no", "max_cycles must be an integer of at least 1, not 'no'"),
    ("mappo", "--env-id matrix/penalty?render_mode=human", "matrix/penalty has no pictures"),
    ("mappo", f"{TWO}?num_workers=-1", "num_workers must be an integer, 0 (no worker processes) or more, not -1"),
    ("mappo", f"{TWO}?num_workers=True", "num_workers must be an integer, 0 (no worker processes) or more, not True"),
    ("mappo", f"{TWO}?num_workers=1.5", "num_workers must be an integer, 0 (no worker processes) or more, not 1.5"),
    ("mappo", f"{TWO}?team_reward=yes", "team_reward must be True or False, not 'yes'"),
    ("mappo", f"{TWO}?may_die=1", "may_die must be True or False, not 1"),
    ("mappo", f"{TWO}?shape=round", "cannot be built with {'shape': 'round'}: TypeError"),
    # names
    ("ippo", "--env-id mpe", "did you mean mpe/"),
    ("ippo", "--env-id /", "multi-agent ids are family/name"),
    ("ippo", "--env-id mpe/simple_spread_v2", "did you mean mpe/simple_spread_v3"),
    ("ippo", "--env-id MPE/simple_spread_v3", "multi-agent ids are family/name"),
    ("mappo", "--env-id matrix/penaltyy", "did you mean matrix/penalty"),
    ("mappo", "--env-id pz/", "unknown environment 'pz/'; did you mean pz/"),
    ("mappo", "--env-id pz/no_such_package/game_v0", "unknown environment 'pz/no_such_package/game_v0'"),
    ("mappo", "--env-id pz/no_such_file:Env", "pz/no_such_file:Env: there is no module no_such_file"),
    ("mappo", "--env-id pz/json:Nothing", "pz/json:Nothing: the module json has no Nothing"),
    ("mappo", "--env-id pz/json", "unknown environment 'pz/json'"),
    ("coma", "--env-id jumanji/Cleanerr-v0", "did you mean jumanji/Cleaner-v0"),
    ("coma", "--env-id jumanji/Cleaner-v0?size=3", "has no option 'size'; it has only render_mode"),
    ("coma", "--env-id pgx/chess", "did you mean pgx/Chess-v1"),
    ("coma", "--env-id pgx/ConnectFour-v1?x=1", "has no option 'x'; it has only render_mode"),
    ("coma", "--env-id smaclite/3m?max_steps=0", "max_steps must be an integer of at least 1, not 0"),
    ("ppo", "--env-id=", "unknown environment ''"),
    ("ppo", "--env-id CartPole-v1?x=1", "did you mean CartPole-v1"),
    ("ppo", "--env-id FrozenLake-v2", "did you mean FrozenLake-v1"),
    ("ppo", "--env-id /etc/passwd", "unknown environment '/etc/passwd'"),
    ("ppo", "--env-id json:Env?x=1", "json:Env?x=1: options in an id are for many agents: here gym.register("),
    ("ppo", "--env-id json:Env-v0", "json:Env-v0: the module json has no Env-v0"),
    ("ppo", "--env-id MountainCarContinuous-v0", "needs Discrete actions and MountainCarContinuous-v0 has Box"),
    ("ppo", "--env-id Hopper-v3", "Hopper-v3 cannot be built: "),
    ("ppo_continuous_action", "--env-id Blackjack-v1", "(K,) of floats and Blackjack-v1 has Discrete(2)"),
    ("impala_continuous_action", "--env-id CartPole-v1", "(K,) of floats and CartPole-v1 has Discrete(2)"),
    ("impala", "--env-id Pendulum-v1", "needs Discrete actions and Pendulum-v1 has Box"),
    ("mappo_continuous_action", "--env-id matrix/penalty", "has discrete actions and this script needs continuous"),
    # numbers as people write them
    ("ppo", "--total-timesteps 1e6", "invalid literal for int() with base 10: '1e6'; --help lists all flags"),
    ("ppo", "--total-timesteps 500_0000.0", "--total-timesteps"),
    ("ppo", "--gamma 0,9", "could not convert string to float: '0,9'"),
    ("ppo", "--gamma inf", "--gamma must be in [0, 1], not inf"),
    ("ppo", "--learning-rate 1e400", "--learning-rate must be finite, not inf"),
    ("ppo", "--target-kl none", "--target-kl"),
    ("ppo", "--anneal-lr true", "Unrecognized options: true"),
    ("ppo", "--no-gamma", "Unrecognized options: --no-gamma; did you mean --gamma?"),
    ("ppo", "--num-env 4", "Unrecognized options: --num-env, 4; did you mean --num-envs?"),
    ("ppo", "--seed 1 2", "Unrecognized options: 2"),
    ("ppo", "--seed 4294967296", "--seed must be in [0, 4294967296), not 4294967296"),
    ("ippo_per_agent", "--learning-rate 0.1 nan 0.1", "--learning-rate must be finite, not nan"),
    ("ippo_per_agent", "--gamma 0.9 x 0.9", "Error parsing --gamma"),
    ("ippo_per_agent", "--ent-coef -1", "--ent-coef must be at least 0, not -1"),
    ("ippo_per_agent", "--reward-scale 1 0 1", "--reward-scale must be greater than 0, not 0"),
    ("ippo_per_agent", "--learning-starts 1000001", "is more than the 1000000 steps of the run: nothing would be"),
    ("ippo_per_agent", "--random-timesteps 999201", "is more than the 999200 steps before the last rollout: nothing"),
    ("maddpg", "--individual-critics maybe", "--individual-critics"),
    ("coppo", "--inner-clip-coef -0.1", "--inner-clip-coef must be in [0, inf], not -0.1"),
    # places
    ("ppo", "--runs-dir=", "--runs-dir is empty; the folder of now is --runs-dir ."),
    ("ppo", "--video-interval 100", "--video-interval does nothing without --capture-video"),
    ("ippo", "--eval-interval 100 --eval-episodes 0", "--eval-interval does nothing with --eval-episodes 0"),
    ("ppo", "--runs-dir /dev/null", "cannot write the run folder /dev/null/"),
    ("ppo", "--resume /dev/null", "/dev/null is not a run folder"),
    ("ppo", "--resume .", ". is not a run folder"),
    ("ppo", "--device=", "--device  is not there (Device string must not be empty)"),
    ("ppo", "--device cuda:-1", "--device cuda:-1 is not there"),
    ("ppo", "--device meta", "--device meta is not there"),
    # what does not fit together
    ("impala_replay", "--replay-size 3", "--replay-size 3 is less than a batch of 16 unrolls"),
    ("impala_replay", "--priority --replay-size 0", "--priority needs a replay: --replay-size"),
    ("impala_replay", "--priority-is-weight", "--priority-is-weight needs --priority"),
    ("mappo_lstm", "--num-envs 8 --num-minibatches 3", "--num-envs 8 is not divisible by --num-minibatches 3"),
    ("ippo_lstm", "--num-envs 8 --num-minibatches 16", "--num-envs 8 is not divisible by --num-minibatches 16"),
    ("ppo", "--num-envs 1000000000", "--total-timesteps 500000 is less than one rollout of 128000000000 steps"),
]
OF_PACKAGES = [
    ("lbforaging", "coppo", "--env-id lbf/Foraging-8x8-2p-2f-v33", "did you mean lbf/Foraging-8x8-2p-2f-v3"),
    ("lbforaging", "coppo", f"{FORAGING}?players=0", "cannot be built with {'players': 0}"),
    ("lbforaging", "coppo", f"{FORAGING}?nothing=1", "cannot be built with {'nothing': 1}: TypeError"),
    ("rware", "coppo", "--env-id rware/rware-tiny-2ag-v1000", "did you mean rware/rware-tiny-2ag-v2"),
    ("rware", "coppo", "--env-id rware/rware-tiny-2ag-v2?n_agents=200", "'n_agents': 200}: ValueError: Cannot take"),
    ("envpool", "impala_atari_envpool", "--env-id ALE/Pong-v5", "did you mean Pong-v5"),
    ("envpool", "impala_atari_envpool", "--env-id Ant-v4", "needs an Atari game, such as Pong-v5, and Ant-v4 is none"),
    ("envpool", "ppo_atari_envpool", "--env-id Pong", "envpool has no environment 'Pong'; did you mean Pong-v5"),
    ("envpool", "ppo_procgen", "--env-id Starpilot", "did you mean Starpilot"),
    ("envpool", "ppo_multidiscrete_mask", "--env-id CartPole-v1", "and CartPole-v1 has Discrete(2)"),
    ("ale_py", "ppo_atari", "--env-id ALE/Pong-v6", "did you mean ALE/Pong-v5"),
    ("mujoco", "ppo", "--env-id Hopper-v5", "needs Discrete actions and Hopper-v5 has Box"),
    ("ray", "impala_ray", "--address nowhere", "there is no Ray cluster at --address nowhere"),
    ("ray", "impala_ray", "--address 127.0.0.1:1", "there is no Ray cluster at --address 127.0.0.1:1"),
]


@pytest.mark.parametrize("script, flags, text", BY_HAND)
def test_refused_by_hand(script, flags, text, refused):
    assert text in refused(script, *flags.split())


@pytest.mark.parametrize("package, script, flags, text", OF_PACKAGES)
def test_refused_with_packages(package, script, flags, text, refused):
    need(package)
    assert text in refused(script, *flags.split())


# ------------------------------------------------------------------------------------------------------------- packages


@pytest.mark.parametrize(
    "package, flags, text",
    [
        ("wandb", "--track", "--track needs the package wandb: pip install wandb"),
        ("moviepy", "--capture-video", "--capture-video needs the package moviepy: pip install moviepy"),
        ("ale_py", "--env-id ALE/Breakout-v5", "needs the package ale-py: python bootstrap.py atari"),
        ("Box2D", "--env-id LunarLander-v3", "LunarLander-v3 needs a package that is missing: Box2D is not installed"),
    ],
)
def test_missing_package(package, flags, text, refused, monkeypatch):
    """None in sys.modules is Python's own way to say that a package is not there."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package or ".box2d" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert text in refused("ppo", *flags.split())


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A complete run of each script."""
    runs_dir, sizes = str(tmp_path_factory.mktemp("runs")), {"num_envs": 2, "num_steps": 32, "eval_episodes": 0}
    return {
        "ppo": ppo.main(ppo.Args(runs_dir=runs_dir, total_timesteps=128, **sizes)),
        "ippo": ippo.main(ippo.Args(runs_dir=runs_dir, total_timesteps=128, **sizes)),
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "script, run, flags, text",
    [
        ("ppo", "ippo", "", "is a run of ippo.py, not of ppo.py"),
        ("ippo", "ppo", "", "is a run of ppo.py, not of ippo.py"),
        ("ppo", "ppo", "--gamma 0.5", "--gamma 0.5 would change the learning of the run to resume, which has 0.99"),
        ("ppo", "ppo", "--env-id Acrobot-v1", "--env-id Acrobot-v1 would change the learning"),
        ("ppo", "ppo", "--no-anneal-lr", "--anneal-lr False would change the learning"),
        ("ippo", "ippo", "--gamma 0.5", "--gamma 0.5 would change the learning"),
        ("ippo", "ippo", "--seed 2", "--seed 2 would change the learning"),
        ("ippo", "ippo", "--no-share-parameters", "--share-parameters False would change the learning"),
        ("ppo", "ppo", "", "is complete at step 128; raise --total-timesteps"),
        ("ippo", "ippo", "--total-timesteps 100", "is complete at step 128; raise --total-timesteps"),
    ],
)
def test_resume_refused(script, run, flags, text, runs, refused):
    before = contents(runs[run])
    assert text in refused(script, "--resume", runs[run], *flags.split())
    assert contents(runs[run]) == before


def test_resume_of_damaged_folders(runs, tmp_path, refused):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").touch()  # as every run has it; that it is held is no writing
    assert "is not a run folder" in refused("ppo", "--resume", folder)
    meta = json.loads((runs["ppo"] / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps(meta)[:-10])
    assert f"{folder}/args.json is damaged (" in refused("ppo", "--resume", folder)
    (folder / "args.json").write_text(json.dumps(meta))
    assert "has no checkpoint.pt" in refused("ppo", "--resume", folder)
    (folder / "checkpoint.pt").write_bytes((runs["ppo"] / "checkpoint.pt").read_bytes()[:-2000])
    assert refused("ppo", "--resume", folder).endswith("checkpoint.pt is damaged, or of another version of cleanmarl\n")
    os.link(folder / "checkpoint.pt", folder / "checkpoint-512.pt")  # a second name of the same file is no way out
    (folder / "checkpoint-256.pt").write_bytes((runs["ppo"] / "checkpoint.pt").read_bytes())
    assert refused("ppo", "--resume", folder).endswith(f"of cleanmarl; {folder} has checkpoint-256.pt too\n")
    (folder / "args.json").write_text(json.dumps(meta | {"args": meta["args"] | {"flag_of_old": 1}}))
    assert "is a run of another version of ppo.py" in refused("ppo", "--resume", folder)


class Kind(Enum):
    RELU = 1


class Level(IntEnum):
    ONE = 1


@dataclass
class Layers:
    width: int = 64


class Word(StrEnum):
    A = "a"


class Pair(NamedTuple):
    low: float
    high: float


@pytest.mark.parametrize("value", [Kind.RELU, Level.ONE, Layers(), {1, 2}, (Word.A,), Pair(0.0, 1.0), {1: 0.5}])
def test_a_flag_that_could_not_be_read_back(value, tmp_path):
    """Text instead of a Kind would load, and be another network."""

    @dataclass
    class Args(ppo.Args):
        added: Any = None

    runs_dir = tmp_path / "runs"
    with pytest.raises(UsageError, match=f"args.json cannot hold {re.escape(repr(value))}: a flag is a number, text"):
        ppo.main(Args(added=value, runs_dir=str(runs_dir), total_timesteps=1000))
    assert not runs_dir.exists() or not any(runs_dir.iterdir())


def test_a_flag_that_the_run_was_begun_without(runs, tmp_path, refused):
    folder = tmp_path / "run"
    shutil.copytree(runs["ppo"], folder)
    meta = json.loads((folder / "args.json").read_text())
    del meta["args"]["gamma"]  # as of a script to which the flag was added since
    (folder / "args.json").write_text(json.dumps(meta))
    line = "--gamma 0.5 would change the learning of the run to resume, which was begun without it, as 0.99"
    assert line in refused("ppo", "--resume", folder, "--gamma", "0.5")


def test_what_resume_may_change(runs, tmp_path, monkeypatch):
    """The other side: nothing that leaves the learning as it is gets refused."""
    flags = f"--resume {runs['ppo']} --total-timesteps 192 --checkpoint-interval 64 --eval-episodes 1 --device cpu"
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags.split(), "--runs-dir", str(tmp_path)])
    launch(ppo.main, ppo.Args)
    assert load_checkpoint(runs["ppo"])["step"] == 192 and not list(tmp_path.iterdir())
    args = {"env_id": "matrix/penalty", "total_timesteps": 50, "num_envs": 1, "batch_size": 2}
    run = vdn.main(vdn.Args(runs_dir=str(tmp_path), **args))
    flags = f"--resume {run} --total-timesteps 100 --log-every 2 --eval-steps 3 --num-eval-ep 1"
    monkeypatch.setattr(sys, "argv", ["vdn.py", *flags.split()])
    launch(vdn.main, vdn.Args)
    assert load_checkpoint(run)["step"] == 100


# ------------------------------------------------------------------------------------------ as the user's shell sees it


def command(*line, cwd: Path, **environment) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *line], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_command_by_path(tmp_path):
    done = command(FOLDER / "ppo.py", "--env-id", "CartPol-v1", cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout and not list(tmp_path.iterdir())
    assert done.stderr.startswith("ppo: unknown environment 'CartPol-v1'; did you mean CartPole-v1")
    assert done.stderr.count("\n") == 1


def test_command_by_module_without_a_package(tmp_path):
    """wandb is there but broken: importing it fails."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("raise ImportError('no wandb here')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    (tmp_path / "empty").mkdir()
    done = command("-m", "cleanmarl.ippo", "--track", cwd=tmp_path / "empty", PYTHONPATH=path)
    assert done.returncode == 2 and not done.stdout and not list((tmp_path / "empty").iterdir())
    assert done.stderr == "ippo: --track needs the package wandb: pip install wandb\n"
