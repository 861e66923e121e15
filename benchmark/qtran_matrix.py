"""Value decomposition on matrix games: the tables of QTRAN's paper, and the opponents in the games of CoPPO's.

    python benchmark/qtran_matrix.py --out docs/results --seeds 30

Trains what is missing in RUNS_DIR (an .npz per game and script, of all seeds), then writes OUT/data/qtran_matrix.csv
(what each script says of every joint action of QTRAN's game) and coppo_matrix_opponents.csv (the curves) with
coppo_matrix_opponents_final.csv (the tables), from which redraw.py draws OUT/qtran_matrix.svg, and the opponents in the
figures of benchmark/matrix_games.py.

All seeds of a script learn side by side: `torch.func.vmap` applies the script's own functions to stacked parameters. A
game is one step, so a target is the reward, and a batch is drawn from all plays so far. DOP, FACMAC and MASAC, which
have actors besides, are run as they are, one seed after the other, FACMAC and MASAC with three seeds at most.

QTRAN's game is played with full exploration, as in the paper: 20,000 plays. CoPPO's are played with the exploration,
plays, widths and learning rate of its appendix C.1, and eight updates for each 20 plays, as many as the others have
epochs.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cleanmarl import dop, facmac, idqn, masac, qmix, qtran, vdn
from cleanmarl.cli import PositiveInt, UsageError, check_ranges
from cleanmarl.envs import make

import numpy as np
import redraw
import torch
import torch.nn as nn
import tyro
from matrix_games import GAMES, binned, curve, is_done, keep, run_path, table_row
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPTS = {"IDQN": idqn, "VDN": vdn, "QMIX": qmix, "QTRAN": qtran}
ACTORS = {"DOP": dop, "FACMAC": facmac, "MASAC": masac}
OPPONENTS = [*SCRIPTS, *ACTORS]  # in CoPPO's games
DECOMPOSE = ["VDN", "QMIX", "QTRAN"]  # those that have joint values
UPDATES = 8  # for each round of plays
COPPOS = {"hidden_dim": 18, "learning_rate": 5e-4, "optimizer": "RMSprop", "num_envs": 20, "total_timesteps": 10_000}
COPPOS |= {"epsilon_start": 0.9, "epsilon_end": 0.02, "epsilon_timesteps": 6000}
WITH_ACTORS = {"actor_hidden_dim": 18, "critic_hidden_dim": 72}
WITH_ACTORS |= {"learning_rate_actor": 5e-4, "learning_rate_critic": 5e-4}
WITH_ACTORS |= {"num_envs": 20, "total_timesteps": 10_000, "epochs": UPDATES, "log_every": 20}
DOPS = {"epsilon_start": 0.9, "epsilon_end": 0.02, "epsilon_timesteps": 6000, "on_policy_episodes": 20}
MOST = {"FACMAC": 3, "MASAC": 3}  # seeds of those that were run fewer times than the others
OWN = {"DOP": DOPS, "FACMAC": {"batch_size": 128}, "MASAC": {"batch_size": 128}}  # the others sample their policies
OWN["QTRAN"] = {"batch_size": 32}  # its default when the published runs were made
QTRANS = {"learning_rate": 1e-3, "num_envs": 32, "total_timesteps": 20_000, "epsilon_start": 1.0, "epsilon_end": 1.0}


@dataclass
class Args:
    out: Path
    """folder of the results"""
    runs_dir: Path = Path("runs/qtran_matrix")
    """folder of the runs"""
    seeds: PositiveInt = 30
    """runs of each script on each game, of FACMAC and MASAC three at most"""


class Learner(nn.Module):
    """A script's agent, whose forward pass is the loss of a batch."""

    def __init__(self, script, envs, args):
        super().__init__()
        self.script, self.agent, self.args = script, script.Agent(envs, args), args

    def forward(self, batch):
        script, agent, args = self.script, self.agent, self.args
        if script is qmix:
            batch = batch._replace(state=torch.zeros_like(batch.state))  # what the only state is when it is normalised
        q = agent.values(batch.obs)
        target = script.td_targets(q.detach(), agent, batch, args)
        if script is qtran:
            td_loss, opt_loss, nopt_loss = script.losses(agent, q, batch, target)
            return td_loss + args.opt_coef * opt_loss + args.nopt_coef * nopt_loss
        return script.value_loss(q, batch, target) if script is idqn else script.value_loss(agent, q, batch, target)


def batch_of(script, envs, action: np.ndarray, reward: np.ndarray):
    """Batches of single plays for every seed; action (seeds, B, A), reward (seeds, B)."""
    (S, B, A), K = action.shape, len(envs.table)
    M = A if script is idqn else 1
    alive = torch.ones(S, B, 2, A, dtype=torch.bool)
    alive[:, :, 1] = False  # a play ends with its only step
    return script.Batch(
        obs=torch.ones(S, B, 2, A, 1),
        state=torch.ones(S, B, 2, A),
        action_mask=torch.ones(S, B, 2, A, K, dtype=torch.bool),
        alive=alive,
        action=torch.from_numpy(action)[:, :, None],
        reward=torch.from_numpy(reward)[:, :, None, None].expand(-1, -1, -1, M),
        weight=torch.ones(S, B, 1, M),
        goes_on=torch.zeros(S, B, 1, M),
    )


def stacked(script, game: str, seeds, args) -> tuple[Learner, dict, dict, torch.optim.Optimizer]:
    """A learner, the parameters and buffers of one for each seed, stacked, and the optimizer of all of them."""
    learners, envs = [], make(f"matrix/{game}")
    for seed in seeds:
        torch.manual_seed(seed)
        learners.append(Learner(script, envs, args))
    parameters, buffers = torch.func.stack_module_state(learners)
    if args.optimizer == "Adam":
        return learners[0], parameters, buffers, torch.optim.Adam(parameters.values(), lr=args.learning_rate)
    optimizer = torch.optim.RMSprop(parameters.values(), lr=args.learning_rate, eps=1e-5)
    return learners[0], parameters, buffers, optimizer


def update(learner: Learner, parameters: dict, buffers: dict, optimizer, batch) -> None:
    """The script's `update` for every seed: a step down the gradient of its loss, clipped by its own norm."""

    def loss_of(parameters, buffers, batch):
        return torch.func.functional_call(learner, (parameters, buffers), (batch,))

    gradients = torch.func.vmap(torch.func.grad(loss_of))(parameters, buffers, batch)
    norm = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()  # (seeds,)
    scale = (learner.args.clip_gradients / (norm + 1e-6)).clamp(max=1)
    for name, p in parameters.items():
        p.grad = gradients[name] * scale.view(-1, *[1] * (p.ndim - 1))
    optimizer.step()


def train(script, game: str, seeds, settings: dict) -> tuple[Learner, dict, np.ndarray]:
    """A learner, the stacked parameters of all seeds after the run, and mean rewards (seeds, rounds)."""
    args, envs = script.Args(env_id=f"matrix/{game}", **settings), make(f"matrix/{game}")
    learner, parameters, buffers, optimizer = stacked(script, game, seeds, args)
    network, prefix = learner.agent.q_network, "agent.q_network."
    of_network = {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}
    S, N, (A, K) = len(seeds), args.num_envs, envs.real_actions.shape
    values_of = torch.func.vmap(lambda p: torch.func.functional_call(network, p, (torch.ones(1, A, 1),)))
    actions, rewards = np.zeros((S, 0, A), np.int64), np.zeros((S, 0), np.float32)
    rng = np.random.default_rng(seeds[0])
    torch.manual_seed(seeds[0])
    for steps in range(0, args.total_timesteps, N):
        progress = min(steps / args.epsilon_timesteps, 1)
        epsilon = args.epsilon_start + progress * (args.epsilon_end - args.epsilon_start)
        with torch.no_grad():
            q = values_of(of_network).expand(-1, N, -1, -1).reshape(-1, A, K).numpy()  # (seeds * N, A, K)
        action = script.act(q, np.ones(q.shape, bool), epsilon).reshape(S, N, A)
        actions = np.concatenate([actions, action], axis=1)
        rewards = np.concatenate([rewards, envs.table[tuple(np.moveaxis(action, -1, 0))]], axis=1)
        for _ in range(UPDATES if rewards.shape[1] >= args.batch_size else 0):
            index = rng.integers(rewards.shape[1], size=(S, args.batch_size))
            drawn = np.take_along_axis(actions, index[..., None], 1), np.take_along_axis(rewards, index, 1)
            update(learner, parameters, buffers, optimizer, batch_of(script, envs, *drawn))
    return learner, parameters, rewards.reshape(S, -1, N).mean(-1)


def train_actors(name: str, game: str, seeds) -> np.ndarray:
    """Mean rewards (seeds, rounds) of runs of a script with actors."""
    script, settings, rewards = ACTORS[name], WITH_ACTORS | OWN[name], []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as tmp:
            settings |= {"env_id": f"matrix/{game}", "seed": seed, "runs_dir": tmp}
            folder = script.main(script.Args(eval_steps=10**9, eval_episodes=0, **settings))
            events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
            rewards.append([event.value / 4 for event in events.Scalars("rollout/ep_reward")])  # the sum of four agents
    return np.array(rewards)


def tables(script, learner: Learner, parameters: dict, seed: int) -> dict[str, np.ndarray]:
    """What one seed has learned of a game of two agents: tables (K, K) of joint values, the agents' values (A, K)."""
    agent = learner.agent
    agent.load_state_dict({name.removeprefix("agent."): p[seed] for name, p in parameters.items()}, strict=False)
    with torch.no_grad():
        q = agent.values(torch.ones(1, 1, 2, 1))[0, 0]  # (A, K)
        K = q.shape[1]
        joint = torch.cartesian_prod(torch.arange(K), torch.arange(K))[None]  # (1, K * K, A)
        parts, state, alive = q.gather(1, joint[0].T).T[None], torch.ones(1, K * K, 2), torch.ones(1, K * K, 2)
        result = {"values": q}
        if script is qtran:
            result["joint"] = agent.joint_value(state, joint, alive).view(K, K)
            result["sum"] = (parts.sum(-1, keepdim=True) + agent.state_network(state)).view(K, K)
        elif script is not idqn:
            result["joint"] = agent.mix(parts, alive, *([0 * state] if script is qmix else [])).view(K, K)
    return {name: x.numpy() for name, x in result.items()}


def find_jobs(args: Args) -> list[tuple[str, str, range]]:
    """What is to be trained: a game, a script and its seeds."""
    jobs = [("qtran", name) for name in DECOMPOSE]
    jobs += [(game, name) for game in ["penalty", *GAMES] for name in OPPONENTS]
    number = {name: min(args.seeds, MOST.get(name, args.seeds)) for _, name in jobs}
    jobs = [job for job in jobs if not is_done(run_path(args.runs_dir, *job), number[job[1]])]
    return [(game, name, range(1, number[name] + 1)) for game, name in jobs]


def run(game: str, name: str, seeds: range, args: Args) -> None:
    """Train and keep what the figures need."""
    path = run_path(args.runs_dir, game, name)
    if name in ACTORS:
        keep(path, reward=train_actors(name, game, seeds))
        return
    settings = (QTRANS if game == "qtran" else COPPOS) | OWN.get(name, {})
    learner, parameters, rewards = train(SCRIPTS[name], game, seeds, settings)
    results = {"reward": rewards}
    if game == "qtran":
        learned = [tables(SCRIPTS[name], learner, parameters, seed) for seed in range(len(seeds))]
        results |= {key: np.stack([x[key] for x in learned]) for key in learned[0]}
    keep(path, **results)
    print(path.stem, flush=True)


def write_tables(args: Args) -> None:
    """What was learned of QTRAN's game."""
    lines = ["script,table,row,column,mean,std,runs,best found"]
    for name in DECOMPOSE:
        learned = np.load(run_path(args.runs_dir, "qtran", name))
        found = int((learned["values"].argmax(-1) == 0).all(-1).sum())  # both agents' best action is the first
        for table in ("joint", "sum"):
            for (row, column), _ in np.ndenumerate(learned[table][0]) if table in learned else ():
                values = learned[table][:, row, column]
                ends = f"{values.mean():.2f},{values.std():.2f},{len(values)},{found}"
                lines.append(f"{name},{table},{row},{column},{ends}")
    folder = args.out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "qtran_matrix.csv").write_text("\n".join(lines) + "\n")


def write_curves(args: Args) -> None:
    """The opponents in CoPPO's games."""
    folder = args.out / "data"
    steps, lines = np.arange(1, 51) * 200, ["panel,variant,x,mean,low,high"]
    table = ['figure,game,variant,runs,"last 1,000 plays","all 10,000 plays",solved']
    for game in ["penalty", *GAMES]:
        panel = "figure 1, reward" if game == "penalty" else f"figure 5, {game}"
        for name in OPPONENTS:
            reward = np.load(run_path(args.runs_dir, game, name))["reward"]
            lines += curve(panel, name, steps, binned(reward))
            table.append(table_row(f"coppo_matrix_{'penalty' if game == 'penalty' else 'games'}", reward, game, name))
    (folder / "coppo_matrix_opponents.csv").write_text("\n".join(lines) + "\n")
    (folder / "coppo_matrix_opponents_final.csv").write_text("\n".join(table) + "\n")


def main(args: Args) -> None:
    check_ranges(args)
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for job in find_jobs(args):
        run(*job, args)
    write_tables(args)
    redraw.qtran_matrix(args.out / "qtran_matrix")
    write_curves(args)
    redraw.coppo_matrix(args.out)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except UsageError as error:
        print(f"qtran_matrix: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a folder that cannot be written
        sys.exit(f"qtran_matrix: {error}")
