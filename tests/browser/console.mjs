/**
 * The console in a real browser, against a real installation: one walk through everything a person does, in
 * order. `test_console.py` starts this, and does what a line that begins with "@" asks for.
 *
 * Ends with status 1 at the first step that fails, after saying which, and what the pages said.
 */

import assert from "node:assert/strict";
import {
  START_SECONDS,
  api,
  expected,
  faults,
  inFlight,
  launch,
  link,
  newContext,
  origin,
  please,
  service,
  serviceTokens,
  shoot,
  textOf,
  until,
  watch,
} from "./driver.mjs";

const LONG = "Write a very long story about the sea.";

/** The parts of a page that the steps look at. */
function parts(page) {
  const card = (region, name) =>
    page
      .getByRole("region", { name: region })
      .locator(".card")
      .filter({ has: page.getByRole("heading", { name, exact: true }) });
  const chat = page.getByRole("region", { name: "Chat" });
  return {
    chat,
    service: (alias) => card("Services", alias),
    model: (name) => card("Models", name),
    badge: (alias) => card("Services", alias).locator(".badge"),
    message: page.getByLabel("Message"),
    send: chat.locator("form button"),
    last: chat.locator(".turns > li").last(),
    dialog: page.getByRole("dialog"),
  };
}

/** What chats of this page ask for besides. */
async function tellEngine(page, options) {
  await page.unroute(/chat\/completions/);
  await page.route(/chat\/completions/, (route) =>
    route.continue({ postData: JSON.stringify({ ...route.request().postDataJSON(), ...options }) }),
  );
}

/** Ask, and go on as soon as some of the answer is there. */
async function askAtLength({ message, send, last, chat }) {
  const before = await chat.locator(".turns > li").count();
  await message.fill(LONG);
  await message.press("Enter");
  await until(async () => (await chat.locator(".turns > li").count()) > before, "a new turn");
  await textOf(last.locator(".answer"), /\S/);
  assert.equal(await send.textContent(), "Stop");
}

const steps = {
  async "an unknown code says what to do"({ stranger }) {
    expected.push(/status of 401 .*\/api\/v1\/session$/);
    await stranger.goto(`${origin}/#code=wrong`);
    await textOf(
      stranger.locator("ficc-sign-in"),
      /unknown, used or expired.*ficc open.*unauthenticated.*request /,
    );
    assert.equal(stranger.url(), `${origin}/`);
    await shoot(stranger, "signed-out");
  },

  async "the printed link signs in, and its code leaves the address and the history"({ page, shared }) {
    shared.link = await link();
    await page.goto(shared.link);
    await textOf(page.locator(".who"), /owner in project default/);
    assert.equal(page.url(), `${origin}/`);
    await page.goBack();
    await page.goForward();
    assert.equal(page.url(), `${origin}/`);
  },

  async "its code does not count twice"({ page, stranger, shared }) {
    await stranger.goto("about:blank");
    await stranger.goto(shared.link);
    await textOf(stranger.locator("ficc-sign-in"), /unknown, used or expired/);
    await page.goto(shared.link);
    await textOf(page.locator("main > .notice"), /used before or is too old; you are still signed in/);
  },

  async "the cookie is out of scripts' reach"({ page }) {
    const [cookie, ...others] = await page.context().cookies();
    assert.deepEqual(others, []);
    assert.deepEqual([cookie.name, cookie.httpOnly, cookie.sameSite], ["ficc_session", true, "Strict"]);
    assert.equal(await page.evaluate(() => document.cookie), "");
  },

  async "the page's policy holds, and breaking it is noticed"({ stranger }) {
    const before = faults.length;
    const refused = await stranger.evaluate(() => {
      document.body.setAttribute("style", "color: red");
      try {
        document.body.innerHTML = "<p>";
      } catch (error) {
        return error.name;
      }
    });
    assert.equal(refused, "TypeError");
    await until(
      () => faults.slice(before).some((text) => /policy violated: style-src/.test(text)),
      "the fault noticed",
    );
    faults.length = before;
    await stranger.close();
  },

  async "a reload keeps the session"({ page }) {
    await page.reload();
    await textOf(page.locator(".who"), /owner in project default/);
  },

  async "nothing yet says what to do, and what comes appears by itself"({ page }) {
    const { service, model, chat, badge } = parts(page);
    await textOf(
      page.getByRole("region", { name: "Services" }),
      /No services yet.*ficc service create assistant --model NAME/,
    );
    await textOf(page.getByRole("region", { name: "Models" }), /No models yet.*ficc model add FILE\.gguf/);
    await textOf(chat, /No service can chat yet/);
    await shoot(page, "empty");
    await Promise.all([
      please("furnish"),
      textOf(model("smollm2"), /Ready/),
      textOf(badge("assistant"), /^(Starting|Ready)$/, START_SECONDS),
    ]);
    await textOf(service("assistant").getByRole("button", { name: "Chat" }), /Chat/, START_SECONDS);
  },

  async "each list asks one request at a time, and none while nobody looks"({ page }) {
    const asked = [];
    const count = (request) => /\/inference\?limit/.test(request.url()) && asked.push(request);
    const hide = (hidden) =>
      page.evaluate((value) => {
        Object.defineProperty(document, "hidden", { configurable: true, get: () => value });
        document.dispatchEvent(new Event("visibilitychange"));
      }, hidden);
    const during = async (seconds) => {
      asked.length = 0;
      await page.waitForTimeout(seconds * 1000);
      return asked.length;
    };
    let release;
    const held = new Promise((resolve) => (release = resolve));
    page.on("request", count);
    await page.route(/\/inference\?limit/, (route) => held.then(() => route.continue()));
    await until(() => asked.length, "a request");
    assert.equal(await during(5), 0);
    release();
    await until(() => asked.length > 1, "the list going on");
    await page.unroute(/\/inference\?limit/);
    await hide(true);
    await page.waitForTimeout(500); // what was under way comes to its end
    assert.equal(await during(5), 0);
    await hide(false);
    await until(() => asked.length, "the list going on");
    page.off("request", count);
  },

  async "the lists show models, services and why one failed"({ page }) {
    const { service, model, badge } = parts(page);
    await textOf(badge("assistant"), /^Ready$/, START_SECONDS);
    await textOf(service("assistant"), /smollm2 · llama_cpp · context 2,048 · 2 at a time/);
    await textOf(service("assistant"), /Wanted: running · generation 1/);
    await textOf(service("assistant").locator(".replicas"), /Ready for \d+ (s|min).*0 of 2 in flight/);
    await textOf(model("smollm2"), /Ready.*98\.4 MB · gguf · chat · used by assistant/);

    await textOf(model("half"), /50 % · 2\.1 MB of 4\.2 MB durable/);
    const bar = model("half").getByRole("progressbar");
    assert.deepEqual(await bar.evaluate((node) => [node.value, node.max]), [2 << 20, 4 << 20]);

    await textOf(badge("broken"), /^Failed$/, START_SECONDS);
    await textOf(service("broken").locator(".replicas"), /Failed \d+ (s|min) ago/);
    const failed = service("broken").locator(":scope > ficc-problem");
    await textOf(failed, /The engine ended by itself.*ficc service logs broken.*engine_exited/);
    assert.match(await failed.locator("pre").textContent(), /tensor/);

    await service("assistant").getByText("Addresses, digests and commands").click();
    const record = (await api("GET", "/inference")).items.find((one) => one.alias === "assistant");
    await shoot(page, "details");
    await textOf(
      service("assistant").locator("dl"),
      new RegExp(`${origin}${record.endpoint}.*ficc service token assistant`),
    );
    await service("assistant").getByText("Addresses, digests and commands").click();
  },

  async "headings are in order, and everything that can be pressed has a name and a focus"({ page }) {
    const found = await page.evaluate(() => ({
      language: document.documentElement.lang,
      levels: [...document.querySelectorAll("h1, h2, h3")]
        .filter((node) => node.checkVisibility())
        .map((node) => +node.localName[1]),
      nameless: [...document.querySelectorAll("button, select, textarea")].filter(
        (node) => node.checkVisibility() && !(node.getAttribute("aria-label") || node.textContent.trim()),
      ).length,
    }));
    assert.equal(found.language, "en");
    assert.equal(found.levels[0], 1);
    found.levels
      .slice(1)
      .forEach((level, index) => assert.ok(level <= found.levels[index] + 1, `${found.levels}`));
    assert.equal(found.nameless, 0);
    await page.keyboard.press("Tab");
    const outline = () => getComputedStyle(document.activeElement).outlineStyle;
    assert.equal(await page.evaluate(outline), "solid", "what the keyboard reaches is marked");
  },

  async "a chat streams: text is there before the answer is complete"({ page }) {
    const { message, send, last } = parts(page);
    await tellEngine(page, { temperature: 0 }); // the same answer every time
    await message.fill("Name three animals");
    await message.press("Shift+Enter");
    await message.pressSequentially("that live in the sea.");
    await message.press("Enter");
    assert.equal(await message.inputValue(), "");
    await textOf(last, /Name three animals that live in the sea\./);
    assert.equal(await last.locator(".question").textContent(), "Name three animals\nthat live in the sea.");
    const first = await textOf(last.locator(".answer"), /\S/);
    assert.equal(await send.textContent(), "Stop");
    const status = await textOf(
      last.locator(".turn-status"),
      /^\d+ tokens · [\d.]+ tok\/s · first token [\d.]+ s/,
    );
    await textOf(send, /^Send$/);
    const whole = await last.locator(".answer").textContent();
    assert.ok(
      whole.length > first.length && whole.trim().startsWith(first),
      `${first} | ${whole} | ${status}`,
    );
  },

  async "the next question carries the conversation"({ page }) {
    const { message, last, send, chat } = parts(page);
    const [request] = await Promise.all([
      page.waitForRequest(/chat\/completions/),
      message.fill("And one that flies?").then(() => message.press("Enter")),
    ]);
    const { messages } = request.postDataJSON();
    assert.deepEqual(
      messages.map((one) => one.role),
      ["user", "assistant", "user"],
    );
    assert.equal(messages[1].content, await chat.locator(".answer").first().textContent());
    await textOf(last.locator(".turn-status"), /first token/);
    await textOf(send, /^Send$/);
    await shoot(page, "ready");
    // From here on the engine is told to go on and on, so that there is something to stop.
    await tellEngine(page, { ignore_eos: true });
    await chat.getByRole("button", { name: "New conversation" }).click();
    await until(async () => (await chat.locator(".turns > li").count()) === 0, "an empty conversation");
  },

  async "the button stops an answer"({ page }) {
    const at = parts(page);
    await askAtLength(at);
    await textOf(at.service("assistant").locator(".load"), /1 of 2 in flight/);
    await at.send.click();
    await textOf(at.last.locator(".turn-status"), /^Stopped by you · \d+ tokens? · .*first token [\d.]+ s$/);
    await textOf(at.send, /^Send$/);
    await until(async () => (await inFlight()) === 0, "the slot free");
    await textOf(at.service("assistant").locator(".load"), /0 of 2 in flight/);
  },

  async "Esc stops an answer"({ page }) {
    const at = parts(page);
    await askAtLength(at);
    await page.keyboard.press("Escape");
    await textOf(at.last.locator(".turn-status"), /^Stopped by you · \d+ tokens? · /);
    await until(async () => (await inFlight()) === 0, "the slot free");
    await shoot(page, "stopped-answer");
  },

  async "stopping a service states what it costs, and the page follows live"({ page }) {
    const at = parts(page);
    await askAtLength(at);
    const stop = page.getByRole("button", { name: "Stop assistant" });
    await stop.click();
    await textOf(
      at.dialog,
      /Stop assistant now\?.*Ends 1 request in flight with an error\..*Ends 1 replica, and gives back 805\.3 MB of memory/,
    );
    assert.equal(await page.evaluate(() => document.activeElement.textContent), "Cancel");
    await shoot(page, "stop-dialog");
    await page.keyboard.press("Escape");
    assert.equal(await at.dialog.count(), 0);
    assert.equal(await at.send.textContent(), "Stop", "Esc closes the dialog and nothing else");

    await stop.click();
    await at.dialog.getByRole("button", { name: "Stop now" }).click();
    await textOf(at.last, /incomplete: service_stopped.*The service was stopped.*request .*Copy/);
    await textOf(at.badge("assistant"), /^Stopped$/);
    await textOf(at.service("assistant"), /Wanted: stopped/);
    await textOf(at.service("assistant").locator(".replicas"), /Stopped \d+ s ago/);
    await textOf(at.chat, /assistant is stopped; it takes messages once it is ready/);
    assert.equal((await service("assistant")).state, "stopped");
  },

  async "a service that changed behind the page is read again before anything happens"({ page }) {
    const at = parts(page);
    await until(
      async () => (await service("assistant")).replicas.every((one) => one.released),
      "everything released",
    );
    let release;
    const held = new Promise((resolve) => (release = resolve));
    const hold = async (route) => held.then(() => route.continue().catch(() => {}));
    await page.route(/\/inference\?limit/, hold);
    await page.getByRole("button", { name: "Start assistant" }).click();
    await textOf(at.dialog, /Starts 1 replica, as generation 2\..*Reserves 805\.3 MB of memory/);
    const { id, revision } = await service("assistant");
    await api("POST", `/inference/${id}/control/start`, { revision });

    expected.push(/status of 409 .*\/control\/start$/);
    await at.dialog.getByRole("button", { name: "Start" }).click();
    await textOf(
      at.dialog,
      /Changed meanwhile: it is (starting|ready) now.*It was not started: the service changed meanwhile.*revision_conflict/,
    );
    assert.ok(await at.dialog.getByRole("button", { name: "Start" }).isDisabled());
    await shoot(page, "changed-meanwhile");
    release();
    await page.unroute(/\/inference\?limit/, hold);
    await at.dialog.getByRole("button", { name: "Cancel" }).click();
    await textOf(at.badge("assistant"), /^Ready$/, START_SECONDS);
    await textOf(at.service("assistant"), /generation 2/);
  },

  async "a start after an attempt that was lost asks for more than a start"({ page }) {
    const at = parts(page);
    await page.getByRole("button", { name: "Stop assistant" }).click();
    await at.dialog.getByRole("button", { name: "Stop now" }).click();
    await textOf(at.badge("assistant"), /^Stopped$/);
    await until(
      async () => (await service("assistant")).replicas.every((one) => one.released),
      "everything released",
    );
    // A machine that reboots cannot be had here: the list is told so, everything else is real.
    const lose = async (route) => {
      const response = await route.fetch();
      const page = await response.json();
      for (const one of page.items) for (const replica of one.replicas) replica.outcome = "unknown";
      await route.fulfill({ response, json: page });
    };
    await page.route(/\/inference\?limit/, lose);
    await textOf(at.service("assistant"), /Lost; nobody can know how it ended/);
    await page.getByRole("button", { name: "Start assistant" }).click();
    await textOf(
      at.dialog,
      /Nobody can know what the last requests of the earlier attempt did\. Nothing is replayed\./,
    );
    const [request] = await Promise.all([
      page.waitForRequest(/control\/start/),
      at.dialog.getByRole("button", { name: "Start a new attempt" }).click(),
    ]);
    assert.equal(request.postDataJSON().acknowledge_unknown, true);
    await page.unroute(/\/inference\?limit/);
    await textOf(at.badge("assistant"), /^Ready$/, START_SECONDS);
  },

  async "drain and start go through the dialog too"({ page }) {
    const at = parts(page);
    await page.getByRole("button", { name: "Drain assistant" }).click();
    await textOf(at.dialog, /Takes no new request.*No request is in flight.*Then ends 1 replica/);
    await at.dialog.getByRole("button", { name: "Drain" }).click();
    await textOf(at.badge("assistant"), /^Stopped$/);
    await until(
      async () => (await service("assistant")).replicas.every((one) => one.released),
      "everything released",
    );
    await page.getByRole("button", { name: "Start assistant" }).click();
    await at.dialog.getByRole("button", { name: "Start" }).click();
    await textOf(
      at.service("assistant").locator(".doing"),
      /^(Queued|Bringing its files|Preparing its sandbox|Starting) for \d+ s/,
    );
    await shoot(page, "starting");
    await textOf(at.badge("assistant"), /^Ready$/, START_SECONDS);
  },

  async "a later session in another window makes this one reload"({ page, context, shared }) {
    expected.push(/status of 409 /);
    shared.other = watch(await context.newPage());
    await shared.other.goto(await link());
    await textOf(shared.other.locator(".who"), /owner/);
    await textOf(page.locator("main > ficc-problem"), /belongs to an earlier session.*session_changed/);
    await shoot(page, "outdated");
    await page.getByRole("button", { name: "Reload" }).click();
    await textOf(parts(page).badge("assistant"), /^Ready$/);
  },

  async "a session that ends keeps what was typed for the next one"({ page, shared }) {
    const { message } = parts(page);
    await message.fill("half a thou");
    await shared.other.getByRole("button", { name: "Sign out" }).click();
    await textOf(shared.other.locator("ficc-sign-in"), /Sign in/);
    await shared.other.close();
    expected.push(/status of 401 /);
    await textOf(page.locator("ficc-sign-in"), /You are not signed in.*ficc open/);
    assert.equal(await message.isVisible(), false);
    await page.getByLabel("Or paste the link here").fill(await link());
    await page.getByRole("button", { name: "Sign in" }).click();
    await textOf(page.locator(".who"), /owner/);
    assert.equal(await message.inputValue(), "half a thou");
    await textOf(parts(page).badge("assistant"), /^Ready$/);
  },

  async "a controller that dies leaves what is known, with its age, and comes back"({ page }) {
    const at = parts(page);
    await tellEngine(page, { ignore_eos: true });
    await askAtLength(at);
    expected.push(/ERR_|Failed to fetch/);
    await please("kill the controller");
    await textOf(
      at.last,
      /incomplete: connection_broken.*Nothing is sent again by itself.*request [0-9a-z]+/,
    );
    const services = page.getByRole("region", { name: "Services" });
    await textOf(
      services.locator(".stale"),
      /The controller does not answer\. What is shown is \d+ s old.*Trying again/,
    );
    assert.equal(await at.badge("assistant").textContent(), "Ready");
    await shoot(page, "stale");
    await at.message.fill("Are you there?");
    await at.message.press("Enter");
    await textOf(at.chat.locator(":scope > ficc-problem"), /It was not sent: the controller does not answer/);
    assert.equal(await at.message.inputValue(), "Are you there?");

    await please("start the controller");
    await services.getByRole("button", { name: "Try now" }).click();
    await until(async () => !(await services.locator(".stale").isVisible()), "the list is current");
    expected.pop();
    await textOf(at.badge("assistant"), /^Ready$/, START_SECONDS);
    await until(
      async () => (await service("assistant")).replicas[0].state === "ready",
      "the replica is ready",
    );
    await at.message.press("Enter");
    await textOf(at.last.locator(".answer"), /\S/);
    await page.keyboard.press("Escape");
    await textOf(at.last.locator(".turn-status"), /^Stopped by you/);
  },

  async "signing out leaves no session, and the chat needed no token"({ page }) {
    expected.push(/status of 401 /); // a list may just be under way
    await page.getByRole("button", { name: "Sign out" }).click();
    await textOf(page.locator("ficc-sign-in"), /Run ficc open/);
    assert.deepEqual(await page.context().cookies(), []);
    assert.deepEqual(await serviceTokens(), []);
  },

  async "nothing was said that should not be"() {
    assert.deepEqual(faults, []);
  },
};

const browser = await launch();
try {
  const context = await newContext(browser);
  const page = watch(await context.newPage());
  const stranger = watch(await (await newContext(browser)).newPage());
  const shared = {};
  for (const [name, step] of Object.entries(steps)) {
    const began = Date.now();
    try {
      await step({ page, context, stranger, shared });
    } catch (error) {
      await shoot(page, "failed").catch(() => {});
      console.log(`FAILED  ${name}\n${error.stack}\nthe pages said:\n${faults.join("\n")}`);
      process.exitCode = 1;
      break;
    }
    console.log(`ok      ${name} (${((Date.now() - began) / 1000).toFixed(1)} s)`);
  }
} finally {
  await browser.close();
  process.stdin.destroy();
}
