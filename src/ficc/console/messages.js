/**
 * The one catalogue of words: for states, for actions, and for errors by their code.
 *
 * The server's own message says why something was refused and often what to do; a code's words here put a name
 * to it (`what`) and add the next step from where the reader is (`next`). `backticks` mark code.
 */

/** `tone` is how a state is coloured; its label says the same. */
const state = (label, tone) => ({ label, tone });

export const modelStates = {
  registered: state("Waiting for its files", "quiet"),
  acquiring: state("Downloading", "busy"),
  pausing: state("Pausing", "busy"),
  paused: state("Paused", "quiet"),
  verifying: state("Verifying", "busy"),
  ready: state("Ready", "good"),
  failed: state("Failed", "bad"),
};

export const fileStates = {
  missing: "nothing yet",
  partial: "partly here",
  verifying: "being verified",
  verified: "verified",
  failed: "failed",
};

export const serviceStates = {
  starting: state("Starting", "busy"),
  ready: state("Ready", "good"),
  degraded: state("Degraded", "warn"),
  draining: state("Draining", "busy"),
  stopping: state("Stopping", "busy"),
  stopped: state("Stopped", "quiet"),
  failed: state("Failed", "bad"),
};

export const desiredStates = { running: "running", stopped: "stopped" };

/** What a replica has been doing, to go before "for 12 s". */
export const replicaStates = {
  queued: state("Queued", "busy"),
  staging: state("Bringing its files", "busy"),
  preparing: state("Preparing its sandbox", "busy"),
  starting: state("Starting", "busy"),
  ready: state("Ready", "good"),
  draining: state("Draining", "busy"),
  stopping: state("Stopping", "busy"),
  finished: state("Ended", "quiet"),
};

/** How a replica that is `finished` ended, to go before "3 min ago". */
export const outcomes = {
  succeeded: state("Ended", "quiet"),
  failed: state("Failed", "bad"),
  cancelled: state("Stopped", "quiet"),
  unknown: state("Lost; nobody can know how it ended", "warn"),
};

export const actions = {
  start: {
    label: "Start",
    title: (alias) => `Start ${alias}?`,
    confirm: "Start",
    failed: "It was not started",
  },
  drain: {
    label: "Drain",
    title: (alias) => `Drain ${alias}?`,
    confirm: "Drain",
    failed: "It was not drained",
  },
  stop: {
    label: "Stop",
    title: (alias) => `Stop ${alias} now?`,
    confirm: "Stop now",
    failed: "It was not stopped",
  },
};

const SIGN_IN = "Run `ficc open` on the machine where ficc runs, and follow the link that it prints.";
const LOOK_AGAIN = "It has been read again: what you see is how it is now.";
const REQUEST_ID = "The request id finds it in the controller's log.";
const TRY_LATER = "Try again in a moment.";
const LOGS =
  "`ficc service logs ALIAS` has more of what the engine said. Start the service again when that is mended.";

const words = (what, next = "") => ({ what, next });

const codes = {
  // the browser's own
  unreachable: words(
    "The controller does not answer",
    "Is `ficc up` running? What happens on the server goes on without this window.",
  ),
  no_answer: words("The controller is silent", TRY_LATER),
  connection_broken: words(
    "The connection broke before the answer was complete",
    "Nothing is sent again by itself. Ask again.",
  ),
  unknown: words("The server answered unexpectedly", REQUEST_ID),
  // the request itself
  invalid_json: words("The request was not understood", REQUEST_ID),
  invalid_request: words("The request was not accepted"),
  invalid_body: words("The engine does not take this request"),
  bad_http: words("The request was malformed", REQUEST_ID),
  too_large: words("That is too large"),
  headers_too_large: words("The request was too large", "Clear this site's cookies, and sign in again."),
  request_timeout: words("The request did not arrive in time", TRY_LATER),
  connections_full: words("The server has too many connections", TRY_LATER),
  unsupported_media_type: words("The request was not understood", REQUEST_ID),
  not_found: words("There is no such object any more", "It may have been removed meanwhile."),
  method_not_allowed: words("The request was not understood", REQUEST_ID),
  // who asks
  unauthenticated: words("You are not signed in", SIGN_IN),
  denied: words("You may not do this", "Whoever manages this project can give you the scope."),
  csrf_failed: words(
    "The request does not count as yours",
    "Reload the page. It must be open under the name that `ficc open` prints.",
  ),
  project_changed: words(
    "This window shows another project",
    "Another window changed the project. Reload to see what it shows.",
  ),
  session_changed: words(
    "This window belongs to an earlier session",
    "Somebody signed in again in another window. Reload to go on with that.",
  ),
  // models
  offset_mismatch: words(
    "The upload starts at the wrong place",
    "Run the upload again; it goes on from where it stands.",
  ),
  empty_upload: words("The upload was empty", "Run the upload again."),
  upload_busy: words("Two uploads are active already", TRY_LATER),
  source_mismatch: words(
    "The file is not what the manifest declares",
    "Get the right file, and run `ficc model upload NAME FILE`; it starts again from zero.",
  ),
  source_unavailable: words(
    "The source does not answer",
    "Try again later; what is here already stays, and the download goes on from there.",
  ),
  source_refused: words(
    "The source is not permitted",
    "`acquisition.allowed_hosts` and `acquisition.allowed_networks` say where the controller may fetch from.",
  ),
  source_changed: words(
    "The source has another file by now",
    "Register the model again from its present revision.",
  ),
  range_unsupported: words(
    "The source cannot go on in the middle of a file",
    "Fetch the file yourself, and run `ficc model upload NAME FILE`.",
  ),
  stalled: words("The source stopped sending", "Try again later; it goes on from where it stands."),
  quota_exceeded: words("The project's quota is used up", "Remove a model that is not needed any more."),
  model_header_refused: words("The file's header is malformed", "Get the file again from its publisher."),
  repository_not_found: words("The hub has no such repository", "Check its name and its revision."),
  repository_gated: words(
    "The hub wants its terms accepted first",
    "Accept them on the hub's page, and set `hub.token_file` to a token of that account.",
  ),
  hub_rate_limited: words("The hub takes no more requests for now", TRY_LATER),
  content_hash_missing: words(
    "The hub declares no digest for a file",
    "Register the model with the digest that its publisher gives.",
  ),
  model_referenced: words("Services use this model", "Remove those services first."),
  model_busy: words("The model is being written", TRY_LATER),
  model_not_ready: words(
    "The model is not ready",
    "A service starts from verified files only; wait until the model is ready.",
  ),
  disk_full: words(
    "The disk is full",
    "Make room on the controller's disk, and run the upload again; it goes on from where it stands.",
  ),
  content_unavailable: words(
    "The model files cannot be read or written",
    "Look at the controller's disk: is it mounted, writable, and the controller's own?",
  ),
  // services
  revision_conflict: words("The service changed meanwhile", LOOK_AGAIN),
  alias_taken: words("The alias is taken"),
  does_not_fit: words(
    "It does not fit on its node",
    "Stop another service, or replace this one with smaller limits: `ficc service replace ALIAS`.",
  ),
  preview_changed: words("The plan changed meanwhile", LOOK_AGAIN),
  service_not_stopped: words("The service is not stopped", LOOK_AGAIN),
  action_not_allowed: words("Its state does not allow this", LOOK_AGAIN),
  attempt_not_released: words(
    "An earlier attempt still holds its reservation",
    "It is given back as soon as its node confirms that nothing of it is left. Then start again.",
  ),
  inference_unknown_outcome: words(
    "Nobody can know how the last attempt ended",
    "Start a new attempt if that is acceptable; nothing is replayed.",
  ),
  // workloads
  input_not_verified: words("The job reads a file that is not here", "Add the model that it is a file of first."),
  idempotency_conflict: words("The key belongs to another job", "Send another key."),
  unknown_outcome: words(
    "Nobody can know how the last attempt ended",
    "Run the job again if that is acceptable; it begins from its beginning.",
  ),
  lease_not_over: words("Its node may still run it", "Release it once its lease is over."),
  gpu_missing: words("Its node has no such GPU", "Replace the service with other limits or another node."),
  runtime_changed: words(
    "Its sandbox provider changed",
    "`ficc service replace ALIAS --runtime current` moves the service to the node's present runtime.",
  ),
  // runtime images
  image_refused: words("The runtime image is not what it says"),
  image_not_found: words(
    "The runtime image is not on that machine",
    "`ficc runtime list` shows what is. Replace the service with another: `ficc service replace " +
      "ALIAS --runtime NAME`.",
  ),
  image_in_use: words("A sandbox runs from this image", "Stop its service first."),
  build_failed: words("The runtime image was not built", REQUEST_ID),
  // inference
  capability_unavailable: words("The model cannot do this"),
  model_not_found: words("The service has another name by now", "Reload the page."),
  rate_limited: words("This credential or its project asked for too much", TRY_LATER),
  queue_full: words("Every slot is taken", TRY_LATER),
  bodies_full: words("Too many requests are waiting", TRY_LATER),
  service_not_ready: words("The service is not ready", "Send it again once it is."),
  service_draining: words(
    "The service is draining",
    "It takes no more requests; start it again when it has stopped.",
  ),
  service_stopped: words("The service was stopped", "Start it again to go on."),
  client_gone: words("This window left before the answer was whole", "Ask again."),
  peer_lost: words("The connection to the replica broke", "Nothing is replayed. Ask again."),
  engine_error: words("The engine failed", LOGS),
  deadline_exceeded: words(
    "The service's deadline passed",
    "Ask for less, or replace the service with a longer deadline.",
  ),
  fenced: words("The replica was replaced meanwhile", "Nothing is replayed. Ask again."),
  busy: words("The replica has no free slot", TRY_LATER),
  engine_busy: words("The engine takes no more requests for now", "Nothing is replayed. Ask again in a moment."),
  // the executor
  lease_refused: words("The node did not take the lease"),
  attempt_unknown: words("The node knows no such attempt"),
  limits_unenforceable: words(
    "The node cannot enforce these limits",
    "`ficc doctor` on that machine says what is missing.",
  ),
  // us
  database_unavailable: words("The database does not answer", TRY_LATER),
  executor_unavailable: words("The executor does not answer", "Is `ficc up` running on that machine?"),
  internal: words("The server failed", REQUEST_ID),
  // why a placement does not do, or is only just enough
  memory_limit_too_small: words("The model needs more memory than it may have"),
  endpoint_unsupported: words("The node's executor is too old", "Upgrade ficc on that machine."),
  tight: words("It is a tight fit"),
  context_beyond_training: words("The context is longer than the model was made for"),
  // why a replica ended
  exited: words("The command ended"),
  engine_exited: words("The engine ended by itself", LOGS),
  engine_killed: words("The engine was killed", LOGS),
  out_of_memory: words(
    "The engine ran out of memory",
    "Replace the service with more memory (`ficc service replace ALIAS --memory-bytes N`), less " +
      "context or less concurrency.",
  ),
  launch_failed: words(
    "The engine was not started",
    "`ficc doctor` on that machine checks what sandboxes need.",
  ),
  ready_timeout: words("The engine was not ready in time", LOGS),
  prepare_timeout: words("The engine was not started in time", LOGS),
  readiness_failed: words("The engine does not answer as it should", LOGS),
  engine_unresponsive: words("The engine stopped answering", LOGS),
  engine_loading: words("The engine loads its model"),
  restart_pending: words("It is tried again by itself", LOGS),
  lease_lapsed: words("The lease ran out", "It is tried again by itself once its node is connected."),
  executor_shutdown: words(
    "The executor was shut down",
    "It is tried again by itself once the executor is back.",
  ),
  job_cancelled: words("Somebody cancelled the job"),
  executor_restarted: words("The executor restarted", "It is tried again by itself."),
  quarantined: words(
    "It ended, and what is left of it cannot be removed",
    "It holds what it reserved until that is gone. The message says what is in the way and what to do.",
  ),
  end_not_observed: words(
    "Nobody saw how the engine ended",
    "Start a new attempt if that is acceptable; nothing is replayed.",
  ),
  node_rebooted: words(
    "The machine was rebooted",
    "Start a new attempt if that is acceptable; nothing is replayed.",
  ),
  lease_over: words(
    "The lease ran out unseen",
    "Start a new attempt if that is acceptable; nothing is replayed.",
  ),
  start_not_confirmed: words("The node never confirmed the start", "It is tried again by itself."),
  no_replicas: words("The service has no replica"),
  partial_shortened: words(
    "The unfinished file lost bytes",
    "Run `ficc model upload NAME FILE`; it goes on from what is left.",
  ),
  content_lost: words(
    "A verified file is gone from the content store",
    "Run `ficc model upload NAME FILE` to bring it again; it starts from zero.",
  ),
  node_unknown: words(
    "Its node is gone",
    "Replace the service, and place it on another: `ficc service replace ALIAS`.",
  ),
  node_disconnected: words("Its node is not connected", "Is `ficc up` running on that machine?"),
};

const otherwise = words("That did not work");

/** The words for a code; for one that is not known here, the server's message has to do. */
export const wordsFor = (code) => (Object.hasOwn(codes, code) ? codes[code] : otherwise);
