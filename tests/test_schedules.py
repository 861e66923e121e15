"""What the loop of every script does when: learning rates, clip range, exploration, target networks, evaluations.

A loop is in `main`, of which every script has its own: no test of a parent proves it.
"""

import importlib
import inspect
from pathlib import Path

import cleanmarl
from cleanmarl.run import EVAL_SEED, Run, load_checkpoint

import numpy as np
import pytest
import torch
from optional import need
from test_continue import OF_AGENTS, arguments, env_id
from test_ppo_family import PPO
from toys import scalars

FOLDER = Path(cleanmarl.__file__).parent
NEEDS = PPO | {"ppo_continuous_action": [], "ppo_selfplay": ["envpool"], "impala_atari_envpool": ["envpool"]}
ENVS = {name: {"env_id": "Pendulum-v1"} for name in ("ppo_continuous_action", "impala_continuous_action")}
FOUR = {"total_timesteps": 240, "num_envs": 4, "num_steps": 15, "unroll_length": 15, "num_actors": 0}  # updates
FOUR |= {"num_minibatches": 1, "match_games": 1, "eval_episodes": 0}


def having(*flags: str) -> list[str]:
    """The scripts with one of these flags."""
    texts = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
    return [name for name, text in texts.items() if any(f"\n    {flag}: " in text for flag in flags)]


def small(name: str, tmp_path: Path, **changes):
    """The arguments of four updates, of those flags that the script has."""
    fields = importlib.import_module(f"cleanmarl.{name}").Args.__dataclass_fields__
    flags = {key: value for key, value in (FOUR | changes).items() if key in fields}
    if name in OF_AGENTS:
        return arguments(name, env_id(name, "toy"), tmp_path, **flags)
    return importlib.import_module(f"cleanmarl.{name}").Args(**flags, **ENVS.get(name, {}), runs_dir=str(tmp_path))


def evaluations(monkeypatch) -> list[int]:
    """The steps at which runs are to evaluate, which they do not."""
    steps = []

    def spy(run, *_, num_envs):
        run.last_evaluation = run.step
        steps.append(run.step)

    monkeypatch.setattr(Run, "evaluate", spy)
    return steps


def policies(name: str, monkeypatch) -> list[bool]:
    """Whether each policy that the script makes is greedy."""
    script, kinds = importlib.import_module(f"cleanmarl.{name}"), []
    plain = script.make_policy

    def spy(*given, **named):
        call = inspect.signature(plain).bind(*given, **named)
        call.apply_defaults()
        kinds.append(call.arguments["greedy"])
        return plain(*given, **named)

    monkeypatch.setattr(script, "make_policy", spy)
    return kinds


def updates(name: str, args, monkeypatch) -> tuple[list, list]:
    """The learning rates of each update of a run that does not learn, and the number that it was given."""
    need(*NEEDS.get(name, []))
    script = importlib.import_module(f"cleanmarl.{name}")
    rates, numbers = [], []

    def spy(*given):
        (optimizer,) = (x for x in given if isinstance(x, torch.optim.Optimizer))
        rates.append([group["lr"] for group in optimizer.param_groups])
        assert name.startswith("impala") or {group["eps"] for group in optimizer.param_groups} == {1e-5}
        numbers.extend(x for x in given if isinstance(x, float))
        return {}

    monkeypatch.setattr(script, "update", spy)
    script.main(args)
    return rates, numbers


RATES = [name for name in having("anneal_lr", "critic_learning_rate") if name != "impala_ray"]  # which needs a cluster


@pytest.mark.parametrize("name", RATES)
def test_learning_rates_and_the_clip_range_fall_where_asked_to(name, toy, tmp_path, monkeypatch):
    """Linearly, those of actors and critics each from its own; else they stay as they are."""
    rates, falling = {"learning_rate": 2e-3, "critic_learning_rate": 1e-3}, np.array([1, 0.75, 0.5, 0.25])
    evaluated, greedy = evaluations(monkeypatch), policies(name, monkeypatch)
    for lr, clip in ((True, False), (False, True)):
        args = small(name, tmp_path, anneal_lr=lr, anneal_clip_coef=clip, **rates, eval_episodes=1, eval_interval=60)
        first = [getattr(args, rate) for rate in rates if hasattr(args, rate)]
        seen, clips = updates(name, args, monkeypatch)
        shares = falling if lr and hasattr(args, "anneal_lr") else np.ones(4)
        np.testing.assert_allclose(seen, shares[:, None] * first)
        if hasattr(args, "anneal_clip_coef"):
            np.testing.assert_allclose(clips, args.clip_coef * (falling if clip else np.ones(4)))
    assert evaluated == 2 * [60, 120, 180, 240, 240]  # and at the end
    assert all(greedy) or name == "ppo_selfplay"  # whose matches are of sampled moves
    assert greedy.count(True) == len(evaluated)


@pytest.mark.parametrize("name", having("epsilon_timesteps"))
def test_exploration_falls_linearly_and_then_stays(name, toy, tmp_path, monkeypatch):
    """What the agents play with, whatever the curve says."""
    script = importlib.import_module(f"cleanmarl.{name}")
    seen, collect = [], script.collect

    def spy(agent, *given):
        (run,) = (x for x in given if isinstance(x, Run))
        seen.append((run.step, float(given[-1] if isinstance(given[-1], float) else agent.epsilon)))
        return collect(agent, *given)

    monkeypatch.setattr(script, "collect", spy)
    script.main(small(name, tmp_path, epsilon_start=0.9, epsilon_end=0.1, epsilon_timesteps=120))
    for step, epsilon in seen:
        assert epsilon == pytest.approx(max(0.9 - 0.8 * step / 120, 0.1))
    steps = [step for step, _ in seen]
    assert steps[0] == 0 and any(0 < step < 120 for step in steps) and steps[-1] > 120


@pytest.mark.parametrize("name", having("polyak"))
def test_target_networks_step_after_every_so_many_updates(name, toy, tmp_path):
    """With polyak 1 all are copies after an update that is due, and after none if that never comes."""
    script = importlib.import_module(f"cleanmarl.{name}")

    def modules(freq: int) -> dict:
        args = arguments(name, env_id(name, "toy"), tmp_path, polyak=1.0, target_network_update_freq=freq)
        return load_checkpoint(script.main(args))["modules"]

    first = modules(1)
    count = next(int(x["num_updates"]) for x in first.values() if "num_updates" in x)
    for freq, are_copies in ((count, True), (count + 1, False)):
        saved = modules(freq)
        targets = [key for key in saved if key.startswith("target_")]
        assert targets and count > 1
        for key in targets:
            pairs = [(x, saved[key.removeprefix("target_")][part]) for part, x in saved[key].items()]
            assert all(torch.equal(*pair) for pair in pairs if pair[0].is_floating_point()) == are_copies


@pytest.mark.parametrize("name", having("eval_steps"))
def test_points_and_evaluations_come_after_every_so_many_episodes(name, toy, tmp_path, monkeypatch):
    """And those of --eval-interval after so many steps."""
    evaluated, script = evaluations(monkeypatch), importlib.import_module(f"cleanmarl.{name}")
    greedy, seeds, play = policies(name, monkeypatch), [], Run.play
    monkeypatch.setattr(Run, "play", lambda run, *given: seeds.append(given[3]) or play(run, *given))
    id_ = "toy/team" + "?continuous=True" * ("continuous" in name)
    options = {"eval_steps": 4, "log_every": 5, "eval_interval": 60}
    folder = script.main(arguments(name, id_, tmp_path, **options))
    of_round = 3 if hasattr(script.Args(), "num_envs") else 1  # episodes, of 6 steps each
    ends = np.arange(0, 31, of_round)
    for tag, every in (("eval/ep_reward", 4), ("rollout/ep_reward", 5)):
        expected = 6 * ends[1:][np.diff(ends // every) > 0]
        assert [step for step, _ in scalars(folder)[tag]] == expected.tolist(), tag
    steps = 6 * ends[1:]
    assert evaluated == [*steps[np.diff(6 * ends // 60) > 0], steps[-1]]
    assert all(greedy) and len(greedy) == len(evaluated) + len(scalars(folder)["eval/ep_reward"])
    assert seeds == [
        1 + EVAL_SEED + step // 6 for step, _ in scalars(folder)["eval/ep_reward"]
    ]  # new episodes each time


@pytest.mark.parametrize("name", having("eval_steps"))
def test_no_evaluations_between_episodes_with_0(name, toy, tmp_path):
    script = importlib.import_module(f"cleanmarl.{name}")
    id_ = "toy/team" + "?continuous=True" * ("continuous" in name)
    args = arguments(name, id_, tmp_path, eval_steps=0, log_every=5, eval_episodes=2)
    curves = scalars(script.main(args))
    assert len(curves["eval/ep_reward"]) == 1 < len(curves["rollout/ep_reward"])  # at the end
