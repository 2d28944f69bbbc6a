"""What the inference contract says, statement by statement and in our own words.

A test claims statements with `@pytest.mark.contract("C-M1", …)`. Whether a statement is held is never written here:
`scripts/contract_page.py` computes it from the tests. `later` names the release work that brings a statement which
this one does not cover; such a statement has no test.
"""

from __future__ import annotations

from dataclasses import dataclass

SECTIONS = {
    "H": "The API as a whole",
    "M": "Models",
    "S": "Services and inference",
    "R": "Runtimes, replicas and plans",
    "D": "Engine adapters",
    "X": "The executor's endpoint",
    "F": "The seam for code inside the controller",
    "U": "Outcomes that nobody knows",
}


@dataclass(frozen=True, slots=True)
class Statement:
    id: str
    text: str
    later: str | None = None

    @property
    def section(self) -> str:
        return SECTIONS[self.id[2]]


STATEMENTS = (
    # The API as a whole.
    Statement("C-H1", "Every management route lies under `/api/v1`."),
    Statement(
        "C-H2", "A browser calls with its session, and changes something only with the session's CSRF token."
    ),
    Statement("C-H3", "Other clients call with a bearer credential."),
    Statement(
        "C-H4",
        "Models and services belong to a project; another project's are not found, whatever the scopes.",
    ),
    Statement("C-H5", "Each route asks for the scopes of its row in the table: all of them, and no others."),
    # Models.
    Statement(
        "C-M1",
        "A model and the list of models show the manifest, which never changes, and each file's progress.",
    ),
    Statement("C-M2", "`POST /models` registers a manifest."),
    Statement(
        "C-M3", "The same manifest in the same project is the same model, however often it is registered."
    ),
    Statement("C-M4", "`acquire` starts or resumes a bounded download over HTTPS."),
    Statement("C-M5", "`pause` lets an admitted write end, then stops the download at its durable offset."),
    Statement("C-M6", "A JSON upload is an offset and a piece in canonical base64."),
    Statement("C-M7", "A JSON upload carries at most 1 MiB, decoded."),
    Statement("C-M8", "An octet-stream upload is the plain bytes at the offset that its query names."),
    Statement("C-M9", "An octet-stream upload carries at most 16 MiB."),
    Statement("C-M10", "At most two octet-stream uploads are active at once."),
    Statement(
        "C-M11",
        "`hub-preview` makes manifests of a public repository's GGUF metadata, weights left alone.",
    ),
    Statement("C-M12", "`DELETE` removes the metadata of a model that nothing refers to, and of no other."),
    Statement("C-M13", "`DELETE` with `evict=true` also removes content that nothing else shares."),
    Statement(
        "C-M14",
        "An empty upload at exactly the declared size verifies and publishes a partial that was left whole.",
    ),
    Statement(
        "C-M15", "That verification is done off the event loop: other requests are answered meanwhile."
    ),
    Statement("C-M16", "Every other empty upload is refused."),
    Statement("C-M17", "A resumed download verifies the same way before it asks for more bytes."),
    # Services and inference.
    Statement(
        "C-S1",
        "A service and the list of services show specification, generation, state and the replicas' workloads.",
    ),
    Statement(
        "C-S2",
        "A preview validates the placement and shows what each replica would reserve; it writes nothing.",
    ),
    Statement("C-S3", "`POST /inference` submits every wanted replica in one transaction, or nothing."),
    Statement("C-S4", "`PUT` gives a stopped service another specification and starts its next generation."),
    Statement("C-S5", "`control` starts, drains, stops and removes."),
    Statement(
        "C-S6",
        "`tokens` makes one credential with a lifetime, which can invoke this service and nothing else.",
    ),
    Statement("C-S7", "A service's `/v1/models` is the model that was selected for it."),
    Statement("C-S8", "Chat completions answer in OpenAI-compatible JSON."),
    Statement("C-S9", "Chat completions stream as OpenAI-compatible server-sent events."),
    Statement(
        "C-S10",
        "Embeddings answer in compatible JSON where the model has the capability, and are refused elsewhere.",
    ),
    Statement(
        "C-S11",
        "A specification names alias, model, engine, runtime, executable, context, concurrency and explicit "
        "placements, each a node and its limits.",
    ),
    Statement("C-S12", "GPU layers, tensor split, parallelism and the request deadline are optional in it."),
    Statement("C-S13", "A change names the revision that was read, and a stale one changes nothing."),
    Statement(
        "C-S14", "Starting and replacing also need `jobs:execute`, `contributors:read` and `models:read`."
    ),
    Statement("C-S15", "Stopping and removing need `jobs:cancel`."),
    # Runtimes, replicas and plans.
    Statement("C-R1", "A runtime binds provider, package digest, image digest, isolation and network."),
    Statement("C-R2", "Every managed service runs without a network."),
    Statement(
        "C-R3",
        "A replica is a contributor workload with its model revision and, if it has one, a fixed endpoint contract.",
    ),
    Statement(
        "C-R4", "A plan without the newer members serialises as before they existed, so its digest stays."
    ),
    Statement("C-R5", "An executor's snapshot says `endpoint_version: 1`."),
    Statement("C-R6", "An executor that does not say so gets no inference placed on it."),
    Statement("C-R7", "Such an executor takes jobs as before."),
    Statement("C-R8", "Batch jobs of contributors are submitted through the API."),
    # Engine adapters.
    Statement("C-D1", "An entry point in `ficc.inference` adds an engine."),
    Statement(
        "C-D2", "The entry point is a factory whose object has `API_VERSION = 1`; any other is refused."
    ),
    Statement(
        "C-D3",
        "`job(specification, model_record, placement, immutable_input_references)` is called so, and its job is run.",
    ),
    Statement("C-D4", "An adapter turns the engine's options and the model's meaning into the job."),
    Statement(
        "C-D5", "Processes, limits and sockets are the executor's; an adapter starts nothing on the host."
    ),
    Statement("C-D6", "llama.cpp is built in."),
    Statement("C-D7", "Ollama is built in.", "the Ollama adapter"),
    Statement("C-D8", "vLLM is built in.", "the vLLM adapter"),
    Statement("C-D9", "The runtime's image has to be installed on the node."),
    Statement("C-D10", "Choosing an adapter downloads nothing."),
    # The executor's endpoint.
    Statement(
        "C-X1",
        "Open, read and cancel each carry the fence of attempt, generation and plan digest, and a stream id.",
    ),
    Statement("C-X2", "One read returns at most 64 KiB."),
    Statement("C-X3", "Four chunks are queued, then the engine is not read until somebody reads."),
    Statement("C-X4", "What an open may ask is bounded by the endpoint contract: body, slots, paths."),
    Statement("C-X5", "Only inputs that were admitted can be named for the upload of a model to an engine."),
    Statement("C-X6", "The engine's own route for models takes such an input."),
    Statement("C-X7", "No host file, header, address or management path can be reached through an endpoint."),
    Statement("C-X8", "A lost peer ends the request; it is not sent again."),
    Statement("C-X9", "Leases are renewed whatever endpoint reads do."),
    # The seam.
    Statement(
        "C-F1",
        "`status, chunks = await inference.gateway.invoke(id, path, body, actor)`; chunks are iterated and closed.",
    ),
    Statement("C-F2", "The caller's authority is checked again all through the answer."),
    Statement("C-F3", "The service's generation is checked again all through the answer."),
    Statement("C-F4", "Cancelling and not reading reach the engine through the seam."),
    Statement(
        "C-F5", "Only an authenticated actor is taken; nothing that a peer sent counts as a credential here."
    ),
    Statement("C-F6", "A transport between machines authenticates its peer by itself.", "remote nodes"),
    # Unknown outcomes.
    Statement(
        "C-U1",
        "Starting a stopped service whose earlier replica ended unknown needs `acknowledge_unknown: true`, else it is "
        "refused with 409 `inference_unknown_outcome` and no replica is tried.",
    ),
    Statement("C-U2", "Every earlier attempt has to be released first."),
    Statement("C-U3", "The acknowledgement starts new attempts; no earlier request is sent again."),
    Statement("C-U4", "The acknowledgement is refused with every other action."),
)
BY_ID = {statement.id: statement for statement in STATEMENTS}
