"""Every codec by its name in a plan."""

from typing import Any

from shoal.compress.bf16 import Bf16
from shoal.compress.codec import Codec
from shoal.compress.int4 import Int4
from shoal.compress.int8 import Int8
from shoal.compress.powersgd import PowerSGD
from shoal.compress.sign import Sign
from shoal.compress.threshold import Threshold
from shoal.compress.topk import TopK
from shoal.core.errors import PlanError, did_you_mean

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Bf16, Int8, Int4, Sign, PowerSGD, TopK, Threshold)}


def codec_named(name: str, **settings: Any) -> Codec:
    """Return the codec of that name, with its settings (fraction, multiple, rank) where they are not the usual ones."""
    if name not in CODECS:
        raise PlanError(f"sync.codec={name!r} is none.{did_you_mean(name, list(CODECS))}")
    return CODECS[name](**settings)
