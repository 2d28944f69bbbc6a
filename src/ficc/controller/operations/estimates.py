"""What memory a model needs as a service wants it, from what its files say of themselves. Headers are read from
verified bytes, once, and remembered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ficc.content.store import ContentStore
from ficc.domain.errors import Reason, Refused
from ficc.domain.estimate import Estimate, Split, from_file_sizes, from_shape
from ficc.domain.manifest import File, Manifest
from ficc.domain.model_shape import ModelShape, add_up
from ficc.inference.schema import Placement, Specification
from ficc.protocol.gguf import Reader
from ficc.protocol.gguf_header import Header

KEPT_MAX = 256
"""Headers that are remembered, some kilobytes each; the first to come is the first to go."""
STEP_BYTES = 64 << 10


class Estimates:
    """Reads files: for threads only."""

    def __init__(self, store: ContentStore) -> None:
        self._store = store
        self._known: dict[str, Header | Refused] = {}

    def of(
        self, manifest: Manifest, specification: Specification
    ) -> tuple[tuple[Estimate, ...], tuple[Reason, ...]]:
        """For each placement, and what the header makes doubtful. An engine may read a file that we do not: a
        header that is refused here is a warning, and the estimate a floor."""
        floor = (from_file_sizes(manifest.bytes_total),) * len(specification.placements)
        try:
            headers = self._headers(manifest)
        except (Refused, OSError) as error:
            return floor, (Reason("model_header_refused", f"The engine may not load this. {error}"),)
        shape = headers[0].shape if headers else None
        if shape is None:
            return floor, ()
        estimates = tuple(
            _estimate(shape, headers, manifest, specification, one) for one in specification.placements
        )
        return estimates, tuple(_doubts(shape, specification))

    def _headers(self, manifest: Manifest) -> tuple[Header, ...]:
        """One header for each file that holds weights, the one that describes the model first; empty for
        another format. Raises Refused `model_header_refused`."""
        if manifest.format != "gguf":
            return ()
        entry = manifest.entry
        others = [file for file in manifest.weights if file != entry]
        return tuple(self._header(file) for file in (entry, *others))

    def _header(self, file: File) -> Header:
        found = self._known.get(file.sha256)
        if found is None:
            try:
                found = self._read(file)
            except Refused as refused:
                found = Refused(refused.code, f"{file.name}: {refused.message}")
            while len(self._known) >= KEPT_MAX:
                del self._known[next(iter(self._known))]
            self._known[file.sha256] = found
        if isinstance(found, Refused):
            raise Refused(found.code, found.message)
        return found

    def _read(self, file: File) -> Header:
        reader = Reader(file_bytes=file.bytes)
        with self._store.blob(file.sha256).open("rb") as opened:
            while not reader.done:
                piece = opened.read(max(STEP_BYTES, reader.need))
                if not piece:
                    break
                reader.feed(piece)
        return reader.end()


def _estimate(
    shape: ModelShape,
    headers: Sequence[Header],
    manifest: Manifest,
    specification: Specification,
    placement: Placement,
) -> Estimate:
    gpus, split = len(placement.limits.gpu_devices), None
    layers = None if specification.gpu_layers == "all" else specification.gpu_layers
    if gpus:
        weights = add_up(header.weights for header in headers)
        split = Split(gpus, weights, layers, specification.tensor_split)
    return from_shape(
        shape,
        manifest.bytes_total,
        context=specification.context,
        concurrency=specification.concurrency,
        capabilities=manifest.served_capabilities,
        split=split,
    )


def _doubts(shape: ModelShape, specification: Specification) -> Iterator[Reason]:
    if shape.context_length is not None and specification.context > shape.context_length:
        yield Reason(
            "context_beyond_training",
            f"The model was made for {shape.context_length} tokens of context; beyond that its answers get worse.",
        )
