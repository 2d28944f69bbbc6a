/** What stands there while nobody is signed in: what to do, and a field for the link. */

import { el, setHidden, setProse, setText } from "./dom.js";
import { problem } from "./problem.js";
import { codeIn } from "./session.js";

const TITLES = {
  asking: "Looking who is signed in …",
  out: "Sign in",
  unreachable: "Not connected",
};

class SignIn extends HTMLElement {
  #session;

  show(session) {
    this.#session = session;
    this.heading = el("h2");
    this.how = el("p");
    setProse(
      this.how,
      "Run `ficc open` on the machine where ficc runs, and follow the link that it prints. It works once, within ten minutes.",
    );
    this.problem = problem({ announced: true });
    this.input = el("input", {
      type: "text",
      id: "link",
      autocomplete: "off",
      spellcheck: "false",
      required: true,
    });
    this.form = el(
      "form",
      { on: { submit: (event) => this.#submit(event) } },
      el("label", { for: "link" }, "Or paste the link here"),
      el("div", { class: "line" }, this.input, el("button", { class: "primary" }, "Sign in")),
    );
    this.replaceChildren(this.heading, this.problem, this.how, this.form);
    // Somebody may have signed in in another window meanwhile.
    const again = () => document.hidden || session.state !== "out" || session.resume();
    document.addEventListener("visibilitychange", again);
    addEventListener("focus", again);
    session.addEventListener("change", () => this.#update());
    this.#update();
  }

  #update() {
    const { state, problem: why } = this.#session;
    setText(this.heading, TITLES[state] ?? "");
    setHidden(this.how, state !== "out" || why !== null);
    setHidden(this.form, state !== "out");
    const actions = state === "unreachable" ? { "Try again": () => this.#session.resume() } : {};
    this.problem.show(why, { actions });
  }

  async #submit(event) {
    event.preventDefault();
    const code = codeIn(this.input.value);
    this.input.value = "";
    await this.#session.begin(code);
  }
}

customElements.define("ficc-sign-in", SignIn);
