/** How an answer of a conversation stands, or how it ended, in words. */

import { count, decimal, duration, number } from "./format.js";

/**
 * "Stopped by you · 90 tokens · 15 tok/s · first token 1.2 s". `turn` is as `Conversation` has it, `now` on the
 * clock of its times.
 */
export function standing(turn, now) {
  const { state, tokens, askedAt, firstAt, lastAt } = turn;
  if (state === "waiting") return `Waiting for the first token … ${duration((now - askedAt) / 1000)}`;
  if (state === "stopping") return "Stopping …";
  const parts = [];
  if (state === "stopped") parts.push("Stopped by you");
  if (state === "incomplete") parts.push(`incomplete: ${turn.error.code}`);
  parts.push(count(tokens, "token"));
  const seconds = (lastAt - firstAt) / 1000;
  if (tokens > 1 && seconds > 0) parts.push(`${rate((tokens - 1) / seconds)} tok/s`);
  if (firstAt !== null) parts.push(`first token ${decimal((firstAt - askedAt) / 1000)} s`);
  if (turn.finish === "length") parts.push("cut off at the length limit");
  return parts.join(" · ");
}

const rate = (perSecond) => (perSecond < 10 ? decimal(perSecond) : number(Math.round(perSecond)));
