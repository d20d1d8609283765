"""Where gradients lie in a bucket, against torch's own way of cutting them."""

import pytest
import torch

from shoal.compress.bucket import BLOCK, Bucket, ShardedBucket
from tests.compress.counted import numbers

SHAPES = {"weight": (7, 3), "bias": (5,), "kernel": (4, 2, 3), "one": (1,)}
PARTS = {name: numbers(*shape, seed=index) for index, (name, shape) in enumerate(SHAPES.items())}


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_a_row_of_shards_is_what_fsdp_gives_its_worker(workers: int) -> None:
    bucket = ShardedBucket(tuple(SHAPES), tuple(SHAPES.values()), workers)
    bucket.join(PARTS, rows := torch.zeros(bucket.rows, bucket.width))
    for worker, row in enumerate(rows):
        expected = []
        for part in PARTS.values():
            most = -(-len(part) // workers)
            own = part[worker * most : (worker + 1) * most].flatten()
            expected.append(torch.cat([own, torch.zeros(most * part[0].numel() - len(own))]))
        assert torch.equal(row, torch.cat(expected))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_what_is_split_and_joined_again_is_the_same_for_any_number_of_workers(workers: int) -> None:
    names, shapes = tuple(SHAPES), tuple(SHAPES.values())
    before = PARTS
    parts: dict[str, torch.Tensor] = {}
    for bucket in (Bucket(names, shapes), ShardedBucket(names, shapes, workers), ShardedBucket(names, shapes, 5)):
        bucket.join(before, flat := torch.zeros(bucket.rows, bucket.width))
        bucket.split(flat, parts)
        before = parts
    assert all(torch.equal(parts[name], PARTS[name]) for name in SHAPES)


def test_room_is_in_whole_blocks() -> None:
    assert Bucket(("a",), ((BLOCK + 1,),)).room(3) == (1, 3 * BLOCK)
    assert ShardedBucket(("a",), ((3, BLOCK + 1),), 3).room(3) == (3, 2 * BLOCK)
