/** What a replica is doing, in words. */

import { age, duration, limit } from "./format.js";
import { outcomes, replicaStates } from "./messages.js";

/**
 * What a replica does and since when: "Starting for 12 s (limit 10 min)", "Failed 3 min ago". `now` is the
 * server's, in milliseconds since 1970.
 */
export function doing(replica, now) {
  const { state, outcome, released } = replica;
  const since = Date.parse(replica.since_at);
  const seconds = Math.max(0, now - since) / 1000;
  if (state === "finished") {
    const held = released ? "" : "; its reservation is still held";
    return `${outcomes[outcome].label} ${age(seconds)} ago${held}`;
  }
  const span = state === "ready" ? age(seconds) : duration(seconds);
  const until = replica.deadline_at === null ? null : (Date.parse(replica.deadline_at) - since) / 1000;
  return `${replicaStates[state].label} for ${span}${until === null ? "" : ` (limit ${limit(until)})`}`;
}

/** How that is coloured. */
export const toneOf = ({ state, outcome }) =>
  (state === "finished" ? outcomes[outcome] : replicaStates[state]).tone;
