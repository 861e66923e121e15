"""Edits of a copy of every script: what acts is what learns, what is added is trained, and the copy resumes.

A copy stands outside the package, as a user's does. It is edited as text, and keeps the ratios of its loss, so that a
test can read them: before the first step of the optimizer all of them are 1 if, and only if, the network that acted is
the one that learns.
"""

import copy
import dataclasses
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import cleanmarl
from cleanmarl import ippo, ppo_multidiscrete, ppo_multidiscrete_mask
from cleanmarl.evaluate import evaluate
from cleanmarl.run import EVAL_SEED, load_checkpoint

import numpy as np
import optional
import pytest
import torch
from toys import scalars

# a hidden layer, its number of units, and its activation
HIDDEN = (
    r"(\n +)(layer_init\((?:StackedLinear\(\w+, |nn\.Linear\()[^,]+, (\w+)\)\),)(\n +)([\w.]+\(\)),(?=\n +layer_init)"
)
KEEP_RATIOS = [
    (r"\n\n\n@dataclass\n", r"\n\nRATIOS = []\n\n\n@dataclass\n"),
    (r"(\n +)((?:ratio = log_ratio|log_rho = log_prob - batch).*)", r"\1\2\1RATIOS.append(KEPT)"),
    # policies that differ from one observation to another from the start on (a trunk shared with V-trace starts so)
    (r"(std=|actor\.weight, )(?:0\.01|1\.0)\)", r"\g<1>1.0)"),
]
ACTIVATION = [(r"(?<!: )\b(nn\.Tanh|Tanh|nn\.ReLU|activation)\(\)", "nn.GELU()")]
LAYERS = [(HIDDEN, r"\1\2\1nn.LayerNorm(\3),\4\5,\1nn.Linear(\3, \3),\4nn.SiLU(),")]
HEADS = [
    (
        r"(\n +)(self\.(?:actor, self\.)?critic\b.* = )",
        r"\1self.predictor = nn.Linear(SIZE, 5)\1self.critic2 = nn.Linear(SIZE, 1)\1\2",
    ),
    (
        r"(\n +)(loss = (?:policy|\(policy).*)",
        r"\1\2\1loss = loss + agent.predictor(OBS).square().mean() + (agent.critic2(OBS) - 3).square().mean()",
    ),
]

# Arguments of two short updates, of 1,000 rows of observations at least; fewer where the observations are pictures.
PPO = {"total_timesteps": 2000, "num_envs": 4, "num_steps": 250, "eval_episodes": 2}
MANY = {"total_timesteps": 800, "num_envs": 4, "num_steps": 100, "eval_episodes": 2}
IMPALA = {"total_timesteps": 2000, "num_envs": 10, "unroll_length": 100, "num_actors": 0, "eval_episodes": 2}
EPISODES = {"total_timesteps": 200, "eval_episodes": 0}
PENDULUM = {"env_id": "Pendulum-v1"}
PIXELS = {"total_timesteps": 128, "num_envs": 2, "num_steps": 32, "num_minibatches": 2, "eval_episodes": 0}
PIXELS_IMPALA = {"total_timesteps": 128, "num_envs": 2, "unroll_length": 32, "num_actors": 0, "eval_episodes": 0}
SCRIPTS = {  # and the size of an observation; 0: added heads read the value instead
    "ppo": (PPO, 4),
    "ppo_shared": (PPO, 4),
    "ppo_continuous_action": (PPO | PENDULUM | {"num_envs": 1, "num_steps": 1024, "total_timesteps": 2048}, 3),
    "ppo_multidiscrete": (PPO, 0),
    "ppo_multidiscrete_mask": (PPO, 0),
    "ppo_selfplay": (PPO | {"num_envs": 32, "num_steps": 32, "total_timesteps": 2048}, 0),
    "ppo_atari": (PIXELS, 0),
    "ppo_atari_envpool": (PIXELS, 0),
    "ppo_atari_lstm": (PIXELS, 0),
    "ppo_atari_multigpu": (PIXELS, 0),
    "ppo_procgen": (PIXELS, 0),
    "ippo": (MANY, 18),
    "ippo_per_agent": (MANY, 18),
    "ippo_continuous_action": (MANY, 18),
    "ippo_lstm": (MANY | {"update_epochs": 2}, 18),
    "mappo": (MANY, 18),
    "mappo_continuous_action": (MANY, 18),
    "mappo_lstm": (MANY | {"update_epochs": 2}, 18),
    "coppo": (MANY, 18),
    "coppo_matrix": (MANY, 18),
    "coppo_lstm": (MANY, 18),
    "impala": (IMPALA, 4),
    "impala_replay": (IMPALA | {"replay_size": 0}, 4),
    "impala_continuous_action": (IMPALA | PENDULUM, 3),
    "impala_atari_envpool": (
        IMPALA | {"total_timesteps": 128, "num_envs": 2, "unroll_length": 32, "eval_episodes": 0},
        0,
    ),
}
NEEDS = {"ppo_atari": "ale_py", "ppo_atari_lstm": "ale_py", "ppo_procgen": "Qt 5"}
HAVE_NO_HIDDEN = ("ppo_atari", "ppo_procgen", "ppo_selfplay", "impala_atari")  # layers of the kind that LAYERS adds to

PICTURES = ("ppo_atari", "ppo_procgen", "impala")  # whose batches share the memory of the rollout, which is large


WORDS = {  # what the losses call observations and ratios
    "ppo": {"OBS": "batch.obs", "VALUE": "new_value.detach()[..., None]", "KEPT": "ratio.detach()"},
    "impala": {"OBS": 'batch["obs"]', "VALUE": "value.detach()[..., None]", "KEPT": "log_rho.exp().detach()"},
}


def copy_of(script: str, edits: list[tuple[str, str]], folder: Path, obs_size: int = 0):
    """my_<script>.py in `folder`, each edit (pattern, replacement) made at least once, as a module."""
    source = Path(cleanmarl.__file__).with_name(f"{script}.py").read_text()
    for pattern, replacement in edits:
        words = WORDS["impala" if script.startswith("impala") else "ppo"]
        words = words | ({"SIZE": str(obs_size)} if obs_size else {"SIZE": "1", "OBS": words["VALUE"]})
        for word, text in words.items():
            replacement = replacement.replace(word, text)
        source, count = re.subn(pattern, replacement, source)
        assert count, f"{script}.py has nothing like {pattern}"
    path = folder / f"my_{script}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_edited_copy_acts_as_it_learns_trains_what_is_new_and_resumes(script, tmp_path, capfd):
    """Another activation, layers more, heads with losses of their own."""
    optional.need(NEEDS.get(script, "numpy"))
    flags, obs_size = SCRIPTS[script]
    edits = [*ACTIVATION, *([] if script.startswith(HAVE_NO_HIDDEN) else LAYERS), *HEADS, *KEEP_RATIOS]
    module = copy_of(script, edits, tmp_path, obs_size)
    args = module.Args(**flags, runs_dir=str(tmp_path))
    module.set_up(args)
    agent = module.Agent(module.make_envs(args, args.num_envs), args)  # as the run makes it
    start = {name: p.clone() for name, p in agent.named_parameters()}

    folder = module.main(args)
    first, last = module.RATIOS[0], module.RATIOS[-1]
    torch.testing.assert_close(first, torch.ones_like(first), atol=1e-5, rtol=0)
    if script != "impala_atari_envpool":  # which takes one step for each batch
        assert (last - 1).abs().max() > 1e-3, "the policy was to move"
    trained = load_checkpoint(folder)["modules"]["agent"]
    assert {"predictor.weight", "critic2.weight"} < set(start)
    for name, _ in agent.named_parameters():
        assert (trained[name] != start[name]).any(), f"{name} has not moved"

    total = args.total_timesteps
    module.RATIOS.clear()
    module.main(dataclasses.replace(args, resume=folder, total_timesteps=total + total // 2))
    assert load_checkpoint(folder)["step"] == total + total // 2
    torch.testing.assert_close(module.RATIOS[0], torch.ones_like(module.RATIOS[0]), atol=1e-5, rtol=0)
    assert "no loss has reached" not in capfd.readouterr().err


WITHOUT_RATIOS = {  # losses that need no probability of what acted: arguments of some updates
    "coma": {"total_timesteps": 200, "num_envs": 4, "num_steps": 25, "learning_rate": 1e-4},
    "coma_lstm": {"total_timesteps": 200, "num_envs": 4, "num_steps": 25, "learning_rate": 1e-4},
    "maddpg": {"total_timesteps": 100, "batch_size": 2},
    "maddpg_multienvs": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "maddpg_continuous_action": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "maddpg_lstm": {"total_timesteps": 100, "batch_size": 2},
    "maddpg_lstm_multienvs": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "dop": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2, "on_policy_episodes": 2},
    "facmac": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "facmac_continuous_action": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "masac": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "masac_continuous_action": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "idqn": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "vdn": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "qmix": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "qtran": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "vdn_lstm": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
    "qmix_lstm": {"total_timesteps": 200, "num_envs": 2, "batch_size": 2},
}
MADDPG = [
    (
        r"(\n +)(self\.actor = \w*\.?\w+\(\*layers, )",
        r"\1self.predictor = nn.Linear(18, 5)\1\2nn.LayerNorm(hidden), nn.GELU(), ",
    ),
    (r"(return -\(\w+ \* batch\.alive.*)", r"\1 + agent.predictor(batch.obs).square().mean()"),
]
MASAC = [MADDPG[0], (r"(return -\(\w+ \* batch\.alive.*clamp\(min=1\))", MADDPG[1][1])]
DOP = [MADDPG[0], (r"(return -\(gain \* batch\.weight.*)", MADDPG[1][1])]
VALUES = [(MADDPG[0][0].replace("actor", "q_network"), MADDPG[0][1])]
VALUES += [(r"(\n +)(optimizer\.zero_grad\(\))", r"\1loss = loss + agent.predictor(batch.obs).square().mean()\1\2")]
COMA = [*ACTIVATION, *LAYERS, *KEEP_RATIOS[2:], (HEADS[0][0], r"\1self.predictor = nn.Linear(18, 5)\1\2")]
COMA += [(HEADS[1][0], r"\1\2\1loss = loss + agent.predictor(batch.obs).square().mean()")]

EDITS_OF = {"coma": COMA, "maddpg": MADDPG, "facmac": MADDPG, "masac": MASAC, "dop": DOP}


@pytest.mark.parametrize("script", WITHOUT_RATIOS)
def test_an_edited_copy_without_ratios_acts_as_it_learns_trains_what_is_new_and_resumes(script, tmp_path, capfd):
    flags = WITHOUT_RATIOS[script] | {"eval_episodes": 2, "runs_dir": str(tmp_path)}
    edits = next((x for name, x in EDITS_OF.items() if script.startswith(name)), VALUES)
    module = copy_of(script, edits, tmp_path, 18)
    args = module.Args(**flags)
    module.set_up(args)
    folder = module.main(args)
    before = load_checkpoint(folder)["modules"]["agent"]
    total = 2 * args.total_timesteps
    module.main(dataclasses.replace(args, resume=folder, total_timesteps=total))
    assert "no loss has reached" not in capfd.readouterr().err
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] >= total
    envs = module.make_envs(args, 1)
    agent = module.Agent(envs, args)
    agent.load_state_dict(checkpoint["modules"]["agent"])
    for name, p in agent.named_parameters():
        assert "target" in name or (before[name] != p).any(), f"{name} has not moved"

    rng = np.random.default_rng(0)
    obs = rng.normal(size=(14, 25, 3, 18)).astype(np.float32)  # (N, T, A, D): 1,050 observations
    mask, done = np.ones((14, 3, 5), bool), np.ones(14, bool)
    policy, acted = module.make_policy(agent, greedy=True), []
    with torch.no_grad():
        for t in range(25):
            acted.append(policy(obs[:, t], {"action_mask": mask, "agent_mask": mask[..., 0]}, done & (t == 0)))
        acted = np.stack(acted, 1)
        learned = what_the_loss_sees(agent, torch.from_numpy(obs), torch.from_numpy(acted))
    if acted.dtype == np.float32:
        np.testing.assert_allclose(acted, learned, atol=1e-5)
    else:
        assert (acted == learned.argmax(-1).numpy()).all() and len(np.unique(acted)) > 1


FROZEN = WITHOUT_RATIOS | dict.fromkeys(("coppo", "coppo_lstm", "coppo_matrix"), MANY | {"share_parameters": False})


@pytest.mark.parametrize("script", FROZEN)
def test_a_frozen_layer_stays_as_it_is_and_the_others_learn(script, tmp_path, monkeypatch):
    module = copy_of(script, [], tmp_path)
    policy = "q_network" if "q_network" in inspect.getsource(module.Agent) else "actor"

    class HalfFrozen(module.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            next(getattr(self, policy).parameters()).requires_grad_(False)

    monkeypatch.setattr(module, "Agent", HalfFrozen)
    args = module.Args(**FROZEN[script] | {"eval_episodes": 0, "runs_dir": str(tmp_path)})
    module.set_up(args)
    start = HalfFrozen(module.make_envs(args, 1), args)  # as the run makes it
    trained = load_checkpoint(module.main(args))["modules"]["agent"]
    moved = {name: (trained[name] != p).any().item() for name, p in getattr(start, policy).named_parameters(policy)}
    assert list(moved.values()) == [False] + [True] * (len(moved) - 1)


@pytest.mark.parametrize("script", ["ippo", "ippo_continuous_action", "mappo_lstm"])
def test_a_critic_learns_beside_a_frozen_actor(script, tmp_path, monkeypatch):
    module = copy_of(script, [], tmp_path)

    class NoActor(module.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.actor.requires_grad_(False)

    monkeypatch.setattr(module, "Agent", NoActor)
    args = module.Args(**MANY | {"eval_episodes": 0, "runs_dir": str(tmp_path)})
    module.set_up(args)
    start = NoActor(module.make_envs(args, 1), args)  # as the run makes it
    folder = module.main(args)
    trained = load_checkpoint(folder)["modules"]["agent"]
    still = {name for name, p in start.named_parameters() if (trained[name] == p).all()}
    assert still == {f"actor.{name}" for name, _ in start.actor.named_parameters()}
    assert {value for _, value in scalars(folder)["train/actor_gradients"]} == {0}


@pytest.mark.parametrize("half", ["actor", "critic"])
@pytest.mark.parametrize("script", [s for s in FROZEN if not s.startswith(("idqn", "vdn", "qmix", "qtran"))])
def test_one_half_learns_beside_the_other_that_is_frozen(script, half, tmp_path, monkeypatch):
    """To learn the critic of a policy that stays, or a policy from a critic that is there."""
    module = copy_of(script, [], tmp_path)
    starts = {}

    def recorded(network_class, place):
        class Recorded(network_class):
            def __init__(self, *args):
                super().__init__(*args)
                if half == place or hasattr(self, half):
                    getattr(self, half, self).requires_grad_(False)
                starts.setdefault(place, copy.deepcopy(self))  # as the run makes it

        return Recorded

    for name in {"Agent", "Critic"} & set(dir(module)):
        monkeypatch.setattr(module, name, recorded(getattr(module, name), name.lower()))
    args = module.Args(**FROZEN[script] | {"runs_dir": str(tmp_path)})
    args.normalize_value = False  # it keeps the values of a frozen critic by another last layer
    trained = load_checkpoint(module.main(args))["modules"]
    for place, start in starts.items():
        for name, p in start.named_parameters():
            if "target" not in name:
                assert (trained[place][name] != p).any() == p.requires_grad, (place, name)
    assert sum(not p.requires_grad for start in starts.values() for p in start.parameters())


def what_the_loss_sees(agent, obs, acted):
    """Logits or actions (N, T, A, K) of episodes of T steps as the loss has them; obs (N, T, A, D), actions taken."""
    mask = torch.ones(*obs.shape[:3], 5, dtype=torch.bool)
    if hasattr(agent, "action"):
        return (agent.action(obs) + 1) / 2  # the units of the environment
    if hasattr(agent, "normal"):
        return (agent.normal(agent.actor(obs))[0].tanh() + 1) / 2
    if hasattr(agent, "q_network"):
        batch = SimpleNamespace(obs=obs, alive=mask.any(-1), action=acted[:, :-1])
        return agent.values(batch if hasattr(agent.q_network, "memory_size") else obs)
    if hasattr(agent, "share_parameters"):  # COMA's rows, step after step
        memory = [torch.zeros(len(obs), 3, agent.actor.memory_size)] if hasattr(agent.actor, "memory_size") else []
        rows = (x.swapaxes(0, 1).flatten(0, 1) for x in (obs, mask))
        return agent.logits(*rows, *memory).unflatten(0, (-1, len(obs))).swapaxes(0, 1)
    if hasattr(agent, "tbptt"):
        return agent.logits(obs, mask, mask.any(-1))
    return agent.logits(obs, mask)


def test_dropout_is_for_training_alone(tmp_path):
    """Evaluations, `enjoy` and `load` play without it; training goes on with it."""
    edits = [(r"(layer_init\(nn\.Linear\(64, num_actions\))", r"nn.Dropout(0.5), \1")]
    edits += [KEEP_RATIOS[0], (r"(\n +)(ratio = log_ratio.*)", r"\1\2\1RATIOS.append(agent.actor[4].training)")]
    module = copy_of("ppo", edits, tmp_path)
    args = module.Args(**PPO | {"eval_interval": 1000, "num_envs": 2, "num_steps": 250}, runs_dir=str(tmp_path))
    folder = module.main(args)
    assert all(module.RATIOS) and len(scalars(folder)["eval/ep_reward"]) == 2
    policy = cleanmarl.load(folder, num_envs=2)
    metrics = evaluate(policy.envs, policy, 2, seed=args.seed + EVAL_SEED)
    assert scalars(folder)["eval/ep_reward"][-1][1] == pytest.approx(metrics["eval/ep_reward"])
    obs = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    one, same = (policy(obs, {}, np.ones(1000, bool)) for _ in range(2))
    assert (one == same).all() and len(np.unique(one)) == 2


@pytest.mark.parametrize("script", [ppo_multidiscrete, ppo_multidiscrete_mask])
def test_a_part_of_an_actor_that_masks_is_layers_alone(script):
    """For a loss on what the policy's hidden layers compute: agent.actor[:-1]."""
    layers = torch.nn.Linear(9, 5), torch.nn.Tanh(), torch.nn.Linear(5, 6)
    actor, obs = script.Actor(torch.ones(2, 3, dtype=torch.bool), *layers), torch.ones(4, 9)
    assert actor[-1] is layers[-1] and torch.equal(actor[:-1](obs), layers[1](layers[0](obs)))
    assert torch.equal(actor(obs), layers[-1](actor[:-1](obs)).unflatten(-1, (2, 3)))


@pytest.mark.parametrize("script", ["idqn", "maddpg_lstm", "masac_continuous_action"])
def test_dropout_is_for_training_alone_between_episodes(script, tmp_path):
    """The evaluations of --eval-steps play without it, too, and exploration with it."""
    edits = [(r"\n\n\n@dataclass\n", r"\n\nPLAYS = []\n\n\n@dataclass\n")]
    edits += [(r"(\n    def policy\(.*:\n)", r"\1        PLAYS.append(agent.training)\n")]
    edits += [(r"(\n +)(run\.write\(run\.play.*)", r"\1\2\1PLAYS.append('afterwards' if agent.training else 'off')")]
    module = copy_of(script, edits, tmp_path)
    module.main(module.Args(**EPISODES, eval_steps=2, num_eval_ep=1, runs_dir=str(tmp_path)))
    assert set(module.PLAYS) == {False, "afterwards"}


SECOND_COPY = {  # the fault of the first version: the actor written a second time, in NumPy
    "ppo": "lambda obs: np.tanh(np.tanh(obs @ p[0].T + p[1]) @ p[2].T + p[3]) @ p[4].T + p[5]",
    "mappo": "lambda obs: np.tanh(np.tanh(np.concatenate([obs, np.broadcast_to(np.eye(3, dtype=np.float32), "
    "(*obs.shape[:2], 3))], -1) @ p[0][0] + p[1][0]) @ p[2][0] + p[3][0]) @ p[4][0] + p[5][0]",
}


@pytest.mark.parametrize("script", [s for s in [*SCRIPTS, "coma", "coma_lstm"] if not s.startswith(PICTURES)])
def test_a_batch_that_is_kept_stays_what_it_was(script, tmp_path, monkeypatch):
    """On the CPU, too, where a tensor of an array may be the array itself, which the next rollout fills."""
    module = importlib.import_module(f"cleanmarl.{script}")
    estimate, kept = module.estimate, []

    def keep(*args):
        batch = estimate(*args)
        kept.append((batch, [x.clone() for x in batch]))
        return batch

    monkeypatch.setattr(module, "estimate", keep)
    flags, _ = SCRIPTS.get(script, (MANY, 18))
    module.main(module.Args(**flags | {"eval_episodes": 0, "runs_dir": str(tmp_path)}))
    assert len(kept) > 1
    for batch, clones in kept:
        assert [torch.equal(x, clone) for x, clone in zip(batch, clones, strict=True)] == [True] * len(clones)


def test_a_network_put_into_an_imported_script_is_told(tmp_path, monkeypatch, capfd):
    """The run folder keeps the script, and not what took the place of its class; of a copy it keeps all."""
    flags, _ = SCRIPTS["ippo"]
    args = ippo.Args(**flags | {"eval_episodes": 0, "runs_dir": str(tmp_path)})
    ippo.main(args)
    assert "is made by" not in capfd.readouterr().err
    (tmp_path / "their_layers.py").write_text("from cleanmarl import ippo\n\nclass Agent(ippo.Agent):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    theirs = importlib.import_module("their_layers")
    monkeypatch.setattr(ippo, "Agent", theirs.Agent)
    ippo.main(args)
    told = f"agent is made by {theirs.__file__}: --resume, enjoy and load would take what ippo.py makes; edit a copy"
    assert told in capfd.readouterr().err
    copy = copy_of("ippo", [(r"\nclass Agent", r"\nfrom their_layers import Agent as Theirs\n\nclass Agent")], tmp_path)
    copy.Agent = theirs.Agent
    copy.main(copy.Args(**dataclasses.asdict(args)))
    assert "is made by" not in capfd.readouterr().err


@pytest.mark.parametrize("script", SECOND_COPY)
def test_a_second_copy_of_the_network_would_be_noticed(script, tmp_path):
    """Without an edit it acts alike; with one the ratios tell."""
    flags, _ = SCRIPTS[script]
    copied = f"(lambda p: {SECOND_COPY[script]})([x.detach().numpy() for x in agent.actor.parameters()])"
    fault = [(r"as_numpy\(agent\.actor\)", copied.replace("\\", r"\\"))]
    for edit, is_one in (([], True), (ACTIVATION, False)):
        module = copy_of(script, edit + fault + KEEP_RATIOS, tmp_path)
        module.main(module.Args(**flags, runs_dir=str(tmp_path)))
        assert ((module.RATIOS[0] - 1).abs().max() < 1e-5) == is_one


def test_what_is_left_out_of_the_optimizer_would_be_noticed(tmp_path):
    """The other fault of the first version: rows of two networks by name, so that an added head stays as it was."""
    fault = [(r"\[p for p in agent\.parameters\(\) if p not in of_critic\]", "list(agent.actor.parameters())")]
    flags, obs_size = SCRIPTS["mappo"]
    module = copy_of("mappo", HEADS + fault, tmp_path, obs_size)
    args = module.Args(**flags, runs_dir=str(tmp_path))
    module.set_up(args)
    start = module.Agent(module.make_envs(args, args.num_envs), args).state_dict()
    trained = load_checkpoint(module.main(args))["modules"]["agent"]
    assert torch.equal(trained["predictor.weight"], start["predictor.weight"])


@pytest.mark.parametrize("script", ["idqn", "vdn", "qmix", "qtran", "vdn_lstm", "qmix_lstm"])
def test_one_value_for_all_actions_ends_the_run(script, tmp_path):
    module = copy_of(script, [(r"nn\.Linear\(hidden, K\)", "nn.Linear(hidden, 1)")], tmp_path)
    with pytest.raises((RuntimeError, IndexError), match=r"out of bounds|size of tensor"):
        module.main(module.Args(**WITHOUT_RATIOS[script], runs_dir=str(tmp_path)))


def test_one_output_for_all_actions_shows_in_the_curves(tmp_path):
    """As docs/failures.md says."""
    module = copy_of("ippo", [(r"hidden, K\), std", "hidden, 1), std")], tmp_path)
    points = scalars(module.main(module.Args(**MANY, runs_dir=str(tmp_path))))
    assert [value for _, value in points["train/entropy"]] == pytest.approx([np.log(5)] * len(points["train/entropy"]))
    for name in ("approx_kl", "clipfrac", "actor_gradients"):
        assert max(abs(value) for _, value in points[f"train/{name}"]) < 1e-5
