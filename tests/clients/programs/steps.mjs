// What the JavaScript programs have in common: where they are told to go, and one JSON line about each step.
import { createInterface } from "node:readline";

export const told = JSON.parse(process.env.CLIENT_TEST);
export const TIMEOUT_MS = 30_000;

const say = (step, found) => console.log(JSON.stringify({ step, ...found }));

const kinds = (error) => {
  const names = [];
  for (let kind = Object.getPrototypeOf(error); kind; kind = Object.getPrototypeOf(kind)) {
    names.push(kind.constructor.name);
  }
  return names;
};

/** Every step, whatever became of those before; an exception is what a step found too. */
export async function run(steps) {
  for (const [name, step] of Object.entries(steps)) {
    let found;
    try {
      found = await step();
    } catch (error) {
      found = { raised: kinds(error), message: String(error.message), trace: String(error.stack) };
    }
    if (found) say(name, found);
  }
}

/** A stream that had begun with this text was left. Nothing else may end it: wait until that was seen. */
export async function aborted(text) {
  say("abort", { text });
  const lines = createInterface({ input: process.stdin });
  await new Promise((resolve) => lines.once("line", resolve).once("close", resolve));
  lines.close();
}
