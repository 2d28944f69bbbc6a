/**
 * A section that shows a live list, in one of four states: loading, an error, nothing yet, or its records; and
 * above those, when they are stale, their age. Subclasses say what a record looks like.
 */

import { button, el, reconcile, setHidden, setText } from "./dom.js";
import { age, clockTime, duration, number } from "./format.js";
import { everySecond } from "./live.js";
import { wordsFor } from "./messages.js";
import { problem } from "./problem.js";

const STALE_SECONDS = 10;

export class ListSection extends HTMLElement {
  /** For the subclass to set: what the section is called, and what is listed, in the plural. */
  static title;
  static noun;

  #rows = new Map();
  #said = new Map();

  /** Show `list`; `others` are lists that rows look into. */
  show(list, ...others) {
    this.list = list;
    const heading = el("h2", { id: `${this.localName}-title` }, this.constructor.title);
    this.setAttribute("role", "region");
    this.setAttribute("aria-labelledby", heading.id);
    this.total = el("span", { class: "total" });
    this.loading = el("p", { class: "quiet", role: "status" }, `Loading ${this.constructor.noun} …`);
    this.failed = problem({ announced: true });
    this.age = el("p");
    this.tryNow = button("Try now", () => list.refresh(), { class: "small" });
    this.stale = el("div", { class: "stale" }, this.age, this.tryNow);
    this.empty = el("div", { class: "empty" });
    this.rows = el("ul", { class: "rows" });
    this.rest = el("p", { class: "quiet" });
    this.changes = el("p", { class: "unseen", role: "status" });
    this.replaceChildren(
      el("header", {}, heading, this.total),
      this.loading,
      this.failed,
      this.stale,
      this.empty,
      this.rows,
      this.rest,
      this.changes,
    );
    for (const one of [list, ...others]) one.addEventListener("change", () => this.update());
    everySecond(() => this.update());
    this.update();
  }

  update() {
    const { items, error, more } = this.list;
    setHidden(this.loading, items !== null || error !== null);
    this.failed.show(items === null ? error : null, { actions: { "Try now": () => this.list.refresh() } });
    this.#updateStale();
    setHidden(this.empty, !items || items.length > 0);
    if (items?.length === 0) this.fillEmpty(this.empty);
    setText(this.total, items?.length ? number(items.length) : "");
    setHidden(this.rest, !more);
    if (more) setText(this.rest, `The newest ${number(items.length)} are shown.`);
    reconcile(
      this.rows,
      items ?? [],
      this.#rows,
      (record) => record.id,
      (record) => this.row(record),
    );
    this.#announce(items ?? []);
  }

  #updateStale() {
    const { items, receivedAt, error, dueAt, running } = this.list;
    const seconds = (Date.now() - receivedAt) / 1000;
    const stale = items !== null && (error !== null || seconds > STALE_SECONDS);
    setHidden(this.stale, !stale);
    this.toggleAttribute("data-stale", stale);
    if (!stale) return;
    setHidden(this.tryNow, !running);
    const wait = Math.max(0, dueAt - Date.now()) / 1000;
    const parts = [`What is shown is ${age(seconds)} old, from ${clockTime(receivedAt)}.`];
    if (error) parts.unshift(`${wordsFor(error.code).what}.`);
    if (running) parts.push(wait >= 1 ? `Trying again in ${duration(wait)}.` : "Trying again …");
    setText(this.age, parts.join(" "));
  }

  /** Say changes of state to those who cannot see them; not what stood there at first. */
  #announce(items) {
    const news = [];
    for (const record of items) {
      const state = this.stateOf(record).label.toLowerCase();
      const before = this.#said.get(record.id);
      if (before !== undefined && before !== state) news.push(`${this.nameOf(record)}: ${state}`);
      this.#said.set(record.id, state);
    }
    if (news.length) setText(this.changes, news.join("; "));
  }
}

/** A state as a dot and its word. */
export function badge() {
  return el("span", { class: "badge" });
}

export function setBadge(node, { label, tone }) {
  setText(node, label);
  if (node.dataset.tone !== tone) node.dataset.tone = tone;
}

/** A closed list of terms and values for those who look for them; `set(entries)` shows [term, value] pairs. */
export function facts(summary) {
  const list = el("dl");
  const element = el("details", { class: "facts" }, el("summary", {}, summary), list);
  let shown = null;
  const set = (entries) => {
    const key = JSON.stringify(entries);
    if (key === shown) return;
    shown = key;
    list.replaceChildren(
      ...entries.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, el("code", {}, value))]),
    );
  };
  return { element, set };
}
