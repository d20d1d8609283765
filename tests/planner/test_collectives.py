"""Every closed form against the same collective run message by message."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.planner.collectives import allreduce, broadcast
from shoal.planner.collectives.allreduce import ALLREDUCE, Cost
from tests.planner import collective_programs as programs
from tests.planner.message_simulation import Link, Outcome, Program, Receive, Send, simulate

COUNTS = [*range(1, 18), 24, 64]
LINKS = [Link(1.25e9, 20e-6), Link(1e6, 0.0), Link(25e9, 5e-3)]
SIZES = [1.0, 1000.0, 100e6]


def run_allreduce(
    program: Callable[[int, int], Program], pieces: int, workers: int, num_bytes: float, link: Link
) -> Outcome:
    """Run `program` on every worker, all with numbers of their own, and check that all end with the whole sum."""
    held = [[1 << index] * pieces for index in range(workers)]
    outcome = simulate([program(i, workers) for i in range(workers)], held, num_bytes, lambda _a, _b: link)
    assert outcome.held == [[(1 << workers) - 1] * pieces] * workers
    return outcome


def run_servers(servers: int, workers: int, num_bytes: float, link: Link) -> Outcome:
    """Run a parameter server: the servers stand behind the workers and have no numbers of their own."""
    held = [[1 << index] * servers for index in range(workers)] + [[0] * servers for _ in range(servers)]
    everyone = [programs.parameter_server(i, workers, servers) for i in range(workers + servers)]
    outcome = simulate(everyone, held, num_bytes, lambda _a, _b: link)
    assert outcome.held[:workers] == [[(1 << workers) - 1] * servers] * workers
    return outcome


def run_broadcast(
    program: Callable[[int, int], Program], pieces: int, workers: int, num_bytes: float, link: Link
) -> Outcome:
    """Run `program` on every worker; worker 0 alone has something, and all must end with it."""
    held = [[1] * pieces, *([0] * pieces for _ in range(workers - 1))]
    outcome = simulate([program(i, workers) for i in range(workers)], held, num_bytes, lambda _a, _b: link)
    assert outcome.held == [[1] * pieces] * workers
    return outcome


def assert_same(cost: Cost, outcome: Outcome) -> None:
    """Exactly, up to the rounding of sums of a few hundred floats."""
    assert cost.steps == outcome.steps
    assert cost.bytes_per_worker == pytest.approx(outcome.bytes_per_worker, rel=1e-12)
    assert cost.seconds == pytest.approx(outcome.seconds, rel=1e-12)
    assert cost.inside_bytes == pytest.approx(outcome.inside_bytes, rel=1e-12)


SIMULATED: dict[str, Callable[[int, float, Link], Outcome]] = {
    "parameter-server": lambda p, n, link: run_servers(1, p, n, link),
    "naive": lambda p, n, link: run_allreduce(programs.naive, 1, p, n, link),
    "tree": lambda p, n, link: run_allreduce(programs.tree, 1, p, n, link),
    "ring": lambda p, n, link: run_allreduce(programs.ring, p, p, n, link),
    "halving-doubling": lambda p, n, link: run_allreduce(programs.halving_doubling, p, p, n, link),
    "recursive-doubling": lambda p, n, link: run_allreduce(programs.recursive_doubling, 1, p, n, link),
}
BROADCASTS: dict[str, Callable[[int, float, Link], Outcome]] = {
    "one-by-one": lambda p, n, link: run_broadcast(programs.one_by_one, 1, p, n, link),
    "tree": lambda p, n, link: run_broadcast(programs.tree_broadcast, 1, p, n, link),
    "scatter-all-gather": lambda p, n, link: run_broadcast(programs.scatter_all_gather, p, p, n, link),
}


def test_every_algorithm_of_the_table_is_simulated() -> None:
    assert SIMULATED.keys() == ALLREDUCE.keys()
    assert BROADCASTS.keys() | {"chain"} == broadcast.BROADCAST.keys()


@pytest.mark.parametrize("workers", COUNTS)
@pytest.mark.parametrize("name", ALLREDUCE)
def test_an_all_reduce_costs_what_its_messages_cost(name: str, workers: int) -> None:
    for link in LINKS:
        for num_bytes in SIZES:
            cost = ALLREDUCE[name](num_bytes, workers, link.bytes_per_s, link.latency_s)
            assert_same(cost, SIMULATED[name](workers, num_bytes, link))


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 40),
    num_bytes=st.floats(1, 1e12),
    link=st.builds(Link, bytes_per_s=st.floats(1e3, 1e12), latency_s=st.floats(0, 1)),
)
def test_it_does_so_for_any_workers_size_and_link_and_never_beats_the_ideal(
    workers: int, num_bytes: float, link: Link
) -> None:
    bound = allreduce.ideal(num_bytes, workers, link.bytes_per_s, link.latency_s)
    for name, cost in ALLREDUCE.items():
        outcome = SIMULATED[name](workers, num_bytes, link)
        assert_same(cost(num_bytes, workers, link.bytes_per_s, link.latency_s), outcome)
        assert bound.seconds <= outcome.seconds * (1 + 1e-12)
        assert bound.steps <= outcome.steps


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 8, 16, 21])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 16, 17])
def test_any_number_of_servers_costs_what_its_messages_cost(workers: int, servers: int) -> None:
    for link in LINKS:
        cost = allreduce.parameter_server(100e6, workers, link.bytes_per_s, link.latency_s, servers=servers)
        assert_same(cost, run_servers(servers, workers, 100e6, link))


@pytest.mark.parametrize(
    ("workers", "per_node"), [(1, 1), (4, 1), (4, 4), (6, 2), (6, 3), (8, 4), (12, 3), (24, 8), (30, 5), (64, 8)]
)
@pytest.mark.parametrize("inside", [Link(300e9, 5e-6), Link(1e6, 0.0), Link(1e9, 1e-2)])
def test_two_levels_cost_what_their_messages_cost_on_two_kinds_of_link(
    workers: int, per_node: int, inside: Link
) -> None:
    nodes = {"per_node": per_node, "inside_bytes_per_s": inside.bytes_per_s, "inside_latency_s": inside.latency_s}
    for between in LINKS:
        for num_bytes in SIZES:

            def link(source: int, target: int, between: Link = between) -> Link:
                return inside if source // per_node == target // per_node else between

            held = [[1 << index] * workers for index in range(workers)]
            everyone = [programs.two_level(i, workers, per_node) for i in range(workers)]
            outcome = simulate(everyone, held, num_bytes, link, per_node=per_node)
            assert outcome.held == [[(1 << workers) - 1] * workers] * workers
            arguments = (num_bytes, workers, between.bytes_per_s, between.latency_s)
            assert_same(allreduce.two_level(*arguments, **nodes), outcome)  # type: ignore[arg-type]
            assert allreduce.ideal(*arguments, **nodes).seconds <= outcome.seconds * (1 + 1e-12)  # type: ignore[arg-type]


def test_with_fast_links_inside_two_levels_reach_the_ideal_and_no_flat_algorithm_does() -> None:
    bound = allreduce.ideal(1e9, 64, 1e9, 0, per_node=8, inside_bytes_per_s=300e9, inside_latency_s=0)
    nodes = allreduce.two_level(1e9, 64, 1e9, 0, per_node=8, inside_bytes_per_s=300e9, inside_latency_s=0)
    assert nodes.seconds == pytest.approx(bound.seconds)
    assert nodes.bytes_per_worker == pytest.approx(bound.bytes_per_worker)
    assert nodes.inside_bytes == pytest.approx(bound.inside_bytes)
    assert min(cost(1e9, 64, 1e9, 0).seconds for cost in ALLREDUCE.values()) > 7 * bound.seconds


@pytest.mark.parametrize("workers", COUNTS)
def test_both_halves_of_a_ring_cost_what_their_messages_cost(workers: int) -> None:
    chunks = [[piece] for piece in range(workers)]
    everyone = range(workers)
    for link in LINKS:
        cost = allreduce.ring_all_gather(100e6, workers, link.bytes_per_s, link.latency_s)
        scatter = simulate(
            [programs.ring_reduce_scatter(i, everyone, chunks) for i in everyone],
            [[1 << index] * workers for index in everyone],
            100e6,
            lambda _a, _b, link=link: link,  # type: ignore[misc]
        )
        assert all(scatter.held[i][(i + 1) % workers] == (1 << workers) - 1 for i in everyone)
        gather = run_gather(lambda i, _p: programs.ring_all_gather(i, everyone, chunks, own=i), workers, link)
        assert_same(cost, scatter)
        assert_same(cost, gather)


@pytest.mark.parametrize("workers", COUNTS)
def test_an_all_gather_by_doubling_costs_what_its_messages_cost(workers: int) -> None:
    for link in LINKS:
        cost = allreduce.doubling_all_gather(100e6, workers, link.bytes_per_s, link.latency_s)
        assert_same(cost, run_gather(programs.doubling_all_gather, workers, link))


def run_gather(program: Callable[[int, int], Program], workers: int, link: Link) -> Outcome:
    """Run `program` on every worker, each with one piece, and check that all end with all of them."""
    held = [[1 << index if piece == index else 0 for piece in range(workers)] for index in range(workers)]
    outcome = simulate([program(i, workers) for i in range(workers)], held, 100e6, lambda _a, _b: link)
    assert outcome.held == [[1 << piece for piece in range(workers)]] * workers
    return outcome


@pytest.mark.parametrize("workers", COUNTS)
@pytest.mark.parametrize("name", BROADCASTS)
def test_a_broadcast_costs_what_its_messages_cost(name: str, workers: int) -> None:
    for link in LINKS:
        for num_bytes in SIZES:
            cost = broadcast.BROADCAST[name](num_bytes, workers, link.bytes_per_s, link.latency_s)
            outcome = BROADCASTS[name](workers, num_bytes, link)
            assert_same(cost, outcome)
            bound = broadcast.ideal_broadcast(num_bytes, workers, link.bytes_per_s, link.latency_s)
            assert bound.seconds <= outcome.seconds


@settings(max_examples=60, deadline=None)
@given(workers=st.integers(1, 20), chunks=st.integers(1, 40), latency_s=st.floats(0, 1))
def test_a_chain_costs_what_its_messages_cost(workers: int, chunks: int, latency_s: float) -> None:
    link = Link(1e6, latency_s)
    outcome = run_broadcast(lambda i, p: programs.chain(i, p, chunks), chunks, workers, 5e6, link)
    assert_same(broadcast.chain(5e6, workers, 1e6, latency_s, chunks=chunks), outcome)


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(2, 100),
    chunks=st.integers(1, 1000),
    num_bytes=st.floats(1, 1e12),
    latency_s=st.floats(1e-7, 1e-1) | st.just(0.0),
)
def test_no_number_of_chunks_beats_the_best(workers: int, chunks: int, num_bytes: float, latency_s: float) -> None:
    best = broadcast.chain(num_bytes, workers, 1e9, latency_s)
    if num_bytes / chunks >= broadcast.LEAST_CHUNK_BYTES or chunks == 1:
        other = broadcast.chain(num_bytes, workers, 1e9, latency_s, chunks=chunks)
        assert best.seconds <= other.seconds * (1 + 1e-12)


def test_the_textbook_example_of_a_broadcast() -> None:
    assert broadcast.one_by_one(5e6, 8, 1e6, 0).seconds == 35
    assert broadcast.tree_broadcast(5e6, 8, 1e6, 0).seconds == 15


def test_the_textbook_example_of_an_all_reduce() -> None:
    """The figures of the module's docstring."""
    link = (64, 1.25e9, 20e-6)
    assert allreduce.ring(100e6, *link).seconds == pytest.approx(126 * (20e-6 + 1.25e-3))
    assert allreduce.halving_doubling(100e6, *link).seconds == pytest.approx(157.74e-3)
    assert allreduce.ideal(100e6, *link).seconds == pytest.approx(157.5e-3)
    assert allreduce.recursive_doubling(1e3, *link).seconds == pytest.approx(124.8e-6)


def test_the_simulation_sees_numbers_counted_twice() -> None:
    def twice(index: int) -> Program:
        for _ in range(2):
            yield [Send(1 - index, [0]), Receive(1 - index, add=True)]

    with pytest.raises(AssertionError, match="in it already"):
        simulate([twice(0), twice(1)], [[1], [2]], 1.0, lambda _a, _b: LINKS[0])


def test_the_simulation_sees_workers_that_wait_for_each_other() -> None:
    def waits(index: int) -> Program:
        yield [Receive(1 - index)]
        yield [Send(1 - index, [0])]

    with pytest.raises(AssertionError, match="for ever"):
        simulate([waits(0), waits(1)], [[1], [2]], 1.0, lambda _a, _b: LINKS[0])


def test_the_simulation_lets_a_port_carry_one_message_at_a_time() -> None:
    """Two senders to one receiver take turns, on a link without latency of 1 byte/s."""
    link = Link(1.0, 0.0)
    everyone = [programs.naive(index, 3) for index in range(3)]
    assert simulate(everyone, [[1], [2], [4]], 5.0, lambda _a, _b: link).seconds == 4 * 5.0
