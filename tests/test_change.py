"""docs/change.md: every worked example is made in a copy, and the copy does what the page says."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import cleanmarl
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from toys import scalars

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = re.findall(
    r"^## (.*?)\n.*?<!-- edit: (\w+) -->\n```diff\n(.*?)```", (DOCS / "change.md").read_text(), re.M | re.S
)
SMALL = {"num_envs": 4, "num_steps": 50, "total_timesteps": 400, "eval_episodes": 2}


def apply(source: str, diff: str) -> str:
    """`source` with the hunks of a diff made, each in the one place that it fits, after the hunk before."""
    done = ""
    for hunk in re.split(r"^@@\n", diff, flags=re.M):
        lines = hunk.removesuffix("\n").split("\n")
        old = "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        new = "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        before, found, source = source.partition(old)
        assert found, f"nothing to replace by:\n{hunk}"
        done += before + new
    return done + source


def example(title: str, folder: Path):
    """The copy of the example with this title, as a module, which keeps the ratios of its loss."""
    ((script, diff),) = [(script, diff) for name, script, diff in EXAMPLES if name == title]
    source = apply(Path(cleanmarl.__file__).with_name(f"{script}.py").read_text(), diff)
    source, count = re.subn(r"(\n +)(ratio = log_ratio\.exp\(\))", r"\1\2\1RATIOS.append(ratio.detach())", source)
    assert count == 1
    path = folder / f"my_{script}.py"
    path.write_text(source.replace("\n\n\n@dataclass\n", "\n\nRATIOS = []\n\n\n@dataclass\n", 1))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(module, folder: Path, **flags):
    """(arguments, run folder) of two updates; the first ratio is 1, and everything that learns has moved."""
    args = module.Args(**SMALL | flags, runs_dir=str(folder))
    module.set_up(args)
    agent = module.Agent(module.make_envs(args, args.num_envs), args)
    start = {name: p.clone() for name, p in agent.named_parameters()}
    run = module.main(args)
    torch.testing.assert_close(module.RATIOS[0], torch.ones_like(module.RATIOS[0]), atol=1e-5, rtol=0)
    trained = load_checkpoint(run)["modules"]["agent"]
    for name, p in start.items():
        assert (trained[name] != p).any(), f"{name} has not moved"
    return args, run


def test_the_page_has_four_examples():
    assert [script for _, script, _ in EXAMPLES] == ["ippo", "mappo", "mappo", "ppo"]


@pytest.mark.parametrize("shared", [True, False])
def test_another_network_for_ippo(shared, tmp_path):
    module = example("Another network for IPPO", tmp_path)
    args, _ = train(module, tmp_path, share_parameters=shared)
    agent = module.Agent(module.make_envs(args, 1), args)
    kinds = [type(layer).__name__ for layer in agent.actor]
    assert kinds[1:] == ["StackedLinear", "LayerNorm", "GELU"] * 2 + ["StackedLinear"]


def test_an_auxiliary_loss_in_mappo(tmp_path):
    module = example("An auxiliary loss in MAPPO", tmp_path)
    _, run = train(module, tmp_path)
    curve = [value for _, value in scalars(run)["train/predictor_loss"]]
    assert len(curve) == 2 and curve[1] < curve[0]  # it learns to predict


def test_pictures_in_mappo(toy, tmp_path):
    module = example("Pictures in MAPPO", tmp_path)
    args, _ = train(module, tmp_path, env_id=f"{toy}?picture=True")
    envs = module.make_envs(args, 2)
    agent = module.Agent(envs, args)
    obs, info = envs.reset(seed=1)
    dark = np.zeros_like(obs)
    mask = torch.from_numpy(info["action_mask"])
    assert obs.dtype == np.uint8 and obs.shape == (2, 3, 12, 16, 3)
    assert (agent.logits(torch.from_numpy(obs), mask) != agent.logits(torch.from_numpy(dark), mask))[mask].any()


def test_pictures_in_mappo_with_the_environment_of_the_page(tmp_path):
    pytest.importorskip("pymunk", reason="pymunk is not installed: python bootstrap.py multiagent")
    example("Pictures in MAPPO", tmp_path)
    page = (DOCS / "environments.md").read_text()
    (tmp_path / "small_pong.py").write_text(
        re.search(r"```python\n(import numpy as np\nfrom gymn.*?)```", page, re.S)[1]
    )
    command = re.search(r"python (my_mappo\.py --env-id pz/small_pong.*)", (DOCS / "change.md").read_text())[1].split()
    command += ["--num-steps", "16", "--total-timesteps", "256", "--eval-episodes", "0"]
    result = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "done: 256 steps" in result.stdout, result.stderr


def test_vtrace_in_ppo(tmp_path):
    module = example("V-trace in PPO", tmp_path)
    train(module, tmp_path, num_steps=128, total_timesteps=1024)
    # with the policy that acted, V-trace with lambda is TD(lambda): advantages of GAE, written out
    rng = np.random.default_rng(0)
    reward, value, next_value, done = (
        rng.normal(size=(9, 3)),
        rng.normal(size=(9, 3)),
        rng.normal(size=3),
        rng.random((9, 3)) < 0.2,
    )
    return_, advantage = module.vtrace(np.zeros((9, 3)), reward, value, next_value, done, 0.9, 0.8)
    expected, following, after = np.zeros_like(reward), next_value, np.zeros(3)
    for t in reversed(range(9)):
        after = reward[t] + 0.9 * ~done[t] * following - value[t] + 0.9 * 0.8 * ~done[t] * after
        expected[t], following = value[t] + after, value[t]
    np.testing.assert_allclose(return_, expected)
    following = np.concatenate([expected[1:], next_value[None]])
    np.testing.assert_allclose(advantage, reward + 0.9 * ~done * following - value)
    # a policy that would hardly have acted so learns less from it
    less, _ = module.vtrace(np.full((9, 3), -20.0), reward, value, next_value, done, 0.9, 0.8)
    np.testing.assert_allclose(less, value, atol=1e-6)
