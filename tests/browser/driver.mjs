/**
 * What the walk through the console is made of: errands for the installation, the browser, and ways to look at a
 * page until it says what it should. Settings come from `test_console.py` in CONSOLE_TEST.
 */

import assert from "node:assert/strict";
import { mkdirSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const settings = JSON.parse(process.env.CONSOLE_TEST);
const { chromium } = createRequire(`${settings.modules}/`)("playwright-core");
export const { origin } = settings;

const FLAGS = [
  "--headless",
  "--no-sandbox",
  "--disable-gpu",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const PATIENCE_SECONDS = 30;
export const START_SECONDS = 90;

// The installation.

const replies = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

export async function please(what) {
  console.log(`@${what}`);
  const { value } = await replies.next();
  assert.equal(value, "done", `${what}: ${value}`);
}

export async function api(method, path, body) {
  const response = await fetch(`${origin}/api/v1${path}`, {
    method,
    headers: { authorization: `Bearer ${settings.token}`, "content-type": "application/json" },
    body: body && JSON.stringify(body),
  });
  assert.ok(response.ok, `${method} ${path}: ${response.status}`);
  return response.json();
}

export const link = async () => (await api("POST", "/session/codes")).url;
export const service = async (alias) =>
  (await api("GET", "/inference")).items.find((one) => one.alias === alias);
export const serviceTokens = async () =>
  (await api("GET", "/tokens")).items.filter((one) => one.service_id !== null).map((one) => one.id);
export const inFlight = async () => (await service("assistant")).replicas[0].in_flight;

// The browser.

/** What no page may say, unless a step expects it. */
export const faults = [];
export const expected = [];

export function watch(page) {
  const fault = (text) => expected.some((pattern) => pattern.test(text)) || faults.push(text);
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) fault(`${message.text()} ${message.location().url}`);
  });
  page.on("pageerror", (error) => fault(`${error.stack}`));
  return page;
}

export async function newContext(browser) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 860 }, colorScheme: "light" });
  context.setDefaultTimeout(PATIENCE_SECONDS * 1000);
  await context.addInitScript(() =>
    document.addEventListener("securitypolicyviolation", (event) =>
      console.error(`policy violated: ${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`),
    ),
  );
  return context;
}

export async function until(look, what, seconds = PATIENCE_SECONDS) {
  const deadline = Date.now() + seconds * 1000;
  for (;;) {
    const found = await look();
    if (found) return found;
    assert.ok(Date.now() < deadline, `after ${seconds} s: not ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 25));
  }
}

/** The visible text of an element, in one line, once it matches. */
export async function textOf(locator, pattern, seconds) {
  let text = "";
  const look = async () => {
    text = (await locator.isVisible()) ? (await locator.innerText()).replace(/\s+/g, " ").trim() : "";
    return pattern.test(text);
  };
  try {
    await until(look, pattern, seconds);
  } catch (error) {
    throw new Error(`${error.message}; it says: ${text}`);
  }
  return text;
}

export async function shoot(page, name) {
  for (const colorScheme of ["light", "dark"]) {
    for (const width of [1280, 400]) {
      await page.emulateMedia({ colorScheme });
      await page.setViewportSize({ width, height: 860 });
      await page.evaluate(
        () => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn))),
      );
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      assert.ok(wide <= width, `${name} is ${wide} pixels wide at ${width}`);
      await page.screenshot({
        path: `${settings.screenshots}/${name}-${colorScheme}-${width}.png`,
        fullPage: width === 400,
      });
    }
  }
  await page.emulateMedia({ colorScheme: "light" });
  await page.setViewportSize({ width: 1280, height: 860 });
}

/** A browser with a profile of its own, made anew. */
export function launch() {
  mkdirSync(settings.screenshots, { recursive: true });
  return chromium.launch({ executablePath: settings.chromium, args: FLAGS });
}
