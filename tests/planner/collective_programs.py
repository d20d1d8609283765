"""The programs that workers run in the message-level simulation: what each sends to whom, and when.

A program gets the index of its worker and how many there are, as it would in MPI. `chunks` are lists of pieces.
"""

from collections.abc import Sequence

from tests.planner.message_simulation import Pieces, Program, Receive, Send

ONE_PIECE = [0]


def naive(index: int, workers: int) -> Program:
    """Worker 0 takes from all others in turn, and gives the sum to each."""
    if index > 0:
        yield [Send(0, ONE_PIECE)]
        yield [Receive(0)]
        return
    for other in range(1, workers):
        yield [Receive(other, add=True)]
    for other in range(1, workers):
        yield [Send(other, ONE_PIECE)]


def tree(index: int, workers: int) -> Program:
    """Up a binomial tree with worker 0 at its root, and down again."""
    yield from tree_reduce(index, workers)
    yield from tree_broadcast(index, workers)


def tree_reduce(index: int, workers: int) -> Program:
    stride = 1
    while stride < workers:
        if index & stride:
            yield [Send(index - stride, ONE_PIECE)]
            return
        if index + stride < workers:
            yield [Receive(index + stride, add=True)]
        stride *= 2


def tree_broadcast(index: int, workers: int) -> Program:
    for stride in strides(workers)[::-1]:
        if index % (2 * stride) == stride:
            yield [Receive(index - stride)]
        elif index % (2 * stride) == 0 and index + stride < workers:
            yield [Send(index + stride, ONE_PIECE)]


def ring(index: int, workers: int) -> Program:
    """As many pieces as workers go once around to be summed, and once more to be shared."""
    chunks = [[piece] for piece in range(workers)]
    yield from ring_reduce_scatter(index, range(workers), chunks)
    yield from ring_all_gather(index, range(workers), chunks, own=index + 1)


def ring_reduce_scatter(rank: int, members: Sequence[int], chunks: Sequence[Pieces]) -> Program:
    """Leaves the whole sum of chunk `rank + 1` with the member at `rank`."""
    size = len(members)
    for step in range(size - 1):
        send = Send(members[(rank + 1) % size], chunks[(rank - step) % size])
        yield [send, Receive(members[(rank - 1) % size], add=True)]


def ring_all_gather(rank: int, members: Sequence[int], chunks: Sequence[Pieces], own: int) -> Program:
    """Gives every member all chunks, of which the one at `rank` has chunk `own`."""
    size = len(members)
    for step in range(size - 1):
        send = Send(members[(rank + 1) % size], chunks[(own - step) % size])
        yield [send, Receive(members[(rank - 1) % size])]


def doubling_all_gather(index: int, workers: int) -> Program:
    """Each has its own piece and, after k steps, those of the next 2**k workers (Bruck's algorithm)."""
    for stride in strides(workers):
        pieces = [(index + offset) % workers for offset in range(min(stride, workers - stride))]
        yield [Send((index - stride) % workers, pieces), Receive((index + stride) % workers)]


def halving_doubling(index: int, workers: int) -> Program:
    """Parts in a circle, counted from one's own: those beyond half go to the worker half away; and so on, and back."""
    halves = []
    distance = workers
    while distance > 1:
        halves.append((distance, (distance + 1) // 2))
        distance = (distance + 1) // 2
    for distance, near in halves:
        pieces = [(index + offset) % workers for offset in range(near, distance)]
        yield [Send((index + near) % workers, pieces), Receive((index - near) % workers, add=True)]
    for distance, near in halves[::-1]:
        pieces = [(index + offset) % workers for offset in range(distance - near)]
        yield [Send((index - near) % workers, pieces), Receive((index + near) % workers)]


def recursive_doubling(index: int, workers: int) -> Program:
    """Exchange everything with the worker 1 away, 2 away, 4 away ..."""
    core = strides(workers + 1)[-1]
    yield from fold_in(index, workers, core, ONE_PIECE)
    if index < core:
        for stride in strides(core):
            yield [Send(index ^ stride, ONE_PIECE), Receive(index ^ stride, add=True)]
    yield from fold_out(index, workers, core, ONE_PIECE)


def fold_in(index: int, workers: int, core: int, pieces: Pieces) -> Program:
    """Each worker beyond the first `core` sends all it has to one of these."""
    if index >= core:
        yield [Send(index - core, pieces)]
    elif index + core < workers:
        yield [Receive(index + core, add=True)]


def fold_out(index: int, workers: int, core: int, pieces: Pieces) -> Program:
    """The same backwards, with the sum."""
    if index >= core:
        yield [Receive(index - core)]
    elif index + core < workers:
        yield [Send(index + core, pieces)]


def parameter_server(index: int, workers: int, servers: int) -> Program:
    """Worker i and server k meet in round (i - k) mod max(workers, servers); server k is number workers + k."""
    rounds = max(workers, servers)
    if index < workers:
        homes = [home for turn in range(rounds) if (home := (index - turn) % rounds) < servers]
        for home in homes:
            yield [Send(workers + home, [home])]
        for home in homes:
            yield [Receive(workers + home)]
        return
    home = index - workers
    clients = [client for turn in range(rounds) if (client := (home + turn) % rounds) < workers]
    for client in clients:
        yield [Receive(client, add=True)]
    for client in clients:
        yield [Send(client, [home])]


def two_level(index: int, workers: int, per_node: int) -> Program:
    """Reduce-scatter inside the node, all-reduce between those of the same place in their nodes, all-gather inside."""
    nodes, place = workers // per_node, index % per_node
    inside = range(index - place, index - place + per_node)
    between = range(place, workers, per_node)
    chunks = [range(start, start + nodes) for start in range(0, workers, nodes)]
    yield from ring_reduce_scatter(place, inside, chunks)
    mine = [[piece] for piece in chunks[(place + 1) % per_node]]
    yield from ring_reduce_scatter(index // per_node, between, mine)
    yield from ring_all_gather(index // per_node, between, mine, own=index // per_node + 1)
    yield from ring_all_gather(place, inside, chunks, own=place + 1)


def one_by_one(index: int, workers: int) -> Program:
    """Worker 0 sends to each in turn."""
    if index > 0:
        yield [Receive(0)]
        return
    for other in range(1, workers):
        yield [Send(other, ONE_PIECE)]


def chain(index: int, workers: int, chunks: int) -> Program:
    """Each sends a chunk on while it receives the next."""
    for turn in range(chunks + 1):
        acts: list[Send | Receive] = []
        if index > 0 and turn < chunks:
            acts.append(Receive(index - 1))
        if index + 1 < workers and turn > 0:
            acts.append(Send(index + 1, [turn - 1]))
        if acts:
            yield acts


def scatter_all_gather(index: int, workers: int) -> Program:
    """Worker 0 deals out one piece for each down a binomial tree; a ring gathers them."""
    for stride in strides(workers)[::-1]:
        if index % (2 * stride) == stride:
            yield [Receive(index - stride)]
        elif index % (2 * stride) == 0 and index + stride < workers:
            yield [Send(index + stride, range(index + stride, min(index + 2 * stride, workers)))]
    yield from ring_all_gather(index, range(workers), [[piece] for piece in range(workers)], own=index)


def strides(workers: int) -> list[int]:
    """Return 1, 2, 4 ... below `workers`."""
    return [1 << power for power in range((workers - 1).bit_length())]
