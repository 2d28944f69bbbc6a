/** The chat: a conversation with one service at a time. Answers stream; Enter sends, Esc stops. */

import { Conversation } from "./conversation.js";
import { button, el, reconcile, setHidden, setText } from "./dom.js";
import { everySecond } from "./live.js";
import { serviceStates } from "./messages.js";
import { problem } from "./problem.js";
import { answers, canChat } from "./services.js";
import { standing } from "./turn.js";

const NEAR_END_PIXELS = 40;
const NOBODY = "No service can chat yet. Once one is ready, talk to it here.";
const HOW =
  "Enter sends, Shift+Enter makes a new line, Esc stops an answer. What is said stays in this window, and is " +
  "gone when it closes.";

class Chat extends HTMLElement {
  #conversations = new Map();
  #rows = new Map();
  #serviceId = null;
  #drawing = 0;

  show(services) {
    this.services = services;
    const heading = el("h2", { id: "chat-title" }, "Chat");
    this.setAttribute("role", "region");
    this.setAttribute("aria-labelledby", heading.id);
    this.picker = el("select", {
      "aria-label": "Service",
      on: { change: () => this.open(this.picker.value) },
    });
    this.fresh = button("New conversation", () => this.#startAnew(), { class: "small" });
    this.hint = el("div", { class: "hint" });
    this.log = el("ol", { class: "turns" });
    this.scroller = el(
      "div",
      { class: "scroller", tabindex: "0", role: "log", "aria-label": "Conversation" },
      this.hint,
      this.log,
    );
    this.problem = problem({ announced: true });
    this.unavailable = el("p", { class: "notice", role: "status" });
    this.input = el("textarea", {
      rows: "2",
      "aria-label": "Message",
      placeholder: "Ask something",
      enterkeyhint: "send",
      on: { keydown: (event) => this.#onEnter(event), input: () => this.#redraw() },
    });
    this.send = el("button", { class: "primary" }, "Send");
    this.form = el("form", { on: { submit: (event) => this.#onSubmit(event) } }, this.input, this.send);
    // A click on what has just become Stop, as the second of a double click, stops nothing.
    this.send.addEventListener("click", (event) => event.detail > 1 && event.preventDefault());
    this.replaceChildren(
      el("header", {}, heading, this.picker, this.fresh),
      this.scroller,
      this.problem,
      this.unavailable,
      this.form,
    );
    services.addEventListener("change", () => this.#redraw());
    document.addEventListener("keydown", (event) => this.#onKey(event));
    everySecond(() => this.#redraw());
    this.#redraw();
  }

  /** Turn to a service. */
  open(serviceId, { focus = false } = {}) {
    if (!this.#conversation?.busy) {
      this.#serviceId = serviceId;
      this.problem.show(null);
    }
    this.#redraw();
    if (!focus) return;
    this.scrollIntoView({ block: "nearest" });
    this.input.focus({ preventScroll: true });
  }

  // What is shown.

  get #service() {
    return this.services.find(this.#serviceId);
  }

  get #conversation() {
    return this.#conversations.get(this.#serviceId);
  }

  /** Draw at the next frame, however many pieces came until then. */
  #redraw() {
    if (this.#drawing) return;
    this.#drawing = requestAnimationFrame(() => {
      this.#drawing = 0;
      this.#draw();
    });
  }

  #draw() {
    const able = (this.services.items ?? []).filter(canChat);
    this.#pick(able);
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    const atEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PIXELS;
    const turns = this.#conversation?.turns ?? [];
    reconcile(
      this.log,
      turns,
      this.#rows,
      (turn) => turn,
      () => new TurnRow(),
    );
    if (atEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.#drawHint(able, turns);
    this.#drawForm();
  }

  #pick(able) {
    if (!this.#service && !this.#conversation) {
      this.#serviceId = (able.find(answers) ?? able[0])?.id ?? null;
    }
    const options = able.map((service) => [service.id, label(service)]);
    const key = JSON.stringify(options);
    if (this.picker.dataset.shown !== key) {
      this.picker.dataset.shown = key;
      this.picker.replaceChildren(...options.map(([id, text]) => el("option", { value: id }, text)));
    }
    if (this.#serviceId !== null) this.picker.value = this.#serviceId;
    setHidden(this.picker, able.length === 0);
    this.picker.disabled = this.#conversation?.busy ?? false;
  }

  #drawHint(able, turns) {
    setHidden(this.hint, turns.length > 0);
    setHidden(this.fresh, turns.length === 0);
    if (this.services.items === null) setText(this.hint, "…");
    else setText(this.hint, able.length ? HOW : NOBODY);
  }

  #drawForm() {
    const conversation = this.#conversation;
    const service = this.#service;
    const state = conversation?.busy ? conversation.turns.at(-1).state : null;
    setText(this.send, state === null ? "Send" : state === "stopping" ? "Stopping …" : "Stop");
    this.send.classList.toggle("primary", state === null);
    const nothing = state === null && (!this.input.value.trim() || !service || !answers(service));
    this.send.setAttribute("aria-disabled", nothing || state === "stopping");
    this.fresh.disabled = conversation?.busy ?? false;
    const known = this.services.items !== null && this.#serviceId !== null;
    const missing = known && !(service && answers(service));
    setHidden(this.unavailable, !missing);
    if (missing) setText(this.unavailable, unavailable(service));
  }

  // What is done.

  #onEnter(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.#conversation?.busy) this.#ask();
  }

  #onKey(event) {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    this.#conversation?.stop();
  }

  #onSubmit(event) {
    event.preventDefault();
    if (this.#conversation?.busy) this.#conversation.stop();
    else this.#ask();
  }

  async #ask() {
    const service = this.#service;
    const question = this.input.value.trim();
    if (!question || !service || !answers(service)) return;
    if (!this.#conversation) {
      const made = new Conversation();
      made.addEventListener("change", () => this.#redraw());
      this.#conversations.set(service.id, made);
    }
    this.input.value = "";
    this.problem.show(null);
    this.scroller.scrollTop = this.scroller.scrollHeight;
    const refused = await this.#conversation.ask(service, question);
    if (refused) this.#giveBack(refused, question, service);
    this.services.refresh(); // what is in flight has changed
  }

  /** Nothing that was typed is lost with a refusal. */
  #giveBack(error, question, service) {
    this.input.value = [question, this.input.value].filter(Boolean).join("\n");
    this.problem.show(error, { title: "It was not sent", names: { ALIAS: service.alias } });
  }

  #startAnew() {
    this.#conversation?.clear();
    this.problem.show(null);
    this.input.focus();
  }
}

const stateOf = (service) => serviceStates[service.state].label.toLowerCase();

const label = (service) => (answers(service) ? service.alias : `${service.alias} (${stateOf(service)})`);

const unavailable = (service) =>
  service
    ? `${service.alias} is ${stateOf(service)}; it takes messages once it is ready.`
    : "The service is gone. Choose another.";

class TurnRow {
  constructor() {
    this.question = el("p", { class: "question" });
    this.text = document.createTextNode("");
    this.answer = el("p", { class: "answer" }, this.text);
    this.status = el("p", { class: "turn-status" });
    this.problem = problem();
    this.element = el("li", {}, this.question, this.answer, this.status, this.problem);
  }

  update(turn) {
    setText(this.question, turn.question);
    // Only what is new, so that it is read out once and selections stay.
    if (turn.answer.length > this.text.length) this.text.appendData(turn.answer.slice(this.text.length));
    this.answer.setAttribute("aria-busy", turn.state === "answering");
    this.element.dataset.state = turn.state;
    setHidden(this.answer, !turn.answer);
    setText(this.status, standing(turn, performance.now()));
    this.problem.show(turn.error);
  }
}

customElements.define("ficc-chat", Chat);
