/** The models of the project, with how far each has come. Bytes come by the command line, not from here. */

import { el, setHidden, setProse, setText } from "./dom.js";
import { bytes, count, duration, number, pasteable, percent } from "./format.js";
import { ListSection, badge, facts, setBadge } from "./list-section.js";
import { fileStates, modelStates } from "./messages.js";
import { problem } from "./problem.js";

const MOVING = new Set(["acquiring", "pausing"]);
const FILES_SHOWN_MAX = 20;

class Models extends ListSection {
  static title = "Models";
  static noun = "models";

  row() {
    return new ModelRow(this.services);
  }

  /** `services` is looked into for the names of those that use a model. */
  show(models, services) {
    this.services = services;
    super.show(models, services);
  }

  fillEmpty(element) {
    if (element.firstChild) return;
    const how = el("p");
    setProse(how, "Add one on the machine where ficc runs: `ficc model add FILE.gguf`");
    element.append(el("p", {}, "No models yet."), how);
  }

  stateOf = (model) => modelStates[model.state];
  nameOf = (model) => model.manifest.name;
}

class ModelRow {
  #services;

  constructor(services) {
    this.#services = services;
    this.name = el("h3");
    this.badge = badge();
    this.about = el("p", { class: "about" });
    this.bar = el("progress");
    this.numbers = el("p", { class: "numbers" });
    this.progress = el("div", { class: "progress" }, this.bar, this.numbers);
    this.problem = problem();
    this.facts = facts("Files and digests");
    this.element = el(
      "li",
      { class: "card" },
      el("div", { class: "title" }, this.name, this.badge),
      this.about,
      this.progress,
      this.problem,
      this.facts.element,
    );
  }

  update(model) {
    const { manifest, state, error } = model;
    setText(this.name, manifest.name);
    this.element.dataset.state = state;
    setBadge(this.badge, arriving(model) ? { label: "Arriving", tone: "busy" } : modelStates[state]);
    setText(this.about, this.#about(model));
    setHidden(this.progress, state === "ready" || (state === "failed" && model.bytes_durable === 0));
    this.#updateProgress(model);
    this.problem.show(error, { names: { NAME: pasteable(manifest.name) } });
    this.facts.set(factsOf(model));
  }

  #about({ manifest, bytes_total, references }) {
    const users = references.map((id) => this.#services.find(id)?.alias ?? id);
    const parts = [bytes(bytes_total), manifest.format, (manifest.capabilities ?? ["chat"]).join(", ")];
    if (manifest.licence) parts.push(manifest.licence);
    if (users.length) parts.push(`used by ${users.join(", ")}`);
    return parts.join(" · ");
  }

  #updateProgress(model) {
    const total = model.bytes_total;
    const verified = model.files.reduce((sum, file) => sum + file.verified_bytes, 0);
    const done = model.state === "verifying" ? verified : model.bytes_durable;
    this.bar.max = total || 1;
    this.bar.value = total ? done : 1;
    this.bar.setAttribute("aria-label", `${modelStates[model.state].label}: ${model.manifest.name}`);
    setText(this.numbers, progressWords(model, done));
  }
}

/** Bytes of an upload are coming in, although nobody asked for a download. */
const arriving = (model) => model.state === "registered" && model.rate_bytes_per_second !== null;

function progressWords(model, done) {
  const { state, bytes_total: total, rate_bytes_per_second: rate, eta_seconds: eta } = model;
  const share = `${percent(done, total)} %`;
  if (state === "verifying") return `${share} · ${bytes(done)} of ${bytes(total)} verified`;
  const parts = [share, `${bytes(done)} of ${bytes(total)} durable`];
  if (rate !== null) parts.push(`${bytes(rate)}/s`);
  else if (MOVING.has(state)) parts.push("no data at the moment");
  if (eta !== null) parts.push(`${duration(eta)} left`);
  return parts.join(" · ");
}

function factsOf(model) {
  const files = model.files
    .slice(0, FILES_SHOWN_MAX)
    .map((file) => [file.name, `${bytes(file.bytes)}, ${fileStates[file.state]}, sha256 ${file.sha256}`]);
  const left = model.files.length - files.length;
  if (left) files.push(["and", `${count(left, "more file")}: ficc model show ${pasteable(model.manifest.name)}`]);
  return [
    ["Id", model.id],
    ["Revision", model.revision],
    ...files,
    ["Bytes", number(model.bytes_total)],
    ["Serve it", `ficc service create ALIAS --model ${pasteable(model.manifest.name)}`],
  ];
}

customElements.define("ficc-models", Models);
