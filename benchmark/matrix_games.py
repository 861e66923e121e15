"""The matrix games of the CoPPO paper, section 4.1, appendices C.1 and D.1: figures 1, 2, 5 by our scripts' functions.

    python benchmark/matrix_games.py --out docs/results --seeds 30 --workers 2

Trains what is missing in RUNS_DIR (an .npz per game and variant, of all seeds; an interrupted call goes on there). Then
it writes OUT/data/coppo_matrix.csv (the curves) and coppo_matrix_final.csv (the tables), from which redraw.py draws
OUT/coppo_matrix_penalty.svg (figure 1, the penalty game), coppo_matrix_inner_clip.svg (figure 2) and
coppo_matrix_games.svg (figure 5, the other games), each with a table .md. All seeds of a variant learn side by side:
their teams are stacked into the networks of one run, which collects, estimates and updates with the functions of
coppo_matrix.py and coma.py. Recorded per update of 20 plays and for each seed, the last two on the penalty game
alone:

    reward        mean reward of the team
    variance      running variance of the policy gradient, summed over all parameters of all agents: one sample is the
                  mean over the epochs of an update, and E[g^2] - E[g]^2 is from exponential averages (0.99, unbiased)
    penalties     for every penalty (three alike) and every epoch, the mean over the three of what weighs a gradient:
                  g A for CoPPO, A for the others

Intervals are 95 % bootstrap intervals of the mean over seeds.

All use the settings of appendix C.1, which leaves open what one update learns from. Here that is 20 plays, with one
critic per agent, and no entropy bonus, normalisation or limit on gradients. Policies explore by epsilon-greedy; the
mixture is the policy, so its probabilities make the ratios. CoPPO, MAPPO and COMA have counterfactual advantages from
critics of joint actions, as in the paper. MAPPO is coppo_matrix.py with an inner clip of 0, which holds the others'
ratios at 1. IPPO is the same with critics of the state: it is all there is to see, so they are the
independent critics of ippo.py.
"""

import multiprocessing
import signal
import sys
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

from cleanmarl import coma, coppo_matrix
from cleanmarl.cli import PositiveInt, UsageError, check, check_ranges
from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.layers import Networks, StackedLinear

import numpy as np
import redraw
import torch
import tyro
from torch.optim.optimizer import register_optimizer_step_pre_hook

PLAYS = 20  # per update
EPOCHS = 8
GAMES = ["penalty-free", "penalty-100", "one-optimum", "climbing-4p", "climbing-4p-penalty", "climbing-4p-rising"]
BEST = {"penalty": 50, "penalty-free": 50, "penalty-100": 100, "one-optimum": 50}  # 90 in the others
ALGORITHMS = ["CoPPO", "MAPPO", "IPPO", "COMA"]
INNER_CLIPS = ["CoPPO 0.05", "CoPPO", "CoPPO 0.15", "CoPPO without double clipping"]
COMMON = {
    "total_timesteps": 10_000,
    "num_envs": PLAYS,
    "num_steps": 1,
    "share_parameters": False,
    "actor_hidden_dim": 18,
    "critic_hidden_dim": 72,
    "learning_rate": 5e-4,
    "critic_learning_rate": 5e-4,
    "gamma": 0.99,
    "epsilon_start": 0.9,
    "epsilon_end": 0.02,
    "epsilon_timesteps": 6000,
    "ent_coef": 0.0,
    "max_grad_norm": 1e9,
    "eval_episodes": 0,
    "checkpoint_interval": 10**9,
}
COPPO = {"optimizer": "rmsprop", "update_epochs": EPOCHS, "num_minibatches": 1, "clip_coef": 0.2}
COPPO |= {
    "advantage": "counterfactual",
    "norm_adv": False,
    "value_clip_coef": 0.0,
    "huber_delta": 0.0,
    "normalize_value": False,
}
VARIANTS = {
    "CoPPO": (coppo_matrix, COPPO | {"inner_clip_coef": 0.1}),
    "CoPPO 0.05": (coppo_matrix, COPPO | {"inner_clip_coef": 0.05}),
    "CoPPO 0.15": (coppo_matrix, COPPO | {"inner_clip_coef": 0.15}),
    "CoPPO without double clipping": (coppo_matrix, COPPO | {"inner_clip_coef": float("inf")}),
    "MAPPO": (coppo_matrix, COPPO | {"inner_clip_coef": 0.0}),
    "IPPO": (coppo_matrix, COPPO | {"inner_clip_coef": 0.0, "advantage": "gae"}),
    "COMA": (coma, {}),
}


@dataclass
class Args:
    out: Path
    """folder of the results"""
    runs_dir: Path = Path("runs/matrix_games")
    """folder of the runs"""
    seeds: PositiveInt = 30
    """runs of each variant on each game"""
    workers: PositiveInt = 2
    """processes that train side by side"""


def split(x):
    """(R, 4 * teams, ...) -> (R * teams, 4, ...), arrays or tensors. Agent i of team s is i * teams + s."""
    return x.reshape(len(x), 4, -1, *x.shape[2:]).swapaxes(1, 2).reshape(-1, 4, *x.shape[2:])


def join(x, num_rows: int):
    """(R * teams, 4, ...) -> (R, 4 * teams, ...), the inverse of `split`."""
    return x.reshape(num_rows, -1, *x.shape[1:]).swapaxes(1, 2).reshape(num_rows, -1, *x.shape[2:])


class Games(MultiAgentVectorEnv):
    """A matrix game that many teams play, each for itself; their agents are the agents of one environment."""

    def __init__(self, game: str, num_envs: int, num_teams: int):
        self.table, A = make(f"matrix/{game}").table, 4 * num_teams
        self._set_spaces(num_envs, [f"agent_{a}" for a in range(A)], [1] * A, [9] * A, 4)
        self.obs = np.ones((num_envs, A, 1), np.float32)
        self.info = {"state": np.ones((num_envs, 4), np.float32), "agent_mask": np.ones((num_envs, A), bool)}
        self.info["action_mask"] = np.ones((num_envs, A, 9), bool)

    def reset(self, *, seed=None, options=None):
        return self.obs, self.info

    def step(self, action):
        reward = self.table[tuple(split(action).T)]  # (N * teams,)
        reward = join(np.repeat(reward[:, None], 4, axis=1), len(action))
        return self.obs, reward, np.ones(len(action), bool), np.zeros(len(action), bool), self.info


def make_teams(script, args, seeds):
    """The script's agents of every seed, as the networks of one agent."""
    one_team = make(args.env_id)

    class Teams(script.Agent):
        def others_actions(self, action, alive):  # of the own team
            return join(super().others_actions(split(action), split(alive)), len(action))

    teams, members = Teams(one_team, args), []
    for seed in seeds:
        torch.manual_seed(seed)
        members.append(script.Agent(one_team, args))
    for parameter, *of_members in zip(teams.parameters(), *(member.parameters() for member in members)):
        parameter.data = torch.stack([p.detach() for p in of_members], dim=1).flatten(0, 1)
    for layer in teams.modules():
        if isinstance(layer, StackedLinear):
            layer.num_networks = 4 * len(seeds)
    return teams


def make_rollout(script, num_agents: int):
    """One rollout of PLAYS games of one step, empty."""
    shape = (1, PLAYS, num_agents)
    arrays = {
        "obs": np.zeros((*shape, 1), np.float32),
        "state": np.zeros((1, PLAYS, 4), np.float32),
        "action_mask": np.zeros((*shape, 9), bool),
        "agent_mask": np.zeros(shape, bool),
        "action": np.zeros(shape, np.int64),
        "log_prob": np.zeros(shape, np.float32),
        "reward": np.zeros(shape, np.float32),
        "done": np.zeros(shape, bool),
    }
    return script.Rollout(**{name: arrays[name] for name in script.Rollout._fields})


def make_optimizer(script, agent, args):
    """The optimizer of a run of teams, and the actors' parameters in groups that step one after another."""
    in_turn = script is coppo_matrix and args.inner_clip_coef > 0
    actors = [list(agent.actor.parameters())] if script is coma else Networks(agent.actor, 4 if in_turn else 1)
    groups = [{"params": [p for turn in actors for p in turn], "lr": args.learning_rate}]
    groups.append({"params": list(agent.critic.parameters()), "lr": args.critic_learning_rate})
    return actors, torch.optim.RMSprop(groups, alpha=0.99, eps=1e-5, foreach=True)


class Recorder:
    """What happens to the teams within an update, seen by the script's `actor_loss` and its optimizer's steps."""

    def __init__(self, script, actors):
        self.script, self.actors, self.turns = script, actors, len(actors)
        self.actor_loss = script.actor_loss
        self.variances, self.penalties = [], []
        self.mean = self.square = 0

    def begin_update(self, rollout):
        action = split(rollout.action[0])
        alike = (action[:, :, None] == action[:, None]).sum(-1)  # (R * teams, 4) agents with the same action, all told
        self.rows, self.agents = np.nonzero(alike == 3)  # three entries for each penalty
        self.weights, self.gradient, self.calls = [], 0, 0

    @torch.no_grad()
    def watch(self, agent, batch, args):
        """In the place of `actor_loss`: notes what weighs the gradients of the three agents of every penalty."""
        log_probs = agent.logits(batch.obs, batch.action_mask).log_softmax(-1)
        if self.script is coma:
            values = agent.values(agent.critic, batch.state, batch.obs, batch.alive, batch.others)
            weight = coma.counterfactual_advantage(values, log_probs, batch.action)
        else:
            log_ratio = log_probs.gather(-1, batch.action[..., None]).squeeze(-1) - batch.log_prob
            weight = batch.advantage * coppo_matrix.ratio_of_others(log_ratio, args)[1]
        weight = split(weight.numpy())[self.rows, self.agents]
        turn = self.calls % self.turns
        if turn == 0:
            self.weights.append(weight)
        mine = (self.agents == turn) | (self.turns == 1)
        self.weights[-1][mine] = weight[mine]  # as it is when it is an agent's turn
        self.calls += 1
        with torch.enable_grad():
            return self.actor_loss(agent, batch, args)

    def before_step(self, optimizer, *_):
        of_turns = [[torch.zeros_like(p) if p.grad is None else p.grad for p in turn] for turn in self.actors]
        self.gradient += torch.cat([torch.cat([g.flatten(1) for g in turn], dim=1) for turn in of_turns])

    def end_update(self):
        num_teams = len(self.gradient) // 4
        weights = np.array(self.weights).reshape(len(self.weights), -1, 3).mean(-1)  # (epochs, penalties)
        teams = self.rows[::3] % num_teams
        self.penalties.append([weights[:, teams == s].T for s in range(num_teams)])
        gradient = (self.gradient.double() / len(self.weights)).reshape(4, num_teams, -1)
        self.mean, self.square = 0.99 * self.mean + 0.01 * gradient, 0.99 * self.square + 0.01 * gradient**2
        unbias = 1 - 0.99 ** len(self.penalties)
        self.variances.append((self.square / unbias - (self.mean / unbias) ** 2).sum((0, 2)).numpy())


class NoRun:
    """In the place of a run: there are no episodes to log, and the rewards are those of a table."""

    def check_rollout(self, rollout, next_obs) -> None:
        pass


def train(job) -> str:
    """One variant on one game with all its seeds, recorded in its file: what `main` of the script does, for teams."""
    game, variant, seeds, path = job
    script, settings = VARIANTS[variant]
    args = script.Args(env_id=f"matrix/{game}", **COMMON, **settings)
    torch.set_num_threads(1)
    agent, envs = make_teams(script, args, seeds), Games(game, PLAYS, len(seeds))
    torch.manual_seed(seeds[0])
    actors, optimizer = make_optimizer(script, agent, args)
    rollout = make_rollout(script, 4 * len(seeds))

    recorder, ratio_of_others, rewards = Recorder(script, actors), coppo_matrix.ratio_of_others, []
    coppo_matrix.ratio_of_others = lambda x, args: [join(y, len(x)) for y in ratio_of_others(split(x), args)]
    watched = game == "penalty"
    if watched:
        script.actor_loss = recorder.watch
        hook = register_optimizer_step_pre_hook(recorder.before_step)
    now = envs.reset()
    for iteration in range(args.total_timesteps // PLAYS):
        progress = min(iteration * PLAYS / args.epsilon_timesteps, 1)
        agent.epsilon.fill_(args.epsilon_start + progress * (args.epsilon_end - args.epsilon_start))
        now = script.collect(agent, envs, now, rollout, args, NoRun())
        batch = script.estimate(agent, rollout, *now, args)
        rewards.append(split(rollout.reward[0])[:, 0].reshape(PLAYS, -1).mean(0))
        recorder.begin_update(rollout)
        if script is coma:
            coma.update(agent, optimizer, batch, iteration, args)
        else:
            coppo_matrix.update(agent, actors, optimizer, batch, args)
        if watched:
            recorder.end_update()
    coppo_matrix.ratio_of_others, results = ratio_of_others, {"reward": np.array(rewards).T}
    if watched:
        hook.remove()
        script.actor_loss = recorder.actor_loss
        penalties = [np.concatenate(of_team) for of_team in zip(*recorder.penalties)]  # each (penalties, epochs)
        results |= {f"penalties_{seed}": p.astype(np.float32) for seed, p in zip(seeds, penalties)}
        results["variance"] = np.array(recorder.variances).T

    keep(path, **results)
    return path.stem


def find_jobs(args: Args) -> list:
    """What is to be trained; the penalty game comes first."""
    jobs = [("penalty", variant) for variant in VARIANTS] + [(game, a) for game in GAMES for a in ALGORITHMS]
    jobs = [(game, variant, range(1, args.seeds + 1), run_path(args.runs_dir, game, variant)) for game, variant in jobs]
    return [job for job in jobs if not is_done(job[-1], args.seeds)]


def is_done(path: Path, seeds: int) -> bool:
    """Whether a file of runs is there; UsageError if it is of another number of seeds."""
    runs = len(np.load(path)["reward"]) if path.exists() else seeds
    check(runs == seeds, f"{path} has {runs} runs, not {seeds}: take another --runs-dir, or other --seeds")
    return path.exists()


def keep(path: Path, **results: np.ndarray) -> None:
    """Write a file of runs whole, or not at all."""
    temporary = path.with_suffix(".tmp.npz")
    np.savez_compressed(temporary, **results)
    temporary.rename(path)


def run_path(runs_dir: Path, game: str, variant: str) -> Path:
    return runs_dir / f"{game}__{variant.replace(' ', '-')}.npz"


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over the seeds and its 95 % bootstrap interval; values (seeds, ...)."""
    rng = np.random.default_rng(0)
    means = np.stack([values[rng.integers(len(values), size=len(values))].mean(0) for _ in range(1000)])
    return values.mean(0), *np.percentile(means, [2.5, 97.5], axis=0)


def curve(panel: str, variant: str, x: np.ndarray, values: np.ndarray) -> list[str]:
    """A curve with its interval as lines of a CSV; values (seeds, points)."""
    ends = zip(x, *interval(values))
    return [f'"{panel}",{variant},{a:g},{mean:.6g},{low:.6g},{high:.6g}' for a, mean, low, high in ends]


def binned(values: np.ndarray) -> np.ndarray:
    """(seeds, 500) -> (seeds, 50): means over ten updates each."""
    return values.reshape(len(values), 50, -1).mean(2)


def table_row(figure: str, reward: np.ndarray, game: str, variant: str) -> str:
    """Rewards at the end and overall, and the share of runs whose final reward is above half of the best one."""
    ends = [reward[:, -50:].mean(1), reward.mean(1)]  # the last 1,000 plays, all plays
    cells = ["{:.1f} [{:.1f}, {:.1f}]".format(*interval(values)) for values in ends]
    solved = (ends[0] > BEST.get(game, 90) / 2).mean()
    return f'{figure},{game},{variant},{len(reward)},"{cells[0]}","{cells[1]}",{solved:.0%}'


def write_data(args: Args) -> None:
    """What the figures and the tables are made of."""
    steps, lines = np.arange(1, 51) * 200, ["panel,variant,x,mean,low,high"]
    for algorithm in ALGORITHMS:
        runs = np.load(run_path(args.runs_dir, "penalty", algorithm))
        lines += curve("figure 1, reward", algorithm, steps, binned(runs["reward"]))
        lines += curve("figure 1, variance", algorithm, steps, binned(runs["variance"]))
        penalties = [runs[name] for name in runs if name.startswith("penalties")]  # each (penalties, epochs)
        first = min(70, *map(len, penalties))
        after = np.stack([p[:first].mean(1) for p in penalties])
        lines += curve("figure 1, advantage after a penalty", algorithm, np.arange(1, first + 1), after)
        by_epoch = np.stack([np.broadcast_to((p - p[:, :1]).mean(0), EPOCHS) for p in penalties])
        lines += curve("figure 1, advantage over the epochs", algorithm, np.arange(1, EPOCHS + 1), by_epoch)
    for variant in INNER_CLIPS:
        runs = np.load(run_path(args.runs_dir, "penalty", variant))
        label = "CoPPO 0.10" if variant == "CoPPO" else variant
        lines += curve("figure 2, reward", label, steps, binned(runs["reward"]))
        lines += curve("figure 2, variance", label, steps, binned(runs["variance"]))
    for game in GAMES:
        for algorithm in ALGORITHMS:
            reward = np.load(run_path(args.runs_dir, game, algorithm))["reward"]
            lines += curve(f"figure 5, {game}", algorithm, steps, binned(reward))

    rows = [("coppo_matrix_penalty", "penalty", algorithm) for algorithm in ALGORITHMS]
    rows += [("coppo_matrix_inner_clip", "penalty", variant) for variant in INNER_CLIPS]
    rows += [("coppo_matrix_games", game, algorithm) for game in GAMES for algorithm in ALGORITHMS]
    table = ['figure,game,variant,runs,"last 1,000 plays","all 10,000 plays",solved']
    for figure, *run in rows:
        table.append(table_row(figure, np.load(run_path(args.runs_dir, *run))["reward"], *run))

    folder = args.out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "coppo_matrix.csv").write_text("\n".join(lines) + "\n")
    (folder / "coppo_matrix_final.csv").write_text("\n".join(table) + "\n")


def hear_signals(signals: set[signal.Signals]) -> None:
    """In a process of the pool: Ctrl-C is for the program, which ends the pool; it began with signals blocked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def main(args: Args) -> None:
    check_ranges(args)
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    jobs = find_jobs(args)
    if jobs:
        signals, caught = {signal.SIGINT, signal.SIGTERM}, []
        for signum in signals:  # a pool that has half started would not end its processes
            signal.signal(signum, lambda signum, _frame: caught.append(signum))
        resource_tracker.ensure_running()  # which unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a process that has half started would end in a traceback
        with multiprocessing.get_context("spawn").Pool(args.workers, hear_signals, [signals]) as pool:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            for signum in signals:
                signal.signal(signum, lambda signum, _frame: sys.exit(128 + signum))  # the pool ends its processes
            if caught:
                sys.exit(128 + caught[0])
            for i, name in enumerate(pool.imap_unordered(train, jobs), start=1):
                print(f"{i}/{len(jobs)} {name}", flush=True)
    write_data(args)
    redraw.coppo_matrix(args.out)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except UsageError as error:
        print(f"matrix_games: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a folder that cannot be written
        sys.exit(f"matrix_games: {error}")
