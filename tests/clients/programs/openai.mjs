// OpenAI's client for JavaScript.
import OpenAI from "openai";
import { TIMEOUT_MS, aborted, run, told } from "./steps.mjs";

const client = (apiKey = told.token) =>
  new OpenAI({ baseURL: told.base_url, apiKey, maxRetries: 0, timeout: TIMEOUT_MS });

const messages = (content) => [{ role: "user", content }];

async function ask(model, token) {
  const answer = await client(token).chat.completions.create({ model, messages: messages(told.hi) });
  return answer.choices[0].message.content;
}

await run({
  chat: async () => ({ text: await ask(told.model) }),
  stream: async () => {
    const pieces = [];
    const stream = await client().chat.completions.create({
      model: told.model,
      messages: messages(told.hi),
      stream: true,
    });
    for await (const chunk of stream) pieces.push(chunk.choices[0].delta.content);
    return { pieces };
  },
  embeddings: async () => {
    const answer = await client().embeddings.create({ model: told.model, input: told.hi });
    return { vector: Array.from(answer.data[0].embedding) };
  },
  unknown_model: async () => ({ text: await ask(told.unknown_model) }),
  wrong_token: async () => ({ text: await ask(told.model, told.wrong_token) }),
  abort: async () => {
    const stream = await client().chat.completions.create({
      model: told.model,
      messages: messages(told.hang),
      stream: true,
    });
    const { value } = await stream[Symbol.asyncIterator]().next();
    stream.controller.abort();
    await aborted(value.choices[0].delta.content);
  },
});
