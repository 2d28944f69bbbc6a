/**
 * Making and changing elements. Text only ever becomes text: nothing here parses markup, and the page's
 * policy (Trusted Types, `trusted-types 'none'`) forbids it.
 */

/**
 * An element. `attributes` may hold `on`, listeners by event name; true makes an empty attribute, and false,
 * null and undefined make none. Children are nodes and strings.
 */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(key, value === true ? "" : value);
    }
  }
  node.append(...children);
  return node;
}

export function button(label, run, attributes = {}) {
  return el("button", { type: "button", ...attributes, on: { click: run } }, label);
}

/** Set a text, and touch nothing where it is the same: selections stay and nobody hears it again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/** Replace children by text in which `backticks` mark code; again only where it differs. */
export function setProse(node, text) {
  if (node.dataset.prose === text) return;
  node.dataset.prose = text;
  const parts = text.split(/`([^`]+)`/); // every second one is what stood between backticks
  node.replaceChildren(...parts.map((part, index) => (index % 2 ? el("code", {}, part) : part)));
}

/**
 * Show records as rows that live as long as their record, so that focus, open details and selections stay.
 * `rows` maps keys to rows, which have an `element` and `update(record)`; `make(record)` makes one.
 */
export function reconcile(container, records, rows, key, make) {
  const gone = new Set(rows.keys());
  let before = container.firstElementChild;
  for (const record of records) {
    const id = key(record);
    gone.delete(id);
    if (!rows.has(id)) rows.set(id, make(record));
    const row = rows.get(id);
    row.update(record);
    if (row.element === before) before = before.nextElementSibling;
    else container.insertBefore(row.element, before);
  }
  for (const id of gone) {
    rows.get(id).element.remove();
    rows.delete(id);
  }
}

/** A button that copies a text, and says so in place. */
export function copyButton(text, label = "Copy") {
  const said = 1500;
  const node = button(
    label,
    async () => {
      try {
        await navigator.clipboard.writeText(text());
        node.textContent = "Copied";
      } catch {
        node.textContent = "Not permitted; select it";
      }
      setTimeout(() => (node.textContent = label), said);
    },
    { class: "small" },
  );
  return node;
}
