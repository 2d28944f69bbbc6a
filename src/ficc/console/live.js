/**
 * Lists that stay current, by asking again and again: the one place that polls. A feed of changes may take its
 * place behind the same class.
 *
 * While the window is visible and somebody listens, each list asks every two seconds, one request at a time,
 * and less and less often while that fails. What was received stays, with its time.
 */

import { ApiError, call } from "./api.js";

const POLL_SECONDS = 2;
const BACKOFF_SECONDS_MAX = 30;
const PAGE_MAX = 200;

/** Dispatches `change`. */
export class LiveList extends EventTarget {
  /** Records, newest first; null until the first answer. */
  items = null;
  /** Whether there are older ones that are not shown. */
  more = false;
  /** When `items` was received, in milliseconds since 1970. */
  receivedAt = null;
  /** Why the last request failed; null after one that did not. */
  error = null;
  /** Whether it goes on asking. */
  running = false;
  /** When the next request is due. */
  dueAt = 0;

  #path;
  #failures = 0;
  #timer = null;
  #request = null;

  constructor(path) {
    super();
    this.#path = path;
    document.addEventListener("visibilitychange", () => this.#schedule());
  }

  start() {
    if (this.running) return;
    this.running = true;
    this.dueAt = 0;
    this.#schedule();
  }

  stop() {
    this.running = false;
    this.#request?.abort();
    this.#request = null;
    this.#schedule();
  }

  /** Ask now; what is being asked already is asked anew, since its answer may be older than the wish. */
  async refresh() {
    clearTimeout(this.#timer);
    this.#request?.abort();
    const request = (this.#request = new AbortController());
    try {
      const page = await call("GET", `${this.#path}?limit=${PAGE_MAX}`, undefined, {
        signal: request.signal,
      });
      if (request.signal.aborted) return;
      this.#failures = 0;
      Object.assign(this, {
        items: page.items,
        more: page.next !== null,
        receivedAt: Date.now(),
        error: null,
      });
    } catch (error) {
      if (request.signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      this.#failures += 1;
      this.error = error;
    }
    this.#request = null;
    const pause = POLL_SECONDS * 2 ** this.#failures;
    this.dueAt = Date.now() + Math.min(pause, BACKOFF_SECONDS_MAX) * 1000;
    this.dispatchEvent(new Event("change"));
    this.#schedule();
  }

  /** Take a record that an action answered with, ahead of the next answer. */
  put(record) {
    this.items = (this.items ?? []).map((one) => (one.id === record.id ? record : one));
    this.dispatchEvent(new Event("change"));
    this.refresh();
  }

  find(id) {
    return this.items?.find((one) => one.id === id);
  }

  #schedule() {
    clearTimeout(this.#timer);
    if (!this.running || this.#request || document.hidden) return;
    this.#timer = setTimeout(() => this.refresh(), Math.max(0, this.dueAt - Date.now()));
  }
}

/** Call `tick` every second while the window is visible. */
export function everySecond(tick) {
  setInterval(() => document.hidden || tick(), 1000);
}
