// Vercel's AI SDK with its provider for compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, streamText } from "ai";
import { aborted, run, told } from "./steps.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false; // standard output is for steps

const provider = (apiKey = told.token) =>
  createOpenAICompatible({ name: "ficc", baseURL: told.base_url, apiKey });

async function ask(model, token) {
  const { text } = await generateText({ model: provider(token)(model), prompt: told.hi, maxRetries: 0 });
  return text;
}

await run({
  chat: async () => ({ text: await ask(told.model) }),
  stream: async () => {
    const pieces = [];
    const { textStream } = streamText({ model: provider()(told.model), prompt: told.hi, maxRetries: 0 });
    for await (const piece of textStream) pieces.push(piece);
    return { pieces };
  },
  embeddings: async () => {
    const model = provider().embeddingModel(told.model);
    const { embedding } = await embed({ model, value: told.hi, maxRetries: 0 });
    return { vector: embedding };
  },
  unknown_model: async () => ({ text: await ask(told.unknown_model) }),
  wrong_token: async () => ({ text: await ask(told.model, told.wrong_token) }),
  abort: async () => {
    const controller = new AbortController();
    const { textStream } = streamText({
      model: provider()(told.model),
      prompt: told.hang,
      maxRetries: 0,
      abortSignal: controller.signal,
    });
    const { value } = await textStream[Symbol.asyncIterator]().next();
    controller.abort();
    await aborted(value);
  },
});
