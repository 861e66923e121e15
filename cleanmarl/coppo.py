"""Coordinated PPO (CoPPO): MAPPO whose agents take into account how far the others' policies have already moved.

In agent i's clipped objective the ratio r_i is multiplied by g, the product of the other agents' ratios, clipped to
1 ± inner_clip_coef and held constant ("double clipping", equation 10). With --no-share-parameters the agents step one
after another, each with the others' newest ratios (Algorithm 1); shared networks take one step for all.

--inner-clip-coef 0 is MAPPO (g = 1), and inf is the objective without double clipping (equation 8). --objective authors
is what the authors' code does: the inner clip in the clipped term only, and gradients through the others' ratios.

Paper: Wu et al. 2021 (arXiv:2111.04051). Parent: mappo.py, but for the actors' objective and their turns. What the
paper's matrix games need besides is in coppo_matrix.py.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cleanmarl.cli import NonNegativeFloat, OnPolicyArgs, PositiveFloat, PositiveInt, UnitFloat, check, launch, set_up
from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.layers import AgentIds, Networks, RunningMeanStd, StackedLinear, Tanh, as_numpy, clip_grads_, compilable
from cleanmarl.run import Run, check_rollout_size

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from annotated_types import Interval


@dataclass
class Args(OnPolicyArgs):
    eval_episodes: int = 100
    env_id: str = "mpe/simple_spread_v3"
    """family/name of a multi-agent environment with discrete actions"""
    total_timesteps: PositiveInt = 1_000_000
    """environment steps of the whole run, all environments together, however many agents act in each"""

    share_parameters: bool = True
    """one policy and one critic for all agents, who are told apart by a one-hot id"""
    actor_hidden_dim: PositiveInt = 64
    """units of each of the two hidden layers of an actor"""
    critic_hidden_dim: PositiveInt = 64
    """units of each of the two hidden layers of a critic"""
    activation: Literal["tanh", "relu"] = "tanh"
    """of the hidden layers; MAPPO's authors take ReLU, but tanh for simple_spread"""
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
    """epsilon of the clipped objective: the outer clip, of g times an agent's own ratio"""
    inner_clip_coef: Annotated[float, Interval(ge=0, le=math.inf)] = 0.1
    """epsilon of the inner clip, of the product of the others' ratios; 0 for MAPPO, inf for no double clipping"""
    clip_separately: bool = False
    """clip each of the others' ratios instead of their product"""
    objective: Literal["equation", "authors"] = "equation"
    """equation 10 of the paper, or the objective of the authors' code"""
    value_clip_coef: NonNegativeFloat = 0.2
    """largest change of the (normalised) value that its loss rewards; 0 for no clipping"""
    huber_delta: NonNegativeFloat = 10.0
    """error of the (normalised) value from which its loss grows linearly; 0 for the squared error"""
    ent_coef: NonNegativeFloat = 0.01
    """weight of the entropy bonus"""
    max_grad_norm: PositiveFloat = 10.0
    """largest norm of the gradient of a network"""
    normalize_value: bool = True
    """let critics predict normalised returns, by the running mean and deviation (PopArt)"""
    normalize_state: bool = False
    """let critics see the state by its running mean and deviation; for states of many scales, as in battles"""
    time_limit_bootstrap: bool = True
    """at a time limit add gamma V(final state) to the reward: a truncated episode is not a terminated one"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run, with discrete actions."""
    return make(args.env_id, num_envs, discrete=True, **options)


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
    def update(self, return_: torch.Tensor, last_layer: StackedLinear | nn.Linear) -> None:
        """Take in return_ (R, A), and adapt the critics' last layer so that every value stays what it was."""
        old_mean, old_std = self.mean.clone(), self.std
        super().update(return_[..., None])
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
        M = 1 if args.share_parameters else A  # networks
        obs_size = envs.single_observation_space.shape[-1] + (A if args.share_parameters else 0)
        # detail ippo-1: one network serves all agents, told apart by ids, or each has its own
        ids = AgentIds(A) if args.share_parameters else nn.Identity()
        activation = {"tanh": Tanh, "relu": nn.ReLU}[args.activation]
        self.actor = nn.Sequential(
            ids,
            layer_init(StackedLinear(M, obs_size, hidden)),
            activation(),
            layer_init(StackedLinear(M, hidden, hidden)),
            activation(),
            layer_init(StackedLinear(M, hidden, K), std=0.01),  # small: every action is about as likely at first
        )
        self.may_die, self.sees_alive = envs.may_die, envs.may_die and not envs.team_reward
        self.critic = nn.Sequential(
            ids,
            layer_init(StackedLinear(M, envs.state_size + obs_size + self.sees_alive, critic_hidden)),
            activation(),
            layer_init(StackedLinear(M, critic_hidden, critic_hidden)),
            activation(),
            layer_init(StackedLinear(M, critic_hidden, 1), std=1.0),
        )
        self.value_stats = PopArt(M, 1) if args.normalize_value else None
        self.state_stats = RunningMeanStd(1, envs.state_size) if args.normalize_state else nn.Identity()
        self.share_parameters = args.share_parameters

    def logits(self, obs: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        """Logits (R, A, K), illegal ones far below; obs (R, A, D), action_mask (R, A, K)."""
        return self.actor(obs).masked_fill(~action_mask, -1e8)  # detail ippo-3: illegal actions

    def normalized_value(self, state: torch.Tensor, obs: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        """Values (R, A) as the critics predict them; state (R, S), obs (R, A, D), alive (R, A)."""
        state = self.state_stats(state[:, None])  # detail mappo-9: states of one scale, (R, 1, S)
        # where nobody dies the state stays (R, 1, S), which a critic reads once for all agents
        if self.may_die:  # detail mappo-3: the critic of a dead agent sees zeros, and the id
            state, obs = state * alive[..., None], obs * alive[..., None]
        if self.sees_alive:  # the dead of no team earn nothing, unlike the living that happen to see zeros
            obs = torch.cat([obs, alive[..., None]], dim=-1)
        return self.critic((state, obs)).squeeze(-1)  # detail mappo-2: from the state and the own observation

    def value(self, state: torch.Tensor, obs: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        """Values (R, A) in the unit of the returns."""
        value = self.normalized_value(state, obs, alive)
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
    state: np.ndarray  # (T, N, S) float32
    action_mask: np.ndarray  # (T, N, A, K) bool, True = legal
    agent_mask: np.ndarray  # (T, N, A) bool, True = alive
    action: np.ndarray  # (T, N, A) int64
    log_prob: np.ndarray  # (T, N, A) float32, of the policy that acted
    reward: np.ndarray  # (T, N, A) float32
    done: np.ndarray  # (T, N, A) bool, the episode ended with this step


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


@torch.no_grad()
def collect(agent: Agent, envs: MultiAgentVectorEnv, start, rollout: Rollout, args: Args, run: Run):
    """Step the environments for one rollout from `start`, the (obs, info) before it; returns the (obs, info) after it.

    Values are not needed meanwhile: they follow for the whole rollout in one batch.
    """
    actor, noise = as_numpy(agent.actor), gumbel_noise(*rollout.action_mask.shape)
    logits = np.empty_like(noise)  # (T, N, A, K)
    obs, info = start
    for t in range(args.num_steps):
        rollout.obs[t], rollout.state[t] = obs, info["state"]
        rollout.action_mask[t], rollout.agent_mask[t] = info["action_mask"], info["agent_mask"]
        if args.normalize_state:  # detail mappo-9: before the values, or PopArt begins with huge ones
            agent.state_stats.update(*to_tensors(agent, info["state"][:, None]))
        logits[t] = np.where(info["action_mask"], actor(obs), -1e8)
        rollout.action[t] = (logits[t] + noise[t]).argmax(-1)

        obs, reward, termination, truncation, info = envs.step(rollout.action[t])
        alive = rollout.agent_mask[t]
        # Death is no end: the dead of a team earn what each of the living does. Rewards of an agent's own end with it.
        of_living = (reward * alive).sum(1, keepdims=True) / alive.sum(1, keepdims=True).clip(1)
        rollout.reward[t] = np.where(alive, reward, of_living if envs.team_reward else 0)
        rollout.done[t] = (termination | truncation)[:, None]
        if "_episode" in info:
            run.log_episodes(info)
            cut = np.flatnonzero(truncation & ~termination)
            if args.time_limit_bootstrap and len(cut):
                final = (info[key][cut] for key in ("final_state", "final_obs", "final_agent_mask"))
                rollout.reward[t, cut] += args.gamma * agent.value(*to_tensors(agent, *final)).cpu().numpy()
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
    state: torch.Tensor  # (R, S)
    action_mask: torch.Tensor  # (R, A, K)
    alive: torch.Tensor  # (R, A) 1.0 for living agents, 0.0 for the rest
    action: torch.Tensor  # (R, A)
    log_prob: torch.Tensor  # (R, A) of the policy that acted
    advantage: torch.Tensor  # (R, A) normalised
    return_: torch.Tensor  # (R, A) normalised if the values are
    value: torch.Tensor  # (R, A) likewise


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, next_obs: np.ndarray, next_info: dict, args: Args) -> Batch:
    """Values, advantages and returns of a rollout; next_obs and next_info are what its last step gave."""
    device = next(agent.parameters()).device
    rows = Rollout(*(torch.tensor(x, device=device).flatten(0, 1) for x in rollout))  # (T * N, ...), copies
    alive = rows.agent_mask.float()
    value = agent.value(rows.state, rows.obs, alive)
    next_value = agent.value(*to_tensors(agent, next_info["state"], next_obs, next_info["agent_mask"])).cpu().numpy()
    values = value.view(rollout.reward.shape).cpu().numpy()
    advantage = gae(rollout.reward, values, next_value, rollout.done, args.gamma, args.gae_lambda)
    advantage = torch.from_numpy(advantage.astype(np.float32)).to(device).flatten(0, 1)  # float64 so far
    return_ = advantage + value
    if agent.value_stats is not None:  # the critic learns normalised returns, and is compared with normalised values
        agent.value_stats.update(return_, agent.critic[-1])  # detail mappo-1: PopArt
        return_, value = (agent.value_stats.normalize(x[..., None]).squeeze(-1) for x in (return_, value))
    if args.norm_adv:  # detail mappo-6: advantages are normalised over the rollout, not per minibatch
        advantage = advantage - agent.mean(advantage, alive)
        advantage = advantage / (agent.mean(advantage.square(), alive).sqrt() + 1e-8)
    return Batch(rows.obs, rows.state, rows.action_mask, alive, rows.action, rows.log_prob, advantage, return_, value)


def ratio_of_others(log_ratio: torch.Tensor, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the other agents' ratios and its clipped form g, (R, A); log_ratio (R, A) is 0 for the dead."""
    low, high = 1 - args.inner_clip_coef, 1 + args.inner_clip_coef
    log_product = log_ratio.sum(1, keepdim=True) - log_ratio
    product = log_product.exp()
    if args.clip_separately:
        # by what each clip takes off, so that rounding changes no product of ratios of which none is clipped
        excess = log_ratio - torch.clamp(log_ratio, math.log(low) if low > 0 else -math.inf, math.log(high))
        return product, (log_product - (excess.sum(1, keepdim=True) - excess)).exp()
    return product, torch.clamp(product, low, high)  # detail coppo-2: double clipping, this is the inner one


@compilable
def actor_loss(agent: Agent, batch: Batch, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of the actors, summed over those that share no parameter, and diagnostics by name.

    A diagnostic is the mean over the networks.
    """
    log_probs = agent.logits(batch.obs, batch.action_mask).log_softmax(-1)
    log_prob = log_probs.gather(-1, batch.action[..., None]).squeeze(-1)
    log_ratio = (log_prob - batch.log_prob) * batch.alive  # detail ippo-4: the dead add nothing; their ratio is 1
    ratio = log_ratio.exp()
    if args.objective == "equation":
        product, g = ratio_of_others(log_ratio.detach(), args)
        unclipped = inner = g * ratio  # detail coppo-1: the others' ratios weigh an agent's own
    else:  # detail coppo-4: the objective of the authors' code
        product, g = ratio_of_others(log_ratio, args)
        unclipped, inner = product * ratio, g * ratio
    outer = torch.clamp(inner, 1 - args.clip_coef, 1 + args.clip_coef)
    surrogate = torch.min(batch.advantage * unclipped, batch.advantage * outer)
    policy_loss = -agent.mean(surrogate, batch.alive)
    entropy = agent.mean(-(log_probs.exp() * log_probs).sum(-1), batch.alive)

    loss = (policy_loss - args.ent_coef * entropy).sum()
    with torch.no_grad():
        spread = (product - agent.mean(product, batch.alive)).square()
        stats = {
            "policy_loss": policy_loss.mean(),
            "entropy": entropy.mean(),
            "approx_kl": agent.mean(ratio - 1 - log_ratio, batch.alive).mean(),
            "outer_clipfrac": agent.mean((inner != outer).float(), batch.alive).mean(),
            "inner_clipfrac": agent.mean((product != g).float(), batch.alive).mean(),
            "ratio_product_var": agent.mean(spread, batch.alive).mean(),
        }
    return loss, stats


@compilable
def critic_loss(agent: Agent, batch: Batch, args: Args) -> torch.Tensor:
    """The loss (1,) or (A,) of each critic."""
    new_value = agent.normalized_value(batch.state, batch.obs, batch.alive)
    delta = args.huber_delta or float("inf")
    value_error = F.huber_loss(new_value, batch.return_, reduction="none", delta=delta)  # detail mappo-4: Huber loss
    if args.value_clip_coef > 0:  # detail mappo-5: the larger of the errors with and without clipping
        clipped_value = batch.value + torch.clamp(new_value - batch.value, -args.value_clip_coef, args.value_clip_coef)
        clipped_error = F.huber_loss(clipped_value, batch.return_, reduction="none", delta=delta)
        value_error = torch.max(value_error, clipped_error)
    # Dead agents count here: what follows their death is what it was worth.
    return agent.mean(value_error, torch.ones_like(batch.alive))


def update(agent: Agent, actors: Networks, optimizer: torch.optim.Optimizer, batch: Batch, args: Args) -> dict:
    """Several epochs of minibatch steps on one rollout; returns the mean diagnostics."""
    num_rows = len(batch.action)
    learned = [p for p in agent.actor.parameters() if p.requires_grad]
    all_stats = []
    for _ in range(args.update_epochs):
        minibatches = [batch]
        if args.num_minibatches > 1:  # detail mappo-8: the agents of a step stay together
            order = torch.randperm(num_rows, device=batch.action.device)
            parts = [x[order].split(num_rows // args.num_minibatches) for x in batch]
            minibatches = map(Batch._make, zip(*parts))
        for minibatch in minibatches:
            value_loss = critic_loss(agent, minibatch, args)
            norms = {}
            # detail coppo-3: one actor after another, with the others' newest ratios (Algorithm 1)
            for turn in range(len(actors)):
                loss, stats = actor_loss(agent, minibatch, args)
                optimizer.zero_grad()
                if turn == 0:  # everything but the actors steps once: with the first of them
                    (loss + value_loss.sum()).backward()
                elif learned:  # none, if a copy freezes the actors
                    loss.backward(inputs=learned)
                norms |= clip_grads_(agent, args.max_grad_norm)  # detail mappo-7: actor and critic apart
                actors.take_gradients(active=[turn])
                optimizer.step()
                gradients = {"actor_gradients": norms["actor"], "critic_gradients": norms["critic"]}
                all_stats.append(stats | {"value_loss": value_loss.detach().mean()} | gradients)
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
    actors = Networks(agent.actor, 1 if args.share_parameters else envs.num_agents)
    of_actor, of_critic = set(agent.actor.parameters()), set(agent.critic.parameters())
    message = "the actor and the critic have a parameter in common: with CoPPO, where one actor steps after another"
    check(not of_actor & of_critic, f"{message}, they must have none")
    others = [p for p in agent.parameters() if p not in of_actor | of_critic]  # what a copy adds learns with the actors
    groups = [
        {"params": [*(p for actor in actors for p in actor), *others], "lr": args.learning_rate},
        {"params": list(agent.critic.parameters()), "lr": args.critic_learning_rate},
    ]
    optimizer = torch.optim.Adam(groups, eps=1e-5, fused=True)
    T, N, A, K = args.num_steps, args.num_envs, *envs.real_actions.shape
    rollout = Rollout(
        obs=np.zeros((T, N, *envs.single_observation_space.shape), envs.single_observation_space.dtype),
        state=np.zeros((T, N, *envs.single_state_space.shape), envs.single_state_space.dtype),
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
            if args.anneal_lr:
                remaining = 1 - iteration / num_updates
                optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
                optimizer.param_groups[1]["lr"] = args.critic_learning_rate * remaining

            now = collect(agent, envs, now, rollout, args, run)
            run.step += steps_per_update
            batch = estimate(agent, rollout, *now, args)
            metrics = update(agent, actors, optimizer, batch, args)
            run.log(metrics | {"train/learning_rate": optimizer.param_groups[0]["lr"]})
            if run.evaluation_due:
                run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
