/**
 * The console: who is signed in above, and below either what to do to sign in, or the lists and the chat. A
 * session that ends hides what was shown and keeps it, typed text and all, for the same person's next one.
 */

import "./chat.js";
import "./control.js";
import "./models.js";
import "./services.js";
import "./sign-in.js";
import { button, el, setHidden, setText } from "./dom.js";
import { dateTime } from "./format.js";
import { LiveList } from "./live.js";
import { problem } from "./problem.js";
import { Session, takeCode } from "./session.js";

class Console extends HTMLElement {
  #session = new Session();
  #workspace = null;

  connectedCallback() {
    const code = takeCode();
    addEventListener("hashchange", () => {
      const later = takeCode();
      if (later !== null) this.#session.begin(later);
    });
    this.#build();
    this.#session.addEventListener("change", () => this.#update());
    this.#session.begin(code);
  }

  #build() {
    this.who = el("p", { class: "who" });
    this.signOut = button("Sign out", () => this.#signOut(), { class: "small" });
    this.problem = problem({ announced: true });
    this.notice = el("p", { class: "notice", role: "status", hidden: true });
    this.signIn = el("ficc-sign-in");
    this.main = el("main", {}, this.problem, this.notice, this.signIn);
    this.replaceChildren(
      el("header", { class: "top" }, el("h1", {}, "ficc"), this.who, this.signOut),
      this.main,
    );
    this.signIn.show(this.#session);
    this.#update();
  }

  #update() {
    const { state, record, problem: why, notice } = this.#session;
    const signedIn = state === "in" || state === "outdated";
    setHidden(this.signIn, signedIn);
    setHidden(this.signOut, !signedIn);
    setText(this.who, signedIn ? `${record.principal.name} in project ${record.project.name}` : "");
    if (signedIn && record.expires_at) this.who.title = `Until ${dateTime(Date.parse(record.expires_at))}`;
    setHidden(this.notice, !notice || state !== "in");
    setText(this.notice, notice ?? "");
    const outdated = state === "outdated" ? why : null;
    this.problem.show(outdated, { actions: { Reload: () => location.reload() } });
    if (state === "in") this.#workspace ??= this.#makeWorkspace();
    if (this.#workspace) this.#showWorkspace(state, signedIn);
  }

  #showWorkspace(state, visible) {
    const { element, lists, nodes, control } = this.#workspace;
    setHidden(element, !visible);
    if (!visible) control.dialog.close();
    if (state === "in") nodes.refresh(); // for their names only, which do not change
    for (const list of lists) {
      if (state === "in") list.start();
      else list.stop();
    }
  }

  #makeWorkspace() {
    const services = new LiveList("/inference");
    const models = new LiveList("/models");
    const nodes = new LiveList("/contributors");
    const control = el("ficc-control");
    const chat = el("ficc-chat");
    const list = el("ficc-services", {
      on: {
        act: ({ detail }) => control.ask(detail.service, detail.action),
        chat: ({ detail }) => chat.open(detail.id, { focus: true }),
      },
    });
    const modelList = el("ficc-models");
    const element = el("div", { class: "workspace" }, list, chat, modelList, control);
    this.main.append(element);
    list.show(services, models, nodes);
    chat.show(services);
    modelList.show(models, services);
    control.show(services, list.nameOfNode);
    return { element, control, nodes, lists: [services, models] };
  }

  async #signOut() {
    this.signOut.disabled = true;
    try {
      await this.#session.signOut();
    } catch (error) {
      this.problem.show(error, { title: "You were not signed out" });
    }
    this.signOut.disabled = false;
  }
}

customElements.define("ficc-console", Console);
