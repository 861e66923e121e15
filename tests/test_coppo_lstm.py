"""coppo_lstm.py: the objective against the paper's equations, turns, its limit MAPPO.

What it shares with ippo_lstm.py and mappo_lstm.py is in test_recurrent_family.py.
"""

import dataclasses
import itertools

from cleanmarl import coppo, coppo_lstm, coppo_matrix, mappo_lstm
from cleanmarl.coppo_lstm import Args
from cleanmarl.layers import Networks
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import test_recurrent_family as family
import torch
from test_coppo import check_logged, equations
from toys import double

SMALL = family.SMALL | {"num_minibatches": 1}
NOISE = "toy/team?see=noise&varied=True"


def collected(args):
    return family.collected(coppo_lstm, args)


def test_settings_are_those_of_coppo_and_of_the_papers_starcraft():
    of_paper = {"num_envs": 8, "num_steps": 400, "gamma": 0.99, "gae_lambda": 0.9, "num_minibatches": 1}
    of_paper |= {"learning_rate": 5e-4, "critic_learning_rate": 5e-4, "activation": "relu"}
    assert vars(Args()) == vars(coppo.Args()) | of_paper | {"cell": "gru", "optimizer": "rmsprop"}


@pytest.mark.parametrize("script", [coppo_lstm, coppo_matrix])
def test_rmsprop_is_the_papers(script, tmp_path):
    """Smoothing 0.99, no momentum, no weight decay (appendix C); epsilon is PyMARL's."""
    args = script.Args(**SMALL, optimizer="rmsprop", runs_dir=str(tmp_path))
    groups = load_checkpoint(script.main(args))["modules"]["optimizer"]["param_groups"]
    keys = "alpha", "momentum", "weight_decay", "eps"
    assert [[group[key] for key in keys] for group in groups] == [[0.99, 0, 0, 1e-5]] * 2


def test_what_is_logged_of_values_and_gradients_is_what_it_says(team):
    args = Args(env_id=team, **SMALL | {"update_epochs": 1}, ent_coef=0.0)
    _, agent, ((_, batch),), _ = collected(args)
    check_logged(coppo_lstm, agent, batch, args)


# proves coppo-1, coppo-2, coppo-4
@pytest.mark.parametrize("inner_clip_coef", [0.0, 0.1, float("inf")])
@pytest.mark.parametrize("objective", ["equation", "authors"])
@pytest.mark.parametrize("shared", [True, False])
def test_loss_and_gradient_are_the_papers_equations(shared, objective, inner_clip_coef, team):
    coefs = {"inner_clip_coef": inner_clip_coef, "ent_coef": 0.0}
    args = Args(env_id=NOISE, **SMALL, share_parameters=shared, objective=objective, **coefs)
    _, agent, ((_, batch),), _ = collected(args)
    agent, batch = agent.double(), double(batch)

    def log_prob():
        log_probs = agent.logits(batch.obs, batch.action_mask, batch.memory, batch.forget).log_softmax(-1)
        return log_probs.gather(-1, batch.action[..., None]).squeeze(-1)

    log_ratio, advantage = 0.15 * torch.randn(batch.alive.shape).double(), torch.randn(batch.alive.shape).double()
    batch = batch._replace(log_prob=log_prob().detach() - log_ratio, advantage=advantage)
    rows = [x.numpy() for x in (log_ratio.exp(), advantage, batch.alive.bool())]
    value, slope = equations(*rows, args.clip_coef, inner_clip_coef, authors=objective == "authors")
    samples = np.array([[rows[2].sum()]]) if shared else rows[2].sum(0, keepdims=True)
    loss, _ = coppo_lstm.actor_loss(agent, batch, args)
    assert loss.item() == pytest.approx(-(value / samples).sum(), rel=1e-9)
    weight = torch.from_numpy(-(slope / samples[..., None]).sum(1))
    parameters = list(agent.actor.parameters())
    theirs = torch.autograd.grad((weight * log_prob()).sum(), parameters)
    for mine, expected in zip(torch.autograd.grad(loss, parameters), theirs):
        torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-10)


# proves coppo-3
def test_independent_agents_step_in_turn_with_the_newest_ratios(team):
    args = Args(env_id=NOISE, **SMALL, share_parameters=False)
    envs, agent, ((_, batch),), _ = collected(args)
    twin = coppo_lstm.Agent(envs, args)
    twin.load_state_dict(agent.state_dict())
    actors = Networks(agent.actor, 3)
    optimizer = torch.optim.SGD([*itertools.chain(*actors)], lr=0.05)
    coppo_lstm.update(agent, actors, optimizer, batch, args)
    parameters = list(twin.actor.parameters())
    for _ in range(args.update_epochs):
        for i in range(3):
            gradients = torch.autograd.grad(coppo_lstm.actor_loss(twin, batch, args)[0], parameters)
            norm = torch.cat([g[i].flatten() for g in gradients]).norm()
            for p, g in zip(parameters, gradients):
                p.data[i] -= 0.05 * g[i] * min(1, args.max_grad_norm / (norm + 1e-6))
    for mine, theirs in zip(agent.actor.parameters(), parameters):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("env_id", ["mpe/simple_speaker_listener_v4", NOISE])
def test_without_the_others_ratios_it_is_mappo_digit_for_digit(env_id, team, tmp_path):
    theirs = mappo_lstm.Args(env_id=env_id, **SMALL | {"num_minibatches": 2}, runs_dir=str(tmp_path))
    ours = Args(**dataclasses.asdict(theirs), inner_clip_coef=0.0, optimizer="adam")
    one, same = load_checkpoint(coppo_lstm.main(ours)), load_checkpoint(mappo_lstm.main(theirs))
    for key, value in same["modules"]["agent"].items():
        assert torch.equal(one["modules"]["agent"][key], value)
