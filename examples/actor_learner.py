"""An actor-learner loop over torch RPC: actors play a small game, the learner (worker 0) learns from what they played.

shoal train examples/actor_learner.py --workers 3

The game is Catch: a ball falls down a board of 7 x 5, and a paddle at the bottom moves left, right or not at all; the
return is 1 if the ball is caught, -1 if not. It is learned by policy gradient (REINFORCE). Which games a step plays,
and every draw in them, depends on the step alone: more actors play them sooner, and what is learned is the same.
"""

import torch
from torch import Tensor, nn

import shoal

ROWS, COLUMNS, ACTIONS = 7, 5, 3
GAMES = 48
"""Games a step, whatever the number of actors."""

Played = tuple[Tensor, Tensor, Tensor]
"""Boards [games, moves, cells], actions [games, moves] and returns [games]."""


def policy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(ROWS * COLUMNS, 64), nn.Tanh(), nn.Linear(64, ACTIONS))


def play(weights: dict[str, Tensor], seeds: list[int]) -> Played:
    """Play a game for each seed, all at once. This is what the learner has actors call."""
    model = policy()
    model.load_state_dict(weights)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    starts = torch.stack([torch.randint(COLUMNS, (2,), generator=generator) for generator in generators])
    ball, paddle = starts[:, 0], starts[:, 1]
    games = torch.arange(len(seeds))
    boards, actions = [], []
    for row in range(ROWS - 1):
        board = torch.zeros(len(seeds), ROWS, COLUMNS)
        board[games, row, ball] = 1
        board[games, ROWS - 1, paddle] = 1
        boards.append(board.flatten(1))
        with torch.no_grad():
            likely = model(boards[-1]).softmax(1).cumsum(1)
        drawn = torch.stack([torch.rand((), generator=generator) for generator in generators])
        actions.append((drawn[:, None] > likely[:, :-1]).sum(1))
        paddle = (paddle + actions[-1] - 1).clamp(0, COLUMNS - 1)
    return torch.stack(boards, 1), torch.stack(actions, 1), torch.where(paddle == ball, 1.0, -1.0)


def gather(run: shoal.ProgramRun, weights: dict[str, Tensor], seeds: list[int]) -> Played:
    """Return the games of a step, played by all actors at the same time; without any, by the learner itself."""
    if not run.others:
        return play(weights, seeds)
    share = -(-len(seeds) // len(run.others))
    parts = [seeds[first : first + share] for first in range(0, len(seeds), share)]
    answers = [run.start(actor, play, weights, part) for actor, part in zip(run.others, parts, strict=False)]
    played = [answer.wait() for answer in answers]
    boards, actions, returns = (torch.cat(each) for each in zip(*played, strict=True))
    return boards, actions, returns


def main(run: shoal.ProgramRun) -> None:
    if run.rank > 0:
        return  # an actor: it serves the learner's calls until that is done
    model = policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(run.steps or 100):
        seeds = list(range(step * GAMES, (step + 1) * GAMES))
        boards, actions, returns = gather(run, model.state_dict(), seeds)
        likely = model(boards).log_softmax(2).gather(2, actions[:, :, None]).squeeze(2).sum(1)
        loss = -(likely * (returns - returns.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.stepped(loss=loss.item(), samples=GAMES)
        run.log(mean_return=returns.mean().item())
    run.say(f"The last {GAMES} games had a mean return of {returns.mean():.2f}.")


job = shoal.Program(main=main, steps=100, unit="games", call_timeout_s=30)
