"""IPPO as in ippo.py, but for continuous actions: every agent's policy is a normal distribution.

A policy acts in a unit of its own, in which every action reaches from -1 to 1; the environment gets it clipped and in
its unit. Observations, and rewards if asked to, are normalised by running statistics, which are saved with the agent.

Papers: de Witt et al. 2020 (arXiv:2011.09533); Huang et al. 2022, the 37 implementation details of PPO (ICLR blog).
Parent: ippo.py, but for the distribution, the units of actions and what is normalised.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cleanmarl.cli import NonNegativeFloat, OnPolicyArgs, PositiveFloat, PositiveInt, UnitFloat, check, launch, set_up
from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.layers import AgentIds, RunningMeanStd, StackedLinear, Tanh, as_numpy, clip_grads_, compilable
from cleanmarl.run import Run, check_rollout_size

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Args(OnPolicyArgs):
    eval_episodes: int = 100
    env_id: str = "mpe/simple_spread_v3?continuous_actions=True"
    """family/name of a multi-agent environment with continuous actions"""
    total_timesteps: PositiveInt = 1_000_000
    """environment steps of the whole run, all environments together, however many agents act in each"""

    share_parameters: bool = True
    """one policy and one critic for all agents, who are told apart by a one-hot id"""
    actor_hidden_dim: PositiveInt = 64
    """units of each of the two hidden layers of an actor"""
    critic_hidden_dim: PositiveInt = 64
    """units of each of the two hidden layers of a critic"""
    learning_rate: PositiveFloat = 7e-4
    """learning rate of the actors' Adam"""
    critic_learning_rate: PositiveFloat = 7e-4
    """learning rate of the critics' Adam"""
    anneal_lr: bool = False
    """let the learning rates fall linearly to 0 over the run"""
    num_envs: PositiveInt = 128
    """N, environments stepped side by side"""
    num_steps: PositiveInt = 25
    """T, steps of each environment in one rollout"""
    gamma: UnitFloat = 0.95
    """discount factor; for long episodes, or without --time-limit-bootstrap, rather 0.99"""
    gae_lambda: UnitFloat = 0.95
    """lambda of GAE"""
    num_minibatches: PositiveInt = 4
    """minibatches of one epoch; must divide num_envs * num_steps, since the agents of a step stay together"""
    update_epochs: PositiveInt = 10
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each rollout"""
    clip_coef: PositiveFloat = 0.2
    """epsilon of the clipped objective"""
    value_clip_coef: NonNegativeFloat = 0.2
    """largest change of the (normalised) value that its loss rewards; 0 for no clipping"""
    huber_delta: NonNegativeFloat = 10.0
    """error of the (normalised) value from which its loss grows linearly; 0 for the squared error"""
    ent_coef: NonNegativeFloat = 0.01
    """weight of the entropy bonus"""
    max_grad_norm: PositiveFloat = 10.0
    """largest norm of the gradient of a network"""
    normalize_obs: bool = True
    """normalise observations by their running mean and deviation"""
    normalize_reward: bool = False
    """divide rewards by the running deviation of the discounted return, each agent's own; values are normalised too"""
    normalize_value: bool = True
    """let critics predict normalised returns, by the running mean and deviation (PopArt)"""
    time_limit_bootstrap: bool = True
    """at a time limit add gamma V(final observation) to the reward: a truncated episode is not a terminated one"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run, with continuous actions."""
    return make(args.env_id, num_envs, discrete=False, **options)


def layer_init(layer: StackedLinear, std: float = np.sqrt(2)) -> StackedLinear:
    for weight in layer.weight.detach():  # of each network
        nn.init.orthogonal_(weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class PopArt(RunningMeanStd):
    """Mean and deviation of all returns so far, for critics that predict normalised ones (van Hasselt et al. 2016)."""

    @property
    def std(self) -> torch.Tensor:
        return self.var.clamp(min=1e-2).sqrt()  # the floor of the official implementation

    @torch.no_grad()
    def update(self, return_: torch.Tensor, weight: torch.Tensor, last_layer: StackedLinear | nn.Linear) -> None:
        """Take in return_ (R, A) where weight is 1.0, and adapt the critics' last layer so that every value stays."""
        old_mean, old_std = self.mean.clone(), self.std
        super().update(return_[..., None], weight[..., None])
        shape = -1, *[1] * (last_layer.bias.ndim - 1)  # (M, 1, 1), or (1,) for the nn.Linear of one critic
        scale, shift = (old_std / self.std).view(shape), ((old_mean - self.mean) / self.std).view(shape)
        last_layer.weight *= scale  # detail mappo-1: every value stays
        last_layer.bias.mul_(scale).add_(shift)


class Agent(nn.Module):
    """The policies and critics of all agents, with one network that serves all of them, or one for each.

    Arrays are (R, A, ...): R rows, each a step of an environment, in which the A agents stay side by side.
    """

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        A, K = envs.real_actions.shape
        hidden, critic_hidden = args.actor_hidden_dim, args.critic_hidden_dim
        D = envs.single_observation_space.shape[-1]
        M = 1 if args.share_parameters else A  # networks
        obs_size = D + (A if args.share_parameters else 0)
        # detail ippo-1: one network serves all agents, told apart by ids, or each has its own
        ids = AgentIds(A) if args.share_parameters else nn.Identity()
        # detail continuous-6, detail continuous-7: observations are normalised, then clipped
        self.obs_stats = RunningMeanStd(M, D) if args.normalize_obs else nn.Identity()
        real_obs = torch.arange(D) < torch.as_tensor(envs.obs_sizes)[:, None]
        self.register_buffer("real_obs", real_obs, persistent=False)  # (A, D), False for padding
        # detail continuous-4: separate networks, two layers with tanh
        self.actor = nn.Sequential(
            self.obs_stats,
            ids,
            layer_init(StackedLinear(M, obs_size, hidden)),
            Tanh(),
            layer_init(StackedLinear(M, hidden, hidden)),
            Tanh(),
            layer_init(StackedLinear(M, hidden, K), std=0.01),  # small: the mean is about 0 at first
        )
        self.critic = nn.Sequential(
            self.obs_stats,
            ids,
            layer_init(StackedLinear(M, obs_size, critic_hidden)),
            Tanh(),
            layer_init(StackedLinear(M, critic_hidden, critic_hidden)),
            Tanh(),
            layer_init(StackedLinear(M, critic_hidden, 1), std=1.0),
        )
        # detail continuous-2: the log standard deviation is a parameter, the same in every state, 0 at first
        self.log_std = nn.Parameter(torch.zeros(M, K))
        self.num_networks = M  # so that the deviations of each network are clipped by their own norm
        self.value_stats = PopArt(M, 1) if args.normalize_value else None
        self.return_stats = RunningMeanStd(A, 1) if args.normalize_reward else None
        self.running_return = np.zeros((envs.num_envs, A))  # discounted, of the episodes under way
        self.share_parameters, self.team_reward = args.share_parameters, envs.team_reward
        space = envs.single_action_space  # actions that an agent does not have stay 0
        self.low, self.high = (np.where(envs.real_actions, bound, 0) for bound in (space.low, space.high))
        is_bounded = np.isfinite(self.high - self.low)  # where it is not, both units are the same
        low, high = np.where(is_bounded, self.low, -1), np.where(is_bounded, self.high, 1)
        self.middle, self.half_range = (high + low) / 2, (high - low) / 2

    def env_action(self, action: np.ndarray) -> np.ndarray:
        """Actions (R, A, K) in the unit of the environment, from the policies' unit, where -1 and 1 are the bounds."""
        # detail continuous-5: the environment gets clipped actions, the rollout keeps the original
        return (self.middle + self.half_range * action).clip(self.low, self.high)

    def scale_reward(self, reward: np.ndarray, done: np.ndarray, earns: np.ndarray, gamma: float) -> np.ndarray:
        """Rewards (T, N, A) of a rollout, scaled by statistics that take in the rollout first; earns (T, N, A)."""
        return_ = np.empty_like(reward)
        for t in range(len(reward)):
            return_[t] = self.running_return = self.running_return * gamma + reward[t]
            self.running_return[done[t]] = 0
        self.return_stats.update(*(x.flatten(0, 1)[..., None] for x in to_tensors(self, return_, earns)))
        # detail continuous-8: rewards are divided by the deviation of the discounted return; their mean stays
        reward = reward / self.return_stats.std.cpu().numpy().ravel()
        # detail continuous-9: reward clipping
        return reward.clip(-10, 10)

    def normalized_value(self, obs: torch.Tensor) -> torch.Tensor:
        """Values (R, A) as the critics predict them; obs (R, A, D)."""
        return self.critic(obs).squeeze(-1)  # detail ippo-2: from what the agent itself observes

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        """Values (R, A) in the unit of the returns."""
        value = self.normalized_value(obs)
        return value if self.value_stats is None else self.value_stats.denormalize(value[..., None]).squeeze(-1)

    def mean(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Weighted mean over each network's samples: x, weight (R, A) -> (1,) if it is shared, else (A,)."""
        axes = (0, 1) if self.share_parameters else 0
        return ((x * weight).sum(axes) / weight.sum(axes).clamp(min=1)).view(-1)


def make_policy(agent: Agent, greedy: bool = True):
    """The agents as a function of (obs, info, done) for `evaluate`: their mean actions, or samples."""
    actor, std = as_numpy(agent.actor), agent.log_std.detach().exp().cpu().numpy()

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        mean = actor(obs)
        noise = 0 if greedy else std * torch.randn(mean.shape).numpy()
        return agent.env_action(mean + noise)

    return policy


class Rollout(NamedTuple):
    """What one rollout leaves behind: T steps of N environments with A agents, NumPy arrays filled in place."""

    obs: np.ndarray  # (T, N, A, D) float32
    action_mask: np.ndarray  # (T, N, A, K) bool, True = the agent has this component
    agent_mask: np.ndarray  # (T, N, A) bool, True = alive
    action: np.ndarray  # (T, N, A, K) float32, as sampled, in the policies' unit
    log_prob: np.ndarray  # (T, N, A) float32, of the policy that acted
    reward: np.ndarray  # (T, N, A) float32, scaled with --normalize-reward
    done: np.ndarray  # (T, N, A) bool, the episode ended with this step, or the agent died and has no team that earns


def gae(reward, value, next_value, done, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimation (Schulman et al. 2016, equation 16), cut where an episode ended.

    reward, value, done: (T, ..., A); next_value: (..., A), of the observation after the last step. Returns (T, ..., A).
    """
    nonterminal = 1.0 - done
    following = np.concatenate([value[1:], next_value[None]])
    advantage = reward + gamma * nonterminal * following - value  # the TD errors
    decay = gamma * gae_lambda * nonterminal
    for t in reversed(range(len(advantage) - 1)):
        advantage[t] += decay[t] * advantage[t + 1]
    return advantage


def gaussian_log_prob(action, mean, log_std, action_mask) -> torch.Tensor:
    """Log density (...) of actions (..., K) under normal distributions, of the components that action_mask has."""
    # detail continuous-1: continuous actions have a normal distribution
    log_prob = -0.5 * ((action - mean) / log_std.exp()).square() - (log_std + 0.5 * np.log(2 * np.pi))
    # detail continuous-3: the components are independent, so the log-probability of an action is the sum of theirs
    return (log_prob * action_mask).sum(-1)


@torch.no_grad()
def collect(agent: Agent, envs: MultiAgentVectorEnv, start, rollout: Rollout, args: Args, run: Run):
    """Step the environments for one rollout from `start`, the (obs, info) before it; returns the (obs, info) after it.

    Values are not needed meanwhile: they follow for the whole rollout in one batch.
    """
    actor, noise = as_numpy(agent.actor), torch.randn(rollout.action.shape).numpy()
    mean, std = np.empty_like(noise), agent.log_std.exp().cpu().numpy()  # (T, N, A, K), (M, K)
    bootstrap = np.zeros_like(rollout.reward)
    obs, info = start
    for t in range(args.num_steps):
        rollout.obs[t], rollout.action_mask[t], rollout.agent_mask[t] = obs, info["action_mask"], info["agent_mask"]
        mean[t] = actor(obs)
        rollout.action[t] = mean[t] + std * noise[t]

        obs, reward, termination, truncation, info = envs.step(agent.env_action(rollout.action[t]))
        alive, dies = rollout.agent_mask[t], rollout.agent_mask[t] & ~info["agent_mask"]
        if agent.team_reward:  # death is no end: the dead go on earning what the team, each of the living, earns
            reward, dies = (reward * alive).sum(1, keepdims=True) / alive.sum(1, keepdims=True).clip(1), False
        rollout.reward[t] = reward
        rollout.done[t] = (termination | truncation)[:, None] | dies
        if "_episode" in info:
            run.log_episodes(info)
            cut = np.flatnonzero(truncation & ~termination)
            if args.time_limit_bootstrap and len(cut):
                final_value = agent.value(*to_tensors(agent, info["final_obs"][cut])).cpu().numpy()
                has_value = agent.team_reward | info["final_agent_mask"][cut]
                bootstrap[t, cut] = args.gamma * final_value * has_value  # detail ippo-5: a time limit is no end
    run.check_rollout(rollout, obs)
    if agent.return_stats is not None:
        earns = rollout.agent_mask | agent.team_reward
        rollout.reward[:] = agent.scale_reward(rollout.reward, rollout.done, earns, args.gamma)
    rollout.reward[:] += bootstrap
    action, mean, mask = map(torch.from_numpy, (rollout.action, mean, rollout.action_mask))
    rollout.log_prob[:] = gaussian_log_prob(action, mean, agent.log_std.cpu(), mask)
    return obs, info


def to_tensors(agent: Agent, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Arrays as float32 tensors where the agent is."""
    device = next(agent.parameters()).device
    return [torch.from_numpy(x).to(device, torch.float32) for x in arrays]


class Batch(NamedTuple):
    """A rollout as the networks learn from it, tensors (R, A, ...) with a row for each step of each environment."""

    obs: torch.Tensor  # (R, A, D)
    action_mask: torch.Tensor  # (R, A, K)
    alive: torch.Tensor  # (R, A) 1.0 for living agents, 0.0 for the rest
    earns: torch.Tensor  # (R, A) 1.0 where there is a return to predict: for the living, and for the dead of a team
    action: torch.Tensor  # (R, A, K)
    log_prob: torch.Tensor  # (R, A) of the policy that acted
    advantage: torch.Tensor  # (R, A) normalised
    return_: torch.Tensor  # (R, A) normalised if the values are
    value: torch.Tensor  # (R, A) likewise


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, next_obs: np.ndarray, args: Args) -> Batch:
    """Values, advantages and returns of a rollout; next_obs (N, A, D) is the observation that follows it."""
    device = next(agent.parameters()).device
    rows = Rollout(*(torch.tensor(x, device=device).flatten(0, 1) for x in rollout))  # (T * N, ...), copies
    alive = rows.agent_mask.float()
    earns = torch.ones_like(alive) if agent.team_reward else alive
    value = agent.value(rows.obs)
    next_value = agent.value(*to_tensors(agent, next_obs)).cpu().numpy()
    values = value.view(rollout.reward.shape).cpu().numpy()
    advantage = gae(rollout.reward, values, next_value, rollout.done, args.gamma, args.gae_lambda)
    advantage = torch.from_numpy(advantage.astype(np.float32)).to(device).flatten(0, 1)  # float64 so far
    return_ = advantage + value
    if agent.value_stats is not None:  # the critic learns normalised returns, and is compared with normalised values
        agent.value_stats.update(return_, earns, agent.critic[-1])  # detail mappo-1: PopArt
        return_, value = (agent.value_stats.normalize(x[..., None]).squeeze(-1) for x in (return_, value))
    if args.norm_adv:  # detail mappo-6: advantages are normalised over the rollout, not per minibatch
        advantage = advantage - agent.mean(advantage, alive)
        advantage = advantage / (agent.mean(advantage.square(), alive).sqrt() + 1e-8)
    return Batch(rows.obs, rows.action_mask, alive, earns, rows.action, rows.log_prob, advantage, return_, value)


@compilable
def ippo_loss(agent: Agent, batch: Batch, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of the actors and the critics, summed over networks that share no parameter, and diagnostics by name.

    A diagnostic is the mean over the networks.
    """
    log_prob = gaussian_log_prob(batch.action, agent.actor(batch.obs), agent.log_std, batch.action_mask)
    log_ratio = (log_prob - batch.log_prob) * batch.alive  # detail ippo-4: the dead add nothing; their ratio is 1
    ratio = log_ratio.exp()
    clipped_ratio = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    surrogate = torch.min(batch.advantage * ratio, batch.advantage * clipped_ratio)
    policy_loss = -agent.mean(surrogate, batch.alive)
    entropy = ((agent.log_std + 0.5 * np.log(2 * np.pi * np.e)) * batch.action_mask).sum(-1)  # (R, A)
    entropy = agent.mean(entropy, batch.alive)

    new_value = agent.normalized_value(batch.obs)
    delta = args.huber_delta or float("inf")
    value_error = F.huber_loss(new_value, batch.return_, reduction="none", delta=delta)  # detail mappo-4: Huber loss
    if args.value_clip_coef > 0:  # detail mappo-5: the larger of the errors with and without clipping
        clipped_value = batch.value + torch.clamp(new_value - batch.value, -args.value_clip_coef, args.value_clip_coef)
        clipped_error = F.huber_loss(clipped_value, batch.return_, reduction="none", delta=delta)
        value_error = torch.max(value_error, clipped_error)
    value_loss = agent.mean(value_error, batch.earns)

    loss = (policy_loss - args.ent_coef * entropy + value_loss).sum()
    with torch.no_grad():
        stats = {
            "policy_loss": policy_loss.mean(),
            "value_loss": value_loss.mean(),
            "entropy": entropy.mean(),
            "approx_kl": agent.mean(ratio - 1 - log_ratio, batch.alive).mean(),
            "clipfrac": agent.mean((ratio != clipped_ratio).float(), batch.alive).mean(),
        }
    return loss, stats


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, args: Args) -> dict:
    """Several epochs of minibatch steps on one rollout; returns the mean diagnostics."""
    num_rows = len(batch.action)
    all_stats = []
    for _ in range(args.update_epochs):
        minibatches = [batch]
        if args.num_minibatches > 1:  # detail mappo-8: the agents of a step stay together
            order = torch.randperm(num_rows, device=batch.action.device)
            parts = [x[order].split(num_rows // args.num_minibatches) for x in batch]
            minibatches = map(Batch._make, zip(*parts))
        for minibatch in minibatches:
            loss, stats = ippo_loss(agent, minibatch, args)
            optimizer.zero_grad()
            loss.backward()
            norms = clip_grads_(agent, args.max_grad_norm)  # detail mappo-7: actor and critic apart
            optimizer.step()
            all_stats.append(stats | {"actor_gradients": norms["actor"], "critic_gradients": norms["critic"]})
    metrics = {f"train/{name}": torch.stack([stats[name] for stats in all_stats]).mean() for name in all_stats[0]}
    return_, value = (x[batch.alive > 0] for x in (batch.return_, batch.value))
    metrics["train/explained_variance"] = (1 - (return_ - value).var() / return_.var()).nan_to_num(0, neginf=0)
    return metrics


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    steps_per_update = args.num_envs * args.num_steps
    message = f"{steps_per_update} steps of a rollout are not divisible by --num-minibatches {args.num_minibatches}"
    check(steps_per_update % args.num_minibatches == 0, message)
    message = f"--total-timesteps {args.total_timesteps} is less than one rollout of {steps_per_update} steps"
    check(args.total_timesteps >= steps_per_update, message)
    device = set_up(args)

    envs = make_envs(args, args.num_envs)
    agent = Agent(envs, args).to(device)
    of_critic = set(agent.critic.parameters())  # what a copy adds to the agent learns with the actors
    groups = [
        {"params": [p for p in agent.parameters() if p not in of_critic], "lr": args.learning_rate},
        {"params": list(agent.critic.parameters()), "lr": args.critic_learning_rate},
    ]
    optimizer = torch.optim.Adam(groups, eps=1e-5, fused=True)
    T, N, A, K = args.num_steps, args.num_envs, *envs.real_actions.shape
    rollout = Rollout(
        obs=np.zeros((T, N, *envs.single_observation_space.shape), envs.single_observation_space.dtype),
        action_mask=np.zeros((T, N, A, K), bool),
        agent_mask=np.zeros((T, N, A), bool),
        action=np.zeros((T, N, A, K), np.float32),
        log_prob=np.zeros((T, N, A), np.float32),
        reward=np.zeros((T, N, A), np.float32),
        done=np.zeros((T, N, A), bool),
    )
    check_rollout_size(rollout)

    num_updates = args.total_timesteps // steps_per_update
    with Run(args, __file__, agent=agent, optimizer=optimizer) as run:
        *now, agent.running_return = run.start(envs, agent.running_return)
        for iteration in range(run.step // steps_per_update, num_updates):
            if args.anneal_lr:
                remaining = 1 - iteration / num_updates
                optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
                optimizer.param_groups[1]["lr"] = args.critic_learning_rate * remaining

            now = collect(agent, envs, now, rollout, args, run)
            run.carried = (agent.running_return,)  # for a checkpoint
            run.step += steps_per_update
            batch = estimate(agent, rollout, now[0], args)
            metrics = update(agent, optimizer, batch, args)
            if args.normalize_obs:  # only now: the update needs the statistics that the rollout acted with
                agent.obs_stats.update(batch.obs, batch.alive[..., None] * agent.real_obs)
            run.log(metrics | {"train/learning_rate": optimizer.param_groups[0]["lr"]})
            if run.evaluation_due:
                run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
