"""Decomposed policy gradients (DOP): actors that climb a critic which is a weighted sum of what each agent does.

The critic of a joint action is linear in the agents' own critics, Q_tot = sum_i k_i(s) Q_i(s, a_i) + b(s) with weights
k_i >= 0, all of which see the global state. So the gradient of the team's value is a sum of one term for each agent,
k_i(s) grad log pi_i(a_i) Q_i(s, a_i), in which what the others do, or explore, is no noise. For the same reason the
expectation over joint actions is one over each agent's own, which makes tree backup affordable: the critic learns from
replayed episodes, off-policy, and from the latest ones by TD(lambda), on-policy. Then the actor takes a step on the
latest episodes. Actors explore with a share of uniformly random actions, which are part of their policy. All agents
have one actor and one critic, which tell them apart by a one-hot id. Where rewards are individual, the team learns
their mean.

Papers: Wang et al. 2021 (arXiv:2007.12322); Precup et al. 2000, "Eligibility traces for off-policy policy evaluation".
Parent: vdn.py, whose sum becomes the critic of actors, which learn from it as those of coma.py do.
"""

import copy
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from cleanmarl.cli import NonNegativeInt, PositiveFloat, PositiveInt, RunArgs, UnitFloat, check, launch, set_up
from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.layers import AgentIds, StackedLinear, as_numpy
from cleanmarl.run import EVAL_SEED, Run, check_replay_size

import numpy as np
import torch
import torch.nn as nn
from annotated_types import Interval


@dataclass
class Args(RunArgs):
    eval_episodes: int = 100
    save_buffer: bool = True
    """keep the replay buffer in checkpoints; without it a resumed run fills a new one first"""
    log_every: PositiveInt = 10
    """episodes between two points of the curves"""
    eval_steps: NonNegativeInt = 50
    """episodes between two evaluations, with the most probable actions in separate environments; 0 for none"""
    num_eval_ep: PositiveInt = 5
    """episodes of each of these evaluations"""
    env_id: str = "mpe/simple_spread_v3"
    """family/name of a multi-agent environment with discrete actions"""
    total_timesteps: PositiveInt = 1_000_000
    """environment steps of the whole run, however many agents act in each; the last episodes are played to their end"""

    agent_ids: bool = True
    """add a one-hot id to the observation: without it the agents' common networks cannot tell them apart"""
    num_envs: PositiveInt = 4
    """N, environments stepped side by side"""
    gamma: UnitFloat = 0.99
    """discount factor"""
    kappa: UnitFloat = 0.5
    """weight of the critic's off-policy loss; that of the on-policy one is 1 - kappa"""
    tb_lambda: UnitFloat = 0.93
    """lambda of tree backup, the critic's off-policy targets"""
    td_lambda: UnitFloat = 0.8
    """lambda of TD(lambda), the critic's on-policy targets"""
    epsilon_start: Annotated[float, Interval(ge=0, lt=1)] = 0.5
    """share of uniformly random actions at the start"""
    epsilon_end: Annotated[float, Interval(ge=0, lt=1)] = 0.05
    """share of uniformly random actions from --epsilon-timesteps on"""
    epsilon_timesteps: PositiveInt = 50_000
    """environment steps over which that share falls linearly"""
    buffer_size: PositiveInt = 5000
    """episodes in the replay buffer"""
    batch_size: PositiveInt = 32
    """episodes of the buffer in a batch of the off-policy part"""
    on_policy_episodes: PositiveInt = 16
    """latest episodes, which are the batch of the on-policy part and of the actor"""
    actor_hidden_dim: PositiveInt = 64
    """units of a hidden layer of the actor"""
    actor_num_layers: NonNegativeInt = 1
    """hidden layers of the actor after the first one"""
    critic_hidden_dim: PositiveInt = 128
    """units of a hidden layer of the critic"""
    critic_num_layers: NonNegativeInt = 1
    """hidden layers of the critic after the first one"""
    mixing_hidden_dim: PositiveInt = 32
    """units of the hidden layer of the weights k and of b"""
    epochs: PositiveInt = 4
    """steps of the critic after each round of N episodes, each with a batch of its own; then the actor takes one"""
    learning_rate_actor: PositiveFloat = 5e-4
    """learning rate of the actor's Adam"""
    learning_rate_critic: PositiveFloat = 5e-4
    """learning rate of the critic's Adam"""
    target_network_update_freq: PositiveInt = 1
    """steps of the critic between two steps of its target network"""
    polyak: Annotated[float, Interval(gt=0, le=1)] = 0.01
    """how far a step takes the target network towards the other; 1 for a copy"""
    clip_gradients: float = 10.0
    """largest norm of a network's gradient; 0 or less for any"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run, with discrete actions."""
    return make(args.env_id, num_envs, discrete=True, **options)


class Agent(nn.Module):
    """The policy of all agents: one network that sees an agent's observation and its one-hot id."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        (A, K), hidden = envs.real_actions.shape, args.actor_hidden_dim
        obs_size = envs.single_observation_space.shape[-1] + (A if args.agent_ids else 0)
        layers = [AgentIds(A) if args.agent_ids else nn.Identity(), nn.Linear(obs_size, hidden), nn.ReLU()]
        for _ in range(args.actor_num_layers):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        self.actor = nn.Sequential(*layers, nn.Linear(hidden, K))
        # the share of random actions, which `main` sets anew: what is loaded plays without
        self.register_buffer("epsilon", torch.zeros(()), persistent=False)

    def logits(self, obs: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, A, K) of the policies that act, illegal ones far below; obs (B, T, A, D), mask (B, T, A, K)."""
        logits = self.actor(obs.flatten(0, 1)).view(action_mask.shape).masked_fill(~action_mask, -1e8)
        if self.epsilon > 0:  # detail dop-6: with their share of random actions
            uniform = action_mask / action_mask.sum(-1, keepdim=True).clamp(min=1)
            probs = (1 - self.epsilon) * logits.softmax(-1) + self.epsilon * uniform
            # illegal actions have probability 0, whose log would make gradients NaN
            logits = probs.clamp(min=1e-30).log()
        return logits


class Critic(nn.Module):
    """The team's value of a joint action, linear in the values of each agent's own action."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        (A, K), S, hidden = envs.real_actions.shape, envs.state_size, args.critic_hidden_dim
        obs_size = envs.single_observation_space.shape[-1] + (A if args.agent_ids else 0)
        layers = [AgentIds(A) if args.agent_ids else nn.Identity(), StackedLinear(1, S + obs_size, hidden), nn.ReLU()]
        for _ in range(args.critic_num_layers):
            layers += [StackedLinear(1, hidden, hidden), nn.ReLU()]
        self.critic = nn.Sequential(*layers, StackedLinear(1, hidden, K))
        self.k, self.b = (
            nn.Sequential(nn.Linear(S, args.mixing_hidden_dim), nn.ReLU(), nn.Linear(args.mixing_hidden_dim, size))
            for size in (A, 1)
        )
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))  # here, so that checkpoints have it

    def values(self, state: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
        """Q_i(s, a) (B, T, A, K) of each agent's actions, legal or not; state (B, T, S), obs (B, T, A, D)."""
        return self.critic((state.flatten(0, 1)[:, None], obs.flatten(0, 1))).unflatten(0, obs.shape[:2])

    def weights(self, state: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        """k_i(s) (B, T, A), those of the dead 0; state (B, T, S), alive (B, T, A)."""
        return self.k(state).abs() * alive  # detail dop-1: weights are not negative

    def mix(self, q: torch.Tensor, state: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        """Q_tot (B, T, 1) where an agent's action is worth q (B, T, A); state (B, T, S), alive (B, T, A)."""
        return (self.weights(state, alive) * q).sum(-1, keepdim=True) + self.b(state)  # detail dop-1: linear critic


def of_action(values: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """The entries (B, T, A) of values (B, T, A, K) at action (B, T, A)."""
    return values.gather(-1, action[..., None]).squeeze(-1)


def gumbel_noise(*shape: int) -> np.ndarray:
    """Noise that makes argmax(logits + noise) a sample of softmax(logits): -log of exponential noise."""
    return -torch.empty(shape).exponential_().log().numpy()


def make_policy(agent: Agent, greedy: bool = True):
    """The agents as a function of (obs, info, done) for `evaluate`: their most probable legal actions, or samples.

    The samples are without the share of random actions that the agents explore with.
    """
    actor = as_numpy(agent.actor)

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        logits = actor(obs)
        noise = 0 if greedy else gumbel_noise(*logits.shape)
        return np.where(info["action_mask"], logits + noise, -np.inf).argmax(-1)

    return policy


class Batch(NamedTuple):
    """B episodes, padded to the longest, of T steps, as the networks learn from them; without the B, one in NumPy.

    What is observed has one more row: what came after the last step.
    """

    obs: torch.Tensor  # (B, T + 1, A, D)
    state: torch.Tensor  # (B, T + 1, S)
    action_mask: torch.Tensor  # (B, T + 1, A, K) bool, True = legal
    alive: torch.Tensor  # (B, T + 1, A) bool, True for living agents; False for all after a termination, and in padding
    action: torch.Tensor  # (B, T, A) int64
    reward: torch.Tensor  # (B, T, 1) of the team
    weight: torch.Tensor  # (B, T, 1) 1.0, and 0.0 in padding
    goes_on: torch.Tensor  # (B, T, 1) 0.0 where there is no value after the step: a termination, or the last death


class Buffer:
    """The last `buffer_size` episodes, and those that are being played in the N environments."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        self.team_reward = envs.team_reward
        self.episodes = deque(maxlen=args.buffer_size)  # detail vdn-6: whole episodes, the oldest is forgotten
        self.playing = [[] for _ in range(envs.num_envs)]  # the steps so far of each environment's episode

    def add(self, obs, info, action, reward, termination, truncation, next_info) -> None:
        """One step of every environment, action (N, A), and the info after it; see cleanmarl.envs."""
        step = (obs, info["state"], info["action_mask"], info["agent_mask"], action, reward)
        for i, playing in enumerate(self.playing):
            playing.append([x[i].copy() for x in step])
        for i in np.flatnonzero(termination | truncation):
            # detail vdn-7: agents live on after a truncation, as its final mask says, and none after a termination
            survivors = next_info["final_agent_mask"][i] & ~termination[i]
            last = [next_info[key][i] for key in ("final_obs", "final_state", "final_action_mask")]
            self.playing[i].append([*last, survivors, action[i], reward[i]])  # to_episode drops these two
            self.episodes.append(self.to_episode(*map(np.array, zip(*self.playing[i]))))
            self.playing[i] = []

    def to_episode(self, obs, state, action_mask, agent_mask, action, reward) -> Batch:
        """An episode of T steps; arrays (T + 1, ...), agent_mask (T + 1, A) bool, reward (T + 1, A)."""
        alive, survive, action, reward = agent_mask[:-1], agent_mask[1:], action[:-1], reward[:-1]
        reward, weight = reward_of_team(reward, alive, self.team_reward), alive.any(-1, keepdims=True)
        goes_on = weight & survive.any(-1, keepdims=True)
        floats = (x.astype(np.float32) for x in (reward, weight, goes_on))
        return Batch(obs, state, action_mask, agent_mask, action, *floats)

    def sample(self, num_episodes: int, device: torch.device) -> Batch:
        """Episodes drawn with replacement."""
        index = torch.randint(len(self.episodes), (num_episodes,)).tolist()
        return to_batch([self.episodes[i] for i in index], device)

    def latest(self, num_episodes: int, device: torch.device) -> Batch:
        """The last episodes that ended."""
        return to_batch(list(self.episodes)[-num_episodes:], device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The episodes, one after the other. Those being played go with the environments: see `run.start`."""
        lengths = np.array([[len(x) for x in episode] for episode in self.episodes], np.int64)  # of each field
        state = {"lengths": lengths} | dict(zip(Batch._fields, map(np.concatenate, zip(*self.episodes))))
        return {key: torch.from_numpy(x) for key, x in state.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        lengths, *fields = (x.numpy() for x in state.values())
        for episode in zip(*(np.split(x, np.cumsum(rows)[:-1]) for x, rows in zip(fields, zip(*lengths), strict=True))):
            self.episodes.append(Batch(*(x.copy() for x in episode)))  # a view would keep the memory of all


def to_batch(episodes: list[Batch], device: torch.device) -> Batch:
    """Episodes side by side, tensors (B, ...)."""
    return Batch(*(torch.from_numpy(padded(x)).to(device) for x in zip(*episodes)))


def padded(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """B arrays (T, ...) as one (B, T, ...), with zeros after the shorter ones."""
    x = np.zeros((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(x, arrays):
        row[: len(array)] = array
    return x


def reward_of_team(reward: np.ndarray, alive: np.ndarray, team_reward: bool) -> np.ndarray:
    """What the team earns (..., 1): what each of its living agents does, else the mean of what all A have of their own.

    reward, alive (..., A). The mean of the living alone would rise with the death of an agent that earns little.
    """
    earners = alive.sum(-1, keepdims=True).clip(1) if team_reward else alive.shape[-1]
    return (reward * alive).sum(-1, keepdims=True) / earners


def collect(agent: Agent, envs: MultiAgentVectorEnv, now, buffer: Buffer, run: Run):
    """Play on to the next multiple of N episodes, from `now`, the (obs, info) before it; returns that after it."""
    actor = as_numpy(agent.actor)
    goal = (run.num_episodes // envs.num_envs + 1) * envs.num_envs
    obs, info = now
    while run.num_episodes < goal:
        at_random = torch.rand(*info["agent_mask"].shape, 1).numpy() < agent.epsilon.item()
        logits = np.where(at_random, 0, actor(obs)) + gumbel_noise(*info["action_mask"].shape)
        action = np.where(info["action_mask"], logits, -np.inf).argmax(-1)
        next_obs, reward, termination, truncation, next_info = envs.step(action)
        buffer.add(obs, info, action, reward, termination, truncation, next_info)
        run.step += envs.num_envs
        if "_episode" in next_info:
            run.log_episodes(next_info, buffer.episodes)  # looked through for NaN
        obs, info = next_obs, next_info
    return obs, info


def lambda_return(batch: Batch, taken, following, trace, gamma: float, lambda_: float) -> torch.Tensor:
    """Targets y_t = r_t + gamma [following_t + lambda trace_t+1 (y_t+1 - taken_t+1)], cut where an episode ended.

    taken, following, trace (B, T, 1): the value of the joint action of a step, that of what comes after it, and how
    much of the surprise at a step counts for those before it.
    """
    surprise = batch.reward + gamma * batch.goes_on * following - taken
    decay = gamma * lambda_ * batch.weight * trace
    steps, decay = surprise.unbind(1), decay.unbind(1)  # a view for each step, made once
    for t in reversed(range(len(steps) - 1)):
        steps[t].addcmul_(decay[t + 1], steps[t + 1])  # +=
    return taken + surprise


@torch.no_grad()
def critic_targets(agent: Agent, target_critic: Critic, batch: Batch, on_policy: bool, args: Args) -> torch.Tensor:
    """What the critic learns (B, T, 1) from the latest episodes, on-policy, or from those of the buffer."""
    log_probs = agent.logits(batch.obs, batch.action_mask).log_softmax(-1)
    q = target_critic.values(batch.state, batch.obs)
    # detail dop-3: as the critic is linear, its mean over joint actions is that of each agent's mean over its own
    expected = target_critic.mix((log_probs.exp() * q).sum(-1), batch.state, batch.alive)[:, 1:]  # (B, T, 1)
    state, alive = batch.state[:, :-1], batch.alive[:, :-1]
    taken = target_critic.mix(of_action(q[:, :-1], batch.action), state, alive)  # (B, T, 1)
    if on_policy:  # detail dop-4: TD(lambda) with the next action that was taken; after the last one, with the mean
        following = torch.where(batch.weight[:, 1:] > 0, taken[:, 1:], expected[:, :-1])
        following = torch.cat([following, expected[:, -1:]], dim=1)  # (B, T, 1)
        return lambda_return(batch, taken, following, torch.ones_like(taken), args.gamma, args.td_lambda)
    # detail dop-3: tree backup goes on as far as the policy would have done the same
    log_prob = of_action(log_probs[:, :-1], batch.action) * alive  # the dead choose nothing
    trace = log_prob.sum(-1, keepdim=True).exp()
    return lambda_return(batch, taken, expected, trace, args.gamma, args.tb_lambda)


def critic_loss(critic: Critic, batch: Batch, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error of the values of the joint actions taken."""
    state, alive = batch.state[:, :-1], batch.alive[:, :-1]
    taken = of_action(critic.values(state, batch.obs[:, :-1]), batch.action)
    error = critic.mix(taken, state, alive) - target
    # detail vdn-6: padding weighs nothing
    return (error.square() * batch.weight).sum() / batch.weight.sum().clamp(min=1)


def actor_loss(agent: Agent, critic: Critic, batch: Batch) -> torch.Tensor:
    """Its gradient is minus the decomposed policy gradient, E[sum_i k_i(s) grad log pi_i(a_i) (Q_i(s, a_i) - V_i(s))].

    The baseline V_i(s), the mean of Q_i under the policy, changes no expectation and lessens the variance.
    """
    state, obs = batch.state[:, :-1], batch.obs[:, :-1]
    log_probs = agent.logits(obs, batch.action_mask[:, :-1]).log_softmax(-1)
    with torch.no_grad():
        q, k = critic.values(state, obs), critic.weights(state, batch.alive[:, :-1])
        advantage = of_action(q, batch.action) - (log_probs.exp() * q).sum(-1)  # detail dop-5: the agent's own baseline
    # detail dop-2: the gradient is a sum over agents, each with its weight
    gain = (k * advantage * of_action(log_probs, batch.action)).sum(-1, keepdim=True)
    return -(gain * batch.weight).sum() / batch.weight.sum().clamp(min=1)


def descend(loss: torch.Tensor, network: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """One step of the network down the gradient of the loss; returns its norm before clipping."""
    optimizer.zero_grad()
    if loss.requires_grad:  # not if a copy freezes the network
        loss.backward()
    norm = nn.utils.clip_grad_norm_(network.parameters(), max_norm if max_norm > 0 else math.inf)
    optimizer.step()
    return norm


def update(agent: Agent, critic: Critic, target_critic: Critic, optimizers, buffer: Buffer, args: Args) -> dict:
    """Some steps of the critic, then one of the actor; optimizers are those of (actor, critic)."""
    device = next(agent.parameters()).device
    losses, norms = [], []
    latest = buffer.latest(args.on_policy_episodes, device)
    for _ in range(args.epochs):
        replayed = buffer.sample(args.batch_size, device)
        on_policy_loss = critic_loss(critic, latest, critic_targets(agent, target_critic, latest, True, args))
        off_policy_loss = critic_loss(critic, replayed, critic_targets(agent, target_critic, replayed, False, args))
        # detail dop-4: the critic learns off-policy and on-policy
        loss = args.kappa * off_policy_loss + (1 - args.kappa) * on_policy_loss
        norms.append(descend(loss, critic, optimizers[1], args.clip_gradients))
        losses.append(loss.detach())
        critic.num_updates += 1
        if critic.num_updates % args.target_network_update_freq == 0:
            soft_update(target_critic, critic, args.polyak)
    loss = actor_loss(agent, critic, latest)
    norm = descend(loss, agent, optimizers[0], args.clip_gradients)
    return {
        "train/critic_loss": torch.stack(losses).mean(),
        "train/critic_gradients": torch.stack(norms).mean(),
        "train/actor_loss": loss.detach(),
        "train/actor_gradients": norm,
        "train/num_updates": critic.num_updates,
    }


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, polyak: float) -> None:
    """Move the target's parameters the share `polyak` of the way to the network's; its buffers become the network's."""
    for ours, theirs in zip(target.parameters(), network.parameters()):
        ours.lerp_(theirs, polyak)  # detail vdn-5: the target follows slowly
    for ours, theirs in zip(target.buffers(), network.buffers()):
        ours.copy_(theirs)


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    most = max(args.batch_size, args.on_policy_episodes)
    message = f"--buffer-size {args.buffer_size} is less than the {most} episodes of a batch"
    check(most <= args.buffer_size, f"{message}; raise it, or lower --batch-size and --on-policy-episodes")
    device = set_up(args)
    envs, eval_envs = make_envs(args, args.num_envs), make_envs(args, args.num_eval_ep)

    agent, critic = Agent(envs, args).to(device), Critic(envs, args).to(device)
    target_critic = copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate_actor, fused=True)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.learning_rate_critic, fused=True)
    check_replay_size(envs, args)
    buffer = Buffer(envs, args)

    modules = {"agent": agent, "critic": critic, "target_critic": target_critic}
    modules |= {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    modules |= {"buffer": buffer} if args.save_buffer else {}
    with Run(args, __file__, **modules) as run:
        *now, buffer.playing = run.start(envs, buffer.playing)
        metrics = {}
        while run.step < args.total_timesteps:
            num_episodes = run.num_episodes
            progress = min(run.step / args.epsilon_timesteps, 1)
            agent.epsilon.fill_(args.epsilon_start + progress * (args.epsilon_end - args.epsilon_start))
            now = collect(agent, envs, now, buffer, run)
            if len(buffer.episodes) >= most:
                metrics = update(agent, critic, target_critic, (actor_optimizer, critic_optimizer), buffer, args)
                metrics["train/epsilon"] = agent.epsilon.item()
            if args.eval_steps and run.num_episodes // args.eval_steps > num_episodes // args.eval_steps:
                seed = args.seed + EVAL_SEED + run.num_episodes
                run.write(run.play(eval_envs, make_policy(agent), args.num_eval_ep, seed))
            is_due = run.num_episodes // args.log_every > num_episodes // args.log_every
            run.log(metrics, is_due or run.step >= args.total_timesteps)
            if run.evaluation_due:
                run.evaluate(make_envs, make_policy(agent), num_envs=args.num_eval_ep)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_eval_ep)
    envs.close()
    eval_envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
