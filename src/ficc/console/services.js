/** The services of the project: what each is asked to be, what it is, its replicas, and what can be done. */

import { button, el, reconcile, setHidden, setProse, setText } from "./dom.js";
import { serverNow } from "./api.js";
import { number, pasteable } from "./format.js";
import { ListSection, badge, facts, setBadge } from "./list-section.js";
import { actions, desiredStates, serviceStates } from "./messages.js";
import { problem } from "./problem.js";
import { doing, toneOf } from "./replica.js";

const POSSIBLE = {
  starting: ["drain", "stop"],
  ready: ["drain", "stop"],
  degraded: ["drain", "stop"],
  draining: ["stop"],
  stopping: [],
  stopped: ["start"],
  failed: ["start"],
};
const ANSWERING = new Set(["ready", "degraded"]);

/** The actions that a service's state allows. */
export const possible = (service) => POSSIBLE[service.state];
export const canChat = (service) => service.capabilities.includes("chat");
export const answers = (service) => ANSWERING.has(service.state);
export const inFlight = (service) => service.replicas.reduce((sum, replica) => sum + replica.in_flight, 0);

/** Dispatches `act` with {service, action}, and `chat` with the service. */
class Services extends ListSection {
  static title = "Services";
  static noun = "services";

  /** `models` and `nodes` are looked into for names. */
  show(services, models, nodes) {
    this.models = models;
    this.nodes = nodes;
    super.show(services, models, nodes);
  }

  row() {
    return new ServiceRow(this);
  }

  fillEmpty(element) {
    element.firstChild ?? element.append(el("p"), el("p"));
    const ready = this.models.items?.find((model) => model.state === "ready");
    const name = pasteable(ready?.manifest.name ?? "NAME");
    setText(element.firstChild, "No services yet. A service is a model that answers.");
    const command = `ficc service create assistant --model ${name}`;
    setProse(element.lastChild, `Make one on the machine where ficc runs: \`${command}\``);
  }

  stateOf = (service) => serviceStates[service.state];
  nameOf = (service) => service.alias;
  nameOfNode = (id) => this.nodes.find(id)?.name ?? id;
  nameOfModel = (id) => this.models.find(id)?.manifest.name ?? id;
  tell = (what, detail) => this.dispatchEvent(new CustomEvent(what, { detail }));
}

class ServiceRow {
  #section;
  #replicas = new Map();
  #service = null;

  constructor(section) {
    this.#section = section;
    this.name = el("h3");
    this.badge = badge();
    this.about = el("p", { class: "about" });
    this.wanted = el("p", { class: "about" });
    this.problem = problem();
    this.replicas = el("ul", { class: "replicas", "aria-label": "Replicas" });
    this.buttons = el("div", { class: "buttons" });
    this.facts = facts("Addresses, digests and commands");
    this.element = el(
      "li",
      { class: "card" },
      el("div", { class: "title" }, this.name, this.badge),
      this.about,
      this.wanted,
      this.replicas,
      this.problem,
      this.buttons,
      this.facts.element,
    );
    this.#makeButtons();
  }

  #makeButtons() {
    this.chat = button("Chat", () => this.#section.tell("chat", this.#service), { class: "primary" });
    this.buttons.append(this.chat);
    this.actions = Object.entries(actions).map(([action, { label }]) => {
      const run = () => this.#section.tell("act", { service: this.#service, action });
      const node = button(`${label} …`, run, { "data-action": action });
      this.buttons.append(node);
      return node;
    });
  }

  update(service) {
    this.#service = service;
    const { alias, spec, state } = service;
    setText(this.name, alias);
    this.element.dataset.state = state;
    setBadge(this.badge, serviceStates[state]);
    const shape = `context ${number(spec.context)} · ${number(spec.concurrency)} at a time`;
    setText(this.about, `${this.#section.nameOfModel(spec.model_id)} · ${spec.engine} · ${shape}`);
    setText(
      this.wanted,
      `Wanted: ${desiredStates[service.desired]} · generation ${number(service.generation)}`,
    );
    this.problem.show(service.reason, { names: { ALIAS: alias } });
    const rows = service.replicas.map((replica, index) => ({ replica, index, service }));
    const make = () => new ReplicaRow(this.#section);
    reconcile(this.replicas, rows, this.#replicas, ({ replica }) => replica.workload_id, make);
    this.#updateButtons(service);
    this.facts.set(factsOf(service));
  }

  #updateButtons(service) {
    setHidden(this.chat, !canChat(service) || !answers(service));
    this.chat.setAttribute("aria-label", `Chat with ${service.alias}`);
    for (const node of this.actions) {
      const { action } = node.dataset;
      setHidden(node, !possible(service).includes(action));
      node.setAttribute("aria-label", `${actions[action].label} ${service.alias}`);
    }
  }
}

class ReplicaRow {
  #section;

  constructor(section) {
    this.#section = section;
    this.name = el("span", { class: "name" });
    this.doing = el("span", { class: "doing" });
    this.load = el("span", { class: "load" });
    this.why = el("p", { class: "why" });
    this.problem = problem();
    this.element = el("li", {}, this.name, this.doing, this.load, this.why, this.problem);
  }

  update({ replica, index, service }) {
    const { attempt, state, in_flight: open, reason } = replica;
    const which = service.replicas.length > 1 ? `Replica ${index + 1} on ` : "On ";
    setText(this.name, which + this.#section.nameOfNode(replica.node_id));
    this.element.dataset.state = state;
    const again = attempt > 1 ? ` · attempt ${number(attempt)}` : "";
    setText(this.doing, doing(replica, serverNow()) + again);
    this.doing.dataset.tone = toneOf(replica);
    const busy = open > 0 || state === "ready" || state === "draining";
    setText(this.load, busy ? `${number(open)} of ${number(service.spec.concurrency)} in flight` : "");
    this.#updateReason(replica, sameReason(reason, service.reason) ? null : reason, service.alias);
  }

  /** A failure with its next step; any other reason as a plain line; what the service says already, not again. */
  #updateReason(replica, reason, alias) {
    const failure = reason !== null && replica.error !== null;
    this.problem.show(failure ? reason : null, { names: { ALIAS: alias } });
    setHidden(this.why, reason === null || failure);
    if (!failure) setText(this.why, reason?.message ?? "");
  }
}

const sameReason = (one, other) => one?.code === other?.code && one?.message === other?.message;

function factsOf(service) {
  const { alias, replicas, spec } = service;
  return [
    ["Base URL", location.origin + service.endpoint],
    ["A token for it", `ficc service token ${alias}`],
    ["Chat in a terminal", `ficc chat ${alias}`],
    ["Engine's log", `ficc service logs ${alias}`],
    ["Id", service.id],
    ["Revision", number(service.revision)],
    ["Runtime image", spec.runtime.image_digest],
    ...replicas.flatMap((replica, index) => [
      [`Replica ${index + 1}: attempt`, replica.attempt_id],
      [`Replica ${index + 1}: plan digest`, replica.plan_digest],
      [`Replica ${index + 1}: model revision`, replica.model_revision ?? "none"],
    ]),
  ];
}

customElements.define("ficc-services", Services);
