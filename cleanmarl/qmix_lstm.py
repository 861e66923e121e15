"""QMIX as in qmix.py, but the network is recurrent: it remembers what an agent no longer observes, as in the paper.

A network values every action of an agent, given what the agent has observed and done. A second one mixes the values of
the agents' actions into the team's, and its weights are the outputs of hypernetworks that see the global state; their
absolute values are taken, so that the team's value rises with each agent's, and every agent finds its part of the best
joint action alone. The mixed value learns the team's return by temporal differences, from whole episodes of a replay
buffer, with a target network. All agents have one network, which tells them apart by a one-hot id; the dead count as 0.
Where rewards are individual, the team learns their mean. Batches are whole episodes, which
both networks replay from the first observation on, and gradients go back to it.

An environment that ends an episode starts the next one at once, with an empty memory, while the others go on with
theirs: none of them waits, and none sees another's memory.

Papers: Rashid et al. 2018 (arXiv:1803.11485); Hausknecht and Stone 2015 (arXiv:1507.06527); van Hasselt et al. 2016
(arXiv:1509.06461), "Deep reinforcement learning with double Q-learning". Parent: qmix.py, with memory as in
maddpg_lstm_multienvs.py.
"""

import copy
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cleanmarl.cli import NonNegativeInt, PositiveFloat, PositiveInt, RunArgs, UnitFloat, check, launch, set_up
from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.layers import AgentIds, Recurrent, RunningMeanStd, as_numpy
from cleanmarl.run import EVAL_SEED, Run, check_replay_size

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from annotated_types import Interval


@dataclass
class Args(RunArgs):
    eval_episodes: int = 100
    save_buffer: bool = True
    """keep the replay buffer in checkpoints; without it a resumed run fills a new one first"""
    log_every: PositiveInt = 10
    """episodes between two points of the curves"""
    eval_steps: NonNegativeInt = 50
    """episodes between two evaluations, with the most valuable actions in separate environments; 0 for none"""
    num_eval_ep: PositiveInt = 5
    """episodes of each of these evaluations"""
    env_id: str = "mpe/simple_spread_v3"
    """family/name of a multi-agent environment with discrete actions"""
    total_timesteps: PositiveInt = 1_000_000
    """environment steps of the whole run, however many agents act in each; the last episodes are played to their end"""

    agent_ids: bool = True
    """add a one-hot id to the observation: without it the agents' common network cannot tell them apart"""
    num_envs: PositiveInt = 16
    """N, environments stepped side by side"""
    gamma: UnitFloat = 0.95
    """discount factor"""
    td_lambda: UnitFloat = 0.6
    """lambda of the targets, Peng's Q(lambda) along the episode; 0 for those of one step"""
    double_q: bool = True
    """the network chooses the next actions that the target network values; else the target network does both"""
    epsilon_start: UnitFloat = 1.0
    """share of uniformly random actions at the start"""
    epsilon_end: UnitFloat = 0.05
    """share of uniformly random actions from --epsilon-timesteps on"""
    epsilon_timesteps: PositiveInt = 200_000
    """environment steps over which that share falls linearly"""
    buffer_size: PositiveInt = 5000
    """episodes in the replay buffer"""
    batch_size: PositiveInt = 32
    """episodes in a batch"""
    normalize_reward: bool = False
    """normalise rewards by the mean and the deviation of those in the replay buffer"""
    hidden_dim: PositiveInt = 64
    """units of a hidden layer"""
    num_layers: PositiveInt = 1
    """recurrent layers, after the first, linear one"""
    cell: Literal["gru", "lstm"] = "gru"
    """kind of the recurrent layers"""
    mixing_dim: PositiveInt = 32
    """units of the mixing network's hidden layer"""
    hyper_dim: PositiveInt = 64
    """units of the hidden layer of the hypernetworks, which make the mixing network's weights from the state"""
    epochs: PositiveInt = 4
    """gradient updates after each round of N episodes, each with a batch of its own"""
    optimizer: Literal["Adam", "RMSprop"] = "Adam"
    """optimizer of the network; RMSprop with smoothing 0.99, as in PyMARL"""
    learning_rate: PositiveFloat = 3e-4
    """learning rate"""
    target_network_update_freq: PositiveInt = 1
    """updates between two steps of the target network"""
    polyak: Annotated[float, Interval(gt=0, le=1)] = 0.005
    """how far a step takes the target network towards the other; 1 for a copy"""
    clip_gradients: float = 10.0
    """largest norm of the gradient; 0 or less for any"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run, with discrete actions."""
    return make(args.env_id, num_envs, discrete=True, **options)


class Mixer(nn.Module):
    """The team's value from the agents' values: a network whose weights, none of them negative, depend on the state."""

    def __init__(self, num_agents: int, state_size: int, hidden: int, hyper: int):
        super().__init__()
        # detail qmix-2: hypernetworks make weights and biases from the state
        self.weight1 = nn.Sequential(nn.Linear(state_size, hyper), nn.ReLU(), nn.Linear(hyper, num_agents * hidden))
        self.weight2 = nn.Sequential(nn.Linear(state_size, hyper), nn.ReLU(), nn.Linear(hyper, hidden))
        self.bias1 = nn.Linear(state_size, hidden)
        self.bias2 = nn.Sequential(nn.Linear(state_size, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, q: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Values (B, T, 1) of the agents' values q (B, T, A) in a state (B, T, S)."""
        # detail qmix-1: no weight is negative, so the team's value rises with each agent's
        weight1 = self.weight1(state).abs().unflatten(-1, (q.shape[-1], -1))  # (B, T, A, H)
        weight2 = self.weight2(state).abs()  # (B, T, H)
        hidden = F.elu((q[..., None] * weight1).sum(-2) + self.bias1(state))
        return (hidden * weight2).sum(-1, keepdim=True) + self.bias2(state)


class Agent(nn.Module):
    """The values of all agents' actions, one network that sees what an agent has observed and done, and their mixer."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        (A, K), hidden = envs.real_actions.shape, args.hidden_dim
        self.num_actions, obs_size = K, envs.single_observation_space.shape[-1] + K + (A if args.agent_ids else 0)
        layers = [AgentIds(A) if args.agent_ids else nn.Identity(), nn.Linear(obs_size, hidden), nn.ReLU()]
        for _ in range(args.num_layers):
            layers += [Recurrent.CELLS[args.cell](1, hidden, hidden)]
        self.q_network = Recurrent(*layers, nn.Linear(hidden, K))
        self.mixer = Mixer(A, envs.state_size, args.mixing_dim, args.hyper_dim)
        self.state_stats = RunningMeanStd(1, envs.state_size)
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))  # here, so that checkpoints have it

    def values(self, batch: "Batch") -> torch.Tensor:
        """Values (B, T + 1, A, K) of all actions, legal or not; who comes back from death remembers nothing."""
        B, A = len(batch.obs), batch.obs.shape[2]
        one_hot = F.one_hot(batch.action, self.num_actions) * batch.alive[:, :-1, :, None]
        last_action = F.pad(one_hot, (0, 0, 0, 0, 1, 0))  # (B, T + 1, A, K): none before the first step
        x = torch.cat([batch.obs, last_action], dim=-1)  # detail recurrent-3: they see what they did last
        memory, alive = x.new_zeros(B, A, self.q_network.memory_size), batch.alive
        comes_back = (alive[:, 1:] > alive[:, :-1]).any()  # if nobody does, torch's own, faster LSTM is enough
        forget = ~alive.swapaxes(0, 1).flatten(0, 1) if comes_back else None
        q, _ = self.q_network(x.swapaxes(0, 1).flatten(0, 1), memory, forget, last=True)  # ((T + 1) * B, A, K)
        return q.unflatten(0, (-1, B)).swapaxes(0, 1)

    def mix(self, q: torch.Tensor, alive: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The team's value (B, T, 1) of a joint action, of whose parts q (B, T, A) those of the dead count as 0."""
        return self.mixer(q * alive, state)


def act(q: np.ndarray, action_mask: np.ndarray, epsilon: float) -> np.ndarray:
    """Actions (N, A): the most valuable legal ones, the share `epsilon` of them any legal ones; q, mask (N, A, K)."""
    explores = torch.rand(q.shape[:2]).numpy() < epsilon
    preferred = np.where(explores[..., None], torch.rand(action_mask.shape).numpy(), q)  # detail vdn-2: epsilon-greedy
    return np.where(action_mask, preferred, -np.inf).argmax(-1)


def first_memory(agent: Agent, num_envs: int, num_agents: int) -> np.ndarray:
    """Of each agent its last action and what the network remembers, (N, A, K + H), before anything was seen or done.

    H is the memory_size of the network: the units of its recurrent layers, or twice as many for LSTMs.
    """
    return np.zeros((num_envs, num_agents, agent.num_actions + agent.q_network.memory_size), np.float32)


def look(agent: Agent, q_network, obs: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values (N, A, K) of all actions and what to remember (N, A, H); obs (N, A, D), memory as in `first_memory`."""
    last_action, state = np.split(memory, [agent.num_actions], axis=-1)
    return q_network(np.concatenate([obs, last_action], axis=-1), state)


def remember(agent: Agent, action: np.ndarray, state: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """The memory after an action (N, A), of the form of `first_memory`; state (N, A, H), alive (N, A) bool."""
    memory = np.concatenate([np.eye(agent.num_actions, dtype=np.float32)[action], state], axis=-1)
    memory[~alive] = 0  # detail recurrent-1: the dead forget
    return memory


def make_policy(agent: Agent, greedy: bool = True):
    """The agents as a function of (obs, info, done) for `evaluate`: their most valuable legal actions.

    There is no other way to play without exploration, so `greedy` makes no difference.
    """
    q_network, memory = as_numpy(agent.q_network), None

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        nonlocal memory
        if done.all():  # at the beginning, when the number of environments may be another one
            memory = first_memory(agent, *obs.shape[:2])
        memory[done] = 0
        q, state = look(agent, q_network, obs, memory)
        action = np.where(info["action_mask"], q, -np.inf).argmax(-1)
        memory = remember(agent, action, state, info["agent_mask"])
        return action

    return policy


class Batch(NamedTuple):
    """B episodes, padded to the longest, of T steps, as the network learns from them; without the B, one in NumPy.

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
        self.team_reward, self.normalize_reward = envs.team_reward, args.normalize_reward
        self.episodes = deque(maxlen=args.buffer_size)  # detail vdn-6: whole episodes, the oldest is forgotten
        self.playing = [[] for _ in range(envs.num_envs)]  # the steps so far of each environment's episode
        self.moments = 0.0  # count, sum and sum of squares (3, 1) of all rewards

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
            self.append(self.to_episode(*map(np.array, zip(*self.playing[i]))))
            self.playing[i] = []

    def to_episode(self, obs, state, action_mask, agent_mask, action, reward) -> Batch:
        """An episode of T steps; arrays (T + 1, ...), agent_mask (T + 1, A) bool, reward (T + 1, A)."""
        alive, survive, action, reward = agent_mask[:-1], agent_mask[1:], action[:-1], reward[:-1]
        reward, weight = reward_of_team(reward, alive, self.team_reward), alive.any(-1, keepdims=True)
        goes_on = weight & survive.any(-1, keepdims=True)
        floats = (x.astype(np.float32) for x in (reward, weight, goes_on))
        return Batch(obs, state, action_mask, agent_mask, action, *floats)

    def append(self, episode: Batch) -> None:
        if len(self.episodes) == self.episodes.maxlen:
            self.moments = self.moments - reward_moments(self.episodes[0])
        self.episodes.append(episode)
        self.moments = self.moments + reward_moments(episode)

    def sample(self, batch_size: int, device: torch.device) -> Batch:
        """Episodes drawn with replacement."""
        index = torch.randint(len(self.episodes), (batch_size,)).tolist()
        batch = Batch(*map(padded, zip(*(self.episodes[i] for i in index))))
        if self.normalize_reward:
            mean, std = self.reward_statistics()
            batch = batch._replace(reward=((batch.reward - mean) / (std + 1e-6)).astype(np.float32))
        return Batch(*(torch.from_numpy(x).to(device) for x in batch))

    def reward_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation (1,) of the rewards in the buffer."""
        count, total, squares = self.moments
        mean = total / count.clip(1)
        return mean, np.sqrt((squares / count.clip(1) - mean**2).clip(0))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The episodes, one after the other. Those being played go with the environments: see `run.start`."""
        lengths = np.array([[len(x) for x in episode] for episode in self.episodes], np.int64)  # of each field
        state = {"moments": np.asarray(self.moments), "lengths": lengths}
        state |= dict(zip(Batch._fields, map(np.concatenate, zip(*self.episodes))))
        return {key: torch.from_numpy(x) for key, x in state.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        moments, lengths, *fields = (x.numpy() for x in state.values())
        for episode in zip(*(np.split(x, np.cumsum(rows)[:-1]) for x, rows in zip(fields, zip(*lengths), strict=True))):
            self.append(Batch(*(x.copy() for x in episode)))  # a view would keep the memory of all
        self.moments = moments  # to the last digit: added up in another order they would differ


def padded(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """B arrays (T, ...) as one (B, T, ...), with zeros after the shorter ones."""
    x = np.zeros((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(x, arrays):
        row[: len(array)] = array
    return x


def reward_moments(episode: Batch) -> np.ndarray:
    """Count, sum and sum of squares (3, 1) of the rewards."""
    reward = episode.reward.astype(np.float64)
    return np.array([(episode.weight * reward**power).sum(0) for power in range(3)])


def reward_of_team(reward: np.ndarray, alive: np.ndarray, team_reward: bool) -> np.ndarray:
    """What the team earns (..., 1): what each of its living agents does, else the mean of what all A have of their own.

    reward, alive (..., A). The mean of the living alone would rise with the death of an agent that earns little.
    """
    earners = alive.sum(-1, keepdims=True).clip(1) if team_reward else alive.shape[-1]
    return (reward * alive).sum(-1, keepdims=True) / earners


def collect(agent: Agent, envs: MultiAgentVectorEnv, now, buffer: Buffer, run: Run, epsilon: float):
    """Play on to the next multiple of N episodes, from `now`, (obs, info, memory) before it; returns those after it."""
    q_network = as_numpy(agent.q_network)
    goal = (run.num_episodes // envs.num_envs + 1) * envs.num_envs
    obs, info, memory = now
    while run.num_episodes < goal:
        q, state = look(agent, q_network, obs, memory)
        action = act(q, info["action_mask"], epsilon)
        memory = remember(agent, action, state, info["agent_mask"])
        next_obs, reward, termination, truncation, next_info = envs.step(action)
        buffer.add(obs, info, action, reward, termination, truncation, next_info)
        memory[termination | truncation] = 0  # detail recurrent-1: an episode begins with nothing
        run.step += envs.num_envs
        if "_episode" in next_info:
            run.log_episodes(next_info, buffer.episodes)  # looked through for NaN
        obs, info = next_obs, next_info
    return obs, info, memory


@torch.no_grad()
def td_targets(q: torch.Tensor, target_agent: Agent, batch: Batch, args: Args) -> torch.Tensor:
    """What the values of joint actions learn (B, T, 1); q (B, T + 1, A, K) are the values of the network that learns.

    r + gamma Q'(s', a'), where a' are the best legal actions. With lambda > 0, Peng's Q(lambda): of this Q' the share
    lambda is replaced by the target of the next step, as long as there is one.
    """
    target_q = target_agent.values(batch)
    chooser = q if args.double_q else target_q  # detail vdn-3: double Q-learning
    best = chooser.masked_fill(~batch.action_mask, -torch.inf).argmax(-1, keepdim=True)
    following = target_agent.mix(target_q.gather(-1, best).squeeze(-1), batch.alive, batch.state)[:, 1:]  # (B, T, 1)
    target = batch.reward + args.gamma * batch.goes_on * following
    decay = args.gamma * args.td_lambda * batch.weight[:, 1:]  # detail vdn-4: Peng's Q(lambda)
    steps, following, decay = (x.unbind(1) for x in (target, following, decay))  # a view for each step, made once
    for t in reversed(range(len(decay))):
        steps[t].addcmul_(decay[t], steps[t + 1] - following[t])  # +=
    return target


def value_loss(agent: Agent, q: torch.Tensor, batch: Batch, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error of the values of the joint actions taken; q (B, T + 1, A, K)."""
    taken = q[:, :-1].gather(-1, batch.action[..., None]).squeeze(-1)
    error = agent.mix(taken, batch.alive[:, :-1], batch.state[:, :-1]) - target
    # detail vdn-6: padding weighs nothing
    return (error.square() * batch.weight).sum() / batch.weight.sum().clamp(min=1)


def update(agent: Agent, target_agent: Agent, optimizer, batch: Batch, args: Args) -> dict[str, torch.Tensor]:
    """One step of the network."""
    # detail qmix-3: hypernetworks see states of one scale: of large ones they would make large weights
    agent.state_stats.update(batch.state[:, :-1].flatten(0, 1)[:, None], batch.weight.flatten(0, 1)[:, None])
    batch = batch._replace(state=agent.state_stats(batch.state))
    q = agent.values(batch)
    target = td_targets(q.detach(), target_agent, batch, args)
    loss = value_loss(agent, q, batch, target)
    optimizer.zero_grad()
    loss.backward()
    max_norm = args.clip_gradients if args.clip_gradients > 0 else math.inf
    norm = nn.utils.clip_grad_norm_(agent.parameters(), max_norm)
    optimizer.step()
    agent.num_updates += 1
    return {"train/value_loss": loss.detach(), "train/gradients": norm, "train/num_updates": agent.num_updates}


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, polyak: float) -> None:
    """Move the target's parameters the share `polyak` of the way to the network's; its buffers become the network's."""
    for ours, theirs in zip(target.parameters(), network.parameters()):
        ours.lerp_(theirs, polyak)  # detail vdn-5: the target follows slowly
    for ours, theirs in zip(target.buffers(), network.buffers()):
        ours.copy_(theirs)


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    message = f"--batch-size {args.batch_size} episodes do not fit into --buffer-size {args.buffer_size}"
    check(args.batch_size <= args.buffer_size, f"{message}; lower the one or raise the other")
    device = set_up(args)
    envs, eval_envs = make_envs(args, args.num_envs), make_envs(args, args.num_eval_ep)

    agent = Agent(envs, args).to(device)
    target_agent = copy.deepcopy(agent)
    if args.optimizer == "Adam":
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    else:
        optimizer = torch.optim.RMSprop(agent.parameters(), lr=args.learning_rate, alpha=0.99, eps=1e-5)
    check_replay_size(envs, args)
    buffer = Buffer(envs, args)

    modules = {"agent": agent, "target_agent": target_agent, "optimizer": optimizer}
    modules |= {"buffer": buffer} if args.save_buffer else {}
    with Run(args, __file__, **modules) as run:
        memory, metrics = first_memory(agent, args.num_envs, envs.num_agents), {}
        *now, buffer.playing = run.start(envs, memory, buffer.playing)
        while run.step < args.total_timesteps:
            num_episodes = run.num_episodes
            progress = min(run.step / args.epsilon_timesteps, 1)
            epsilon = args.epsilon_start + progress * (args.epsilon_end - args.epsilon_start)
            now = collect(agent, envs, now, buffer, run, epsilon)
            run.carried = now[2], buffer.playing  # for a checkpoint
            for _ in range(args.epochs if len(buffer.episodes) >= args.batch_size else 0):
                batch = buffer.sample(args.batch_size, device)
                metrics = update(agent, target_agent, optimizer, batch, args) | {"train/epsilon": epsilon}
                if agent.num_updates % args.target_network_update_freq == 0:
                    soft_update(target_agent, agent, args.polyak)
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
