"""IMPALA as in impala.py, but for Atari games on envpool: the paper's deep or shallow network, and an LSTM by a flag.

With a convolutional network most of the work is the learner's: without a GPU, more actors than one gain nothing.
Settings are the paper's for Atari: RMSProp on losses that are sums over the batch. It learns from lives and the signs
of rewards; the returns it reports are the scores of whole games.

Paper: Espeholt et al. 2018 (arXiv:1802.01561).
"""

import math
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from cleanmarl.actors import Actors, check_unrolls_size
from cleanmarl.cli import NonNegativeFloat, PositiveFloat, PositiveInt, RunArgs, UnitFloat, check, launch, set_up
from cleanmarl.envs.pool import EnvPool, envpool_spec
from cleanmarl.layers import Bf16, use_bf16
from cleanmarl.run import Run

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from annotated_types import Ge

HIDDEN = 256  # features of a picture, and units of the LSTM


@dataclass
class Args(RunArgs):
    env_id: str = "Pong-v5"
    """any Atari game of envpool"""
    total_timesteps: PositiveInt = 10_000_000
    """environment steps that are learned from, all environments together; one is 4 frames"""

    shallow: bool = False
    """the network of two convolutions (Mnih et al. 2016) instead of the residual one"""
    lstm: bool = False
    """an LSTM that also sees the previous action and reward, behind the convolutions"""
    num_actors: Annotated[int, Ge(0)] = 1
    """actor processes; 0: collect and learn in turn in one process"""
    deterministic: bool = False
    """take one unroll from each actor in turn, and give all of them new parameters at the same time"""
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"
    """rmsprop is the paper's, as TensorFlow has it"""
    learning_rate: PositiveFloat = 6e-4
    """learning rate of the optimizer"""
    optimizer_eps: PositiveFloat = 0.01
    """epsilon: RMSProp adds it to the mean square of a gradient, Adam to its root; losses are sums"""
    num_envs: PositiveInt = 32
    """N, environments of each actor; N unrolls fill a slot"""
    unroll_length: PositiveInt = 20
    """T, steps of each environment in one unroll"""
    batch_size: PositiveInt | None = None
    """B, unrolls in a gradient step: of several slots, or a part of one; default: N, one slot"""
    updates_per_collect: PositiveInt = 1
    """gradient steps for each batch that is collected"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    gamma: UnitFloat = 0.99
    """discount factor"""
    vtrace_lambda: UnitFloat = 1.0
    """lambda of V-trace"""
    rho_clip: PositiveFloat = 1.0
    """largest importance weight of a value error: where the value function converges to; at least c_clip"""
    c_clip: PositiveFloat = 1.0
    """largest importance weight in the trace: how fast it gets there"""
    pg_rho_clip: PositiveFloat = 1.0
    """largest importance weight of the policy gradient"""
    ent_coef: NonNegativeFloat = 0.01
    """weight of the entropy bonus"""
    vf_coef: NonNegativeFloat = 0.5
    """weight of the value loss"""
    max_grad_norm: PositiveFloat = 40.0
    """largest norm of the gradient of all parameters together"""
    bf16: Bf16 = "off"
    """convolutions in bfloat16: "auto" where the machine is made for it, a GPU or a CPU with AVX512-BF16 or AMX"""


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of a run, with four grey frames (4, 84, 84) as observations; UsageError for other games."""
    message = f"this script needs an Atari game, such as Pong-v5, and {args.env_id} is none"
    check("episodic_life" in envpool_spec(args.env_id).config._fields, message)
    wrappers = {
        "noop_max": 30,  # up to 30 no-ops first
        "frame_skip": 4,  # 4 frames per step, seen as the maximum of the last two
        "episodic_life": True,  # a lost life ends the episode
        "use_fire_reset": True,  # FIRE starts the game
        "gray_scale": True,  # luminance first, then 84 x 84
        "img_height": 84,
        "img_width": 84,
        "reward_clip": True,  # detail impala-9: rewards are -1, 0 or 1
        "stack_num": 4,  # the last 4 frames show what moves
    }
    # actors share the cores: envpool would start a thread for every core in each of them
    cores = max(1, (os.cpu_count() or 1) // max(1, args.num_actors))
    return EnvPool(args.env_id, num_envs, num_threads=min(num_envs, cores), **wrappers, **options)


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Module):
    """x plus two convolutions of it."""

    def __init__(self, size: int):
        super().__init__()
        first, second = nn.Conv2d(size, size, 3, padding=1), nn.Conv2d(size, size, 3, padding=1)
        self.layers = nn.Sequential(nn.ReLU(), first, nn.ReLU(), second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Agent(nn.Module):
    """Policy logits (T, N, K), state value (T, N) and the LSTM's state after them (2, N, H): hidden and cell.

    For observations (T, N, 4, 84, 84) uint8, start (T, N) bool, where an episode begins, the action (T, N) and reward
    (T, N) that led to them, and the LSTM's state before them. Without an LSTM, H is 0 and only observations matter.
    """

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        num_frames, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
        # detail impala-10: two networks, with and without an LSTM
        if args.shallow:
            layers = [
                layer_init(nn.Conv2d(num_frames, 16, 8, stride=4)),
                nn.ReLU(),
                layer_init(nn.Conv2d(16, 32, 4, stride=2)),
            ]
            size = 32 * 9 * 9
        else:
            layers, size = [], 32 * 11 * 11
            for before, after in pairwise([num_frames, 16, 32, 32]):
                layers += [layer_init(nn.Conv2d(before, after, 3, padding=1)), nn.MaxPool2d(3, stride=2, padding=1)]
                layers += [Residual(after), Residual(after)]
        # By torch's own weights, all pictures look alike behind three layers: features vary a thirtieth as much as now.
        self.network = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), layer_init(nn.Linear(size, HIDDEN)), nn.ReLU())
        self.lstm = nn.LSTM(HIDDEN + num_actions + 1, HIDDEN) if args.lstm else None
        self.state_size, self.num_actions = HIDDEN * args.lstm, num_actions
        # std: with 0.01 the value alone would shape the trunk
        self.actor = layer_init(nn.Linear(HIDDEN, num_actions), std=1.0)
        self.critic = layer_init(nn.Linear(HIDDEN, 1), std=1.0)
        self.to(memory_format=torch.channels_last)  # makes convolutions faster
        self.bf16 = use_bf16(args)

    def forward(self, obs, start, last_action, last_reward, state) -> tuple[torch.Tensor, ...]:
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.network(obs.flatten(0, 1).to(torch.float32, memory_format=torch.channels_last).div_(255))
        hidden = hidden.float().unflatten(0, start.shape)
        if self.lstm is not None:
            last_action = nn.functional.one_hot(last_action, self.num_actions)
            last = torch.cat([last_action, last_reward[..., None]], -1) * ~start[..., None]
            inputs, outputs = torch.cat([hidden, last], -1), []
            # Where an episode begins, the state is 0; the steps up to the next such place are one call.
            begins = start[1:].any(1).nonzero().flatten() + 1
            for first, end in pairwise([0, *begins.tolist(), len(start)]):
                state = state * ~start[first, :, None]
                output, state = self.lstm(inputs[first:end], tuple(state[:, None]))
                state = torch.cat(state)
                outputs.append(output)
            hidden = torch.cat(outputs)
        return self.actor(hidden), self.critic(hidden).squeeze(-1), state


def make_policy(agent: Agent, greedy: bool = True):
    """The agent as a function of (obs, info, done) for `evaluate`: the most probable action, or a sample."""
    device, action, state = next(agent.parameters()).device, None, None

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        nonlocal action, state
        if done.all():  # at the beginning, when the number of environments may be another one
            action, state = np.zeros(len(obs), np.int64), torch.zeros(2, len(obs), agent.state_size, device=device)
        reward = np.sign(info["reward"]).astype(np.float32)  # the game's own
        inputs = (torch.as_tensor(x, device=device)[None] for x in (obs, done, action, reward))
        logits, _, state = agent(*inputs, state)
        sample = logits.argmax(-1) if greedy else torch.distributions.Categorical(logits=logits).sample()
        action = sample[0].cpu().numpy()
        return action

    return policy


def unroll_dtype(envs: gym.vector.VectorEnv, args: Args) -> np.dtype:
    """An unroll, T steps of one environment, as a record."""
    T, shape = args.unroll_length, envs.single_observation_space.shape
    fields = [
        ("obs", np.uint8, (T + 1, *shape)),  # the last one follows the last step
        ("start", np.bool_, (T + 1,)),  # the episode began with this observation
        ("last_action", np.int64, (T + 1,)),  # that led to it
        ("last_reward", np.float32, (T + 1,)),  # that came with it
        ("log_prob", np.float32, (T,)),  # of the action, by the policy that acted
        ("ep_return", np.float32, (T,)),  # of the game that ended with this step
        ("ep_length", np.int64, (T,)),  # 0: none did
        ("state", np.float32, (2, HIDDEN * args.lstm)),  # of the LSTM before the first step
    ]
    return np.dtype(fields, align=True)


class Player:
    """N environments of their own seeds, played one unroll after another, across the ends of episodes."""

    def __init__(self, args: Args, index: int, step: int):
        self.args = args
        self.rng = np.random.default_rng([args.seed, step, index])  # a resumed run begins new episodes
        self.envs = make_envs(args, args.num_envs)
        self.obs, _ = self.envs.reset(seed=int(self.rng.integers(2**31)))
        N = args.num_envs
        self.start, self.action, self.reward = np.ones(N, bool), np.zeros(N, np.int64), np.zeros(N, np.float32)
        self.state = torch.zeros(2, N, HIDDEN * args.lstm)

    @torch.no_grad()
    def play(self, agent: Agent, unrolls: np.ndarray) -> None:
        """Fill `unrolls`, records (N,) of unroll_dtype, with the next T steps by `agent`."""
        T, N, K = self.args.unroll_length, self.args.num_envs, self.envs.single_action_space.n
        steps = {name: unrolls[name].swapaxes(0, 1) for name in unrolls.dtype.names if name != "state"}  # (T, N, ...)
        device = next(agent.parameters()).device
        # The argmax of logits + Gumbel noise is a sample of the softmax; -log(exponential) is Gumbel noise.
        noise = -np.log(self.rng.standard_exponential((T, N, K), np.float32).clip(1e-8))  # it may be 0
        logits = np.empty_like(noise)
        unrolls["state"], steps["ep_length"][:] = self.state.cpu().numpy().swapaxes(0, 1), 0
        for t in range(T):
            last = self.obs, self.start, self.action, self.reward
            steps["obs"][t], steps["start"][t], steps["last_action"][t], steps["last_reward"][t] = last
            inputs = (torch.as_tensor(x, device=device)[None] for x in last)
            output, _, self.state = agent(*inputs, self.state.to(device))
            logits[t] = output[0].cpu().numpy()
            self.action = (logits[t] + noise[t]).argmax(-1)
            self.obs, self.reward, termination, truncation, info = self.envs.step(self.action)
            self.start, truncation = termination | truncation, truncation & ~termination
            if truncation.any():  # an end like others, with the value of its last observation in the reward
                same = info["final_obs"], np.zeros(N, bool), self.action, self.reward
                inputs = (torch.as_tensor(x, device=device)[None] for x in same)
                final_value = agent(*inputs, self.state)[1][0].cpu().numpy()
                self.reward = self.reward + self.args.gamma * final_value * truncation
            if "_episode" in info:
                steps["ep_return"][t], steps["ep_length"][t] = info["episode"]["r"], info["episode"]["l"]
        last = self.obs, self.start, self.action, self.reward
        steps["obs"][T], steps["start"][T], steps["last_action"][T], steps["last_reward"][T] = last
        # detail impala-1: what acted is older than what learns, and its log-probabilities come with the steps
        log_probs = torch.from_numpy(logits).log_softmax(-1)
        steps["log_prob"][:] = np.take_along_axis(log_probs.numpy(), steps["last_action"][1:, :, None], -1)[..., 0]


def vtrace(log_rho, reward, value, next_value, done, *, gamma, lambda_, rho_clip, c_clip, pg_rho_clip):
    """Targets of the value function and advantages by V-trace (Espeholt et al. 2018, section 4), cut where done.

    Arrays (T, ...): log_rho, the log of the ratio of the policy that learns to the one that acted; value, of the
    observation before each step; next_value, of the one after it: 0 if the step terminated the episode, and the value
    of its final observation if it truncated it. Returns (T, ...), (T, ...).
    """
    largest = math.log(max(rho_clip, c_clip, pg_rho_clip)) + 1  # beyond it all are clipped; exp might overflow
    rho = np.exp(np.minimum(log_rho, largest))
    # detail impala-3: rho weighs the errors, c the trace, and each has a clip of its own
    error = np.minimum(rho, rho_clip) * (reward + gamma * next_value - value)  # TD errors; summed below: v_s - V(x_s)
    decay = gamma * lambda_ * ~done * np.minimum(rho, c_clip)
    # detail impala-2: targets of the value function
    for t in reversed(range(len(error) - 1)):
        error[t] += decay[t] * error[t + 1]
    return_ = value + error
    # detail impala-4: the advantage has the target of the next state, and a clipped rho
    next_return = np.where(done, next_value, np.concatenate([return_[1:], next_value[-1:]]))
    return return_, np.minimum(rho, pg_rho_clip) * (reward + gamma * next_return - value)


def impala_loss(agent: Agent, unrolls: np.ndarray, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch of unrolls, records (B,), and its diagnostics by name."""
    device = next(agent.parameters()).device
    # time first, (T, B, ...); but the memory, (B, 2, H), becomes (2, B, H)
    batch = {name: torch.from_numpy(unrolls[name].swapaxes(0, 1).copy()).to(device) for name in unrolls.dtype.names}
    last = batch["start"], batch["last_action"], batch["last_reward"]
    done, action, reward = (x[1:] for x in last)

    logits, value, _ = agent(batch["obs"], *last, batch["state"])  # (T + 1, B, K), (T + 1, B)
    log_probs = logits[:-1].log_softmax(-1)
    log_prob = log_probs.gather(-1, action[..., None]).squeeze(-1)
    with torch.no_grad():
        log_rho = log_prob - batch["log_prob"]
        return_, advantage = vtrace(
            *(x.cpu().numpy() for x in (log_rho, reward, value[:-1], value[1:] * ~done, done)),
            gamma=args.gamma,
            lambda_=args.vtrace_lambda,
            rho_clip=args.rho_clip,
            c_clip=args.c_clip,
            pg_rho_clip=args.pg_rho_clip,
        )
        return_, advantage = torch.from_numpy(return_).to(device), torch.from_numpy(advantage).to(device)

    # detail impala-5: one loss for policy, value and entropy bonus, the sum over the batch
    policy_loss = -(log_prob * advantage).mean()
    value_loss = 0.5 * (value[:-1] - return_).square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = (policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss) * done.numel()

    with torch.no_grad():
        stats = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": (log_rho.exp() - 1 - log_rho).mean(),
            "clipfrac": (log_rho.exp() > args.rho_clip + 1e-5).float().mean(),  # by more than rounding
            "explained_variance": (1 - (return_ - value[:-1]).var() / return_.var()).nan_to_num(0, neginf=0),
        }
    return loss, stats


class RMSProp(torch.optim.Optimizer):
    """RMSProp as in TensorFlow, which the paper uses: epsilon inside the root, and a mean square that is 1 at first."""

    def __init__(self, parameters, lr: float, eps: float):
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p]["mean_square"] = torch.ones_like(p)
                    mean_square = self.state[p]["mean_square"].lerp_(p.grad.square(), 0.01)  # decay 0.99
                    # detail impala-8: epsilon stands inside the root
                    p.addcdiv_(p.grad, (mean_square + group["eps"]).sqrt(), value=-group["lr"])


def make_optimizer(agent: Agent, args: Args) -> torch.optim.Optimizer:
    # detail impala-8: RMSProp as the paper has it, or Adam; both on losses that are sums
    if args.optimizer == "rmsprop":
        return RMSProp(agent.parameters(), lr=args.learning_rate, eps=args.optimizer_eps)
    return torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=args.optimizer_eps, fused=True)


def update(agent: Agent, optimizer: torch.optim.Optimizer, unrolls: np.ndarray, args: Args) -> dict:
    """--updates-per-collect gradient steps for B new unrolls; returns the mean diagnostics."""
    all_stats = []
    for _ in range(args.updates_per_collect):
        loss, stats = impala_loss(agent, unrolls, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # detail impala-6: one norm over all gradients
        optimizer.step()
        all_stats.append(stats)
    return {f"train/{name}": torch.stack([stats[name] for stats in all_stats]).mean() for name in all_stats[0]}


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    check(args.rho_clip >= args.c_clip, f"--rho-clip {args.rho_clip} must be at least --c-clip {args.c_clip}")
    slot_size = args.num_envs * args.unroll_length
    batch_size = args.batch_size or args.num_envs
    first = math.ceil(batch_size / args.num_envs) * slot_size
    message = f"--total-timesteps {args.total_timesteps} is less than the {first} steps of one batch"
    check(args.total_timesteps >= first, message)
    device = set_up(args)

    envs = make_envs(args, 1)
    dtype = unroll_dtype(envs, args)
    check_unrolls_size(args, dtype)
    agent = Agent(envs, args).to(device)
    optimizer = make_optimizer(agent, args)
    num_updates, metrics = 0, {}  # updates since the start or resume, and metrics of the latest

    with (
        Run(args, __file__, agent=agent, optimizer=optimizer) as run,
        Actors(Player, args, agent, dtype, run.step) as actors,
    ):
        gathered = np.zeros(0, dtype)  # not learned from yet
        while run.step + slot_size <= args.total_timesteps:
            slot = actors.take(num_updates)  # from now on actors get the parameters of now
            run.check_unrolls(slot)
            unrolls, lag = slot["unrolls"], num_updates - slot["version"]
            # detail impala-7: the learning rate falls linearly to 0
            remaining = 1 - run.step / args.total_timesteps
            optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)
            run.step += slot_size
            if (ended := unrolls["ep_length"] > 0).any():
                episodes = {"r": unrolls["ep_return"], "l": unrolls["ep_length"]}
                run.log_episodes({"_episode": ended, "episode": episodes})
            gathered = np.concatenate([gathered, unrolls])
            while len(gathered) >= batch_size:
                batch, gathered = np.split(gathered, [batch_size])
                metrics = update(agent, optimizer, batch, args)
                num_updates += args.updates_per_collect
            metrics |= {"train/policy_lag": lag, "train/learning_rate": optimizer.param_groups[0]["lr"]}
            metrics["time/learner_wait"] = actors.waited / (time.perf_counter() - run.start_time)
            run.log(metrics)
            if run.evaluation_due:
                run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
