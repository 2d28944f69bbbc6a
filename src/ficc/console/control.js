/**
 * The dialog before a service is started, drained or stopped. It states what follows in numbers that stay
 * current while it is open, and acts on the revision that it shows: if that is no longer the newest, the service
 * is read again, and the person decides anew.
 */

import { call } from "./api.js";
import { button, el, setHidden, setText } from "./dom.js";
import { bytes, cores, count, limit, number } from "./format.js";
import { actions, serviceStates } from "./messages.js";
import { problem } from "./problem.js";
import { inFlight, possible } from "./services.js";

const LOST = "Nobody can know what the last requests of the earlier attempt did. Nothing is replayed.";

class Control extends HTMLElement {
  #service = null;
  #action = null;
  #busy = false;
  #acknowledge = false;

  /** `services` is the live list that holds the service; `nameOfNode` names a node. */
  show(services, nameOfNode) {
    this.services = services;
    this.nameOfNode = nameOfNode;
    this.heading = el("h2", { id: "control-title" });
    this.changed = el("p", { class: "notice", role: "status" });
    this.consequences = el("ul", { class: "consequences" });
    this.problem = problem({ announced: true });
    this.cancel = button("Cancel", () => this.dialog.close(), { autofocus: true });
    this.confirm = button("", () => this.#run());
    this.dialog = el(
      "dialog",
      { "aria-labelledby": "control-title" },
      this.heading,
      this.changed,
      this.consequences,
      this.problem,
      el("div", { class: "buttons" }, this.cancel, this.confirm),
    );
    this.replaceChildren(this.dialog);
    services.addEventListener("change", () => this.dialog.open && this.#look());
  }

  ask(service, action) {
    this.#action = action;
    this.#acknowledge = false;
    setHidden(this.changed, true);
    this.problem.show(null);
    this.#take(service);
    this.dialog.dataset.action = action;
    this.dialog.showModal();
  }

  /** The list changed: follow it, and say so if the service is no longer what the dialog opened with. */
  #look() {
    const service = this.services.find(this.#service.id);
    if (service && service.revision > this.#service.revision && !this.#busy) this.#sayChanged(service);
    if (service && service.revision >= this.#service.revision) this.#take(service);
  }

  #sayChanged(service) {
    setText(this.changed, `Changed meanwhile: it is ${stateOf(service)} now.`);
    setHidden(this.changed, false);
  }

  #take(service) {
    this.#service = service;
    this.#acknowledge ||= this.#action === "start" && service.replicas.some(lost);
    const words = actions[this.#action];
    setText(this.heading, words.title(service.alias));
    setText(this.confirm, this.#acknowledge ? "Start a new attempt" : words.confirm);
    this.confirm.disabled = this.#busy || !possible(service).includes(this.#action);
    const lines = this.#consequences(service);
    const key = lines.join("\n");
    if (key === this.consequences.dataset.shown) return;
    this.consequences.dataset.shown = key;
    this.consequences.replaceChildren(...lines.map((line) => el("li", {}, line)));
  }

  #consequences(service) {
    if (!possible(service).includes(this.#action)) {
      return [`A service that is ${stateOf(service)} cannot be asked for this.`];
    }
    const open = inFlight(service);
    const replicas = count(service.replicas.length, "replica");
    const reserved = this.#reserved(service);
    const deadline = limit(service.spec.deadline_seconds);
    const idle = "No request is in flight at the moment.";
    switch (this.#action) {
      case "stop":
        return [
          open ? `Ends ${count(open, "request")} in flight with an error.` : idle,
          `Ends ${replicas}, and gives back ${reserved}.`,
          ...(service.state === "draining"
            ? []
            : [`Drain would let requests finish, within at most ${deadline}.`]),
        ];
      case "drain":
        return [
          "Takes no new request from now on.",
          open ? `Lets ${count(open, "request")} in flight finish, within at most ${deadline}.` : idle,
          `Then ends ${replicas}, and gives back ${reserved}.`,
        ];
      default:
        return [
          ...(this.#acknowledge ? [LOST] : []),
          `Starts ${count(service.spec.placements.length, "replica")}, as generation ${number(service.generation + 1)}.`,
          `Reserves ${reserved}.`,
        ];
    }
  }

  #reserved({ spec }) {
    const sum = (limit) => spec.placements.reduce((total, one) => total + one.limits[limit], 0);
    const nodes = [...new Set(spec.placements.map((one) => this.nameOfNode(one.node_id)))];
    return `${bytes(sum("memory_bytes"))} of memory and ${cores(sum("cpu_millis"))} on ${nodes.join(", ")}`;
  }

  async #run() {
    const { id, revision } = this.#service;
    const body = this.#acknowledge ? { revision, acknowledge_unknown: true } : { revision };
    this.#setBusy(true);
    this.problem.show(null);
    setHidden(this.changed, true);
    try {
      this.services.put(await call("POST", `/inference/${id}/control/${this.#action}`, body));
      this.dialog.close();
    } catch (error) {
      await this.#failed(error);
    } finally {
      this.#setBusy(false);
    }
  }

  async #failed(error) {
    if (error.status === 401) return this.dialog.close(); // the window asks for a new session
    if (error.code === "inference_unknown_outcome") this.#acknowledge = true;
    const title = actions[this.#action].failed;
    this.problem.show(error, { title, names: { ALIAS: this.#service.alias } });
    if (error.status === 0) return;
    try {
      const service = await call("GET", `/inference/${this.#service.id}`);
      if (service.revision > this.#service.revision) this.#sayChanged(service);
      this.#take(service);
      this.services.put(service);
    } catch {
      // The refusal stands, and the list says by itself that it is stale.
    }
  }

  #setBusy(busy) {
    this.#busy = busy;
    this.dialog.toggleAttribute("data-busy", busy);
    this.#take(this.#service);
  }
}

const stateOf = (service) => serviceStates[service.state].label.toLowerCase();
const lost = (replica) => replica.outcome === "unknown";

customElements.define("ficc-control", Control);
