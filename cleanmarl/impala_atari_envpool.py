"""IMPALA as in impala.py, but for Atari games on envpool: the paper's deep or shallow network, and an LSTM by a flag.

Each actor process plays N environments with its own copy of the policy and fills slots of shared memory with unrolls of
T steps; only the numbers of slots travel between the processes. The learner takes them as they come. Its parameters are
newer than those that acted, so V-trace weighs every step by the ratio of the two policies, clipped. With --num-actors 0
one process does both in turn, and the run repeats exactly; with --deterministic a run with actors does so too.

With a convolutional network most of the work is the learner's: without a GPU, more actors than one gain nothing.
Settings are the paper's for Atari: RMSProp on losses that are sums over the batch. It learns from lives and
the signs of rewards; the returns it reports are the scores of whole games.

Paper: Espeholt et al. 2018 (arXiv:1802.01561).
If an actor dies, the run saves and ends; if the learner dies, the actors find their pipes closed and end.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections import deque
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import resource_tracker
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from cleanmarl.envs.pool import EnvPool, envpool_spec
from cleanmarl.run import Run, check, check_positive, find_device, keep_freed_memory, launch, seed_everything

SLOTS_PER_ACTOR = 2  # one to fill while the other waits for the learner


@dataclass
class Args:
    seed: int = 1
    """seed of the networks, the policy's samples and the environments"""
    device: str = "cpu"
    """torch device of the learner: cpu, cuda, cuda:1, mps; actors use the CPU"""
    torch_threads: int = 1
    """threads of torch on the CPU, in the learner"""
    runs_dir: str = "runs"
    """where run folders are made"""
    checkpoint_interval: int = 100_000
    """environment steps between two checkpoints; there is always one at the end"""
    resume: Path | None = None
    """run folder to continue; --total-timesteps may be raised"""
    eval_episodes: int = 20
    """episodes of the evaluation at the end, with the most probable action; 0 for none"""
    capture_video: bool = False
    """record an episode at the end into the run folder"""
    track: bool = False
    """log to Weights & Biases too"""
    wandb_project_name: str = "cleanmarl"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team"""

    env_id: str = "Pong-v5"
    """any Atari game of envpool"""
    total_timesteps: int = 10_000_000
    """environment steps that are learned from, all environments together; one is 4 frames"""

    shallow: bool = False
    """the network of two convolutions (Mnih et al. 2016) instead of the residual one"""
    lstm: bool = False
    """an LSTM that also sees the previous action and reward, behind the convolutions"""
    num_actors: int = 2
    """actor processes; 0: collect and learn in turn in one process"""
    deterministic: bool = False
    """take one unroll from each actor in turn, and give all of them new parameters at the same time"""
    learning_rate: float = 6e-4
    """learning rate of RMSProp"""
    num_envs: int = 32
    """N, environments of each actor; N unrolls are a batch"""
    unroll_length: int = 20
    """T, steps of each environment in one unroll"""
    updates_per_collect: int = 1
    """gradient steps for each batch that is collected"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    gamma: float = 0.99
    """discount factor, in [0, 1]"""
    vtrace_lambda: float = 1.0
    """lambda of V-trace, in [0, 1]"""
    rho_clip: float = 1.0
    """largest importance weight of a value error: where the value function converges to; at least c_clip"""
    c_clip: float = 1.0
    """largest importance weight in the trace: how fast it gets there"""
    pg_rho_clip: float = 1.0
    """largest importance weight of the policy gradient"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 40.0
    """largest norm of the gradient of all parameters together"""


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of a run, with four grey frames (4, 84, 84) as observations; UsageError for other games."""
    message = f"impala_atari_envpool.py needs an Atari game, such as Pong-v5, and {args.env_id} is none"
    check("episodic_life" in envpool_spec(args.env_id).config._fields, message)
    wrappers = {
        "noop_max": 30,  # up to 30 no-ops first
        "frame_skip": 4,  # 4 frames per step, seen as the maximum of the last two
        "episodic_life": True,  # a lost life ends the episode
        "use_fire_reset": True,  # FIRE starts the game
        "gray_scale": True,  # luminance first, then 84 x 84
        "img_height": 84,
        "img_width": 84,
        "reward_clip": True,  # rewards are -1, 0 or 1
        "stack_num": 4,  # the last 4 frames show what moves
    }
    return EnvPool(args.env_id, num_envs, **wrappers, **options)


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
        if args.shallow:
            layers = [nn.Conv2d(num_frames, 16, 8, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 4, stride=2)]
            size = 32 * 9 * 9
        else:
            layers, size = [], 32 * 11 * 11
            for before, after in pairwise([num_frames, 16, 32, 32]):
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
                layers += [Residual(after), Residual(after)]
        self.network = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(size, 256), nn.ReLU())
        self.lstm = nn.LSTM(256 + num_actions + 1, 256) if args.lstm else None
        self.state_size, self.num_actions = 256 * args.lstm, num_actions
        self.actor, self.critic = nn.Linear(256, num_actions), nn.Linear(256, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)  # small: every action is about as likely at first
        nn.init.zeros_(self.actor.bias)
        self.to(memory_format=torch.channels_last)  # makes convolutions faster

    def forward(self, obs, start, last_action, last_reward, state) -> tuple[torch.Tensor, ...]:
        hidden = self.network(obs.flatten(0, 1).to(torch.float32, memory_format=torch.channels_last).div_(255))
        hidden = hidden.unflatten(0, start.shape)
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
        ("state", np.float32, (2, 256 * args.lstm)),  # of the LSTM before the first step
    ]
    return np.dtype(fields, align=True)


def slot_dtype(envs: gym.vector.VectorEnv, args: Args) -> np.dtype:
    """What an actor hands over at once: N unrolls, the version of their policy, and the episodes that ended."""
    T, N = args.unroll_length, args.num_envs
    fields = [("unrolls", unroll_dtype(envs, args), (N,)), ("version", np.int64)]
    fields += [("ep_return", np.float64, (T, N)), ("ep_length", np.int64, (T, N))]  # length 0: no end here
    return np.dtype(fields, align=True)


class Player:
    """N environments of their own seeds, played one unroll after another."""

    def __init__(self, args: Args, index: int, step: int):
        self.args = args
        self.rng = np.random.default_rng([args.seed, step, index])  # a resumed run begins new episodes
        self.envs = make_envs(args, args.num_envs)
        self.obs, _ = self.envs.reset(seed=int(self.rng.integers(2**31)))
        N = args.num_envs
        self.start, self.action, self.reward = np.ones(N, bool), np.zeros(N, np.int64), np.zeros(N, np.float32)
        self.state = torch.zeros(2, N, 256 * args.lstm)

    @torch.no_grad()
    def play(self, agent: Agent, slot: np.ndarray) -> None:
        """Fill `slot`, a record of slot_dtype, with the next T steps by `agent`."""
        T, N, K = self.args.unroll_length, self.args.num_envs, self.envs.single_action_space.n
        device = next(agent.parameters()).device
        # The argmax of logits + Gumbel noise is a sample of the softmax; -log(exponential) is Gumbel noise.
        noise = -np.log(self.rng.standard_exponential((T, N, K), np.float32))
        logits = np.empty((T, N, K), np.float32)
        unrolls = {name: slot["unrolls"][name].swapaxes(0, 1) for name in slot["unrolls"].dtype.names}  # (T, N, ...)
        unrolls["state"][:] = self.state.cpu().numpy()
        slot["ep_length"][:] = 0
        for t in range(T):
            last = self.obs, self.start, self.action, self.reward
            unrolls["obs"][t], unrolls["start"][t], unrolls["last_action"][t], unrolls["last_reward"][t] = last
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
                ended = info["_episode"]
                slot["ep_return"][t], slot["ep_length"][t] = info["episode"]["r"], info["episode"]["l"] * ended
        last = self.obs, self.start, self.action, self.reward
        unrolls["obs"][T], unrolls["start"][T], unrolls["last_action"][T], unrolls["last_reward"][T] = last
        logits -= logits.max(-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        unrolls["log_prob"][:] = np.take_along_axis(log_probs, unrolls["last_action"][1:, :, None], -1)[..., 0]


class Parameters:
    """The newest parameters of an agent and their version, flat in shared memory: one process writes, others read."""

    def __init__(self, memory):
        self.version, self.flat = np.frombuffer(memory, np.int64, 1), np.frombuffer(memory, np.float32, offset=8)

    def write(self, agent: Agent, version: int) -> None:
        flat = torch.cat([p.detach().flatten() for p in agent.parameters()]).cpu().numpy()
        self.version[0] = -1  # no version: they are being written
        self.flat[:] = flat
        self.version[0] = version

    def read(self, agent: Agent) -> int:
        """Load the newest parameters into agent, and return their version; versions must differ."""
        while True:  # again, if they were written meanwhile
            version, flat = self.version[0], self.flat.copy()
            if version >= 0 and version == self.version[0]:
                parts = torch.from_numpy(flat).split([p.numel() for p in agent.parameters()])
                for parameter, part in zip(agent.parameters(), parts):  # in place: the memory format stays
                    parameter.data.copy_(part.view_as(parameter))
                return int(version)
            parent = multiprocessing.parent_process()
            if parent is not None and not parent.is_alive():
                raise SystemExit  # the learner was killed while it wrote


def send(connection, message: int | str) -> None:
    with suppress(OSError):  # the other side is gone, which receive notices
        connection.send(message)


def receive(connection) -> int | str | None:
    """The next message, None if the other side is gone."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def act(index: int, args: Args, step: int, connection, parameters_memory, slots_memory) -> None:
    """The life of an actor process: fill the slots whose numbers come, and send the numbers back."""
    try:
        torch.set_num_threads(1)
        keep_freed_memory()
        player = Player(args, index, step)
        agent, parameters = Agent(player.envs, args), Parameters(parameters_memory)
        slots = np.frombuffer(slots_memory, slot_dtype(player.envs, args))
        gc.freeze()
        while (message := receive(connection)) is not None:
            slots[message]["version"] = parameters.read(agent)
            player.play(agent, slots[message])
            send(connection, message)
    except Exception:
        send(connection, traceback.format_exc())


class Actors:
    """Actor processes and what they share with the learner, memory without a name that nobody can leave behind.

    Every actor has slots and a pipe of its own: its end tells each side that the other one died, whatever the cause.
    """

    def __init__(self, args: Args, agent: Agent, envs: gym.vector.VectorEnv, step: int):
        self.args, self.agent, dtype = args, agent, slot_dtype(envs, args)
        self.waited, self.ready, self.connections, self.processes = 0.0, deque(), [], []
        if args.num_actors == 0:
            self.player, self.slots = Player(args, 0, step), np.zeros(1, dtype)
            return
        context = multiprocessing.get_context("spawn")
        parameters_memory = context.RawArray("b", 8 + 4 * sum(p.numel() for p in agent.parameters()))
        slots_memory = context.RawArray("b", args.num_actors * SLOTS_PER_ACTOR * dtype.itemsize)
        self.parameters, self.slots = Parameters(parameters_memory), np.frombuffer(slots_memory, dtype)
        self.publish(version=0)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # actors share the cores already
        resource_tracker.ensure_running()  # which unblocks signals
        signals = {signal.SIGINT, signal.SIGTERM}  # are for the learner: actors keep what is blocked when they start
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            for i in range(args.num_actors):
                connection, theirs = context.Pipe()
                self.connections.append(connection)
                arguments = (i, args, step, theirs, parameters_memory, slots_memory)
                process = context.Process(target=act, args=arguments, daemon=True)
                process.start()
                self.processes.append(process)
                theirs.close()  # so that the pipe ends with the process
                for k in range(1 if args.deterministic else SLOTS_PER_ACTOR):
                    send(connection, i * SLOTS_PER_ACTOR + k)
        except BaseException:  # too many processes or files
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def receive(self, i: int) -> int:
        """The number of a slot that actor i has filled; RuntimeError if it failed or died."""
        message, process = receive(self.connections[i]), self.processes[i]
        if message is None:
            process.join(5)
            raise RuntimeError(f"actor {i} (pid {process.pid}) died (exit code {process.exitcode})")
        if isinstance(message, str):
            raise RuntimeError(f"actor {i} failed:\n{message}")
        return message

    def take(self, version: int) -> list[tuple[int, np.ndarray]]:
        """(actor, slot) of the next full slot; if deterministic, of one from each actor. `version`: the agent's."""
        if self.args.num_actors == 0:
            self.slots["version"] = version
            self.player.play(self.agent, self.slots[0])
            return [(0, self.slots[0])]
        start = time.perf_counter()
        if self.args.deterministic:
            full = [self.receive(i) for i in range(self.args.num_actors)]
            self.publish(version)  # now that nobody reads
        else:
            if not self.ready:
                self.ready.extend(multiprocessing.connection.wait(self.connections))
            full = [self.receive(self.connections.index(self.ready.popleft()))]
        self.waited += time.perf_counter() - start
        copies = [(slot // SLOTS_PER_ACTOR, self.slots[slot].copy()) for slot in full]
        for (actor, _), slot in zip(copies, full):
            send(self.connections[actor], slot)  # so that it goes on while we learn
        return copies

    def publish(self, version: int) -> None:
        self.parameters.write(self.agent, version)

    def close(self) -> None:
        """End the actors: closed pipes tell them; who is still busy after two seconds is killed."""
        for connection in self.connections:
            connection.close()
        end = time.monotonic() + 2
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()
            process.join()


def vtrace(log_rho, reward, value, next_value, done, gamma, lambda_, rho_clip, c_clip, pg_rho_clip):
    """Targets of the value function and advantages by V-trace (Espeholt et al. 2018, section 4), cut where done.

    Arrays (T, ...): log_rho, the log of the ratio of the policy that learns to the one that acted; value, of the
    observation before each step; next_value, of the one after it: 0 if the step terminated the episode, and the value
    of its final observation if it truncated it. Returns (T, ...), (T, ...).
    """
    rho, continues = np.exp(log_rho), ~done
    delta = np.minimum(rho, rho_clip) * (reward + gamma * next_value - value)
    decay = gamma * lambda_ * continues * np.minimum(rho, c_clip)
    error = delta  # of the value, v_s - V(x_s)
    for t in reversed(range(len(error) - 1)):
        error[t] += decay[t] * error[t + 1]
    return_ = value + error
    next_return = next_value.copy()
    next_return[:-1][continues[:-1]] = return_[1:][continues[:-1]]
    return return_, np.minimum(rho, pg_rho_clip) * (reward + gamma * next_return - value)


def impala_loss(agent: Agent, unrolls: np.ndarray, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a batch, and its diagnostics: policy_loss, value_loss, entropy, approx_kl, clipfrac,
    explained_variance, means over its steps. unrolls: records (B,)."""
    names, device = unrolls.dtype.names, next(agent.parameters()).device
    batch = {x: torch.from_numpy(unrolls[x].swapaxes(0, 1).copy()).to(device) for x in names}  # (T, B, ...)
    last = batch["start"], batch["last_action"], batch["last_reward"]
    done, action, reward = (x[1:] for x in last)

    logits, value, _ = agent(batch["obs"], *last, batch["state"])
    log_probs = logits[:-1].log_softmax(-1)  # (T, B, K)
    log_prob = log_probs.gather(-1, action[..., None]).squeeze(-1)
    with torch.no_grad():
        log_rho = log_prob - batch["log_prob"]
        arrays = (x.cpu().numpy() for x in (log_rho, reward, value[:-1], value[1:] * ~done, done))
        clips = args.rho_clip, args.c_clip, args.pg_rho_clip
        targets = vtrace(*arrays, args.gamma, args.vtrace_lambda, *clips)
        return_, advantage = (torch.from_numpy(x).to(device) for x in targets)

    policy_loss = -(log_prob * advantage).mean()
    value_loss = 0.5 * (value[:-1] - return_).square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = (policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss) * done.numel()  # sums, as in the paper

    with torch.no_grad():
        approx_kl = (log_rho.exp() - 1 - log_rho).mean()
        clipfrac = (log_rho.exp() > args.rho_clip).float().mean()
        explained_variance = (1 - (return_ - value[:-1]).var() / return_.var()).nan_to_num(0, neginf=0)
        stats = torch.stack([policy_loss, value_loss, entropy, approx_kl, clipfrac, explained_variance])
    return loss, stats


def update(agent: Agent, optimizer: torch.optim.Optimizer, unrolls: np.ndarray, args: Args) -> dict:
    """--updates-per-collect gradient steps for N new unrolls; returns the mean diagnostics."""
    all_stats = []
    for _ in range(args.updates_per_collect):
        loss, stats = impala_loss(agent, unrolls, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        all_stats.append(stats)
    names = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"]
    return {f"train/{name}": x for name, x in zip(names, torch.stack(all_stats).mean(0).tolist())}


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    check_positive(args, "num_envs", "unroll_length", "updates_per_collect", "learning_rate", "torch_threads")
    check_positive(args, "checkpoint_interval", "max_grad_norm", "rho_clip", "c_clip", "pg_rho_clip")
    check(args.num_actors >= 0, f"--num-actors must be at least 0, not {args.num_actors}")
    check(0 <= args.gamma <= 1 and 0 <= args.vtrace_lambda <= 1, "--gamma and --vtrace-lambda must be in [0, 1]")
    message = f"--rho-clip {args.rho_clip} must be at least --c-clip {args.c_clip}"
    check(args.rho_clip >= args.c_clip, message)
    slot_steps = args.num_envs * args.unroll_length
    message = f"--total-timesteps {args.total_timesteps} is less than the {slot_steps} steps of one batch"
    check(args.total_timesteps >= slot_steps, message)
    device = find_device(args.device)
    seed_everything(args.seed, args.torch_threads)

    envs = make_envs(args, 1)
    agent = Agent(envs, args).to(device)
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=args.learning_rate, alpha=0.99, eps=0.01)
    num_updates = 0

    with (
        Run(args, __file__, agent=agent, optimizer=optimizer) as run,
        closing(Actors(args, agent, envs, run.step)) as actors,
    ):
        while run.step + slot_steps <= args.total_timesteps:
            for _, slot in actors.take(num_updates):
                if run.step + slot_steps > args.total_timesteps:
                    break  # --deterministic takes one from every actor
                remaining = 1 - run.step / args.total_timesteps
                optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)
                run.step += slot_steps
                ended = slot["ep_length"] > 0
                if ended.any():
                    run.log_episodes({"_episode": ended, "episode": {"r": slot["ep_return"], "l": slot["ep_length"]}})
                metrics = {"train/policy_lag": num_updates - slot["version"]}
                metrics |= update(agent, optimizer, slot["unrolls"], args)
                num_updates += args.updates_per_collect
                if args.num_actors and not args.deterministic:
                    actors.publish(num_updates)
                metrics["train/learning_rate"] = optimizer.param_groups[0]["lr"]
                metrics["time/learner_wait"] = actors.waited / (time.perf_counter() - run.start_time)
                run.log(metrics)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
