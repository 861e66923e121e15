"""`cleanmarl.load`: a run folder as a policy; the page docs/load.md does what it says."""

import importlib
import re
import sys
from pathlib import Path

import cleanmarl
from cleanmarl.evaluate import evaluate
from cleanmarl.run import EVAL_SEED, UsageError

import gymnasium as gym
import numpy as np
import pytest
import torch
from optional import need

PAGE = (Path(__file__).parent.parent / "docs" / "load.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
SMALL = {
    "ppo": {"env_id": "Float64CartPole-v0", "total_timesteps": 512, "num_envs": 2, "num_steps": 64},
    "ppo_continuous_action": {"env_id": "Pendulum-v1", "total_timesteps": 512, "num_envs": 2, "num_steps": 64},
    "mappo": {"total_timesteps": 400, "num_envs": 4},
    "mappo_lstm": {"total_timesteps": 400, "num_envs": 4},
    "qmix": {"total_timesteps": 400, "batch_size": 2},
    "vdn_lstm": {"total_timesteps": 400, "batch_size": 2},
    "mappo_continuous_action": {"total_timesteps": 400, "num_envs": 4},
    "masac_continuous_action": {"total_timesteps": 400, "num_envs": 4, "batch_size": 2},
    "ppo_selfplay": {"total_timesteps": 512, "num_envs": 4, "num_steps": 64},
}


MASKED = 'np.where(info["action_mask"], logits, -np.inf)'
gym.register("Float64CartPole-v0", lambda: gym.wrappers.DtypeObservation(gym.make("CartPole-v1"), np.float64))


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Train a script for some steps, once; returns its run folder and what its final evaluation wrote."""
    folders = {}

    def train(name: str) -> Path:
        if name not in folders:
            script = importlib.import_module(f"cleanmarl.{name}")
            runs = str(tmp_path_factory.mktemp(name))
            folders[name] = script.main(script.Args(runs_dir=runs, eval_episodes=4, **SMALL[name]))
        return folders[name]

    return train


@pytest.mark.parametrize("name", SMALL)
def test_a_loaded_policy_is_the_one_that_was_trained(train, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train(name)
    policy = cleanmarl.load(folder, num_envs=SMALL[name].get("num_envs", 4))  # as in the run
    events = EventAccumulator(str(folder)).Reload()
    metrics = evaluate(policy.envs, policy, 4, seed=1 + EVAL_SEED)
    for key in ("eval/ep_reward", "eval/ep_length"):
        assert metrics[key] == pytest.approx(events.Scalars(key)[-1].value, rel=1e-6)
    assert policy.step == policy.args.total_timesteps


@pytest.mark.parametrize("name", SMALL)
def test_the_page_plays_every_kind_of_policy(train, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there: dict = {}
    exec(BLOCKS[0].replace("RUN_DIR", str(train(name))), there)
    assert there["obs"].shape[0] == 4 and np.isfinite(there["reward"]).all()


def test_the_page_plays_in_other_environments(train):
    there: dict = {}
    exec(BLOCKS[0].replace("RUN_DIR", str(train("mappo"))) + BLOCKS[1], there)
    assert there["metrics"]["eval/ep_length"] == 50 and there["policy"].envs.time_limit == 25


def test_torchscript_acts_the_same(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there: dict = {}
    exec(BLOCKS[0].replace("RUN_DIR", str(train("mappo"))) + BLOCKS[2], there)
    policy, obs, info = there["policy"], there["obs"], there["info"]
    np.testing.assert_array_equal(there["action"], policy(obs, info, np.ones(4, bool)))
    saved, memoryless = torch.jit.load("policy.pt"), policy.agent.actor
    for n in (1, 7):  # as many environments as one likes
        other = torch.randn(n, *obs.shape[1:])
        torch.testing.assert_close(saved(other), memoryless(other))


@pytest.mark.parametrize("block, packages", [(2, []), (3, ["onnxruntime", "onnxscript"])])
def test_observations_of_float64_are_exported_too(block, packages, train, tmp_path, monkeypatch):
    """MuJoCo's are, and those of many environments that people write."""
    need(*packages)
    monkeypatch.chdir(tmp_path)
    there: dict = {}
    exec(BLOCKS[0].replace("RUN_DIR", str(train("ppo"))), there)
    assert there["obs"].dtype == np.float64 and MASKED in BLOCKS[block]
    exec(BLOCKS[block].replace(MASKED, "logits"), there)  # one agent of Gymnasium, as the page says
    policy, obs, info = there["policy"], there["obs"], there["info"]
    np.testing.assert_array_equal(there["action"], policy(obs, info, np.ones(4, bool)))


def test_a_normalised_actor_is_exported_as_the_page_says(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there: dict = {}
    block = BLOCKS[2].replace("obs.astype(np.float32)", "policy.agent.normalize_obs(seen := obs)")
    block = block.replace(f"{MASKED}.argmax(-1)", "logits")
    exec(BLOCKS[0].replace("RUN_DIR", str(train("ppo_continuous_action"))) + block, there)
    expected = there["policy"](there["seen"], there["info"], np.ones(4, bool))
    np.testing.assert_allclose(there["action"], expected, atol=1e-6)


@pytest.mark.parametrize(
    "name, output",
    [("mappo_continuous_action", "logits"), ("masac_continuous_action", "policy.agent.act(logits, True)")],
)
def test_a_continuous_actor_is_exported_as_the_page_says(name, output, train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there: dict = {}
    block = BLOCKS[2].replace(f"{MASKED}.argmax(-1)", f"policy.agent.env_action({output})")
    exec(BLOCKS[0].replace("RUN_DIR", str(train(name))) + block, there)
    expected = there["policy"](there["obs"], there["info"], np.ones(4, bool))
    np.testing.assert_allclose(there["action"], expected, atol=1e-6)
    assert np.abs(there["action"] - there["logits"][..., : expected.shape[-1]]).max() > 0.1  # of another unit
    there["policy"].envs.step(there["action"])


def test_an_agent_that_sees_boards_is_exported_as_the_page_says(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there: dict = {}
    block = BLOCKS[2].replace(".astype(np.float32)", "").replace("policy.agent.actor", "policy.agent")
    block = block.replace(".detach()", "[0].detach()").replace(MASKED, "logits")
    exec(BLOCKS[0].replace("RUN_DIR", str(train("ppo_selfplay"))) + block, there)
    policy, obs, info = there["policy"], there["obs"], there["info"]
    np.testing.assert_array_equal(there["action"], policy(obs, info, np.ones(4, bool)))


def test_onnx_acts_the_same(train, tmp_path, monkeypatch):
    need("onnxruntime", "onnxscript")
    monkeypatch.chdir(tmp_path)
    there: dict = {}
    exec(BLOCKS[0].replace("RUN_DIR", str(train("mappo"))) + BLOCKS[3], there)
    policy, obs, info = there["policy"], there["obs"], there["info"]
    np.testing.assert_array_equal(there["action"], policy(obs, info, np.ones(4, bool)))
    for number in (1, 3):  # of environments
        [logits] = there["session"].run(None, {"obs": obs[:number]})
        np.testing.assert_allclose(logits, there["logits"][:number], atol=1e-6)


def test_a_recurrent_actor_can_be_traced_with_its_memory(train):
    policy = cleanmarl.load(train("mappo_lstm"), num_envs=2)
    obs, _ = policy.envs.reset(seed=3)
    actor, memory = policy.agent.actor, torch.zeros(2, 3, policy.agent.actor.memory_size)
    traced, x = torch.jit.trace(actor, (torch.from_numpy(obs), memory)), torch.from_numpy(obs)
    (logits, after), (expected, expected_after) = traced(x, memory + 0.5), actor(x, memory + 0.5)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(after, expected_after)


def test_values_with_a_memory_are_those_of_the_page(train):
    """What an agent did last stands behind what it sees; both episodes begin with nothing."""
    assert (
        "| `vdn_lstm`, `qmix_lstm` | `agent.q_network` | `obs` with the one-hot of what the agent did last behind"
        in PAGE
    )
    policy = cleanmarl.load(train("vdn_lstm"), num_envs=2)
    q_network, envs = policy.agent.q_network, policy.envs
    (obs, info), done, (A, K) = envs.reset(seed=3), np.ones(2, bool), envs.real_actions.shape
    for step in range(2 * 25):
        if step % 25 == 0:
            memory, last_action = torch.zeros(2, A, q_network.memory_size), np.zeros((2, A, K), np.float32)
        q, memory = q_network(torch.from_numpy(np.concatenate([obs, last_action], axis=-1)), memory)
        action = np.where(info["action_mask"], q.detach().numpy(), -np.inf).argmax(-1)
        np.testing.assert_array_equal(action, policy(obs, info, done))
        last_action = np.eye(K, dtype=np.float32)[action]
        obs, _, termination, truncation, info = envs.step(action)
        done = termination | truncation


def test_a_policy_keeps_no_graph_of_what_it_has_seen(train):
    policy = cleanmarl.load(train("mappo_lstm"))
    policy.act = lambda *seen: torch.is_grad_enabled()
    assert not policy(None, None, None)


def test_a_loaded_copy_stands_for_no_module_of_the_users(tmp_path, monkeypatch):
    """Who loads an old run and imports the script as it is now gets the script as it is now."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = Path(importlib.import_module("cleanmarl.ppo").__file__).read_text()
    old, new = (
        text.replace("learning_rate: PositiveFloat = 2.5e-4", f"learning_rate: {rate}")
        for rate in ("PositiveFloat = 1e-3", "PositiveFloat = 7e-5")
    )
    Path("edited_ppo.py").write_text(old)
    module = importlib.import_module("edited_ppo")
    run = module.main(module.Args(total_timesteps=512, num_steps=64, eval_episodes=0))
    Path("edited_ppo.py").write_text(new)
    monkeypatch.delitem(sys.modules, "edited_ppo")  # as in a new process
    assert cleanmarl.load(run).args.learning_rate == 1e-3
    module = importlib.import_module("edited_ppo")
    assert Path(module.__file__) == tmp_path / "edited_ppo.py" and module.Args().learning_rate == 7e-5
    monkeypatch.delitem(sys.modules, "edited_ppo")


def test_what_cannot_be_loaded_says_so(train, tmp_path):
    with pytest.raises(UsageError, match="is not a run folder"):
        cleanmarl.load(tmp_path)
    with pytest.raises(UsageError, match=r"has no checkpoint-7.pt: it has .*checkpoint.pt"):
        cleanmarl.load(train("qmix"), checkpoint="checkpoint-7.pt")
