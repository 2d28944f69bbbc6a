/**
 * What went wrong, beside where it did, until it is dismissed or mended: what happened, why, the next step, the
 * code, and the request id to copy. Lines that an engine said stand as it said them.
 */

import { button, copyButton, el, setProse } from "./dom.js";
import { wordsFor } from "./messages.js";

class Problem extends HTMLElement {
  #shown = null;

  /**
   * Show `error`, which has a code, a message and maybe a requestId; null hides the element. `title` goes
   * before the code's own words. `names` are put in place of words in capitals in the next step. `actions` are
   * buttons by label.
   */
  show(error, { title, names = {}, actions = {} } = {}) {
    this.hidden = error === null;
    const key = error && JSON.stringify([title, error.code, error.message, error.requestId, names]);
    if (key === this.#shown) return;
    this.#shown = key;
    this.replaceChildren(...(error ? this.#parts(error, title, names, actions) : []));
  }

  #parts(error, title, names, actions) {
    const { what, next } = wordsFor(error.code);
    const [why, ...lines] = error.message.split("\n");
    const parts = [
      el("p", { class: "what" }, title ? `${title}: ${what[0].toLowerCase()}${what.slice(1)}.` : `${what}.`),
    ];
    if (why !== `${what}.`) parts.push(prose(why));
    if (lines.length) parts.push(lastLines(lines));
    if (next)
      parts.push(
        prose(
          next.replace(/\b(ALIAS|NAME)\b/g, (word) => names[word] ?? word),
          "next",
        ),
      );
    parts.push(this.#foot(error, actions));
    return parts;
  }

  #foot(error, actions) {
    const foot = el("div", { class: "foot" }, el("code", {}, error.code));
    if (error.requestId) {
      foot.append(
        el(
          "span",
          { class: "id" },
          "request ",
          el("code", {}, error.requestId),
          copyButton(() => error.requestId),
        ),
      );
    }
    for (const [label, run] of Object.entries(actions))
      foot.append(button(label, run, { class: "small primary" }));
    return foot;
  }
}

function prose(text, name) {
  const element = el("p", { class: name });
  setProse(element, text);
  return element;
}

/** Where there are too many to see, the last ones are what matters. */
function lastLines(lines) {
  const element = el("pre", { tabindex: "0", role: "group", "aria-label": "Last lines" }, lines.join("\n"));
  requestAnimationFrame(() => (element.scrollTop = element.scrollHeight));
  return element;
}

customElements.define("ficc-problem", Problem);

/** An empty one. `announced` is for what follows from an action: it is read out when it appears. */
export const problem = ({ announced = false } = {}) =>
  el("ficc-problem", { hidden: true, role: announced && "alert" });
