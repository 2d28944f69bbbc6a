/**
 * Calls of the public API, and the one shape of what goes wrong with them.
 *
 * Every call says which project and session the window shows, and every change carries the token against
 * forgery. What that means for the whole window (signed out, or outdated) is told to `refusals`.
 */

const ROOT = "/api/v1";
const ANSWER_SECONDS = 15;
const SKEW_SECONDS = 2; // the Date header counts whole seconds; less is no difference of clocks
const OUTDATED = new Set(["project_changed", "session_changed"]);

/** What went wrong: a refusal of the server, or (status 0) that there was no answer. */
export class ApiError extends Error {
  constructor({ code, message, status = 0, requestId = null, details = {} }) {
    super(message);
    Object.assign(this, { code, status, requestId, details });
  }
}

/** Events `signed-out` and `outdated`, each with the ApiError as `detail`. */
export const refusals = new EventTarget();

let shown = null;
let skewMilliseconds = 0;

/** What the window shows from now on: a record of GET /session, or null. */
export function show(session) {
  shown = session;
}

/** The server's time, in milliseconds since 1970. */
export const serverNow = () => Date.now() + skewMilliseconds;

/** The JSON answer of a management route. Raises ApiError, or what `signal` was aborted with. */
export async function call(method, path, body, { signal } = {}) {
  const limit = AbortSignal.timeout(ANSWER_SECONDS * 1000);
  const response = await send(method, path, body, signal ? AbortSignal.any([signal, limit]) : limit);
  const document = await response.json().catch((error) => {
    if (error instanceof SyntaxError) return {};
    throw noAnswer(error, signal);
  });
  if (response.ok) return document;
  throw refusal(response, document);
}

/** The open response of a streaming inference route. Raises as `call` does. */
export async function stream(path, body, signal) {
  const response = await send("POST", path, body, signal);
  if (response.ok) return response;
  throw refusal(response, await response.json().catch(() => ({})));
}

async function send(method, path, body, signal) {
  const headers = new Headers();
  if (body !== undefined) headers.set("content-type", "application/json");
  if (shown !== null) {
    headers.set("x-ficc-project", shown.project.id);
    headers.set("x-ficc-session", shown.session_id);
    if (method !== "GET") headers.set("x-csrf-token", shown.csrf);
  }
  const options = { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) };
  try {
    const response = await fetch(ROOT + path, { ...options, cache: "no-store", redirect: "error" });
    const skew = Date.parse(response.headers.get("date")) - Date.now();
    skewMilliseconds = Math.abs(skew) > SKEW_SECONDS * 1000 ? skew : 0;
    return response;
  } catch (error) {
    throw noAnswer(error, signal);
  }
}

function noAnswer(error, signal) {
  if (error.name === "TimeoutError") {
    return new ApiError({ code: "no_answer", message: `There was no answer within ${ANSWER_SECONDS} s.` });
  }
  if (signal?.aborted) return error;
  return new ApiError({ code: "unreachable", message: "The controller does not answer." });
}

function refusal(response, document) {
  const { code = "unknown", message, ...details } = document.error ?? {};
  const error = new ApiError({
    code,
    message: message ?? `The server answered ${response.status} without saying why.`,
    status: response.status,
    requestId: response.headers.get("x-request-id"),
    details,
  });
  if (error.status === 401) tell("signed-out", error);
  if (OUTDATED.has(error.code)) tell("outdated", error);
  return error;
}

function tell(what, error) {
  refusals.dispatchEvent(new CustomEvent(what, { detail: error }));
}
