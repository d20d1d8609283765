"""Gradients meet at K servers, which hold the parameters and do the optimizer's steps: exact, step by step.

1. Each of K servers owns an equal slice of all parameters, with the job's optimizer over it (`slices`), and has a
   replica on another host (`replica`).
2. A worker sends every server its slice of the gradient. A server that has all workers' says who is in the step.
3. The worker has each server apply the weighted mean, clipped by the norm over all slices, and gets its parameters.
4. At a boundary it gets what the optimizers keep as well: evaluations, checkpoints and snapshots see an ordinary state.

A worker that dies is gone from the lists of the next step; of one that dies within a step, all servers count the
gradient, or none does. (If a worker and a server die at the same moment, the slice of that server may be the only one
without the dead worker's samples in that step.)

Bytes on a worker's link: n out and n in for n bytes of parameters; on a server's, p n / K each way, and n / K once more
to its replica. With K = p servers beside workers that is what a ring all-reduce sends.

Example: 4 workers, 2 servers, 8 MB of parameters. Each worker sends 4 MB to either server and gets 4 MB from either.

With `asynchronous`, see `apart`.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.comm.calls import CALLS
from shoal.comm.group import all_reduce_sum
from shoal.core.errors import PeerLost
from shoal.sync.mode import Met, Mine, Place, Trained
from shoal.sync.server.apart import Apart
from shoal.sync.server.copies import Copies
from shoal.sync.server.fetching import Fetching
from shoal.sync.server.opening import open_servers
from shoal.sync.server.overlap import Overlap
from shoal.sync.server.slices import settings_of
from shoal.sync.server.wire import LOOK_S, Ended

_Answer = TypeVar("_Answer")


class Servers:
    """This worker's side of K servers. Opened by every worker, with equal parameters and optimizer state on all.

    Benchmarks do without replicas (`has_replica`), and have hosts on machines of their own (`starts_hosts`).
    """

    def __init__(self, trained: Trained, place: Place, *, has_replica: bool = True, starts_hosts: bool = True) -> None:
        self._trained, self.place = trained, place
        self._is_closing = False
        self.copies = Copies(trained, servers=num_servers(place))
        try:
            self.opened = open_servers(
                self.copies, place, in_vain=self._in_vain, has_replica=has_replica, starts_hosts=starts_hosts
            )
        except Ended:
            raise self._lost() from None
        clips_parts = place.sync.asynchronous and trained.clip_norm is not None
        self.overlap = Overlap(self, is_off=clips_parts)
        self.fetching: Fetching | None = None
        self.tickets: Apart | None = None
        """Set where workers take parts as they are free."""
        if place.sync.asynchronous:
            self.tickets = Apart(self, trained)
        # What the servers' optimizers keep is here at boundaries only: where they keep nothing, parameters are all.
        groups = trained.optimizer.param_groups
        plain = type(trained.optimizer) is torch.optim.SGD and not any(group["momentum"] for group in groups)
        self._is_always_common = plain and not trained.buffers

    def meet(self, mine: Mine) -> Met:
        """Do the step with all other workers; asynchronously, apply this worker's gradient."""
        self.finish_fetching()
        self.overlap.finish()
        if self.tickets is not None:
            return self.tickets.meet(mine)
        with self.place.waiting():
            told = self._step(mine)
        self.leave_gradients()
        is_boundary = self.place.is_boundary(mine.step)
        if is_boundary:
            self.settle()
        weight = math.fsum(told["weight"])
        loss = math.fsum(w * x for w, x in zip(told["weight"], told["loss"], strict=True)) / (weight or 1.0)
        number_of = self.place.rank.number_of
        took_part = tuple(number_of(i) for i, w in zip(told["list"], told["weight"], strict=True) if w > 0)
        return Met(loss, weight, took_part, mine.step + 1, is_common=is_boundary or self._is_always_common)

    def sending(self) -> AbstractContextManager[None]:
        """Return what the last backward pass of a step may run in: gradients then go out as they become ready."""
        self.finish_fetching()
        return self.overlap.sending()

    def fetch_beside(self, model: nn.Module) -> None:
        """Let parameters come beside the forward of `model`, from now on, where steps are exact and no boundaries.

        `meet` then returns before they are there: whoever looks at them between two steps calls `finish_fetching`.
        """
        if self.tickets is None and not self._is_always_common:
            self.fetching = Fetching(model, self.copies, self.all)

    def finish_fetching(self) -> None:
        """Have all parameters in place."""
        if self.fetching is not None:
            self.fetching.finish()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: at a boundary the job's own parameters and optimizer have all there is."""
        return iter(())

    def close(self) -> None:
        """Say goodbye to the servers, and end those that this worker has started."""
        self._is_closing = True
        self.overlap.close()
        if self.fetching is not None:
            self.fetching.close()
        is_lost = self.place.watch is not None and self.place.watch.lost is not None
        self.opened.close(in_order=not is_lost)

    def all(self, futures: "Sequence[Future[_Answer]]") -> list[_Answer]:
        """Return what all links' threads return; PeerLost as soon as it is in vain to wait."""
        with CALLS.waiting_in("the parameter servers"):
            return [self._one(future) for future in futures]

    def leave_gradients(self) -> None:
        """Let go of the gradients, which are applied."""
        self._trained.optimizer.zero_grad(set_to_none=True)
        if self._trained.schedule is not None and self.tickets is None:
            self.step_schedule()

    def step_schedule(self) -> None:
        """Have the schedule make its step after one of the optimizer that there are no gradients for: nothing moves."""
        self._trained.optimizer.step()
        self._trained.schedule.step()

    def settle(self) -> dict[str, Any]:
        """Get all that the servers have, and have the running statistics of batch norms averaged. Called by all.

        Returns what the first server knows of the last steps.
        """
        with self.place.waiting():
            saved = self.all([link.do(link.save) for link in self.opened.links])
            self.place.changing()
            self.copies.give_parameters()
            self.copies.give_state(saved)
            self._average_statistics()
        told: dict[str, Any] = saved[0][0]["told"]
        return told

    def _step(self, mine: Mine) -> dict[str, Any]:
        """Have the servers do a step, get the parameters after it, and return who took part with what."""
        links, clip_norm = self.opened.links, self._trained.clip_norm
        has_norm = clip_norm is not None
        header: dict[str, Any] = {"step": mine.step, "weight": mine.weight, "loss": mine.loss, "samples": mine.samples}
        header |= {"norm": has_norm, "settings": settings_of(self._trained.optimizer)}
        answers = self.all([link.do(link.push, header) for link in links])
        told = next((answer for answer in answers if answer["done"]), None)
        if told is None:
            agreed = sorted(set.intersection(*(set(answer["list"]) for answer in answers)))
            if has_norm and any(answer["list"] != agreed for answer in answers):
                answers = self.all([link.do(link.sum, {"step": mine.step, "list": agreed}) for link in links])
            told = next((answer for answer in answers if answer["done"]), None) or {
                **_only(answers[0], agreed),
                "factor": _factor([answer["squares"] for answer in answers], clip_norm),
            }
        apply = {**header, "list": told["list"], "factor": told["factor"]}
        fetches = [link.do(link.apply, apply) for link in links]
        if self.fetching is not None and not self.place.is_boundary(mine.step):
            self.place.changing()
            self.fetching.begin(fetches)
        else:
            self.all(fetches)
            self.place.changing()
            self.copies.give_parameters()
        return told

    @torch.no_grad()
    def _average_statistics(self) -> None:
        kept = [b for name, b in self._trained.buffers.items() if name.endswith(("running_mean", "running_var"))]
        if not kept or self.place.rank.workers == 1:
            return
        row = torch.cat([buffer.detach().reshape(-1).float().cpu() for buffer in kept]).div_(self.place.rank.workers)
        work = all_reduce_sum(row)
        if self.place.watch is not None:
            self.place.watch.wait(work)
        else:
            work.wait()
        for buffer, part in zip(kept, torch.split(row, [buffer.numel() for buffer in kept]), strict=True):
            buffer.copy_(part.view(buffer.shape))

    def _one(self, future: "Future[_Answer]") -> _Answer:
        try:
            while True:
                try:
                    return future.result(LOOK_S)
                except NotYet:
                    if future.done():  # it is the link's own: it has waited for as long as may be
                        raise PeerLost("a server has not answered in time.") from None
        except Ended:
            raise self._lost() from None

    def _lost(self) -> PeerLost:
        why = self.place.watch.lost if self.place.watch is not None else None
        return PeerLost(why or "the servers were closed while a worker waited for them.")

    def _in_vain(self) -> bool:
        return self._is_closing or (self.place.watch is not None and self.place.watch.lost is not None)


def num_servers(place: Place) -> int:
    """Return how many servers there are: beside workers, at most as many as those, who may be fewer than planned."""
    servers, workers = place.sync.servers, place.rank.workers
    return servers if place.sync.place == "processes" else min(servers, workers)


def _only(answer: dict[str, Any], workers: Sequence[int]) -> dict[str, Any]:
    """Return what those of `workers` have brought."""
    names, at = ("list", "weight", "loss", "samples"), [answer["list"].index(worker) for worker in workers]
    return {name: [answer[name][place] for place in at] for name in names}


def _factor(squares: Sequence[float], clip_norm: float | None) -> float:
    """Return by what the gradient is scaled, by the very rule of torch.nn.utils.clip_grad_norm_."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (math.sqrt(math.fsum(squares)) + 1e-6))
