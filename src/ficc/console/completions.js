/** One streamed chat answer, piece by piece. */

import { ApiError, stream } from "./api.js";
import { Broken, events } from "./sse.js";

/**
 * The answer of `service` to `messages`: {requestId} once it is open, then pieces {text}, then {finish} and
 * {tokens} as far as the engine says them. Raises ApiError for a refusal, for an error inside the stream and for
 * a stream that ends before it says that it is done; and what `signal` was aborted with.
 */
export async function* complete(service, messages, signal) {
  const response = await open(service, messages, signal);
  const requestId = response.headers.get("x-request-id");
  yield { requestId };
  const broken = { code: "connection_broken", message: "What is shown is all that arrived.", requestId };
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError({ ...chunk.error, requestId });
      const choice = chunk.choices?.[0];
      if (choice?.delta?.content) yield { text: choice.delta.content };
      if (choice?.finish_reason) yield { finish: choice.finish_reason };
      if (chunk.usage) yield { tokens: chunk.usage.completion_tokens };
    }
  } catch (error) {
    throw error instanceof Broken && !signal.aborted ? new ApiError(broken) : error;
  }
  throw new ApiError(broken);
}

function open(service, messages, signal) {
  const path = `/inference/${service.id}/v1/chat/completions`;
  const body = { model: service.alias, messages, stream: true, stream_options: { include_usage: true } };
  return stream(path, body, signal);
}
