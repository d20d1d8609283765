"""Random numbers as a pure function of keys and of an element's place: no generator, no state, the same on any device.

1. `key` hashes words (the seed, a step, a sample; the name of a layer) to two 32-bit numbers, on the host. The layer's
   key moves on with every draw. That of a draw for a sample is the product of both keys, modulo 2**32.
2. The elements of a sample are numbered from 0. A bijection scrambles the number; it is computed once for all samples.
3. Each sample's first key is mixed in (xor, multiply, xor the upper half into the lower), and the second one multiplied
   on, which spreads every bit into the upper ones. All of it is int32 arithmetic, in place.
4. Of a tensor that is divided among workers (a DTensor) each worker computes the bits of its own elements only, by
   their numbers in the whole tensor.

Example: of a tensor [4, 6] for 4 samples, divided in two along dim 1, the second worker has elements 3, 4, 5 of each
sample. Of a tensor [8, 6], for 4 samples of 2 tokens each, row 5 is token 1 of sample 2: elements 6 to 11.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

# Odd multipliers from C. Wellons' search for 32-bit mixers of low bias (nullprogram.com/blog/2018/07/31), as signed.
_FIRST, _SECOND = 0x21F0AAAD, 0xD35A2D97 - 2**32
# Even, without a pattern in their bits: twice the fractions of the roots of 2, 3, 5 and 7, times 2**31.
_EVEN = tuple(2 * int(root**0.5 % 1 * 2**31) for root in (2, 3, 5, 7))
# Elements mixed at a time: on the CPU what stays in its cache, elsewhere what bounds the memory for it to 0.5 GiB.
_CHUNK_CPU, _CHUNK_ELSEWHERE = 2**18, 2**26


def key(*words: object) -> tuple[int, int]:
    """Return two odd, signed 32-bit numbers that stand for `words`; odd, so that products of keys lose no bit."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    first, second = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))
    return first | 1, second | 1


def tensor_of_keys(keys: Sequence[tuple[int, int]]) -> Tensor:
    """Return `keys` as int32 [2, keys], on the host."""
    return torch.tensor(list(zip(*keys, strict=True)), dtype=torch.int32, device="cpu")


def key_of_draw(key_of_layer: Tensor, number: int, draws: int) -> tuple[Tensor, Tensor]:
    """Return the two odd keys of draw `draws` in call `number` of a layer, as tensors of one element."""
    steps = [(draws * _EVEN[row] + number * _EVEN[row + 2] + 2**31) % 2**32 - 2**31 for row in (0, 1)]
    return key_of_layer[0] + steps[0], key_of_layer[1] + steps[1]


def draw(
    shape: Sequence[int], like: Tensor, keys: Sequence[Tensor], *, batch_dim: int, finish: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `finish` of 32 random bits for each element that this worker has of a tensor of `shape`.

    `keys` are two vectors with an element for each sample; `batch_dim` has equally many rows for each, sample by
    sample. If `like` is a DTensor, the tensor is divided as `like` is, and what is returned is the local part.
    """
    if isinstance(like, DTensor) or batch_dim:
        starts, sizes = _own_part(shape, like) if isinstance(like, DTensor) else ([0] * len(shape), list(shape))
        index = _index_in_sample(shape, starts, sizes, batch_dim=batch_dim, keys=keys[0])
        rows = max(shape[batch_dim] // len(keys[0]), 1)
        mine = torch.arange(starts[batch_dim], starts[batch_dim] + sizes[batch_dim], device=index.device) // rows
        keys = [part[mine].view(-1, *[1] * (len(shape) - 1 - batch_dim)) for part in keys]
        return _mixed_in_chunks(_scrambled(index), keys, sizes, finish)
    sizes = [len(keys[0]), math.prod(shape) // len(keys[0])]
    index = torch.arange(sizes[1], dtype=torch.int32 if sizes[1] < 2**31 else torch.int64, device=keys[0].device)
    keys = [part.unsqueeze(1) for part in keys]
    return _mixed_in_chunks(_scrambled(index.to(torch.int32)), keys, sizes, finish).view(tuple(shape))


def _own_part(shape: Sequence[int], like: DTensor) -> tuple[list[int], list[int]]:
    """Return where this worker's part of `shape`, divided as `like` is, starts in each dim; and its sizes."""
    starts, sizes = [0] * len(shape), list(shape)
    coordinate = like.device_mesh.get_coordinate() or [0] * like.device_mesh.ndim
    for axis, placement in enumerate(_placements(shape, like)):
        if isinstance(placement, Shard):  # cut as torch.chunk does: the last parts may be smaller, or empty
            size = sizes[placement.dim]
            most = -(-size // like.device_mesh.size(axis))
            start = min(coordinate[axis] * most, size)
            starts[placement.dim] += start
            sizes[placement.dim] = min(most, size - start)
    return starts, sizes


def placed(local: Tensor, shape: Sequence[int], like: DTensor) -> Tensor:
    """Return the DTensor of `shape`, divided as `like` is, of which this worker's part is `local`."""
    size = torch.Size(shape)
    return DTensor.from_local(
        local,
        like.device_mesh,
        _placements(shape, like),
        run_check=False,
        shape=size,
        stride=torch.empty(size, device="meta").stride(),
    )


def _placements(shape: Sequence[int], like: DTensor) -> list[Shard | Replicate]:
    # Whole in dims of size 1, which are broadcast, and beside partial sums, every one of which needs all of it.
    return [p if type(p) is Shard and shape[p.dim] > 1 else Replicate() for p in like.placements]


def _index_in_sample(
    shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int], *, batch_dim: int, keys: Tensor
) -> Tensor:
    """Return the int32 number of each element within its sample, of size 1 in dims that it does not depend on."""
    index, stride = torch.zeros([1] * len(shape), dtype=torch.int32, device=keys.device), 1
    for dim in reversed(range(len(shape))):
        extent = shape[dim] // len(keys) if dim == batch_dim else shape[dim]
        if extent > 1:
            place = torch.arange(starts[dim], starts[dim] + sizes[dim], device=keys.device) % extent * stride
            index = index + place.to(torch.int32).view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= extent
    return index


def _mixed_in_chunks(
    index: Tensor, keys: Sequence[Tensor], sizes: Sequence[int], finish: Callable[[Tensor], Tensor]
) -> Tensor:
    total = math.prod(sizes)
    chunk = _CHUNK_CPU if index.device.type == "cpu" else _CHUNK_ELSEWHERE
    if total <= chunk or torch.compiler.is_compiling():  # compiled, it is one kernel without memory of its own
        return finish(_mixed(index, *keys)).expand(*sizes)
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    step = max(1, sizes[dim] * chunk // total)
    whole = [part.expand(*sizes) for part in (index, *keys)]
    pieces = zip(*(torch.split(part, step, dim) for part in whole), strict=True)
    return torch.cat([finish(_mixed(*piece)) for piece in pieces], dim)


def _scrambled(index: Tensor) -> Tensor:
    bits = index * _FIRST
    return bits.bitwise_xor_((bits >> 15).bitwise_and_(2**17 - 1)).mul_(_SECOND)  # a logical shift: stays a bijection


def _mixed(bits: Tensor, first: Tensor, second: Tensor) -> Tensor:
    mixed = (bits ^ first).mul_(_SECOND)
    return mixed.bitwise_xor_(mixed >> 16).mul_(second)
