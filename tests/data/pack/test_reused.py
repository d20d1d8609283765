"""Memory that is used again: by the next piece, and not before the last view of the one before is gone."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from shoal.data.pack.reused import ReusedMemory


def address(array: NDArray[np.uint8]) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_when_its_last_view_is_gone() -> None:
    memory = ReusedMemory()
    first = memory.take(1000)
    view, place = first[10:20].view(np.uint16), address(first)
    view[:] = 7
    del first
    second = memory.take(1000)
    second[:] = 1
    assert address(second) != place
    assert view.tolist() == [7] * 5
    del view
    assert address(memory.take(1000)) == place


def test_more_than_the_free_memory_has_is_fresh() -> None:
    memory = ReusedMemory()
    del_me = memory.take(1000)
    place = address(del_me)
    del del_me
    larger = memory.take(3 << 20)
    larger[:] = 1
    assert larger.size == 3 << 20
    assert address(larger) != place


def test_threads_never_have_the_same_memory_at_once() -> None:
    memory = ReusedMemory()

    def piece(number: int) -> bool:
        taken = memory.take(4096 + number % 3)
        taken[:] = number % 251
        return bool((taken == number % 251).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(piece, range(2000)))
