"""IPPO as in ippo.py, with settings for each agent: those marked "per agent" take one value, or one for each agent.

--gamma 0.99 or --gamma 0.99 0.95 0.99. By default every agent has a policy and a critic of its own. No gradient crosses
from one agent to another, and an optimizer steps each by itself: every agent learns exactly as if it were trained alone
on the same data. Learning rates may follow the KL divergence, agents may stop early, act at random or learn late.

Paper: de Witt et al. 2020 (arXiv:2011.09533); the settings that skrl's IPPO has, with defaults of our own.
Parent: ippo.py, but for these, observations that may be normalised, and losses: squared errors of values, normalised
without PopArt, and advantages normalised by minibatch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from cleanmarl.cli import (
    NonNegativeFloat,
    NonNegativeInt,
    OnPolicyArgs,
    PositiveFloat,
    PositiveInt,
    UnitFloat,
    check,
    flag,
    launch,
    set_up,
)
from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.layers import AgentIds, Networks, RunningMeanStd, StackedLinear, Tanh, as_numpy, compilable
from cleanmarl.run import Run, check_rollout_size

import numpy as np
import torch
import torch.nn as nn


@dataclass
class Args(OnPolicyArgs):
    eval_episodes: int = 100
    env_id: str = "mpe/simple_spread_v3"
    """family/name of a multi-agent environment with discrete actions"""
    total_timesteps: PositiveInt = 1_000_000
    """environment steps of the whole run, all environments together, however many agents act in each"""

    share_parameters: bool = False
    """one policy and one critic for all agents, who are told apart by a one-hot id"""
    actor_hidden_dim: PositiveInt = 64
    """units of each of the two hidden layers of an actor"""
    critic_hidden_dim: PositiveInt = 64
    """units of each of the two hidden layers of a critic"""
    learning_rate: tuple[PositiveFloat, ...] = (5e-4,)
    """learning rate of Adam, per agent"""
    lr_schedule: tuple[Literal["constant", "linear", "kl-adaptive"], ...] = ("linear",)
    """constant, linear fall to 0, or steered by the KL divergence of each epoch; per agent"""
    lr_kl_target: PositiveFloat = 0.008
    """KL divergence that the kl-adaptive schedule aims at"""
    num_envs: PositiveInt = 16
    """N, environments stepped side by side"""
    num_steps: PositiveInt = 50
    """T, steps of each environment in one rollout"""
    gamma: tuple[UnitFloat, ...] = (0.95,)
    """discount factor, per agent"""
    gae_lambda: tuple[UnitFloat, ...] = (0.95,)
    """lambda of GAE, per agent"""
    num_minibatches: PositiveInt = 2
    """minibatches of one epoch; must divide num_envs * num_steps, since the agents of a step stay together"""
    update_epochs: tuple[PositiveInt, ...] = (8,)
    """passes over each rollout, per agent"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: tuple[PositiveFloat, ...] = (0.2,)
    """epsilon of the clipped objective, per agent"""
    clip_predicted_values: tuple[NonNegativeFloat, ...] = (0.0,)
    """largest change of the value that its loss sees, per agent; 0 for no clipping"""
    ent_coef: tuple[NonNegativeFloat, ...] = (0.001,)
    """weight of the entropy bonus, per agent"""
    vf_coef: tuple[NonNegativeFloat, ...] = (1.0,)
    """weight of the value loss, per agent"""
    max_grad_norm: tuple[PositiveFloat, ...] = (0.5,)
    """largest norm of the gradient of an agent's two networks, per agent"""
    target_kl: tuple[NonNegativeFloat, ...] = (0.0,)
    """an agent whose KL divergence exceeds this skips the rest of the update, per agent; 0 for never"""
    normalize_obs: bool = False
    """normalise observations by their running mean and deviation, each network's own"""
    normalize_value: bool = True
    """let critics predict normalised returns, by the running mean and deviation, each network's own"""
    reward_scale: tuple[PositiveFloat, ...] = (1.0,)
    """rewards are multiplied by this before learning, per agent"""
    time_limit_bootstrap: bool = True
    """at a time limit add gamma V(final observation) to the reward: a truncated episode is not a terminated one"""
    random_timesteps: NonNegativeInt = 0
    """environment steps of uniformly random legal actions at the start, without learning"""
    learning_starts: NonNegativeInt = 0
    """environment steps before the first update"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run, with discrete actions."""
    return make(args.env_id, num_envs, discrete=True, **options)


def layer_init(layer: StackedLinear, std: float = np.sqrt(2)) -> StackedLinear:
    for weight in layer.weight.detach():  # of each network
        nn.init.orthogonal_(weight, std)
    nn.init.zeros_(layer.bias)
    return layer


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
        self.obs_stats = RunningMeanStd(M, D) if args.normalize_obs else nn.Identity()
        real_obs = torch.arange(D) < torch.as_tensor(envs.obs_sizes)[:, None]
        self.register_buffer("real_obs", real_obs, persistent=False)  # (A, D), False for padding
        self.actor = nn.Sequential(
            self.obs_stats,
            ids,
            layer_init(StackedLinear(M, obs_size, hidden)),
            Tanh(),
            layer_init(StackedLinear(M, hidden, hidden)),
            Tanh(),
            layer_init(StackedLinear(M, hidden, K), std=0.01),  # small: every action is about as likely at first
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
        self.value_stats = RunningMeanStd(M, 1) if args.normalize_value else None
        self.share_parameters, self.team_reward = args.share_parameters, envs.team_reward

    def logits(self, obs: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        """Logits (R, A, K), illegal ones far below; obs (R, A, D), action_mask (R, A, K)."""
        return self.actor(obs).masked_fill(~action_mask, -1e8)  # detail ippo-3: illegal actions

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
    """The agents as a function of (obs, info, done) for `evaluate`: their most probable legal actions, or samples."""
    actor = as_numpy(agent.actor)

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        logits = actor(obs)
        noise = 0 if greedy else gumbel_noise(*logits.shape)
        return np.where(info["action_mask"], logits + noise, -np.inf).argmax(-1)

    return policy


def gumbel_noise(*shape: int) -> np.ndarray:
    """Noise that makes argmax(logits + noise) a sample of softmax(logits): -log of exponential noise."""
    return -torch.empty(shape).exponential_().log().numpy()


class Rollout(NamedTuple):
    """What one rollout leaves behind: T steps of N environments with A agents, NumPy arrays filled in place."""

    obs: np.ndarray  # (T, N, A, D) float32
    action_mask: np.ndarray  # (T, N, A, K) bool, True = legal
    agent_mask: np.ndarray  # (T, N, A) bool, True = alive
    action: np.ndarray  # (T, N, A) int64
    log_prob: np.ndarray  # (T, N, A) float32, of the policy that acted
    reward: np.ndarray  # (T, N, A) float32
    done: np.ndarray  # (T, N, A) bool, the episode ended with this step, or the agent died and has no team that earns


def gae(reward, value, next_value, done, gamma, gae_lambda) -> np.ndarray:
    """Generalized advantage estimation (Schulman et al. 2016, equation 16), cut where an episode ended.

    reward, value, done: (T, ..., A); next_value: (..., A), of the observation after the last step; gamma, gae_lambda:
    numbers, or (A,) one per agent. Returns (T, ..., A).
    """
    nonterminal = 1.0 - done
    following = np.concatenate([value[1:], next_value[None]])
    advantage = reward + gamma * nonterminal * following - value  # the TD errors
    decay = gamma * gae_lambda * nonterminal
    for t in reversed(range(len(advantage) - 1)):
        advantage[t] += decay[t] * advantage[t + 1]
    return advantage


@torch.no_grad()
def collect(agent: Agent, envs: MultiAgentVectorEnv, start, rollout: Rollout, args: Args, run: Run):
    """Step the environments for one rollout from `start`, the (obs, info) before it; returns the (obs, info) after it.

    Values are not needed meanwhile: they follow for the whole rollout in one batch.
    """
    actor, noise = as_numpy(agent.actor), gumbel_noise(*rollout.action_mask.shape)
    logits = np.empty_like(noise)  # (T, N, A, K)
    gamma, reward_scale = np.array(args.gamma, np.float32), np.array(args.reward_scale, np.float32)  # (1,) or (A,)
    obs, info = start
    for t in range(args.num_steps):
        rollout.obs[t], rollout.action_mask[t], rollout.agent_mask[t] = obs, info["action_mask"], info["agent_mask"]
        warm_up = run.step + t * args.num_envs < args.random_timesteps
        logits[t] = np.where(info["action_mask"], 0 if warm_up else actor(obs), -1e8)
        rollout.action[t] = (logits[t] + noise[t]).argmax(-1)

        obs, reward, termination, truncation, info = envs.step(rollout.action[t])
        alive, dies = rollout.agent_mask[t], rollout.agent_mask[t] & ~info["agent_mask"]
        if agent.team_reward:  # death is no end: the dead go on earning what the team, each of the living, earns
            reward, dies = (reward * alive).sum(1, keepdims=True) / alive.sum(1, keepdims=True).clip(1), False
        rollout.reward[t] = reward * reward_scale
        rollout.done[t] = (termination | truncation)[:, None] | dies
        if "_episode" in info:
            run.log_episodes(info)
            cut = np.flatnonzero(truncation & ~termination)
            if args.time_limit_bootstrap and len(cut):
                final_value = agent.value(*to_tensors(agent, info["final_obs"][cut])).cpu().numpy()
                has_value = agent.team_reward | info["final_agent_mask"][cut]
                rollout.reward[t, cut] += gamma * final_value * has_value  # detail ippo-5: a time limit is no end
    run.check_rollout(rollout, obs)
    log_prob = torch.from_numpy(logits).log_softmax(-1).gather(-1, torch.from_numpy(rollout.action)[..., None])
    rollout.log_prob[:] = log_prob.squeeze(-1)
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
    action: torch.Tensor  # (R, A)
    log_prob: torch.Tensor  # (R, A) of the policy that acted
    advantage: torch.Tensor  # (R, A)
    return_: torch.Tensor  # (R, A) normalised if the values are
    value: torch.Tensor  # (R, A) likewise
    predicted: torch.Tensor  # (R, A) the same value as the critic put it, in the unit of before this rollout


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
    advantage = gae(rollout.reward, values, next_value, rollout.done, np.array(args.gamma), np.array(args.gae_lambda))
    advantage = torch.from_numpy(advantage.astype(np.float32)).to(device).flatten(0, 1)  # float64 so far
    return_ = advantage + value
    predicted = value
    if agent.value_stats is not None:  # the critic learns normalised returns
        predicted = agent.value_stats.normalize(value[..., None]).squeeze(-1)
        agent.value_stats.update(return_[..., None], earns[..., None])
        return_, value = (agent.value_stats.normalize(x[..., None]).squeeze(-1) for x in (return_, value))
    acted = rows.action, rows.log_prob
    return Batch(rows.obs, rows.action_mask, alive, earns, *acted, advantage, return_, value, predicted)


@compilable
def ippo_loss(agent: Agent, batch: Batch, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of the actors and the critics, summed over networks that share no parameter, and diagnostics by name.

    A diagnostic is (M,), of each network.
    """
    settings = args.clip_coef, args.clip_predicted_values, args.ent_coef, args.vf_coef
    clip_coef, clip_predicted_values, ent_coef, vf_coef = (batch.value.new_tensor(x) for x in settings)  # (1,) or (A,)
    log_probs = agent.logits(batch.obs, batch.action_mask).log_softmax(-1)
    log_prob = log_probs.gather(-1, batch.action[..., None]).squeeze(-1)
    log_ratio = (log_prob - batch.log_prob) * batch.alive  # detail ippo-4: the dead add nothing; their ratio is 1
    ratio = log_ratio.exp()
    clipped_ratio = torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
    advantage = batch.advantage
    if args.norm_adv:  # detail core-7: per minibatch
        advantage = advantage - agent.mean(advantage, batch.alive)
        advantage = advantage / (agent.mean(advantage.square(), batch.alive).sqrt() + 1e-8)
    policy_loss = -agent.mean(torch.min(advantage * ratio, advantage * clipped_ratio), batch.alive)
    entropy = agent.mean(-(log_probs.exp() * log_probs).sum(-1), batch.alive)

    new_value = agent.normalized_value(batch.obs)
    if any(args.clip_predicted_values):  # as in skrl: the value itself is clipped
        limit = clip_predicted_values.masked_fill(clip_predicted_values == 0, float("inf"))
        new_value = batch.predicted + torch.clamp(new_value - batch.predicted, -limit, limit)
    value_loss = agent.mean((new_value - batch.return_).square(), batch.earns)

    loss = (policy_loss - ent_coef * entropy + vf_coef * value_loss).sum()
    with torch.no_grad():
        stats = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": agent.mean(ratio - 1 - log_ratio, batch.alive),
            "clipfrac": agent.mean((ratio != clipped_ratio).float(), batch.alive),
        }
    return loss, stats


def update(agent: Agent, networks: Networks, optimizer: torch.optim.Optimizer, batch: Batch, args: Args) -> dict:
    """Several epochs of minibatch steps on one rollout; returns the mean diagnostics."""
    num_rows, M = len(batch.action), len(networks)
    settings = args.update_epochs, args.max_grad_norm, args.target_kl
    epochs, max_norms, target_kl = (np.broadcast_to(x, M) for x in settings)  # (M,)
    active = np.ones(M, bool)  # networks that still learn from this rollout
    all_stats = []
    for epoch in range(epochs.max()):
        active &= epoch < epochs
        learning = active.copy()
        minibatches = [batch]
        if args.num_minibatches > 1:  # detail mappo-8: the agents of a step stay together
            order = torch.randperm(num_rows, device=batch.action.device)
            parts = [x[order].split(num_rows // args.num_minibatches) for x in batch]
            minibatches = map(Batch._make, zip(*parts))
        for minibatch in minibatches:
            loss, stats = ippo_loss(agent, minibatch, args)
            if target_kl.any():
                active &= (target_kl == 0) | (stats["approx_kl"].cpu().numpy() <= target_kl)
            agent.zero_grad()
            loss.backward()
            networks.take_gradients(active=np.flatnonzero(active))
            for parameters, max_norm in zip(networks, max_norms):  # of an agent's two networks together
                nn.utils.clip_grad_norm_(parameters, max_norm)
            optimizer.step()
            all_stats.append(stats)
        if "kl-adaptive" in args.lr_schedule:
            kl = torch.stack([stats["approx_kl"] for stats in all_stats[-args.num_minibatches :]]).mean(0)  # (M,)
            adapt_learning_rate(optimizer, kl, learning, args)
        if not active.any():
            break
    metrics = {f"train/{name}": torch.stack([stats[name] for stats in all_stats]).mean() for name in all_stats[0]}
    return_, value = (x[batch.alive > 0] for x in (batch.return_, batch.value))
    metrics["train/explained_variance"] = (1 - (return_ - value).var() / return_.var()).nan_to_num(0, neginf=0)
    return metrics


def adapt_learning_rate(optimizer: torch.optim.Optimizer, kl: torch.Tensor, learning: np.ndarray, args: Args) -> None:
    """The kl-adaptive schedule: policies that are learning slow down 1.5 times if they move too far, or speed up.

    Within 1e-6 to 1e-2, as in skrl.
    """
    schedules = np.broadcast_to(args.lr_schedule, len(optimizer.param_groups))
    for m in np.flatnonzero((schedules == "kl-adaptive") & learning):
        group = optimizer.param_groups[m]
        if kl[m] > 2 * args.lr_kl_target:
            group["lr"] = max(group["lr"] / 1.5, 1e-6)
        elif kl[m] < args.lr_kl_target / 2:
            group["lr"] = min(group["lr"] * 1.5, 1e-2)


def check_per_agent(args: Args, num_agents: int) -> None:
    """Check the lengths of the settings that are given once or per agent: all tuples."""
    of_rewards = "gamma", "gae_lambda", "reward_scale"  # an agent's, even if the networks are shared
    for name, values in vars(args).items():
        if isinstance(values, tuple):
            one_network = args.share_parameters and name not in of_rewards
            lengths = {1} if one_network else {1, num_agents}
            takes = "with --share-parameters" if one_network else f"or one for each of {num_agents} agents"
            check(len(values) in lengths, f"{flag(name)} takes one value {takes}, not {len(values)}")


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    steps_per_update = args.num_envs * args.num_steps
    message = f"{steps_per_update} steps of a rollout must be a multiple (2+)"
    message += f" of --num-minibatches {args.num_minibatches}"
    check(steps_per_update % args.num_minibatches == 0 and steps_per_update > args.num_minibatches, message)
    message = f"--total-timesteps {args.total_timesteps} is less than one rollout of {steps_per_update} steps"
    check(args.total_timesteps >= steps_per_update, message)
    played = args.total_timesteps // steps_per_update * steps_per_update  # whole rollouts, of which the last must count
    message = f"--learning-starts {args.learning_starts} is more than the {played} steps of the run"
    check(args.learning_starts <= played, f"{message}: nothing would be learned")
    message = f"--random-timesteps {args.random_timesteps} is more than the {played - steps_per_update} steps before"
    check(args.random_timesteps <= played - steps_per_update, f"{message} the last rollout: nothing would be learned")
    device = set_up(args)

    envs = make_envs(args, args.num_envs)
    check_per_agent(args, envs.num_agents)
    agent = Agent(envs, args).to(device)
    networks = Networks(agent, 1 if args.share_parameters else envs.num_agents)
    learning_rates, schedules = (np.broadcast_to(x, len(networks)) for x in (args.learning_rate, args.lr_schedule))
    groups = [{"params": parameters, "lr": float(lr)} for parameters, lr in zip(networks, learning_rates)]
    optimizer = torch.optim.Adam(groups, eps=1e-5, fused=True)
    T, N, A, K = args.num_steps, args.num_envs, *envs.real_actions.shape
    rollout = Rollout(
        obs=np.zeros((T, N, *envs.single_observation_space.shape), envs.single_observation_space.dtype),
        action_mask=np.zeros((T, N, A, K), bool),
        agent_mask=np.zeros((T, N, A), bool),
        action=np.zeros((T, N, A), np.int64),
        log_prob=np.zeros((T, N, A), np.float32),
        reward=np.zeros((T, N, A), np.float32),
        done=np.zeros((T, N, A), bool),
    )
    check_rollout_size(rollout)

    num_updates = args.total_timesteps // steps_per_update
    with Run(args, __file__, agent=agent, optimizer=optimizer) as run:
        now = run.start(envs)
        for iteration in range(run.step // steps_per_update, num_updates):
            for group, lr, schedule in zip(optimizer.param_groups, learning_rates, schedules):
                if schedule == "linear":
                    group["lr"] = float(lr * (1 - iteration / num_updates))  # a plain number, for checkpoints

            now = collect(agent, envs, now, rollout, args, run)
            run.step += steps_per_update
            batch = estimate(agent, rollout, now[0], args)
            metrics = {}
            at_random = run.step - steps_per_update < args.random_timesteps  # the rollout began so
            if not at_random and run.step >= args.learning_starts:
                metrics = update(agent, networks, optimizer, batch, args)
                metrics["train/learning_rate"] = np.mean([group["lr"] for group in optimizer.param_groups])
            if args.normalize_obs:  # only now: the update needs the statistics that the rollout acted with
                agent.obs_stats.update(batch.obs, batch.alive[..., None] * agent.real_obs)
            run.log(metrics)
            if run.evaluation_due:
                run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
