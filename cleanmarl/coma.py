"""Counterfactual multi-agent policy gradients (COMA): each agent's action against what it could have done instead.

A centralised critic predicts the value of every action of an agent, given the state and the actions of the others. The
advantage of the action taken is its value less the mean value under the agent's policy: the others' actions are kept,
and only the agent's own is marginalised out. Critics learn from TD(lambda) targets of a slower target network, one step
of time after another from the last to the first; then each actor takes one policy-gradient step. Actors explore with a
share of uniformly random actions, which are part of their policy.

Paper: Foerster et al. 2018 (arXiv:1705.08926). Parent: mappo.py, less all that makes it PPO.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn

from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.run import Run, check, check_positive, find_device, launch, seed_everything


@dataclass
class Args:
    seed: int = 1
    """seed of the networks, the policies' samples and the environments"""
    device: str = "cpu"
    """torch device: cpu, cuda, cuda:1, mps; small networks are fastest on the CPU"""
    torch_threads: int = 1
    """threads of torch on the CPU"""
    runs_dir: str = "runs"
    """where run folders are made"""
    checkpoint_interval: int = 100_000
    """environment steps between two checkpoints; there is always one at the end"""
    resume: Path | None = None
    """run folder to continue; --total-timesteps may be raised"""
    eval_episodes: int = 100
    """episodes of the evaluation at the end, with the most probable actions; 0 for none"""
    capture_video: bool = False
    """record an episode at the end into the run folder"""
    track: bool = False
    """log to Weights & Biases too"""
    wandb_project_name: str = "cleanmarl"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team"""

    env_id: str = "mpe/simple_spread_v3"
    """family/name of a multi-agent environment with discrete actions"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, all environments together, however many agents act in each"""

    share_parameters: bool = True
    """one policy and one critic for all agents, who are told apart by a one-hot id"""
    hidden_dim: int = 64
    """units of each of the two hidden layers of an actor"""
    critic_hidden_dim: int = 128
    """units of each of the two hidden layers of a critic"""
    learning_rate: float = 5e-4
    """learning rate of the actors' RMSprop"""
    critic_learning_rate: float = 5e-4
    """learning rate of the critics' RMSprop"""
    num_envs: int = 16
    """N, environments stepped side by side"""
    num_steps: int = 25
    """T, steps of each environment in one rollout, and steps of the critic for each"""
    gamma: float = 0.99
    """discount factor, in [0, 1]"""
    td_lambda: float = 0.8
    """lambda of the critics' targets, in [0, 1]"""
    target_network_update_freq: int = 200
    """steps of the critics between two copies to their target networks"""
    epsilon_start: float = 0.5
    """share of uniformly random actions at the start, in [0, 1)"""
    epsilon_end: float = 0.02
    """share of uniformly random actions from --epsilon-timesteps on, in [0, 1)"""
    epsilon_timesteps: int = 100_000
    """environment steps over which that share falls linearly"""
    ent_coef: float = 0.0
    """weight of an entropy bonus"""
    max_grad_norm: float = 10.0
    """largest norm of the gradient of a network"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run; UsageError if their actions are continuous."""
    envs = make(args.env_id, num_envs, **options)
    message = (
        f"coma.py needs discrete actions and those of {args.env_id} are continuous; try mappo_continuous_action.py"
    )
    check(not envs.continuous, message)
    return envs


class StackedLinear(nn.Module):
    """M linear layers as one batched product: (M, B, in) -> (M, B, out)."""

    def __init__(self, num_networks: int, size_in: int, size_out: int, std: float = np.sqrt(2)):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_networks, size_in, size_out))
        self.bias = nn.Parameter(torch.zeros(num_networks, 1, size_out))
        for weight in self.weight.detach():
            nn.init.orthogonal_(weight, std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class Agent(nn.Module):
    """The policies and critics of all agents: M = 1 network shared by all, or M = A.

    Arrays have the agents as second axis, (R, A, ...) with R rows: the agents of one step stay side by side. Inside,
    `by_network` brings them to (M, B, ...), where B = R * A rows of the shared network, or R rows of each agent.
    """

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        self.num_agents, self.shared = envs.num_agents, args.share_parameters
        self.ids = np.eye(self.num_agents, dtype=np.float32)
        num_networks = 1 if self.shared else self.num_agents
        obs_size = int(envs.obs_sizes.max()) + (self.num_agents if self.shared else 0)
        num_actions, hidden, critic_hidden = int(envs.action_sizes.max()), args.hidden_dim, args.critic_hidden_dim
        self.one_hot = np.eye(num_actions, dtype=np.float32)
        critic_size = envs.state_size + obs_size + self.num_agents * num_actions
        self.actor = nn.Sequential(
            StackedLinear(num_networks, obs_size, hidden),
            nn.Tanh(),
            StackedLinear(num_networks, hidden, hidden),
            nn.Tanh(),
            StackedLinear(num_networks, hidden, num_actions, std=0.01),
        )
        self.critic, self.target_critic = (
            nn.Sequential(
                StackedLinear(num_networks, critic_size, critic_hidden),
                nn.Tanh(),
                StackedLinear(num_networks, critic_hidden, critic_hidden),
                nn.Tanh(),
                StackedLinear(num_networks, critic_hidden, num_actions, std=1.0),
            )
            for _ in range(2)
        )
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.target_critic.requires_grad_(False)
        self.epsilon = 0.0  # share of random actions, which `main` sets

    def by_network(self, x):
        """(R, A, ...) -> (M, B, ...)."""
        return x.reshape(1, -1, *x.shape[2:]) if self.shared else x.swapaxes(0, 1)

    def by_agent(self, x):
        """(M, B, ...) -> (R, A, ...)."""
        return x.reshape(-1, self.num_agents, *x.shape[2:]) if self.shared else x.swapaxes(0, 1)

    def mean(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Weighted mean over each network's samples: x, weight (R, A) -> (1, 1) if shared, else (1, A)."""
        axes = (0, 1) if self.shared else (0,)
        return (x * weight).sum(axes, keepdim=True) / weight.sum(axes, keepdim=True).clamp(min=1)

    def features(self, obs: np.ndarray) -> np.ndarray:
        """What the actors see: obs (R, A, D), with ids if they are shared."""
        ids = [np.broadcast_to(self.ids, (len(obs), *self.ids.shape))] if self.shared else []
        return np.concatenate([obs, *ids], axis=-1)

    def critic_features(self, state: np.ndarray, obs: np.ndarray, alive: np.ndarray, action: np.ndarray) -> np.ndarray:
        """What the critics see of state (R, S), obs (R, A, D) and the others' actions, one-hot; ids if shared.

        An agent's own action (R, A) is left out. All are zeros where alive (R, A) is False.
        """
        state = np.broadcast_to(state[:, None], (*obs.shape[:2], state.shape[1]))
        one_hot = self.one_hot[action] * alive[..., None]
        others = (one_hot[:, None] * (1 - self.ids)[:, :, None]).reshape(*alive.shape, -1)  # (R, A, A * K)
        return self.features(np.concatenate([state, obs, others], axis=-1) * alive[..., None])

    def logits(self, features: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        """Logits (R, A, K), illegal ones far below, of the policies that act: with their share of random actions."""
        logits = self.by_agent(self.actor(self.by_network(features))).masked_fill(~action_mask, -1e8)
        if self.epsilon > 0:
            uniform = action_mask / action_mask.sum(-1, keepdim=True).clamp(min=1)
            probs = (1 - self.epsilon) * logits.softmax(-1) + self.epsilon * uniform
            logits = probs.clamp(min=1e-30).log()
        return logits

    def values(self, critic: nn.Module, critic_features: torch.Tensor) -> torch.Tensor:
        """Values (R, A, K) of each action of each agent beside the others' actions, by `critic` or `target_critic`."""
        return self.by_agent(critic(self.by_network(critic_features)))


def of_action(values: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """The entries (R, A) of values (R, A, K) at action (R, A)."""
    return values.gather(-1, action[..., None]).squeeze(-1)


def numpy_actor(agent: Agent):
    """The actors as a NumPy function, features (R, A, D) -> logits (R, A, K).

    For the few rows of one step it takes a quarter of torch's time. Who changes the network changes it here too.
    """
    w1, b1, w2, b2, w3, b3 = (p.detach().cpu().numpy() for p in agent.actor.parameters())

    def actor(features: np.ndarray) -> np.ndarray:
        x = agent.by_network(features)
        return agent.by_agent(np.tanh(np.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3)

    return actor


def gumbel_noise(*shape: int) -> np.ndarray:
    """Noise that makes argmax(logits + noise) a sample of softmax(logits), from torch's generator."""
    return -torch.empty(shape).exponential_().log().numpy()


def make_policy(agent: Agent, greedy: bool = True):
    """The agents as a function of (obs, info, done) for `evaluate`: their most probable legal actions, or samples."""
    actor = numpy_actor(agent)

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        logits = actor(agent.features(obs))
        noise = 0 if greedy else gumbel_noise(*logits.shape)
        return np.where(info["action_mask"], logits + noise, -np.inf).argmax(-1)

    return policy


class Rollout(NamedTuple):
    """What one rollout leaves behind: T steps of N environments with A agents, NumPy arrays filled in place."""

    obs: np.ndarray  # (T, N, A, D) float32
    state: np.ndarray  # (T, N, S) float32
    action_mask: np.ndarray  # (T, N, A, K) bool, True = legal
    agent_mask: np.ndarray  # (T, N, A) bool, True = alive
    action: np.ndarray  # (T, N, A) int64
    reward: np.ndarray  # (T, N, A) float32
    done: np.ndarray  # (T, N, A) bool, the episode ended with this step


def td_lambda(reward, value, next_value, done, gamma: float, lambda_: float) -> np.ndarray:
    """TD(lambda) targets G_t = r_t + gamma ((1 - lambda) Q_t+1 + lambda G_t+1), cut where an episode ended.

    reward, done: (T, ..., A); value: (T, ..., A), of the actions taken; next_value: (..., A), after the last step.
    Returns (T, ..., A).
    """
    following = np.concatenate([value[1:], next_value[None]])
    discount = gamma * (1.0 - done)
    target = reward + discount * following  # what TD(0) learns
    for t in reversed(range(len(target) - 1)):
        target[t] += discount[t] * lambda_ * (target[t + 1] - following[t])
    return target


@torch.no_grad()
def bootstrap(agent: Agent, state: np.ndarray, obs: np.ndarray, alive: np.ndarray, action_mask: np.ndarray):
    """Values (R, A), by the target network, of what follows a rollout or an episode, for a sample of the next actions.

    state (R, S), obs (R, A, D), alive (R, A), action_mask (R, A, K).
    """
    device = next(agent.parameters()).device
    logits = agent.logits(torch.from_numpy(agent.features(obs)).to(device), torch.from_numpy(action_mask).to(device))
    action = (logits.cpu().numpy() + gumbel_noise(*logits.shape)).argmax(-1)
    critic_features = torch.from_numpy(agent.critic_features(state, obs, alive, action)).to(device)
    values = agent.values(agent.target_critic, critic_features)
    return of_action(values, torch.from_numpy(action).to(device)).cpu().numpy()


@torch.no_grad()
def collect(agent: Agent, envs: MultiAgentVectorEnv, start, rollout: Rollout, args: Args, run: Run):
    """Step the environments for one rollout from `start`, the (obs, info) before it; returns the (obs, info) after it.

    Only actions are needed meanwhile: values follow for the whole rollout in one batch.
    """
    actor, noise = numpy_actor(agent), gumbel_noise(*rollout.action_mask.shape)
    at_random = torch.rand(*rollout.action.shape, 1).numpy() < agent.epsilon
    obs, info = start
    for t in range(args.num_steps):
        rollout.obs[t], rollout.state[t] = obs, info["state"]
        rollout.action_mask[t], rollout.agent_mask[t] = info["action_mask"], info["agent_mask"]
        logits = np.where(at_random[t], 0, actor(agent.features(obs)))
        rollout.action[t] = np.where(rollout.action_mask[t], logits + noise[t], -np.inf).argmax(-1)

        obs, reward, termination, truncation, info = envs.step(rollout.action[t])
        # Death is no end: a dead agent earns what the living do on average, and its critic knows that it is dead.
        alive = rollout.agent_mask[t]
        of_living = (reward * alive).sum(1, keepdims=True) / alive.sum(1, keepdims=True).clip(1)
        rollout.reward[t] = np.where(alive, reward, of_living)
        rollout.done[t] = (termination | truncation)[:, None]
        if "_episode" in info:
            run.log_episodes(info)
            cut = np.flatnonzero(truncation & ~termination)
            if len(cut):  # a truncated episode is not a terminated one: it would have gone on from the final state
                final = info["final_state"][cut], info["final_obs"][cut], info["final_agent_mask"][cut]
                rollout.reward[t, cut] += args.gamma * bootstrap(agent, *final, info["final_action_mask"][cut])
    return obs, info


class Batch(NamedTuple):
    """A rollout as the networks learn from it, tensors (R, A, ...) with a row for each step of each environment."""

    features: torch.Tensor  # (R, A, D) what the actors see
    critic_features: torch.Tensor  # (R, A, S + D + A K) what the critics see
    action_mask: torch.Tensor  # (R, A, K)
    alive: torch.Tensor  # (R, A) 1.0 for living agents, 0.0 for the rest
    action: torch.Tensor  # (R, A)
    target: torch.Tensor  # (R, A) what the critics learn


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, next_obs: np.ndarray, next_info: dict, args: Args) -> Batch:
    """The critics' targets of a rollout; next_obs, next_info are what the last step gave."""
    device = next(agent.parameters()).device
    rows = Rollout(*(x.reshape(-1, *x.shape[2:]) for x in rollout))  # (T * N, ...)

    def to_tensor(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(device)

    features = to_tensor(agent.features(rows.obs))
    critic_features = to_tensor(agent.critic_features(rows.state, rows.obs, rows.agent_mask, rows.action))
    action_mask, action, alive = to_tensor(rows.action_mask), to_tensor(rows.action), to_tensor(rows.agent_mask).float()
    value = of_action(agent.values(agent.target_critic, critic_features), action)
    value, following = value.view(rollout.reward.shape).cpu().numpy(), (next_info["state"], next_obs)
    next_value = bootstrap(agent, *following, next_info["agent_mask"], next_info["action_mask"])
    target = td_lambda(rollout.reward, value, next_value, rollout.done, args.gamma, args.td_lambda)
    target = to_tensor(target.reshape(rows.reward.shape).astype(np.float32))
    return Batch(features, critic_features, action_mask, alive, action, target)


def critic_loss(agent: Agent, batch: Batch) -> torch.Tensor:
    """The loss (1, M) of each critic."""
    value = of_action(agent.values(agent.critic, batch.critic_features), batch.action)
    # Dead agents count here: what their team goes on to earn is what their death was worth.
    return agent.mean((value - batch.target).square(), torch.ones_like(batch.alive))


def counterfactual_advantage(values: torch.Tensor, log_probs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """How much better (R, A) the action (R, A) was than what the agent would have done instead, on average.

    values, log_probs: (R, A, K), of each action of an agent beside the others' actions, and under its policy.
    """
    return of_action(values, action) - (log_probs.exp() * values).sum(-1)


def actor_loss(agent: Agent, batch: Batch, args: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of the actors, summed over those that share no parameter; mean policy loss and entropy."""
    log_probs = agent.logits(batch.features, batch.action_mask).log_softmax(-1)
    with torch.no_grad():
        values = agent.values(agent.critic, batch.critic_features)
        advantage = counterfactual_advantage(values, log_probs, batch.action)
    policy_loss = -agent.mean(advantage * of_action(log_probs, batch.action), batch.alive)
    entropy = agent.mean(-(log_probs.exp() * log_probs).sum(-1), batch.alive)
    loss = policy_loss - args.ent_coef * entropy
    return loss.sum(), policy_loss.detach().mean(), entropy.detach().mean()


def clipped_gradient(loss: torch.Tensor, network: nn.Module, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient (M, P) of a loss, no row of which is longer than max_norm, and the mean length before that."""
    gradient = torch.cat([g.flatten(1) for g in torch.autograd.grad(loss, list(network.parameters()))], dim=1)
    norm = gradient.norm(dim=1, keepdim=True)  # (M, 1), of each network
    return gradient * (max_norm / (norm + 1e-6)).clamp(max=1), norm.mean()


def stack_parameters(network: nn.Module) -> torch.Tensor:
    """Put the parameters of the M networks of a stack into the rows of one tensor (M, P), which is stepped at once.

    The network's parameters become views of it: what changes the rows changes the network.
    """
    parameters = list(network.parameters())  # each (M, ...)
    rows = torch.cat([p.detach().flatten(1) for p in parameters], dim=1)
    for p, values in zip(parameters, rows.split([p[0].numel() for p in parameters], dim=1)):
        p.data = values.view_as(p)
    return rows


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, num_updates: int, args: Args) -> dict:
    """T steps of the critics and one of the actors; num_updates updates came before. Returns the mean diagnostics."""
    actors, critics = (group["params"][0] for group in optimizer.param_groups)  # (M, P), (M, P')
    steps, all_stats = list(zip(*(x.split(args.num_envs) for x in batch))), []
    for i, step in enumerate(reversed(steps)):  # the rows of one time step, from the last to the first
        if (num_updates * args.num_steps + i) % args.target_network_update_freq == 0:
            agent.target_critic.load_state_dict(agent.critic.state_dict())
        loss = critic_loss(agent, Batch(*step))
        critics.grad, norm = clipped_gradient(loss.sum(), agent.critic, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()  # to None: what has no gradient is left alone
        all_stats.append(torch.stack([loss.detach().mean(), norm]))
    loss, policy_loss, entropy = actor_loss(agent, batch, args)
    actors.grad, norm = clipped_gradient(loss, agent.actor, args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    value_loss, critic_norm = torch.stack(all_stats).mean(0)
    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    metrics |= {"actor_gradients": norm, "critic_gradients": critic_norm}
    return {f"train/{name}": x for name, x in metrics.items()}


def check_args(args: Args) -> None:
    """What can be checked without the environment; raises UsageError."""
    check_positive(args, "num_envs", "num_steps", "torch_threads", "hidden_dim", "critic_hidden_dim", "max_grad_norm")
    check_positive(args, "learning_rate", "critic_learning_rate", "checkpoint_interval", "epsilon_timesteps")
    check_positive(args, "target_network_update_freq")
    for name in ("gamma", "td_lambda"):
        check(0 <= getattr(args, name) <= 1, f"--{name.replace('_', '-')} must be in [0, 1], not {getattr(args, name)}")
    for name in ("epsilon_start", "epsilon_end"):
        check(0 <= getattr(args, name) < 1, f"--{name.replace('_', '-')} must be in [0, 1), not {getattr(args, name)}")
    steps = args.num_envs * args.num_steps
    message = f"--total-timesteps {args.total_timesteps} is less than one rollout of {steps} steps"
    check(args.total_timesteps >= steps, message)


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    check_args(args)
    device = find_device(args.device)
    seed_everything(args.seed, args.torch_threads)
    envs = make_envs(args, args.num_envs)
    T, N = args.num_steps, args.num_envs
    (A, D), S, K = envs.single_observation_space.shape, envs.state_size, envs.real_actions.shape[1]
    steps_per_update = T * N

    agent = Agent(envs, args).to(device)
    learning_rates = [args.learning_rate, args.critic_learning_rate]
    groups = [
        {"params": [stack_parameters(network)], "lr": lr}
        for network, lr in zip((agent.actor, agent.critic), learning_rates)
    ]
    optimizer = torch.optim.RMSprop(groups, alpha=0.99, eps=1e-5)
    rollout = Rollout(
        obs=np.zeros((T, N, A, D), np.float32),
        state=np.zeros((T, N, S), np.float32),
        action_mask=np.zeros((T, N, A, K), bool),
        agent_mask=np.zeros((T, N, A), bool),
        action=np.zeros((T, N, A), np.int64),
        reward=np.zeros((T, N, A), np.float32),
        done=np.zeros((T, N, A), bool),
    )

    num_updates = args.total_timesteps // steps_per_update
    with Run(args, __file__, agent=agent, optimizer=optimizer) as run:
        now = envs.reset(seed=args.seed + run.step)
        for iteration in range(run.step // steps_per_update, num_updates):
            progress = min(run.step / args.epsilon_timesteps, 1)
            agent.epsilon = args.epsilon_start + progress * (args.epsilon_end - args.epsilon_start)
            now = collect(agent, envs, now, rollout, args, run)
            run.step += steps_per_update
            batch = estimate(agent, rollout, *now, args)
            metrics = update(agent, optimizer, batch, iteration, args)
            run.log(metrics | {"train/epsilon": agent.epsilon})

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
