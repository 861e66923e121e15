"""COMA whose policies remember: a recurrent layer (GRU or LSTM) follows the hidden ones. Critics see the state instead.

A centralised critic predicts the value of every action of an agent, given the state and the actions of the others. The
advantage of the action taken is its value less the mean value under the agent's policy: the others' actions are kept,
and only the agent's own is marginalised out. Critics learn from TD(lambda) targets of a slower target network, one step
of time after another from the last to the first; then each actor takes one policy-gradient step. Actors explore with a
share of uniformly random actions, which are part of their policy.

A memory is empty where an episode begins or an agent comes back to life, in training as in evaluation. Training replays
whole sequences from the memories with which the rollout began.

Paper: Foerster et al. 2018 (arXiv:1705.08926). Parent: coma.py, plus the memory, which is that of mappo_lstm.py.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cleanmarl.cli import NonNegativeFloat, OnPolicyArgs, PositiveFloat, PositiveInt, UnitFloat, check, launch, set_up
from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.layers import AgentIds, Recurrent, StackedLinear, Tanh, as_numpy, clip_grads_, compilable
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
    """units of each of the two hidden layers of an actor, and of the recurrent one"""
    cell: Literal["lstm", "gru"] = "gru"
    """recurrent layer of the policies"""
    critic_hidden_dim: PositiveInt = 128
    """units of each of the two hidden layers of a critic"""
    learning_rate: PositiveFloat = 5e-4
    """learning rate of the actors' RMSprop"""
    critic_learning_rate: PositiveFloat = 5e-4
    """learning rate of the critics' RMSprop"""
    num_envs: PositiveInt = 16
    """N, environments stepped side by side"""
    num_steps: PositiveInt = 25
    """T, steps of each environment in one rollout, and steps of the critic for each; gradients go back as far"""
    gamma: UnitFloat = 0.99
    """discount factor"""
    td_lambda: UnitFloat = 0.8
    """lambda of the critics' targets"""
    target_network_update_freq: PositiveInt = 200
    """steps of the critics between two copies to their target networks"""
    epsilon_start: Annotated[float, Interval(ge=0, lt=1)] = 0.5
    """share of uniformly random actions at the start"""
    epsilon_end: Annotated[float, Interval(ge=0, lt=1)] = 0.02
    """share of uniformly random actions from --epsilon-timesteps on"""
    epsilon_timesteps: PositiveInt = 100_000
    """environment steps over which that share falls linearly"""
    ent_coef: NonNegativeFloat = 0.0
    """weight of the entropy bonus"""
    max_grad_norm: PositiveFloat = 10.0
    """largest norm of the gradient of a network"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run, with discrete actions."""
    return make(args.env_id, num_envs, discrete=True, **options)


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    for name, parameter in layer.named_parameters():
        for weight in parameter.detach():  # of each network
            nn.init.zeros_(weight) if "bias" in name else nn.init.orthogonal_(weight, std)
    return layer


class Agent(nn.Module):
    """The policies and critics of all agents, with one network that serves all of them, or one for each.

    Arrays are (R, A, ...): R rows, each a step of an environment, in which the A agents stay side by side. All steps of
    N environments follow each other, from `memory` (N, A, H) before the first; it is 0 after those in forget (R, A).
    H is the memory_size of a network: the units of its recurrent layer, or twice as many for an LSTM.
    """

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        A, K = envs.real_actions.shape
        hidden, critic_hidden = args.actor_hidden_dim, args.critic_hidden_dim
        M = 1 if args.share_parameters else A  # networks
        obs_size = envs.single_observation_space.shape[-1] + (A if args.share_parameters else 0)
        # detail ippo-1: one network serves all agents, told apart by ids, or each has its own
        ids = AgentIds(A) if args.share_parameters else nn.Identity()
        self.actor = Recurrent(
            ids,
            layer_init(StackedLinear(M, obs_size, hidden)),
            Tanh(),
            layer_init(StackedLinear(M, hidden, hidden)),
            Tanh(),
            layer_init(Recurrent.CELLS[args.cell](M, hidden, hidden), std=1.0),
            layer_init(StackedLinear(M, hidden, K), std=0.01),  # small: every action is about as likely at first
        )
        self.may_die, self.sees_alive = envs.may_die, envs.may_die and not envs.team_reward
        # detail coma-3: a critic sees the actions of the others, and values each of its agent's
        self.critic = nn.Sequential(
            ids,
            layer_init(StackedLinear(M, envs.state_size + A * K + obs_size + self.sees_alive, critic_hidden)),
            Tanh(),
            layer_init(StackedLinear(M, critic_hidden, critic_hidden)),
            Tanh(),
            layer_init(StackedLinear(M, critic_hidden, K), std=1.0),
        )
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.share_parameters = args.share_parameters
        self.num_actions = K
        # the share of random actions, which `main` sets: a tensor, whose value --compile does not take for a constant
        self.register_buffer("epsilon", torch.zeros(()), persistent=False)

    def logits(self, obs: torch.Tensor, action_mask: torch.Tensor, memory: torch.Tensor, forget=None):
        """Logits (R, A, K) of the policies that act, illegal ones far below; obs (R, A, D), action_mask (R, A, K)."""
        logits = self.actor(obs, memory, forget)[0].masked_fill(~action_mask, -1e8)  # detail ippo-3: illegal actions
        uniform = action_mask / action_mask.sum(-1, keepdim=True).clamp(min=1)
        probs = (1 - self.epsilon) * logits.softmax(-1) + self.epsilon * uniform  # with their share of random actions
        return probs.clamp(min=1e-30).log()  # illegal actions have probability 0, whose log would make gradients NaN

    def others_actions(self, action: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        """For each agent the actions of all living ones but itself: action, alive (R, A) -> (R, A, A K), one-hot."""
        one_hot = F.one_hot(action, self.num_actions) * alive[..., None]  # (R, A, K)
        others = 1 - torch.eye(action.shape[1], device=action.device)[..., None]  # (A, A, 1)
        return (one_hot[:, None] * others).flatten(2)

    def values(self, critic: nn.Module, state, obs, alive, others) -> torch.Tensor:
        """Values (R, A, K) of each action of each agent beside the others', by `critic` or `target_critic`.

        state (R, S), obs (R, A, D), alive (R, A), others (R, A, A K), the actions of the others.
        """
        # detail coma-3: what the others do stands beside what the agent observes
        seen = state[:, None], torch.cat([obs, others], dim=-1)  # (R, 1, S), (R, A, D + A K)
        # where nobody dies the state stays (R, 1, S), which a critic reads once for all agents
        if self.may_die:  # detail mappo-3: the critic of a dead agent sees zeros, and the id
            seen = tuple(x * alive[..., None] for x in seen)
        if self.sees_alive:  # the dead of no team earn nothing, unlike the living that happen to see zeros
            seen = *seen, alive[..., None]
        return critic(seen)

    def mean(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Weighted mean over each network's samples: x, weight (R, A) -> (1,) if it is shared, else (A,)."""
        axes = (0, 1) if self.share_parameters else 0
        return ((x * weight).sum(axes) / weight.sum(axes).clamp(min=1)).view(-1)


def of_action(values: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """The entries (R, A) of values (R, A, K) at action (R, A)."""
    return values.gather(-1, action[..., None]).squeeze(-1)


def make_policy(agent: Agent, greedy: bool = True):
    """The agents as a function of (obs, info, done) for `evaluate`: their most probable legal actions, or samples.

    The samples are without the share of random actions that the agents explore with.
    """
    actor, memory, alive = as_numpy(agent.actor), None, None

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        nonlocal memory, alive
        if done.all():  # at the beginning, when the number of environments may be another one
            memory, alive = np.zeros((*obs.shape[:2], agent.actor.memory_size), np.float32), info["agent_mask"]
        logits, memory = actor(obs, memory * ~forgets(done, alive, info)[..., None])
        alive = info["agent_mask"].copy()
        noise = 0 if greedy else gumbel_noise(*logits.shape)
        return np.where(info["action_mask"], logits + noise, -np.inf).argmax(-1)

    return policy


def forgets(done: np.ndarray, alive: np.ndarray, info: dict) -> np.ndarray:
    """(N, A) True where memories are emptied: an episode is done (N,), or who was not alive (N, A) is so in `info`."""
    return done[:, None] | (~alive & info["agent_mask"])  # detail recurrent-1: what comes back has a fresh memory


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
    reward: np.ndarray  # (T, N, A) float32
    done: np.ndarray  # (T, N, A) bool, the episode ended with this step
    forget: np.ndarray  # (T, N, A) bool, memories are emptied after this step
    memory: np.ndarray  # (1, N, A, H) float32, of the actors before the first step


def td_lambda(reward, value, next_value, done, gamma: float, lambda_: float) -> np.ndarray:
    """TD(lambda) targets G_t = r_t + gamma ((1 - lambda) Q_t+1 + lambda G_t+1), cut where an episode ended.

    reward, done: (T, ..., A); value: (T, ..., A), of the actions taken; next_value: (..., A), after the last step.
    Returns (T, ..., A).
    """
    # detail coma-2: TD(lambda) targets
    following = np.concatenate([value[1:], next_value[None]])
    discount = gamma * (1.0 - done)
    target = reward + discount * following  # what TD(0) learns
    for t in reversed(range(len(target) - 1)):
        target[t] += discount[t] * lambda_ * (target[t + 1] - following[t])
    return target


@torch.no_grad()
def bootstrap(agent: Agent, obs: np.ndarray, state: np.ndarray, action_mask: np.ndarray, alive: np.ndarray, memory):
    """Values (R, A), by the target network, of what follows a rollout or an episode, for a sample of the next actions.

    obs (R, A, D), state (R, S), action_mask (R, A, K), alive (R, A), memory (R, A, H).
    """
    state, obs, alive, memory = to_tensors(agent, state, obs, alive, memory)
    logits = agent.logits(obs, torch.from_numpy(action_mask).to(obs.device), memory)
    action = (logits + torch.from_numpy(gumbel_noise(*logits.shape)).to(obs.device)).argmax(-1)
    values = agent.values(agent.target_critic, state, obs, alive, agent.others_actions(action, alive))
    return of_action(values, action).cpu().numpy()


@torch.no_grad()
def collect(agent: Agent, envs: MultiAgentVectorEnv, start, rollout: Rollout, args: Args, run: Run):
    """Step the environments for one rollout from `start`: (obs, info, memory) before it; returns those after it.

    Values are not needed meanwhile: they follow for the whole rollout in one batch.
    """
    actor, noise = as_numpy(agent.actor), gumbel_noise(*rollout.action_mask.shape)
    at_random = torch.rand(*rollout.action.shape, 1).numpy() < agent.epsilon.item()
    obs, info, memory = start
    rollout.memory[:] = memory  # detail recurrent-2: to replay from
    for t in range(args.num_steps):
        rollout.obs[t], rollout.state[t] = obs, info["state"]
        rollout.action_mask[t], rollout.agent_mask[t] = info["action_mask"], info["agent_mask"]
        logits, memory = actor(obs, memory)
        logits = np.where(at_random[t], 0, logits)
        rollout.action[t] = np.where(info["action_mask"], logits + noise[t], -np.inf).argmax(-1)

        obs, reward, termination, truncation, info = envs.step(rollout.action[t])
        alive = rollout.agent_mask[t]
        # Death is no end: the dead of a team earn what each of the living does. Rewards of an agent's own end with it.
        of_living = (reward * alive).sum(1, keepdims=True) / alive.sum(1, keepdims=True).clip(1)
        rollout.reward[t] = np.where(alive, reward, of_living if envs.team_reward else 0)
        rollout.done[t] = (termination | truncation)[:, None]
        rollout.forget[t] = forgets(termination | truncation, alive, info)
        if "_episode" in info:
            run.log_episodes(info)
            cut = np.flatnonzero(truncation & ~termination)
            if len(cut):  # a truncated episode is not a terminated one: it would have gone on from the final state
                keys = "final_obs", "final_state", "final_action_mask", "final_agent_mask"
                came_back = ~alive[cut] & info["final_agent_mask"][cut]  # detail recurrent-1: a fresh memory there, too
                final = bootstrap(agent, *(info[key][cut] for key in keys), memory[cut] * ~came_back[..., None])
                rollout.reward[t, cut] += args.gamma * final
        memory = memory * ~rollout.forget[t, ..., None]
    run.check_rollout(rollout, obs)
    return obs, info, memory


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
    others: torch.Tensor  # (R, A, A K) the actions of the others, one-hot
    target: torch.Tensor  # (R, A) what the critics learn
    forget: torch.Tensor  # (R, A)
    memory: torch.Tensor  # (N, A, H)


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, next_obs: np.ndarray, next_info: dict, memory, args: Args) -> Batch:
    """The critics' targets of a rollout; next_obs, next_info and memory are what its last step gave."""
    device = next(agent.parameters()).device
    rows = Rollout(*(torch.tensor(x, device=device).flatten(0, 1) for x in rollout))  # (T * N, ...), copies
    alive = rows.agent_mask.float()
    others = agent.others_actions(rows.action, alive)
    values = agent.values(agent.target_critic, rows.state, rows.obs, alive, others)
    value = of_action(values, rows.action).view(rollout.reward.shape).cpu().numpy()
    seen = (next_info[key] for key in ("state", "action_mask", "agent_mask"))
    next_value = bootstrap(agent, next_obs, *seen, memory)
    target = td_lambda(rollout.reward, value, next_value, rollout.done, args.gamma, args.td_lambda)
    target = torch.from_numpy(target.astype(np.float32)).to(device).flatten(0, 1)  # float64 so far
    learned = rows.action, others, target, rows.forget, rows.memory
    return Batch(rows.obs, rows.state, rows.action_mask, alive, *learned)


@compilable
def critic_loss(agent: Agent, batch: Batch) -> torch.Tensor:
    """The loss (1,) or (A,) of each critic."""
    values = agent.values(agent.critic, batch.state, batch.obs, batch.alive, batch.others)
    error = of_action(values, batch.action) - batch.target
    # Dead agents count here: what follows their death is what it was worth.
    return agent.mean(error.square(), torch.ones_like(batch.alive))


def counterfactual_advantage(values: torch.Tensor, log_probs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """How much better (R, A) the action (R, A) was than what the agent would have done instead, on average.

    values, log_probs: (R, A, K), of each action of an agent beside the others' actions, and under its policy.
    """
    # detail coma-1: the counterfactual baseline
    return of_action(values, action) - (log_probs.exp() * values).sum(-1)


@compilable
def actor_loss(agent: Agent, batch: Batch, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of the actors, summed over those that share no parameter, and diagnostics by name.

    A diagnostic is the mean over the networks.
    """
    # detail recurrent-2: memories are replayed from those before the rollout
    log_probs = agent.logits(batch.obs, batch.action_mask, batch.memory, batch.forget).log_softmax(-1)
    with torch.no_grad():
        values = agent.values(agent.critic, batch.state, batch.obs, batch.alive, batch.others)
        advantage = counterfactual_advantage(values, log_probs, batch.action)
    policy_loss = -agent.mean(advantage * of_action(log_probs, batch.action), batch.alive)
    entropy = agent.mean(-(log_probs.exp() * log_probs).sum(-1), batch.alive)
    loss = (policy_loss - args.ent_coef * entropy).sum()
    return loss, {"policy_loss": policy_loss.detach().mean(), "entropy": entropy.detach().mean()}


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, iteration: int, args: Args) -> dict:
    """T steps of the critics and one of the actors; `iteration` updates came before. Returns the mean diagnostics."""
    steps = list(zip(*(x.split(args.num_envs) for x in batch[:-1])))  # the rows of each time step
    losses, norms = [], []
    for i, step in enumerate(reversed(steps)):
        loss = critic_loss(agent, Batch(*step, batch.memory))
        optimizer.zero_grad()
        if loss.requires_grad:  # not if a copy freezes the critic
            loss.sum().backward()
        norms.append(clip_grads_(agent, args.max_grad_norm)["critic"])
        optimizer.step()  # what has no gradient is left alone
        losses.append(loss.detach().mean())
        if (iteration * args.num_steps + i + 1) % args.target_network_update_freq == 0:
            agent.target_critic.load_state_dict(agent.critic.state_dict())
    loss, stats = actor_loss(agent, batch, args)
    optimizer.zero_grad()
    if loss.requires_grad:  # not if a copy freezes the actor
        loss.backward()
    stats["actor_gradients"] = clip_grads_(agent, args.max_grad_norm)["actor"]
    optimizer.step()
    stats |= {"value_loss": torch.stack(losses).mean(), "critic_gradients": torch.stack(norms).mean()}
    return {f"train/{name}": x for name, x in stats.items()}


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    steps_per_update = args.num_envs * args.num_steps
    message = f"--total-timesteps {args.total_timesteps} is less than one rollout of {steps_per_update} steps"
    check(args.total_timesteps >= steps_per_update, message)
    device = set_up(args)

    envs = make_envs(args, args.num_envs)
    agent = Agent(envs, args).to(device)
    # what a copy adds to the agent learns with the actors
    of_critics = {*agent.critic.parameters(), *agent.target_critic.parameters()}
    groups = [
        {"params": [p for p in agent.parameters() if p not in of_critics], "lr": args.learning_rate},
        {"params": list(agent.critic.parameters()), "lr": args.critic_learning_rate},
    ]
    optimizer = torch.optim.RMSprop(groups, alpha=0.99, eps=1e-5)
    T, N, A, K = args.num_steps, args.num_envs, *envs.real_actions.shape
    rollout = Rollout(
        obs=np.zeros((T, N, *envs.single_observation_space.shape), envs.single_observation_space.dtype),
        state=np.zeros((T, N, *envs.single_state_space.shape), envs.single_state_space.dtype),
        action_mask=np.zeros((T, N, A, K), bool),
        agent_mask=np.zeros((T, N, A), bool),
        action=np.zeros((T, N, A), np.int64),
        reward=np.zeros((T, N, A), np.float32),
        done=np.zeros((T, N, A), bool),
        forget=np.zeros((T, N, A), bool),
        memory=np.zeros((1, N, A, agent.actor.memory_size), np.float32),
    )
    check_rollout_size(rollout)

    num_updates = args.total_timesteps // steps_per_update
    with Run(args, __file__, agent=agent, optimizer=optimizer) as run:
        now = run.start(envs, rollout.memory[0])
        for iteration in range(run.step // steps_per_update, num_updates):
            progress = min(run.step / args.epsilon_timesteps, 1)
            agent.epsilon.fill_(args.epsilon_start + progress * (args.epsilon_end - args.epsilon_start))
            now = collect(agent, envs, now, rollout, args, run)
            run.step += steps_per_update
            run.carried = now[2:]  # memories, for a checkpoint
            batch = estimate(agent, rollout, *now, args)
            metrics = update(agent, optimizer, batch, iteration, args)
            run.log(metrics | {"train/epsilon": agent.epsilon.item()})
            if run.evaluation_due:
                run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
