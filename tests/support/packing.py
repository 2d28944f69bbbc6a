"""What clients pack request bodies with."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable

from ficc.protocol.content_coding import Coding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["PACK", "zstd"]

PACK: dict[Coding, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
