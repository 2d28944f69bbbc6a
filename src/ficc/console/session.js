/**
 * Who is signed in, and in which project. The session itself is a cookie that scripts cannot read; a one-use
 * code from the printed link is exchanged for it, and leaves the address bar before anything else happens.
 */

import { call, refusals, show } from "./api.js";

/** Take the code out of the address and out of the history. Null where there is none. */
export function takeCode() {
  const found = /^#code=([^&]+)$/.exec(location.hash);
  if (!found) return null;
  history.replaceState(null, "", location.pathname + location.search);
  return decodeURIComponent(found[1]);
}

/** The code of what a person pasted: a whole link, or the code alone. */
export const codeIn = (text) => text.trim().replace(/^.*#code=/, "");

/** Dispatches `change`. */
export class Session extends EventTarget {
  /** "asking", "in", "out" (`problem` says why, if not by choice), "outdated", or "unreachable". */
  state = "asking";
  record = null;
  problem = null;
  /** Something to know that stands in nobody's way. */
  notice = null;
  #entering = false;

  constructor() {
    super();
    refusals.addEventListener("signed-out", (event) => this.#ended(event.detail));
    refusals.addEventListener("outdated", (event) => this.#to("outdated", event.detail));
  }

  /** With a code, sign in; otherwise, and after a code that does not count, go on with what there is. */
  async begin(code) {
    if (code === null) return this.resume();
    show(null);
    this.#entering = true;
    try {
      this.#enter(await call("POST", "/session", { code }));
    } catch (error) {
      if (error.status === 0) return this.#to("unreachable", error);
      await this.resume(error);
    } finally {
      this.#entering = false;
    }
  }

  /** Go on with the session of this browser. `failed` is why a code did not count. */
  async resume(failed = null) {
    show(null);
    try {
      const record = await call("GET", "/session");
      this.notice = failed && "The link was used before or is too old; you are still signed in.";
      this.#enter(record);
    } catch (error) {
      if (error.status === 0) return this.#to("unreachable", error);
      this.#to("out", failed ?? (error.status === 401 ? this.problem : error));
    }
  }

  async signOut() {
    await call("DELETE", "/session");
    location.reload(); // nothing of what was shown stays in memory
  }

  #enter(record) {
    const before = this.record;
    if (before && (before.principal.id !== record.principal.id || before.project.id !== record.project.id)) {
      location.reload(); // what the window holds belongs to somebody else
      return;
    }
    show(record);
    this.record = record;
    this.#to("in", null);
  }

  #ended(error) {
    if (this.state === "in" && !this.#entering) this.#to("out", error);
  }

  #to(state, problem) {
    this.state = state;
    this.problem = problem;
    this.dispatchEvent(new Event("change"));
  }
}
